"""Step 8 of 9: parameters -> weights of the next ``policy_version``.

The publisher decides which policies get new weights and verifies that they arrived: trainer and engine must
assign the same log-probabilities to the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from agentrl_train.errors import ConfigError, WeightMismatch, not_numbers
from agentrl_train.types import Completion, SamplingParams, TokenSequence, WeightSync

CANARY_TOKENS = 8
"""Length of the prompt and of the completion of a canary."""
FOREIGN = -1
"""Version of the weights of a model that is not trained."""
CANARY_REPEATS = 16
"""Number of canaries that decide if a single canary exceeds the tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Difference between engine and trainer log-probabilities: measured, or tolerated."""

    worst: float = 0.0
    mean: float = 0.0


FLOAT32 = Drift(worst=1e-3, mean=1e-4)
"""Tolerance for rounding if both compute in float32 on the same device.

Of the tokens of a step of a model with 30 layers, the worst differs by 1e-4 and the mean by 2e-6.
"""


class LogProbs(Protocol):
    """Computes log-probabilities with the trainer's weights."""

    def __call__(self, sequences: Sequence[TokenSequence]) -> Sequence[np.ndarray]:
        """Return the log-probabilities of sequences, [T] each."""
        ...


class Probe(Protocol):
    """Samples a completion from every engine."""

    def __call__(
        self, token_ids: Sequence[int], *, sampling: SamplingParams, policies: Sequence[str]
    ) -> Sequence[Completion]:
        """Return a completion of every engine of these policies."""
        ...


class Canary:
    """Compares a short completion of every engine with the trainer after each weight push.

    It detects errors that a checksum cannot: stale copies of weights inside kernels, a cache of old weights,
    a misplaced tensor. The prompts are random tokens, different for each version, because a confident policy
    hardly shows wrong weights.

    In bfloat16 a single token can differ by a nat. The mean of a few tokens can then exceed a tolerance that
    the mean of many tokens satisfies. A canary that fails is therefore followed by ``CANARY_REPEATS`` others,
    which decide.

    Args:
        probe: samples from the engines.
        logprobs: scores with the trainer.
        vocabulary: number of tokens to draw from.
        temperature: sampling temperature of the run.
        tolerance: largest accepted difference.
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
        """Compare these policies with the trainer, which must hold the same ``version``.

        Returns:
            The measured difference.

        Raises:
            WeightMismatch: they differ, or an engine samples with another version.
        """
        draws = np.random.default_rng(version)
        found = self._measure(policies, draws, version=version, count=1)
        try:
            require_agreement(found, tolerance=self._tolerance, version=version)
        except WeightMismatch:
            found = self._measure(policies, draws, version=version, count=CANARY_REPEATS)
            require_agreement(found, tolerance=self._tolerance, version=version)
        return found

    def _measure(
        self, policies: Sequence[str], draws: np.random.Generator, *, version: int, count: int
    ) -> Drift:
        """Return the difference on ``count`` completions of every engine."""
        sampling = SamplingParams(max_new_tokens=CANARY_TOKENS, temperature=self._temperature, seed=version)
        sequences: list[TokenSequence] = []
        for context in draws.integers(self._vocabulary, size=(count, CANARY_TOKENS)).tolist():
            completions = self._probe(context, sampling=sampling, policies=policies)
            if others := {v for completion in completions for v in completion.versions} - {version}:
                raise WeightMismatch(
                    f"an engine samples with version {min(others)} after a push of {version}"
                )
            sequences += [probe_sequence(context, completion) for completion in completions]
        return drift(self._logprobs(sequences), sequences, version=version)


class DriftCheck:
    """Compares log-probabilities of engine and trainer before each update.

    The first check covers all sequences. Later checks cover the sequence with the most tokens of the current
    weights.

    Args:
        logprobs: scores with the trainer.
        tolerance: largest accepted difference.
        truncated: True if the engine never sampled improbable tokens.
        inherited: groups of a resumed run. Their versions can refer to lost weights.
    """

    def __init__(
        self,
        logprobs: LogProbs,
        *,
        tolerance: Drift = FLOAT32,
        truncated: bool = False,
        inherited: Collection[int] = (),
    ) -> None:
        self._logprobs = logprobs
        self._tolerance = tolerance
        self._truncated = truncated
        self._inherited = inherited
        self._checked_all = False

    def check(self, rows: Sequence[TokenSequence], *, version: int) -> Drift:
        """Return the drift of the freshest row of a step; raises ``WeightMismatch``."""
        own = [row for row in rows if row.group_id not in self._inherited]
        fresh = [(int((row.versions == version).sum()), row) for row in own]
        fresh = [(count, row) for count, row in fresh if count]
        if not fresh:
            return Drift()
        freshest, *others = [row for _, row in sorted(fresh, key=lambda pair: -pair[0])]
        if not self._checked_all and others:
            self._compare([freshest, *others], version=version, truncated=self._truncated)
        self._checked_all = True
        # Computed alone, so that the last bits are the same in a resumed run.
        return self._compare([freshest], version=version, truncated=self._truncated)

    def check_probe(self, context: Sequence[int], completion: Completion, *, version: int) -> None:
        """Check a completion that was sampled without truncation; raises ``WeightMismatch``."""
        self._compare([probe_sequence(context, completion)], version=version, truncated=False)

    def _compare(self, rows: Sequence[TokenSequence], *, version: int, truncated: bool) -> Drift:
        found = drift(self._logprobs(rows), rows, version=version, truncated=truncated)
        require_agreement(found, tolerance=self._tolerance, version=version)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleWeights:
    """Weights of the stale policy, and their version."""

    weights: Mapping[str, torch.Tensor]
    version: int


class Publisher:
    """Publishes to the current policy every time and to the stale policy every ``stale_interval`` versions.

    Cross-policy sampling (AgentRL, section 3.1) draws turns from both. With ``stale_interval = 0`` there is
    no stale policy, or it keeps its first weights.

    Args:
        sync: receives the weights.
        stale_interval: versions between two refreshes of the stale policy.
        stale: called with the first published version. Returns the first weights of the stale policy, or
            None for the published weights.
        canary: checks every push.
    """

    def __init__(
        self,
        sync: WeightSync,
        *,
        stale_interval: int = 0,
        stale: Callable[[int], StaleWeights | None] | None = None,
        canary: Canary | None = None,
    ) -> None:
        self._sync = sync
        self._stale_interval = stale_interval
        self._stale = stale
        self._canary = canary
        self.drift = Drift()
        """Difference measured by the canary after the last push."""

    def is_refresh(self, version: int) -> bool:
        """Return True if the stale policy is refreshed at this version."""
        return version in self.refreshes([version])

    def refreshes(self, versions: Iterable[int]) -> set[int]:
        """Return the versions of the stale policy's weights at these versions of the current policy."""
        interval = self._stale_interval
        return {last_refresh(version, interval=interval) for version in versions} if interval else set()

    def publish(
        self, weights: Mapping[str, torch.Tensor], *, policy_version: int, everywhere: bool = False
    ) -> None:
        """Publish weights as ``policy_version``; ``everywhere`` includes the stale policy.

        Raises:
            WeightMismatch: the engine holds other weights.
            EngineError: the weights could not be loaded.
            ConfigError: the stale policy has other parameters than the current one.
        """
        first = self._stale(policy_version) if everywhere and self._stale is not None else None
        if first is not None:
            require_same_parameters(first.weights, weights)
            self._sync.publish(first.weights, policy_version=first.version, policies=("stale",))
        begins = everywhere and first is None and self._stale_interval > 0
        stale = begins or self.is_refresh(policy_version)
        policies = ("current", "stale") if stale else ("current",)
        self._sync.publish(weights, policy_version=policy_version, policies=policies)
        if self._canary is not None:
            self.drift = self._canary.check(policies, version=policy_version)


def last_refresh(version: int, *, interval: int) -> int:
    """Return the last version at which the stale policy was refreshed."""
    return version - version % interval


def require_same_parameters(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that two sets of weights have the same parameter names and shapes. Raises ConfigError."""
    differing = [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in found or name not in expected or found[name].shape != expected[name].shape
    ]
    if differing:
        raise ConfigError(
            f"the model of the stale policy has another architecture than the policy: {len(differing)} "
            f"parameters differ, such as {differing[0]}; use a model with the same config.json"
        )


def drift(
    trainer: Sequence[np.ndarray],
    sequences: Sequence[TokenSequence],
    *,
    version: int,
    truncated: bool = False,
) -> Drift:
    """Return the difference of engine and trainer on tokens sampled by ``version``; 0 if there are none.

    Args:
        trainer: the trainer's log-probabilities of each sequence, [T] each.
        sequences: sequences with the engine's log-probabilities.
        version: policy version of the trainer's weights.
        truncated: True if the engine excluded improbable tokens, which makes the others more probable.

    Raises:
        WeightMismatch: the trainer's own log-probabilities are not numbers.
    """
    differences = [np.zeros(0)]
    for ours, one in zip(trainer, sequences, strict=True):
        compared = (one.versions == version) & (one.loss_mask > 0)
        if not np.isfinite(ours[compared]).all():
            raise WeightMismatch(not_numbers("trainer", version))
        excess = (ours - one.logprobs)[compared]
        differences.append(np.maximum(excess, 0.0) if truncated else np.abs(excess))
    values = np.concatenate(differences)
    return Drift(worst=float(values.max()), mean=float(values.mean())) if values.size else Drift()


def require_agreement(found: Drift, *, tolerance: Drift, version: int) -> None:
    """Check a measured difference against its tolerance.

    Raises:
        WeightMismatch: the difference exceeds the tolerance or is not a number.
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
    """Return one completion as a sequence, to compare log-probabilities after a weight update."""
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
