"""Functions of the loss in ``[algorithm]``: ratio, region, correction and aggregation, with parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from agentrl_train.config.functions import Choice, Function, Own
from agentrl_train.config.section import Count, NonNegative, Positive, Share


class PlainRatio(Function):
    """Ratio of the token, or the geometric mean over its turn or sequence."""

    name: Literal["token", "turn", "sequence", "sequence_token"] = "token"


class GeometricRatio(Function):
    """Geometric mean of the clipped ratios of a sequence (GMPO)."""

    name: Literal["geometric"] = "geometric"
    low: Share = 0.2
    """Ratios are clipped at 1 - low and 1 + high."""
    high: Positive = 0.28
    """See low."""
    dual: NonNegative = 3.0
    """Upper bound of the ratio for tokens with negative advantage. 0 disables it."""


Ratio = Annotated[PlainRatio | GeometricRatio | Own, Choice("token")]


class Unbounded(Function):
    """No bound."""

    name: Literal["none"] = "none"


class Clip(Function):
    """Clip the ratio."""

    name: Literal["clip"] = "clip"
    low: Share = 0.2
    """The ratio is clipped at 1 - low and 1 + high."""
    high: Positive = 0.28
    """See low."""
    dual: NonNegative = 3.0
    """Upper bound of the ratio for tokens with negative advantage. 0 disables it."""

    def problems(self) -> list[str]:
        """Return violated constraints between the parameters, one sentence each."""
        if 0.0 < self.dual <= 1.0 + self.high:
            return [f"dual ({self.dual}) must be above 1 + high ({1.0 + self.high:g}), or 0 to disable it"]
        return []


class Bounds(Function):
    """Cap the ratio without losing the gradient (CISPO), or omit tokens with a ratio outside ("band")."""

    name: Literal["cap", "band"]
    low: Share = 0.2
    """The range of the ratio is 1 - low to 1 + high."""
    high: Positive = 0.28
    """See low."""


class Soft(Function):
    """Soft gate (SAPO)."""

    name: Literal["soft"] = "soft"
    positive: Positive = 1.0
    """Steepness for positive advantages."""
    negative: Positive = 1.05
    """Steepness for negative advantages."""


class Divergence(Function):
    """Omit tokens whose probability moved too far (DPPO)."""

    name: Literal["divergence"] = "divergence"
    low: Share = 0.2
    """Largest fall of a token's probability if its advantage is negative."""
    high: Share = 0.2
    """Largest rise of a token's probability if its advantage is positive."""
    cap: NonNegative = 20.0
    """Upper bound of the weight of a token, without losing its gradient. 0 disables it."""


Region = Annotated[Unbounded | Clip | Bounds | Soft | Divergence | Own, Choice("clip")]


class NoCorrection(Function):
    """No weights."""

    name: Literal["none"] = "none"


class Truncate(Function):
    """Weigh tokens by the ratio of the anchor to the sampler, truncated (TIS)."""

    name: Literal["truncate"] = "truncate"
    cap: NonNegative = 2.0
    """Upper bound of the ratio. 0 means no bound."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of the token, or the geometric mean over its sequence."""


class Mask(Truncate):
    """Omit tokens with a ratio outside [floor, cap], and weigh the others by the ratio (MIS, IcePop)."""

    name: Literal["mask"] = "mask"  # type: ignore[assignment]
    floor: NonNegative = 0.5
    """Lower bound of the ratio."""

    def problems(self) -> list[str]:
        """Return violated constraints between the parameters, one sentence each."""
        if 0.0 < self.cap <= self.floor:
            return [f"floor ({self.floor}) must be below cap ({self.cap})"]
        return []


Correction = Annotated[NoCorrection | Truncate | Mask | Own, Choice("none")]


class Mean(Function):
    """Equal weight for each token, episode ("sequence_mean"), group or task.

    An episode can have several segments, for example with a sub-agent. Within it, its segments
    ("sequence_mean") or its tokens ("rollout_mean") have equal weight, or each segment has the weight of an
    episode ("segment_mean").
    """

    name: Literal[
        "token_mean", "sequence_mean", "rollout_mean", "segment_mean", "group_mean", "task_mean"
    ] = "sequence_mean"


class Constant(Function):
    """Divide by a constant number of tokens for each episode (Dr. GRPO)."""

    name: Literal["constant"] = "constant"
    tokens: Count | None = None
    """Denominator of each episode, ``engine.max_context`` by default."""


Aggregation = Annotated[Mean | Constant, Choice("sequence_mean")]
