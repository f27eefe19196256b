"""The words the trainer speaks in: tokens, turns, trajectories, batches, and the three seams.

Who makes what: the engine makes ``Completion``; the actor makes ``Turn``, ``Trajectory`` and
``TrajectoryGroup``; ``batch.py`` makes ``TokenSequence`` and ``Batch``; the learner takes a ``Batch``.

Example. A trajectory of two turns is one row of tokens, never decoded and encoded again::

    turns[0].prompt_ids      = P0          # system, tools, task          mask 0
    turns[0].completion      = A0          # sampled                      mask 1
    turns[1].prompt_ids      = E0          # the environment's reply      mask 0
    turns[1].completion      = A1          # sampled                      mask 1
    TokenSequence.token_ids  = P0 + A0 + E0 + A1
    TokenSequence.loss_mask  = 0…0  1…1  0…0  1…1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl_env.types import Message, TaskSample

if TYPE_CHECKING:
    import torch

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; ``temperature = 0`` is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    seed: int = 0
    """Seed of this request's own random stream, so that its draw does not depend on its neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine sampled for one turn; each list has one entry a token, the stop token included."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probability of each token under the distribution it was really drawn from."""
    versions: Sequence[int]
    """``policy_version`` of the weights that sampled each token."""
    finish_reason: str
    """"stop" (a stop token was sampled) or "length"."""
    policy: str = "current"
    """Which policy of the pool acted: "current" or "stale" (cross-policy sampling)."""


class EpisodeEnd(StrEnum):
    """How an episode ended. Only the first four can be trained on; a failure is never a reward."""

    TERMINATED = "terminated"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TIME = "truncated_time"
    TRUNCATED_LENGTH = "truncated_length"
    """The context was full: the model talked too much."""
    FAILED_ENVIRONMENT = "failed_environment"
    FAILED_ENGINE = "failed_engine"

    @property
    def failed(self) -> bool:
        """Whether infrastructure broke, so that the reward means nothing."""
        return self in (EpisodeEnd.FAILED_ENVIRONMENT, EpisodeEnd.FAILED_ENGINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion and the environment's reply to it."""

    prompt_ids: Sequence[int]
    """The new tokens in front of the completion: the opening for turn 1, then the rendered reply."""
    completion: Completion
    message: Message
    """The completion as parsed and sent to the environment."""
    reply: Sequence[Message]
    reward: float
    invalid_calls: int = 0
    """Tool calls of this turn that the environment could not accept (the model's error)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode: its turns, its end and its total reward."""

    sample: TaskSample
    opening: Sequence[Message]
    turns: Sequence[Turn]
    end: EpisodeEnd
    reward: float
    """Sum of the turns' rewards, as the environment gave them."""
    success: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0

    @property
    def invalid_calls(self) -> int:
        """Number of tool calls the environment could not accept."""
        return sum(turn.invalid_calls for turn in self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens the policy sampled, over all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """Sibling trajectories of one sample; ``group_id`` is the admission number, unique in a run."""

    group_id: int
    task: str
    trajectories: Sequence[Trajectory]
    admitted_version: int
    """``policy_version`` when the group was admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One trajectory as one row of tokens; all arrays are [T]."""

    token_ids: IntArray
    loss_mask: FloatArray
    """1 exactly where the policy sampled the token."""
    logprobs: FloatArray
    """Behaviour log-probabilities; 0 where the mask is 0."""
    versions: IntArray
    """``policy_version`` of each sampled token; -1 where the mask is 0."""
    advantages: FloatArray
    """0 where the mask is 0."""
    task: str
    group_id: int

    def __len__(self) -> int:
        """Return T."""
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed rows that go through the model together; all tensors are [rows, row length].

    A row holds one or more whole sequences. ``segment_ids`` numbers them from 1 in each row (0 is padding);
    ``position_ids`` start at 0 in each sequence. ``loss_mask[r, t]`` marks token t as sampled: its
    log-probability comes from the logits at t - 1.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    """Weight of each sampled token in the loss: the global denominator of the aggregation is already in it,
    so that a step's loss is the plain sum over all its micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step's worth of micro-batches."""

    micro_batches: Sequence[MicroBatch]
    num_sequences: int
    num_loss_tokens: int
    num_tokens: int
    """Real tokens, padding left out."""
    num_slots: int
    """Tokens with padding; ``1 - num_tokens / num_slots`` is the waste."""


class Engine(Protocol):
    """Seam: where completions come from. It need not say how or where generation runs."""

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        session_key: str,
        policy: str = "current",
    ) -> Completion:
        """Sample one completion after ``token_ids``.

        ``token_ids`` is the whole context. Calls with the same ``session_key`` extend one another, so an
        engine may keep the prefix. Raises ``EngineError`` if no completion can be had.
        """
        ...

    def release(self, session_key: str) -> None:
        """Forget what is kept for a session; idempotent."""
        ...

    async def close(self) -> None:
        """Stop; idempotent."""
        ...


class MeasuredEngine(Engine, Protocol):
    """An engine that counts what it does."""

    def statistics(self) -> Mapping[str, float]:
        """Return running totals: ``sampled_tokens``, ``prefilled_tokens`` and ``busy_s``."""
        ...


class Sleeper(Protocol):
    """Seam: an engine that gives its device's memory back while others need it. Blocking, as ``publish``."""

    def sleep(self) -> None:
        """Release what is cached and move the weights to host memory; requests wait. Idempotent."""
        ...

    def wake(self) -> None:
        """Go on with the same weights; idempotent."""
        ...


class RunningEngine(MeasuredEngine, Sleeper, Protocol):
    """What a run has of its engine beside its weights."""


class WeightSync(Protocol):
    """Seam: how parameters reach an engine."""

    def publish(
        self,
        state: Mapping[str, Any],
        *,
        policy_version: int,
        policies: Sequence[str] = ("current",),
    ) -> None:
        """Make these policies sample from these weights, labelled ``policy_version``, from now on.

        Returns once the weights are in force. Raises ``EngineError`` if they cannot be.
        """
        ...


class Trace(Protocol):
    """Seam: who is told what happened when. May be called from any thread; never raises.

    A track is named ``group/track``, such as ``trainer/steps``; what happens on one track is nested or one
    after another.
    """

    def span(self, track: str, name: str, **facts: Any) -> AbstractContextManager[dict[str, Any]]:
        """Record how long the block takes; facts known only at its end may be added to what it yields."""
        ...

    def mark(self, track: str, name: str, *, since: float, **facts: Any) -> None:
        """Record what began at ``since`` (``time.monotonic``) and ends now."""
        ...

    def lane(self, group: str) -> AbstractContextManager[str]:
        """Lend a track of a group that nobody else uses meanwhile."""
        ...


class Untraced:
    """A ``Trace`` that records nothing."""

    def span(self, track: str, name: str, **facts: Any) -> AbstractContextManager[dict[str, Any]]:
        """Record nothing."""
        return nullcontext(facts)

    def mark(self, track: str, name: str, *, since: float, **facts: Any) -> None:
        """Record nothing."""

    def lane(self, group: str) -> AbstractContextManager[str]:
        """Lend the same name to everyone."""
        return nullcontext(group)


UNTRACED = Untraced()
