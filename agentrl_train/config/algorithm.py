"""The section ``[algorithm]``: one key per choice, presets, and the combinations that make no sense.

A preset is a TOML file with some keys of a run, in ``config/presets`` or anywhere else; the keys of the
configuration override it. If a key takes the name of a function, it also takes ``file.py:function``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from agentrl_train.config.section import Count, CountOrOff, Fraction, NonNegative, Positive, Section

if TYPE_CHECKING:
    from agentrl_train.config.run_config import RunConfig

SIBLINGS = ("mean", "leave_one_out", "length_weighted")
"""Baselines that compare siblings."""
GAE = ("gae_token", "gae_turn", "gae_bi_level")
"""Credits by generalized advantage estimation, which need a critic."""
BY_CRITIC = (*GAE, "archer", "sweet")
"""Credits by a critic."""
NO_UNIT = "say what an action is: 'gae_token', 'gae_turn' or 'gae_bi_level'"


def one_of(*names: str, reasons: dict[str, str] | None = None) -> AfterValidator:
    """Return a validator of a name, or of a function as ``file.py:function``."""

    def check(value: str) -> str:
        if value in names or ":" in value:
            return value
        if reasons and value in reasons:
            raise ValueError(f"{value!r}: {reasons[value]}")
        raise ValueError(
            f"{value!r} is none of {', '.join(names)}, and no function such as 'mine.py:function'"
        )

    return AfterValidator(check)


class AlgorithmSection(Section):
    """Advantages and loss: a preset, or one choice at a time."""

    preset: str | None = None
    """Name of a preset, or the path of a TOML file with keys of a run; the keys of this file override it."""
    invalid_call_penalty: NonNegative = 0.0
    """Subtracted from the reward of an episode with any invalid tool call."""
    truncation_penalty: NonNegative = 0.0
    """Subtracted from the reward of an episode that a limit ended."""
    overlong_buffer: CountOrOff = 0
    """Tokens before ``engine.max_context`` over which ``overlong_penalty`` rises from 0; 0 is off."""
    overlong_penalty: NonNegative = 1.0
    """Subtracted from the reward of an episode as long as ``engine.max_context``."""
    dynamic_sampling: CountOrOff = 0
    """Replace groups of equal rewards by other samples, at most this many in a row for each group of a step;
    0 is off."""
    keep_groups: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the groups of each task that is trained on, those with the largest spread of rewards."""
    mask_truncated: bool = False
    """Leave episodes that a limit ended out of the loss; they count in the baseline."""
    leave_out: tuple[Annotated[str, one_of("void", "repetitive")], ...] = ()
    """Episodes that are left out of the loss likewise: with a turn that says nothing ("void"), or
    that repeats itself ("repetitive"); or those for which a function of a trajectory is true."""
    credit: Annotated[str, one_of("trajectory", "turn", "state", *BY_CRITIC, reasons={"gae": NO_UNIT})] = (
        "trajectory"
    )
    """Return of a turn: that of its trajectory; the rewards from the turn on ("turn"); or the trajectory's
    plus a comparison of turns that follow the same observation ("state", GiGPO). With a critic, generalized
    advantage estimation by token, by turn, or by turn and then by token ("gae_bi_level", RAGEN); or the
    difference of twin critics of turns ("archer"), or the log-ratio of one with privileged information
    ("sweet")."""
    gamma: Fraction = 1.0
    """Discount per turn of credit by turn, by state, "gae_turn", "gae_bi_level" and "archer"."""
    token_gamma: Fraction = 1.0
    """Discount per token of "gae_token", and within the turns of "gae_bi_level"."""
    gae_lambda: Fraction = 1.0
    """Weight of longer returns in generalized advantage estimation; 0 trusts the critic alone."""
    state_weight: NonNegative = 1.0
    """Weight of the comparison at equal states."""
    baseline: Annotated[
        str, one_of("mean", "leave_one_out", "length_weighted", "greedy", "batch_mean", "value", "none")
    ] = "mean"
    """Subtracted from a return: the mean of its group ("mean"), of the others ("leave_one_out"), weighted by
    tokens ("length_weighted"), the return of a greedy episode ("greedy"), the mean of the batch, the value of
    the critic ("value", where credit is by a critic), or none."""
    scale: Annotated[str, one_of("std", "batch_std", "mean", "none")] = "std"
    """Divisor of advantages: standard deviation of the group or of the batch, mean of the group, or none."""
    normalization: Literal["task", "batch", "none"] = "task"
    """Normalize the advantages of each task (AgentRL), or of the batch, to mean 0 and std 1 under the weights
    of the loss."""
    anchor: Annotated[str, one_of("behaviour", "old", "interpolated")] = "behaviour"
    """Policy that the ratio is taken against: the sampler, the policy recomputed before the update ("old"),
    or one between the sampler and the current policy, by the age of the token ("interpolated")."""
    ratio: Annotated[str, one_of("token", "turn", "sequence", "sequence_token", "geometric")] = "token"
    """Ratio of a token: its own; the geometric mean of its turn or its sequence; the latter with the gradient
    of the token ("sequence_token"); or the mean of clipped ratios ("geometric")."""
    region: Annotated[str, one_of("clip", "cap", "soft", "divergence", "band", "none")] = "clip"
    """Bound of an update: clip the ratio, cap it without losing the gradient ("cap"), a soft gate, leave out
    tokens whose probability moved too far ("divergence") or whose ratio lies outside ("band"), or none."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The ratio is clipped at 1 - clip_low and 1 + clip_high."""
    clip_high: Positive = 0.28
    """See clip_low."""
    dual_clip: NonNegative = 3.0
    """Upper bound of the ratio for tokens with negative advantage; 0 is off."""
    soft_positive: Positive = 1.0
    """Steepness of the soft gate for positive advantages."""
    soft_negative: Positive = 1.05
    """Steepness of the soft gate for negative advantages."""
    divergence_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Largest fall of a token's probability where its advantage is negative, for region "divergence"."""
    divergence_high: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Largest rise of a token's probability where its advantage is positive, for region "divergence"."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Weigh tokens by the ratio of the anchor to the sampler, truncated at ``importance_cap``; or set those
    outside [importance_floor, importance_cap] to 0."""
    correction_level: Literal["token", "sequence"] = "token"
    """Ratio of the correction: of the token, or the geometric mean of its sequence."""
    importance_cap: NonNegative = 2.0
    """Upper bound of the correction; 0 is without a bound."""
    importance_floor: NonNegative = 0.5
    """Lower bound of the correction "mask"."""
    aggregation: Literal[
        "token_mean",
        "sequence_mean",
        "rollout_mean",
        "segment_mean",
        "group_mean",
        "task_mean",
        "constant",
    ] = "sequence_mean"
    """Unit with equal weight in the loss: token, episode, group, task, or a constant number of tokens. Where
    an episode has several segments, as with a sub-agent, these have equal weight within it ("sequence_mean"),
    or its tokens have ("rollout_mean"), or each segment has that of an episode ("segment_mean")."""
    constant_tokens: Count | None = None
    """Denominator of each episode with ``aggregation = "constant"``; left out, ``engine.max_context``."""
    covariance_share: Fraction = 0.0
    """Share of the tokens that have no loss because their covariance of advantage and log-probability lies
    between covariance_low and covariance_high (Clip-Cov); 0 is off."""
    covariance_low: NonNegative = 1.0
    """See covariance_share."""
    covariance_high: Positive = 40.0
    """See covariance_share."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus that is subtracted from the loss; 0 is off."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL penalty towards the initial policy, which takes a copy of the model, or with adapters
    none; 0 is off."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Estimate of that KL: half the squared log-ratio, or q/p - 1 - log(q/p)."""

    @property
    def by_critic(self) -> bool:
        """Return whether credit is by a critic."""
        return self.credit in BY_CRITIC

    @property
    def corrects(self) -> bool:
        """Return whether tokens are weighed by the ratio of the anchor to the sampler."""
        return self.correction != "none"

    @property
    def by_sequence(self) -> list[str]:
        """Return the keys whose values need whole sequences."""
        return [key for key in ("ratio", "correction_level") if getattr(self, key) != "token"]

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        return [*self._problems_of_advantages(), *self._problems_of_loss()]

    def _problems_of_advantages(self) -> list[str]:
        found = []
        if self.baseline == "greedy" and self.credit != "trajectory":
            found.append(
                "baseline 'greedy' is the return of a whole episode, which no single turn can be compared "
                "with: use credit = 'trajectory'"
            )
        if self.baseline == "batch_mean" and self.normalization == "batch":
            found.append(
                "baseline 'batch_mean' and normalization 'batch' both centre the batch: use baseline = 'none'"
            )
        if self.by_critic != (self.baseline == "value") or (self.by_critic and self.scale != "none"):
            found.append(
                "credit by a critic has the critic's values as its baseline, and no scale: set "
                f"credit to one of {', '.join(BY_CRITIC)} with baseline = 'value' and scale = 'none', not "
                f"{self.credit!r} with baseline = {self.baseline!r} and scale = {self.scale!r}"
            )
        if self.dynamic_sampling and self.baseline in ("none", "batch_mean", "value"):
            found.append(
                f"dynamic_sampling drops groups of equal rewards, which have a signal with baseline "
                f"{self.baseline!r}: use a baseline of the group, or set it to 0"
            )
        return found

    def _problems_of_loss(self) -> list[str]:
        found = []
        if self.region == "clip" and 0.0 < self.dual_clip <= 1.0 + self.clip_high:
            found.append(
                f"dual_clip ({self.dual_clip}) must be above 1 + clip_high "
                f"({1.0 + self.clip_high:g}), or 0 to disable it"
            )
        if self.correction == "mask" and 0.0 < self.importance_cap <= self.importance_floor:
            found.append(
                f"importance_floor ({self.importance_floor}) must be below importance_cap "
                f"({self.importance_cap})"
            )
        if self.corrects and self.anchor == "behaviour":
            found.append(
                f"correction = {self.correction!r} weighs the anchor against the sampler, which is the "
                "anchor: set anchor = 'old' or 'interpolated', or correction = 'none'"
            )
        if self.anchor == "interpolated" and not self.corrects:
            found.append(
                "anchor 'interpolated' moves the ratio away from the sampler, and nothing weighs the "
                "difference: set correction = 'truncate'"
            )
        if self.ratio == "geometric" and self.region != "none":
            found.append(
                f"ratio 'geometric' clips each token before the mean, and region = {self.region!r} would "
                "bound it twice: set region = 'none'"
            )
        if self.ratio in ("sequence", "geometric") and self.credit in ("turn", "state", *BY_CRITIC):
            found.append(
                f"ratio = {self.ratio!r} gives a sequence one update, but credit = {self.credit!r} gives its "
                "turns different advantages: use ratio = 'sequence_token' or 'turn'"
            )
        if self.region == "divergence" and self.ratio != "token":
            found.append(
                f"region 'divergence' compares the probabilities of tokens: set ratio = 'token', not "
                f"{self.ratio!r}"
            )
        if self.covariance_low >= self.covariance_high:
            found.append(
                f"covariance_low ({self.covariance_low:g}) must be below covariance_high "
                f"({self.covariance_high:g})"
            )
        if self.constant_tokens is not None and self.aggregation != "constant":
            found.append("constant_tokens needs aggregation = 'constant': set it, or leave it out")
        return found


def algorithm_problems(config: RunConfig) -> list[str]:
    """Return violated constraints between ``[algorithm]`` and other sections, one sentence each."""
    algorithm, rollout, engine = config.algorithm, config.rollout, config.engine
    found = []
    if rollout.group_size == 1:
        found += _problems_of_single_episodes(algorithm)
    found += _problems_of_critic(config)
    stale = rollout.max_staleness > 0 or rollout.stale_fraction > 0
    if algorithm.anchor == "old" and not algorithm.corrects and (stale or engine.truncates):
        found.append(
            "algorithm.anchor = 'old' takes the recomputed policy for the sampler, but tokens are sampled by "
            "others (rollout.max_staleness, rollout.stale_fraction, engine.top_p, top_k, min_p): set "
            "algorithm.correction = 'truncate', or algorithm.anchor = 'behaviour'"
        )
    if engine.truncates and not (algorithm.anchor == "old" and algorithm.corrects):
        found.append(
            "engine.top_p, top_k and min_p sample from another distribution than the trained one: set "
            "algorithm.anchor = 'old' and algorithm.correction = 'truncate', which weighs each token by "
            "their ratio"
        )
    if rollout.sub_agent is not None and algorithm.credit == "turn":
        found.append(
            "algorithm.credit = 'turn' compares turns of the same number, but with rollout.sub_agent one may "
            "be of a planner and the other of a worker: use credit = 'trajectory'"
        )
    if config.train.sequence_parallel > 1 and algorithm.by_sequence:
        found.append(
            f"algorithm.{algorithm.by_sequence[0]} needs whole sequences on a rank, but "
            f"train.sequence_parallel = {config.train.sequence_parallel} splits them: set it to 1, or use "
            "the value 'token'"
        )
    if algorithm.overlong_buffer >= engine.max_context:
        found.append(
            f"algorithm.overlong_buffer ({algorithm.overlong_buffer}) must be below engine.max_context "
            f"({engine.max_context})"
        )
    if config.distill.weight:
        found += _problems_of_distillation(config)
    return found


def _problems_of_distillation(config: RunConfig) -> list[str]:
    algorithm, found = config.algorithm, []
    selects = algorithm.keep_groups < 1.0 or algorithm.dynamic_sampling or config.replay.weight
    if selects and not config.distill.keep_rewards:
        found.append(
            "algorithm.keep_groups, dynamic_sampling and replay.weight select episodes by rewards, which "
            "distillation replaces: leave them out, or set distill.keep_rewards = true"
        )
    if config.engine.truncates:
        found.append(
            "engine.top_p, top_k and min_p sample from another distribution than the one that distillation "
            "compares with the teacher's: leave them out"
        )
    return found


def _problems_of_critic(config: RunConfig) -> list[str]:
    algorithm, critic = config.algorithm, config.critic
    if critic is None:
        if not algorithm.by_critic:
            return ["rollout.alternatives are for critic.pairs of credit 'sweet' alone: set it to 0"] * bool(
                config.rollout.alternatives
            )
        return [
            f"algorithm.credit = {algorithm.credit!r} takes advantages from the values of a critic: add "
            "a section [critic], or use credit = 'turn' or 'state'"
        ]
    found = []
    if not algorithm.by_critic:
        found.append(
            f"[critic] trains values that algorithm.credit = {algorithm.credit!r} does not use: set it to "
            f"one of {', '.join(BY_CRITIC)} with baseline = 'value', or remove the section"
        )
    if algorithm.credit == "sweet" and config.rollout.group_size == 1:
        found.append(
            "algorithm.credit = 'sweet' learns from pairs of siblings, but rollout.group_size is 1: use a "
            "larger group or another credit"
        )
    if critic.pairs and algorithm.credit != "sweet":
        found.append(
            f"critic.pairs are ranked by the critic of credit 'sweet', not {algorithm.credit!r}: set it to 0"
        )
    elif bool(critic.pairs) != bool(config.rollout.alternatives):
        found.append(
            f"critic.pairs = {critic.pairs} are drawn from the completions that rollout.alternatives = "
            f"{config.rollout.alternatives} adds to each turn: set both, or neither"
        )
    elif critic.pairs and algorithm.aggregation != "token_mean":
        found.append(
            "critic.pairs weighs all pairs equally, which needs algorithm.aggregation = 'token_mean', not "
            f"{algorithm.aggregation!r}"
        )
    if critic.replay and algorithm.credit != "archer":
        found.append(
            f"critic.replay is of credit 'archer', not {algorithm.credit!r}, whose returns are those of the "
            "policy: set it to 0"
        )
    if config.replay.weight:
        found.append(
            "replay.weight weighs episodes by their advantages among siblings, which [critic] replaces: set "
            "it to 0, or use an algorithm without a critic"
        )
    if critic.warmup_steps >= config.run.steps:
        found.append(
            f"critic.warmup_steps ({critic.warmup_steps}) must be below run.steps ({config.run.steps}), or "
            "the policy is never trained"
        )
    return found


def _problems_of_single_episodes(algorithm: AlgorithmSection) -> list[str]:
    found = []
    if algorithm.baseline in SIBLINGS:
        found.append(
            f"algorithm.baseline = {algorithm.baseline!r} compares siblings, but "
            "rollout.group_size is 1: use a larger group or baseline = 'none'"
        )
    if algorithm.scale in ("std", "mean"):
        found.append(
            f"algorithm.scale = {algorithm.scale!r} needs the spread of siblings, but rollout.group_size "
            "is 1: use a larger group or scale = 'none'"
        )
    if algorithm.keep_groups < 1.0 or algorithm.dynamic_sampling:
        found.append(
            "algorithm.keep_groups and dynamic_sampling select groups by the spread of their rewards, but "
            "rollout.group_size is 1: use a larger group, or leave them out"
        )
    return found
