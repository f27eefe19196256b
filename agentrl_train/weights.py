"""Step 8 of 9: parameters -> weights of ``policy_version + 1``.

The publisher says which policies of the pool get the new weights, and checks that they really arrived: the
trainer and the engine must give the same tokens the same log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from agentrl_train.errors import WeightMismatch
from agentrl_train.types import Completion, SamplingParams, TokenSequence, WeightSync

CANARY_TOKENS = 8
"""Tokens that a canary is given, and as many that it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far the engine's log-probabilities of some tokens are from the trainer's: found, or allowed."""

    worst: float = 0.0
    mean: float = 0.0


FLOAT32 = Drift(worst=1e-4, mean=1e-4)
"""What rounding explains where both compute in float32 on the same device with the same operations."""


class LogProbs(Protocol):
    """The trainer's side of a comparison."""

    def __call__(self, sequences: Sequence[TokenSequence]) -> Sequence[np.ndarray]:
        """Return the log-probabilities of sequences, [T] each."""
        ...


class Probe(Protocol):
    """The engines' side of a comparison."""

    def __call__(
        self, token_ids: Sequence[int], *, sampling: SamplingParams, policies: Sequence[str]
    ) -> Sequence[Completion]:
        """Return a completion of every engine of these policies."""
        ...


class Canary:
    """A short completion of every engine after each push, compared with the trainer.

    What a checksum cannot see, it does: a copy of a weight that the engine's kernels keep, a cache of the
    old weights, a tensor that arrived in the wrong place. It speaks after tokens drawn at random, others for
    each version: where a trained policy is sure of itself, wrong weights would hardly show.

    Args:
        probe: the engines' side.
        logprobs: the trainer's side.
        vocabulary: number of tokens to draw from.
        temperature: of the run.
        tolerance: differences that rounding explains.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        logprobs: LogProbs,
        vocabulary: int,
        temperature: float,
        tolerance: Drift,
    ) -> None:
        self._probe = probe
        self._logprobs = logprobs
        self._vocabulary = vocabulary
        self._temperature = temperature
        self._tolerance = tolerance

    def check(self, policies: Sequence[str], *, version: int) -> Drift:
        """Compare what these policies say with the trainer, which holds ``version`` as well.

        Returns:
            How far apart they are.

        Raises:
            WeightMismatch: they differ, or an engine samples with another version.
        """
        sampling = SamplingParams(max_new_tokens=CANARY_TOKENS, temperature=self._temperature, seed=version)
        context = np.random.default_rng(version).integers(self._vocabulary, size=CANARY_TOKENS).tolist()
        completions = self._probe(context, sampling=sampling, policies=policies)
        if others := {v for completion in completions for v in completion.versions} - {version}:
            raise WeightMismatch(f"an engine samples with version {min(others)} after version {version} came")
        sequences = [probe_sequence(context, completion) for completion in completions]
        found = drift(self._logprobs(sequences), sequences, version=version)
        require_agreement(found, tolerance=self._tolerance, version=version)
        return found


class Publisher:
    """Publishes to the current policy every time and to the stale one every ``stale_interval`` versions.

    Cross-policy sampling (AgentRL, section 3.1) draws turns from both. ``stale_interval = 0``: there is no
    stale policy.
    """

    def __init__(self, sync: WeightSync, *, stale_interval: int = 0, canary: Canary | None = None) -> None:
        self._sync = sync
        self._stale_interval = stale_interval
        self._canary = canary
        self.drift = Drift()
        """What the canary found after the last push."""

    def publish(
        self, weights: Mapping[str, torch.Tensor], *, policy_version: int, everywhere: bool = False
    ) -> None:
        """Put weights in force as ``policy_version``; ``everywhere`` includes the stale policy.

        Raises:
            WeightMismatch: the engine does not hold what it was given.
            EngineError: the weights could not be put in force.
        """
        due = self._stale_interval and policy_version % self._stale_interval == 0
        stale = self._stale_interval and (everywhere or due)
        policies = ("current", "stale") if stale else ("current",)
        self._sync.publish(weights, policy_version=policy_version, policies=policies)
        if self._canary is not None:
            self.drift = self._canary.check(policies, version=policy_version)


def drift(trainer: Sequence[np.ndarray], sequences: Sequence[TokenSequence], *, version: int) -> Drift:
    """Return how far engine and trainer are apart on tokens sampled by ``version``; 0 if there are none.

    Args:
        trainer: the trainer's log-probabilities of each sequence, [T] each.
        sequences: what the engine sampled, with its own log-probabilities.
        version: the policy version whose weights the trainer holds.
    """
    told = [(one.versions == version) & (one.loss_mask > 0) for one in sequences]
    apart = [
        np.abs(ours - one.logprobs)[here] for ours, one, here in zip(trainer, sequences, told, strict=True)
    ]
    every = np.concatenate([np.zeros(0), *apart])
    return Drift(worst=float(every.max()), mean=float(every.mean())) if every.size else Drift()


def require_agreement(found: Drift, *, tolerance: Drift, version: int) -> None:
    """Stop a run whose engine does not hold the weights it should.

    Raises:
        WeightMismatch: a difference is over its tolerance, or not a number.
    """
    for name, value, limit in (
        ("by", found.worst, tolerance.worst),
        ("on average by", found.mean, tolerance.mean),
    ):
        if not value <= limit:
            raise WeightMismatch(
                f"engine and trainer differ {name} {value:.2e} in log-probability at version {version} "
                f"(tolerance {limit:g}): the engine does not hold the trainer's weights"
            )


def probe_sequence(context: Sequence[int], completion: Completion) -> TokenSequence:
    """Turn one completion into a sequence, to compare log-probabilities after a weight update."""
    before, after = len(context), len(completion.token_ids)
    return TokenSequence(
        token_ids=np.array([*context, *completion.token_ids], dtype=np.int64),
        loss_mask=np.array([0.0] * before + [1.0] * after, dtype=np.float32),
        logprobs=np.array([0.0] * before + list(completion.logprobs), dtype=np.float32),
        versions=np.array([-1] * before + list(completion.versions), dtype=np.int64),
        advantages=np.zeros(before + after, dtype=np.float32),
        task="probe",
        group_id=-1,
    )
