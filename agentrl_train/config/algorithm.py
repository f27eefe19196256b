"""The section ``[algorithm]``: one key per choice, presets, and checks of combinations.

A preset is a TOML file with some keys of a run, in ``config/presets`` or anywhere else. The keys of the
configuration override it. A key that selects a function also accepts a user's function
(``config.functions``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl_train.config.credit import Credit, CriticCredit, Sweet, Trajectory
from agentrl_train.config.functions import Choice, Function, Own
from agentrl_train.config.loss import (
    Aggregation,
    Clip,
    Correction,
    Mean,
    NoCorrection,
    PlainRatio,
    Ratio,
    Region,
)
from agentrl_train.config.paths import ModelPath
from agentrl_train.config.section import (
    Count,
    CountOrOff,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Share,
    Table,
)

if TYPE_CHECKING:
    from agentrl_train.config.run_config import RunConfig

SIBLINGS = ("mean", "leave_one_out", "length_weighted")
"""Baselines that compare siblings."""
WIDE = 9.0
"""From this ``region.high`` on, a cap only bounds the weights of rare tokens and does not limit updates."""


class Baseline(Function):
    """Mean of the group, of the siblings, weighted by tokens, or of the batch, a greedy episode, or none."""

    name: Literal["mean", "leave_one_out", "length_weighted", "greedy", "batch_mean", "value", "none"]


class Scale(Function):
    """Standard deviation of the group or of the batch, mean of the group, or none."""

    name: Literal["std", "batch_std", "mean", "none"]


class Anchor(Function):
    """The sampler, the policy recomputed before the update, or an interpolation of sampler and policy."""

    name: Literal["behaviour", "old", "interpolated"]


class Exclusion(Function):
    """Episodes that were ended by a limit, have an empty turn, or repeat themselves."""

    name: Literal["truncated", "void", "repetitive"]


class Overlong(Table):
    """Penalty of long episodes (DAPO)."""

    buffer: Count
    """The penalty rises from 0 over this many tokens before ``engine.max_context``."""
    most: NonNegative = 1.0
    """Subtracted from the reward of an episode as long as ``engine.max_context``."""


class Penalties(Table):
    """Penalties, which are subtracted from the reward of an episode or replace it."""

    invalid_call: NonNegative = 0.0
    """Penalty for an episode with invalid tool calls."""
    truncation: NonNegative = 0.0
    """Penalty for an episode that a limit ended."""
    incomplete: Literal[False] | float = False
    """Replaces the reward of an episode with an invalid call or an end by a limit, unless it is false."""
    overlong: Overlong | None = None
    """Penalty for long episodes: ``{buffer = 128, most = 1.0}``."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this table, one sentence each."""
        if self.incomplete is False or not (self.invalid_call or self.truncation):
            return []
        return [
            f"penalties.incomplete = {self.incomplete:g} replaces the rewards that invalid_call and "
            "truncation are subtracted from: set it to false, or leave them out"
        ]


class ClipCov(Table):
    """Omit tokens whose covariance of advantage and log-probability is large (Clip-Cov)."""

    share: Fraction = 0.02
    """Share of the tokens to omit."""
    low: NonNegative = 1.0
    """Lower bound of the covariance of the tokens to omit."""
    high: Positive = 40.0
    """Upper bound of the covariance of the tokens to omit."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this table, one sentence each."""
        return [f"low ({self.low:g}) must be below high ({self.high:g})"] * (self.low >= self.high)


class Kl(Table):
    """KL penalty towards the initial policy. It needs a copy of the model, except with adapters."""

    coefficient: NonNegative = 0.0
    """Weight of the penalty. 0 disables it."""
    estimator: Literal["k2", "k3"] = "k3"
    """Estimate of the divergence: half the squared log-ratio (k2), or q/p - 1 - log(q/p) (k3)."""


class ReplayTable(Table):
    """Self-imitation: a second loss on earlier successful episodes (SPEAR)."""

    weight: NonNegative = 0.0
    """Weight of the loss of replayed episodes. 0 disables it."""
    warmup_steps: CountOrOff = 200
    """Steps over which the weight rises from 0, along half a cosine."""
    size: Count = 2048
    """Maximum number of episodes in the buffer. The oldest leave it first."""
    episodes: Count = 64
    """Maximum number of episodes to replay in a step. They are drawn at random, each only once."""
    max_age: Count = 10
    """Steps after which an episode leaves the buffer."""
    quantile: Fraction = 0.5
    """Baseline of a replayed episode: this quantile of the mean rewards of its task's recent groups."""
    history: Count = 10_240
    """Number of recent groups for the baseline."""


class DistillTable(Table):
    """On-policy distillation: frozen teachers score the tokens that the policy samples."""

    weight: NonNegative = 0.0
    """Weight of the teacher's log-probability minus the policy's, the advantage of a token. 0 disables it."""
    teachers: dict[str, ModelPath] = Field(default_factory=dict)
    """Teacher of each task: a model folder, or the name of a model on the hub. "*" stands for other tasks."""
    keep_rewards: bool = False
    """Add the teachers' advantages to the advantages of the rewards instead of replacing them."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this table, one sentence each."""
        if bool(self.weight) == bool(self.teachers):
            return []
        lacking = "teachers, such as {'*' = 'models/teacher'}" if self.weight else "a weight above 0"
        return [f"distillation needs weight and teachers, or none of them: give {lacking}"]

    def teacher_of(self, task: str) -> str | None:
        """Return the teacher of a task, or None if it has none."""
        return self.teachers.get(task, self.teachers.get("*"))


class AlgorithmSection(Section):
    """Advantages and loss: a preset, or one choice at a time."""

    preset: str | None = None
    """Name of a preset, or path of a TOML file with keys of a run. Keys of this file override the preset."""
    penalties: Penalties = Penalties()
    """Penalties, which are subtracted from the reward of an episode or replace it."""
    dynamic_sampling: CountOrOff = 0
    """Replace groups of equal rewards by other samples, at most this many in a row for each group of a step.
    0 disables it."""
    keep_groups: Share = 1.0
    """Share of the groups of each task to train on: those with the largest spread of rewards."""
    leave_out: tuple[Annotated[Exclusion | Own, Choice()], ...] = ()
    """Episodes to omit from the loss: ended by a limit ("truncated"), with an empty turn ("void"), or with
    repetitions ("repetitive"), or those for which a function of a trajectory is true. They still count in the
    baseline."""
    credit: Credit = Trajectory()
    """Function that credits reward to turns."""
    baseline: Annotated[Baseline | Own, Choice("mean")] = Baseline(name="mean")
    """Baseline subtracted from a return: the mean of its group ("mean"), of its siblings ("leave_one_out"),
    the mean weighted by tokens ("length_weighted"), the return of a greedy episode ("greedy"), the mean of
    the batch, or none. With credit by a critic, it is the critic's "value"."""
    scale: Annotated[Scale | Own, Choice("std")] = Scale(name="std")
    """Divisor of advantages: standard deviation of the group or of the batch, mean of the group, or none.
    With credit by a critic, it is "none"."""
    normalization: Literal["task", "task_exact", "batch", "none"] = "task"
    """Normalize the advantages of each task (AgentRL), or of the batch, to mean 0 and std 1 under the weights
    of the loss. Groups without a signal stay 0, except with "task_exact", the equation of the paper."""
    anchor: Annotated[Anchor | Own, Choice("behaviour")] = Anchor(name="behaviour")
    """Policy that the ratio is taken against: the sampler ("behaviour"), the policy recomputed before the
    update ("old"), or an interpolation of sampler and current policy by the age of the token
    ("interpolated")."""
    ratio: Ratio = PlainRatio()
    """Ratio of a token: its own ratio, the geometric mean over its turn or sequence, the mean over the
    sequence with the gradient of the token ("sequence_token"), or the mean of clipped ratios
    ("geometric")."""
    region: Region = Clip()
    """Function that bounds an update."""
    correction: Correction = NoCorrection()
    """Weights that correct for the difference between anchor and sampler."""
    aggregation: Aggregation = Mean()
    """Units that have equal weight in the loss."""
    clip_cov: ClipCov | None = None
    """Omit tokens depending on their covariance. Off by default."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus that is subtracted from the loss. 0 disables it."""
    kl: Kl = Kl()
    """KL penalty towards the initial policy."""
    replay: ReplayTable = ReplayTable()
    """Replay of earlier successful episodes."""
    distill: DistillTable = DistillTable()
    """Distillation from teachers."""

    @model_validator(mode="before")
    @classmethod
    def _critics_baseline(cls, table: Any) -> Any:
        """Set the defaults of baseline and scale for credit by a critic."""
        if not isinstance(table, dict):
            return table
        credit = table.get("credit")
        name = credit.get("name") if isinstance(credit, dict) else getattr(credit, "name", credit)
        return {"baseline": "value", "scale": "none", **table} if name in BY_CRITIC else table

    @property
    def critic(self) -> CriticCredit | None:
        """Return the credit if a critic computes it."""
        return self.credit if isinstance(self.credit, CriticCredit) else None

    @property
    def corrects(self) -> bool:
        """Return True if tokens are weighted by the ratio of the anchor to the sampler."""
        return self.correction.name != "none"

    @property
    def recomputes(self) -> bool:
        """Return True if the anchor needs log-probabilities recomputed before the update."""
        return self.anchor.name == "old" or isinstance(self.anchor, Own)

    @property
    def constant_tokens(self) -> int | None:
        """Return the denominator of each episode with the aggregation "constant", if it is set."""
        return getattr(self.aggregation, "tokens", None)

    @property
    def by_sequence(self) -> str | None:
        """Return a key with a value that needs whole sequences, if there is one."""
        if self.ratio.name != "token":
            return "ratio"
        return "correction.level" if getattr(self.correction, "level", "token") != "token" else None

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        credit, baseline, ratio, region = (
            one.name for one in (self.credit, self.baseline, self.ratio, self.region)
        )
        found = []
        if baseline == "greedy" and credit != "trajectory":
            found.append(
                "baseline 'greedy' is the return of a whole episode, which cannot be compared with single "
                "turns: use credit = 'trajectory'"
            )
        if baseline == "batch_mean" and self.normalization == "batch":
            found.append(
                "baseline 'batch_mean' and normalization 'batch' both centre the batch: use baseline = 'none'"
            )
        critic = self.critic is not None
        if critic != (baseline == "value") or (critic and self.scale.name != "none"):
            found.append(
                "credit by a critic has the critic's values as its baseline, and no scale: set credit to "
                f"one of {', '.join(BY_CRITIC)} with baseline = 'value' and scale = 'none', not {credit!r} "
                f"with baseline = {baseline!r} and scale = {self.scale.name!r}"
            )
        if self.dynamic_sampling and baseline in ("none", "batch_mean", "value"):
            found.append(
                f"dynamic_sampling drops groups of equal rewards, which have a signal with baseline "
                f"{baseline!r}: use a baseline of the group, or set it to 0"
            )
        if self.corrects and self.anchor.name == "behaviour":
            found.append(
                f"correction = {self.correction.name!r} weighs the anchor against the sampler, which is the "
                "anchor: set anchor = 'old' or 'interpolated', or correction = 'none'"
            )
        if self.anchor.name == "interpolated" and not self.corrects:
            found.append(
                "anchor 'interpolated' moves the ratio away from the sampler, and nothing weighs the "
                "difference: set correction = 'truncate'"
            )
        if ratio == "geometric" and region != "none":
            found.append(
                f"ratio 'geometric' clips each token before the mean, and region = {region!r} would "
                "bound it twice: set region = 'none'"
            )
        if ratio in ("sequence", "geometric") and credit in ("turn", "state", *BY_CRITIC):
            found.append(
                f"ratio = {ratio!r} gives a sequence one update, but credit = {credit!r} gives its "
                "turns different advantages: use ratio = 'sequence_token' or 'turn'"
            )
        if region == "divergence" and ratio != "token":
            found.append(
                "region 'divergence' compares the probabilities of tokens: set ratio = 'token', not "
                f"{ratio!r}"
            )
        if isinstance(self.credit, Sweet) and self.credit.pairs and self.aggregation.name != "token_mean":
            found.append(
                "credit.pairs weighs all pairs equally, which needs aggregation = 'token_mean', not "
                f"{self.aggregation.name!r}"
            )
        if critic and self.replay.weight:
            found.append(
                "algorithm.replay.weight weighs episodes by their advantages among siblings, which a "
                "critic replaces: set it to 0, or use a credit without a critic"
            )
        selects = self.keep_groups < 1.0 or self.dynamic_sampling or self.replay.weight
        if self.distill.weight and selects and not self.distill.keep_rewards:
            found.append(
                "keep_groups, dynamic_sampling and algorithm.replay.weight select episodes by rewards, "
                "which distillation replaces: leave them out, or set algorithm.distill.keep_rewards = true"
            )
        return found


BY_CRITIC = ("gae_token", "gae_turn", "gae_bi_level", "archer", "sweet")
"""Credit functions that use a critic."""


def algorithm_problems(config: RunConfig) -> list[str]:
    """Return violated constraints between ``[algorithm]`` and other sections, one sentence each."""
    algorithm, rollout, engine = config.algorithm, config.rollout, config.engine
    found = _problems_of_critic(config)
    if rollout.group_size == 1:
        found += _problems_of_single_episodes(algorithm)
    stale = rollout.max_staleness > 0 or rollout.stale.fraction > 0
    if algorithm.anchor.name == "old" and not algorithm.corrects and (stale or engine.truncates):
        found.append(
            "algorithm.anchor = 'old' takes the recomputed policy for the sampler, but other policies sample "
            "tokens (rollout.max_staleness, rollout.stale.fraction, engine.top_p, top_k, min_p): set "
            "algorithm.correction = 'truncate', or algorithm.anchor = 'behaviour'"
        )
    if algorithm.anchor.name == "interpolated" and rollout.stale.model is not None:
        found.append(
            "algorithm.anchor = 'interpolated' needs the age of a token in policy versions, which tokens of "
            "rollout.stale.model do not have: set algorithm.anchor = 'old', or leave out the model"
        )
    if engine.truncates and not (algorithm.anchor.name == "old" and algorithm.corrects):
        found.append(
            "engine.top_p, top_k and min_p sample from another distribution than the trained one: set "
            "algorithm.anchor = 'old' and algorithm.correction = 'truncate', which weighs each token by "
            "their ratio"
        )
    if rollout.sub_agent is not None and algorithm.credit.name == "turn":
        found.append(
            "algorithm.credit = 'turn' compares turns of the same number, but with rollout.sub_agent one can "
            "belong to a planner and the other to a worker: use credit = 'trajectory'"
        )
    if config.train.sequence_parallel > 1 and algorithm.by_sequence:
        found.append(
            f"algorithm.{algorithm.by_sequence} needs whole sequences on a rank, but "
            f"train.sequence_parallel = {config.train.sequence_parallel} splits them: set it to 1, or use "
            "the value 'token'"
        )
    overlong = algorithm.penalties.overlong
    if overlong is not None and overlong.buffer >= engine.max_context:
        found.append(
            f"algorithm.penalties.overlong.buffer ({overlong.buffer}) must be below engine.max_context "
            f"({engine.max_context})"
        )
    if algorithm.distill.weight and engine.truncates:
        found.append(
            "engine.top_p, top_k and min_p sample from another distribution than the one that distillation "
            "compares with the teacher's: leave them out"
        )
    return found


def _problems_of_critic(config: RunConfig) -> list[str]:
    credit, alternatives, found = config.algorithm.credit, config.rollout.alternatives, []
    pairs = credit.pairs if isinstance(credit, Sweet) else 0
    if bool(pairs) != bool(alternatives):
        found.append(
            f"algorithm.credit.pairs = {pairs} of credit 'sweet' are drawn from the completions that "
            f"rollout.alternatives = {alternatives} adds to each turn: set both, or neither"
        )
    if isinstance(credit, Sweet) and config.rollout.group_size == 1:
        found.append(
            "algorithm.credit = 'sweet' learns from pairs of siblings, but rollout.group_size is 1: use a "
            "larger group or another credit"
        )
    return found


def algorithm_notes(config: RunConfig) -> list[str]:
    """Return notes on ``[algorithm]`` and other sections, one sentence each."""
    algorithm, rollout = config.algorithm, config.rollout
    region = algorithm.region
    wide = region.name == "none" or (region.name == "cap" and getattr(region, "high", 0.0) >= WIDE)
    older = []
    if rollout.max_staleness > 0:
        older.append(f"rollout.max_staleness = {rollout.max_staleness}")
    if rollout.stale.fraction > 0:
        older.append(f"rollout.stale.fraction = {rollout.stale.fraction:g}")
    if not (wide and older) or algorithm.corrects or algorithm.ratio.name == "geometric":
        return []
    zero = " and ".join(f"{one.partition(' = ')[0]} = 0" for one in older)
    return [
        f"algorithm.region = {region.name!r} is for tokens of the policy that is trained, but older policies "
        f"also sample ({', '.join(older)}), and nothing limits the update of their tokens: set {zero}, or "
        "algorithm.region = 'clip'"
    ]


def _problems_of_single_episodes(algorithm: AlgorithmSection) -> list[str]:
    found = []
    if algorithm.baseline.name in SIBLINGS:
        found.append(
            f"algorithm.baseline = {algorithm.baseline.name!r} compares siblings, but "
            "rollout.group_size is 1: use a larger group or baseline = 'none'"
        )
    if algorithm.scale.name in ("std", "mean"):
        found.append(
            f"algorithm.scale = {algorithm.scale.name!r} needs the spread of siblings, but "
            "rollout.group_size is 1: use a larger group or scale = 'none'"
        )
    if algorithm.keep_groups < 1.0 or algorithm.dynamic_sampling:
        found.append(
            "algorithm.keep_groups and dynamic_sampling select groups by the spread of their rewards, but "
            "rollout.group_size is 1: use a larger group, or leave them out"
        )
    return found
