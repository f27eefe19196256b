"""Step 8 of 9: parameters -> weights of ``policy_version + 1``.

The publisher says which policies of the pool get the new weights, and checks that they really arrived: the
trainer and the engine must give the same tokens the same log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from agentrl_train.errors import WeightMismatch
from agentrl_train.types import Completion, TokenSequence, WeightSync


class Publisher:
    """Publishes to the current policy every time and to the stale one every ``stale_interval`` versions.

    Cross-policy sampling (AgentRL, section 3.1) draws turns from both. ``stale_interval = 0``: there is no
    stale policy.
    """

    def __init__(self, sync: WeightSync, *, stale_interval: int = 0) -> None:
        self._sync = sync
        self._stale_interval = stale_interval

    def publish(
        self, weights: Mapping[str, torch.Tensor], *, policy_version: int, everywhere: bool = False
    ) -> None:
        """Put weights in force as ``policy_version``; ``everywhere`` includes the stale policy."""
        due = self._stale_interval and policy_version % self._stale_interval == 0
        stale = self._stale_interval and (everywhere or due)
        policies = ("current", "stale") if stale else ("current",)
        self._sync.publish(weights, policy_version=policy_version, policies=policies)


def disagreement(trainer: Sequence[np.ndarray], sequences: Sequence[TokenSequence], *, version: int) -> float:
    """Return the largest log-probability difference on tokens sampled by ``version``; 0 if there are none.

    Args:
        trainer: the trainer's log-probabilities of each sequence, [T] each.
        sequences: what the engine sampled, with its own log-probabilities.
        version: the policy version whose weights the trainer holds.
    """
    worst = 0.0
    for ours, sequence in zip(trainer, sequences, strict=True):
        told = (sequence.versions == version) & (sequence.loss_mask > 0)
        if told.any():
            # Not Python's ``max``, which would hide what is not a number.
            worst = float(np.maximum(worst, np.abs(ours - sequence.logprobs)[told].max()))
    return worst


def require_agreement(difference: float, *, tolerance: float, version: int) -> None:
    """Stop a run whose engine does not hold the weights it should.

    Raises:
        WeightMismatch: the difference is over ``tolerance``, or not a number.
    """
    if not difference <= tolerance:
        raise WeightMismatch(
            f"engine and trainer differ by {difference:.2e} in log-probability at policy version {version} "
            f"(tolerance {tolerance:g}): the engine does not hold the trainer's weights"
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
