"""Data types of the trainer, and the protocols between its parts.

The engine produces ``Completion``; the actor produces ``Turn``, ``Trajectory`` and ``TrajectoryGroup``;
``batch.py`` produces ``TokenSequence`` and ``Batch``; the learner consumes ``Batch``.

A trajectory of two turns is one row of tokens that is never decoded and re-encoded::

    turns[0].prompt_ids      = P0          # system, tools, task          mask 0
    turns[0].completion      = A0          # sampled                      mask 1
    turns[1].prompt_ids      = E0          # the environment's reply      mask 0
    turns[1].completion      = A1          # sampled                      mask 1
    TokenSequence.token_ids  = P0 + A0 + E0 + A1
    TokenSequence.loss_mask  = 0…0  1…1  0…0  1…1

A context that does not continue the previous one is another ``Segment`` of the same trajectory and another
row, with the same return. Sub-agents and rewritten histories have such contexts.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl_env.types import Message, TaskSample, notebook_html
from agentrl_train.errors import EngineError

if TYPE_CHECKING:
    import torch

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSource:
    """A task to draw samples from."""

    task: str
    split: str = "train"
    num_samples: int | None = None
    """Number of samples of the split; None is unlimited."""
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; ``temperature = 0`` is greedy decoding."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    """Sample from the most probable tokens with this total probability. 1 means all tokens."""
    top_k: int = 0
    """Sample from this many of the most probable tokens. 0 means all tokens."""
    min_p: float = 0.0
    """Sample from tokens whose probability is at least this share of the most probable token's."""
    seed: int = 0
    """Seed of this request. Its tokens do not depend on the rest of the batch."""
    grammar: str = ""
    """Grammar of the allowed text, in the syntax of llguidance. "" allows any text."""

    @property
    def truncates(self) -> bool:
        """Whether improbable tokens are excluded."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def check_room(self, token_ids: Sequence[int], *, max_context: int) -> None:
        """Check that a context is not empty and leaves room for ``max_new_tokens``.

        Raises:
            EngineError: the context is empty or too long.
        """
        if not token_ids or len(token_ids) + self.max_new_tokens > max_context:
            raise EngineError(
                f"a context of {len(token_ids)} tokens leaves no room for {self.max_new_tokens} new tokens "
                f"in {max_context}: raise engine.max_context or lower engine.max_new_tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters and limits of the turns of an episode."""

    max_context: int = 2048
    """Token limit of one context, prompt and replies included."""
    max_new_tokens: int = 256
    """Token limit of one turn. The last turn of a full context is shorter."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def at(self, temperature: float) -> Sampling:
        """Return the same limits with another temperature and without truncation."""
        return replace(self, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)

    def request(
        self, context: Sequence[int], *, seed: int, limit: int | None = None, grammar: str = ""
    ) -> SamplingParams:
        """Return the parameters of the turn after ``context``, of at most ``limit`` tokens."""
        most = min(limit or self.max_new_tokens, self.max_new_tokens, self.max_context - len(context))
        return SamplingParams(
            max_new_tokens=most,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=seed,
            grammar=grammar,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedSets:
    """The tokens from which each token of a constrained completion was drawn.

    Most positions in a text share a few sets, so each set is stored once.
    """

    sets: Sequence[bytes]
    """Packed bits, all of one size: bit ``t % 8`` of byte ``t // 8`` is set if token ``t`` is allowed."""
    places: Sequence[int]
    """Number of the set of each token, from 1; 0 allows all tokens."""

    def first(self, count: int) -> AllowedSets:
        """Return the sets of the first ``count`` tokens."""
        return replace(self, places=self.places[:count])

    def plain(self) -> dict[str, Any]:
        """Return the sets as a JSON value, without loss."""
        packed = base64.b64encode(zlib.compress(b"".join(self.sets))).decode()
        return {"count": len(self.sets), "sets": packed, "places": list(self.places)}

    @classmethod
    def of_plain(cls, value: Mapping[str, Any]) -> AllowedSets:
        """Restore sets from the result of ``plain``."""
        packed = zlib.decompress(base64.b64decode(value["sets"]))
        size = len(packed) // max(1, value["count"])
        sets = tuple(packed[i * size : (i + 1) * size] for i in range(value["count"]))
        return cls(sets=sets, places=tuple(value["places"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens sampled for one turn. Every list has one entry per token, including the stop token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probability of each token under the distribution it was sampled from, with truncation and
    constraint."""
    versions: Sequence[int]
    """``policy_version`` of the weights that sampled each token."""
    finish_reason: str
    """"stop" (a stop token was sampled) or "length"."""
    policy: str = "current"
    """Policy that sampled the completion: "current" or "stale" (cross-policy sampling)."""
    allowed: AllowedSets | None = None
    """The allowed tokens of a constrained completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode to play: its sample, and the seed of all its draws."""

    task: str
    split: str
    index: int | str | None
    seed: int | None
    draw_seed: tuple[int, ...]
    version: int | None = None
    """``policy_version`` at which a training episode was admitted."""


class EpisodeEnd(StrEnum):
    """The end of an episode. Only the first four are trained on; a failure has no reward."""

    TERMINATED = "terminated"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TIME = "truncated_time"
    TRUNCATED_LENGTH = "truncated_length"
    """The context was full."""
    FAILED_ENVIRONMENT = "failed_environment"
    FAILED_ENGINE = "failed_engine"
    FAILED_REWARD = "failed_reward"
    """A score of ``[reward]`` is missing."""

    @property
    def failed(self) -> bool:
        """Return True if the infrastructure failed, which makes the reward meaningless."""
        return self in (EpisodeEnd.FAILED_ENVIRONMENT, EpisodeEnd.FAILED_ENGINE, EpisodeEnd.FAILED_REWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion and the environment's reply to it."""

    prompt_ids: Sequence[int]
    """The new tokens in front of the completion: the opening of its segment for the first turn, then the
    rendered reply."""
    completion: Completion
    message: Message
    """The completion as parsed and sent to the environment."""
    reply: Sequence[Message]
    reward: float
    invalid_calls: int = 0
    """Tool calls of this turn that the environment rejected (a model error)."""
    tolerant: bool = False
    """True if its calls were parsed although they are not in the syntax of the model's family."""
    thought: str | None = None
    """The thought of the completion. It is recorded, but the environment never sees it."""
    segment: int = 0
    """Number of the segment in its trajectory whose context the turn extends."""
    alternatives: Sequence[Completion] = ()
    """More completions of the same context, which the environment never saw."""
    times: Sequence[float] = field(default=(), compare=False)
    """Seconds from the start of the episode to the request, the completion and, if it came, the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One context of a trajectory: a row of tokens that is only ever extended.

    The segments of a trajectory form a tree: a sub-agent has its own context, and a rewritten (summarized,
    cut) history continues in a new segment.
    """

    parent: int | None
    """Number of the segment from which this segment was opened; None for the first."""
    after_turn: int | None
    """Number in the trajectory of the parent's turn after which it was opened; None for the first."""
    reason: Literal["root", "rewritten", "sub_agent"]
    agent: str = "main"
    """Name of the agent that acts in the segment."""
    opening: Sequence[Message] = ()
    """Messages before its first turn; the first segment starts with the trajectory's ``opening``."""


ROOT = Segment(parent=None, after_turn=None, reason="root")
"""The only segment of a trajectory that is one conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode: its turns, its end and its total reward.

    It is one rollout, whatever its number of segments: it has one return, one place in its group and one
    weight.
    """

    sample: TaskSample
    opening: Sequence[Message]
    turns: Sequence[Turn]
    """The turns of all segments, in sampling order."""
    end: EpisodeEnd
    reward: float
    """Sum of the environment's rewards over all turns; with ``scores``, their combination."""
    success: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named scores of the environment."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Scores of ``[reward]`` by name, with the environment's own reward as ``environment``."""
    error: str | None = None
    seconds: float = 0.0
    started: float | None = field(default=None, compare=False)
    """Unix time of the start; None if it was not recorded."""
    segments: Sequence[Segment] = (ROOT,)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless each segment follows its parent and each turn has a segment."""
        for number, segment in enumerate(self.segments):
            parent, after = segment.parent, segment.after_turn
            if number == 0 and (parent, after) == (None, None):
                continue
            if (
                parent is None
                or after is None
                or not 0 <= parent < number
                or not 0 <= after < len(self.turns)
            ):
                raise ValueError(
                    f"segment {number} of a trajectory was opened from segment {parent} after turn {after}; "
                    "name an earlier segment and one of its turns, or None and None for segment 0."
                )
            if self.turns[after].segment != parent:
                raise ValueError(
                    f"segment {number} of a trajectory follows turn {after}, which is of segment "
                    f"{self.turns[after].segment}, not of its parent {parent}."
                )
        unknown = [turn.segment for turn in self.turns if not 0 <= turn.segment < len(self.segments)]
        if unknown:
            raise ValueError(f"a turn is of segment {unknown[0]}, which its trajectory does not have.")

    @property
    def privileged(self) -> Mapping[str, Any]:
        """Return the data of the sample that only critics and judges see, such as a reference answer."""
        found: Mapping[str, Any] = self.sample.data.get("privileged", {})
        return found

    @property
    def invalid_calls(self) -> int:
        """Number of tool calls the environment rejected."""
        return sum(turn.invalid_calls for turn in self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens the policy sampled, over all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    def _repr_html_(self) -> str:
        result = "no reward" if self.error else f"reward {self.reward:g}"
        messages = [*self.opening]
        for turn in self.turns:
            messages += [turn.message, *turn.reply]
        heading = (
            f"sample {self.sample.index}: {self.end}, {result}, {self.num_sampled_tokens} sampled tokens"
        )
        return notebook_html(f"{heading}, {self.error}" if self.error else heading, messages)


def succeeded(metrics: Mapping[str, float], reward: float) -> bool:
    """Return True if an episode succeeded, by its metric ``success`` or else by a reward of at least 1."""
    return metrics.get("success", float(reward >= 1.0)) >= 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """Sibling trajectories of one sample; ``group_id`` is the admission number, unique in a run."""

    group_id: int
    task: str
    trajectories: Sequence[Trajectory]
    admitted_version: int
    """``policy_version`` when the group was admitted."""
    greedy: Trajectory | None = None
    """An episode at temperature 0 for a baseline that needs it; it is not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The groups of one training step."""

    groups: Sequence[TrajectoryGroup]
    trained_version: int = 0
    """``policy_version`` of the weights before the step, which is the number of trained steps."""
    waited_s: float = 0.0
    """Time that the trainer waited for these groups."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics once the step is trained, with ``reward`` and ``success`` as means over its episodes."""
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Task -> its metrics once the step is trained."""

    @property
    def number(self) -> int:
        """Number of trained steps after this step, from 1."""
        return self.next_version

    @property
    def next_version(self) -> int:
        """``policy_version`` of the weights after the step."""
        return self.trained_version + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One segment of a trajectory as one row of tokens; all arrays are [T]."""

    token_ids: IntArray
    loss_mask: FloatArray
    """1 for tokens that the policy sampled, else 0."""
    logprobs: FloatArray
    """Behaviour log-probabilities; 0 if the mask is 0."""
    versions: IntArray
    """``policy_version`` of each sampled token; -1 if the mask is 0."""
    advantages: FloatArray
    """Advantages; 0 if the mask is 0."""
    task: str
    group_id: int
    rollout: int | None = None
    """Number of its trajectory in the step, the same for all segments; None if it is the only segment."""
    allowed: IntArray | None = None
    """Row in ``allowed_sets`` of the set of each token; None if all tokens of all rows are allowed."""
    allowed_sets: NDArray[np.uint8] | None = None
    """Packed sets as in ``AllowedSets``, [sets, bytes]; the first allows all tokens."""

    def __len__(self) -> int:
        """Return T."""
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed rows of one forward pass; all tensors are [rows, row length].

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
    ages: torch.Tensor
    """Policy versions between the sampling of each token and this step; 0 if the mask is 0."""
    weights: torch.Tensor
    """Weight of each sampled token in the loss. It includes the global denominator of the aggregation, so the
    loss of a step is the plain sum over its micro-batches."""
    allowed: torch.Tensor
    """Row in ``allowed_sets`` of the set of each token."""
    allowed_sets: torch.Tensor
    """Packed sets as in ``AllowedSets``, [sets, bytes]; the first allows all tokens. Log-probabilities,
    entropy and gradients of the policy are renormalized over the allowed tokens."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """Return the micro-batch with every tensor of rows changed."""
        rows = [name for name in MicroBatch.__slots__ if name != "allowed_sets"]
        return replace(self, **{name: change(getattr(self, name)) for name in rows})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The micro-batches of one optimizer step."""

    micro_batches: Sequence[MicroBatch]
    num_sequences: int
    num_loss_tokens: int
    num_tokens: int
    """Tokens without padding."""
    num_slots: int
    """Tokens including padding; ``1 - num_tokens / num_slots`` is the padding share."""


class Engine(Protocol):
    """Interface: a source of completions, in any process or machine."""

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
        engine can cache the prefix. Raises ``EngineError`` on failure, and also if the engine makes no
        progress, so callers need no deadline of their own.
        """
        ...

    def release(self, session_key: str) -> None:
        """Drop the cache of a session; idempotent."""
        ...

    async def close(self) -> None:
        """Stop the engine; idempotent."""
        ...


class Sampler(Protocol):
    """Interface: samples the turns of one attempt at an episode."""

    @property
    def sampling(self) -> Sampling:
        """Limits and sampling parameters of a turn."""
        ...

    async def complete(
        self,
        context: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        segment: int = 0,
        grammar: str = "",
        seed: int | None = None,
    ) -> Completion:
        """Sample a turn after ``context``. The contexts of one segment extend one another.

        ``seed`` is the seed in a request. A run ignores it, because siblings with one seed would be equal.

        Raises ``EngineError`` on failure, and ``ConstraintError`` if the engine cannot follow ``grammar``.
        """
        ...


class MeasuredEngine(Engine, Protocol):
    """An engine with running totals of its work."""

    def statistics(self) -> Mapping[str, float]:
        """Return running totals: ``sampled_tokens``, ``prefilled_tokens`` and ``busy_s``."""
        ...


class Sleeper(Protocol):
    """Interface: an engine that can release its device memory for a while. Blocking, like ``publish``."""

    def sleep(self) -> None:
        """Drop caches and move the weights to host memory; requests wait. Idempotent."""
        ...

    def wake(self) -> None:
        """Resume with the same weights; idempotent."""
        ...


class WeightSync(Protocol):
    """Interface: transfer of parameters to an engine."""

    def publish(
        self,
        state: Mapping[str, Any],
        *,
        policy_version: int,
        policies: Sequence[str] = ("current",),
    ) -> None:
        """Load weights into these policies, labelled ``policy_version``.

        Returns once the weights are in use. Raises ``EngineError`` on failure.
        """
        ...


class RunningEngine(MeasuredEngine, Sleeper, WeightSync, Protocol):
    """The interface of an engine in a run: generation, statistics, sleep and new weights."""


class Trace(Protocol):
    """Interface: recorder of timed spans. Callable from any thread; never raises.

    A track is named ``group/track``, such as ``trainer/steps``; the spans of one track are nested or
    consecutive.
    """

    def span(self, track: str, name: str, **facts: Any) -> AbstractContextManager[dict[str, Any]]:
        """Record the duration of the block. Late attributes can be added to the yielded dict."""
        ...

    def mark(self, track: str, name: str, *, since: float, **facts: Any) -> None:
        """Record a span that began at ``since`` (``time.monotonic``) and ends now."""
        ...

    def lane(self, group: str) -> AbstractContextManager[str]:
        """Yield a free track of a group for the duration of the block."""
        ...


class Untraced:
    """A ``Trace`` that records nothing."""

    def span(self, track: str, name: str, **facts: Any) -> AbstractContextManager[dict[str, Any]]:
        """Record nothing."""
        return nullcontext(facts)

    def mark(self, track: str, name: str, *, since: float, **facts: Any) -> None:
        """Record nothing."""

    def lane(self, group: str) -> AbstractContextManager[str]:
        """Return the group as the track."""
        return nullcontext(group)


UNTRACED = Untraced()
