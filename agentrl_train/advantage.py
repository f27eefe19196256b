"""Step 5 of 9: ``TrajectoryGroup`` -> advantages, one number per turn.

Pure functions, float64 inside, in this order::

    shaped   rewards of turns, less the penalties                                     ``shaped_rewards``
    credit   returns, and the siblings that each is compared with                     ``by_trajectory`` ...
    baseline minus the returns of the siblings                                        ``mean`` ...
    scale    divided by their spread                                                  ``std`` ...
    filter   groups and trajectories that are not trained on                          ``most_varied``
    normalize every task, or the batch, to mean 0 and std 1 over all its tokens       ``normalized``

    reward 1, 0, 0, 1  ->  return 1, -0.2, 0, 1  ->  centred  ->  / group std  ->  / task std
                           (one invalid call)        by group     if wanted        if wanted

Credit, baseline and scale are arguments: any function with the same signature can replace the ones here.
Every token that the policy sampled in a turn gets the turn's advantage (``batch.py``). A trajectory has one
return and one place in its group, however many segments it has: a sub-agent's turns have the advantage of the
episode that called it (MATPO, arXiv 2510.04678).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from agentrl_train.types import EpisodeEnd, Trajectory, TrajectoryGroup

Values = NDArray[np.float64]
Normalization = Literal["task", "task_exact", "batch", "none"]

RESOLUTION = 1e-5
"""Differences below this share of a group's rewards, or of the mean of its task, are treated as rounding
errors. A float32 resolves 6e-8 of a value. A sum of many values or the score of a model is less exact.
"""

TRUNCATED = (EpisodeEnd.TRUNCATED_TURNS, EpisodeEnd.TRUNCATED_TIME, EpisodeEnd.TRUNCATED_LENGTH)
EVERY_TURN, NO_TURN = slice(None), slice(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaped:
    """The rewards of one group after penalties."""

    returns: Values
    """Total of each trajectory, [N]."""
    rewards: Sequence[Values]
    """Rewards of the turns of each trajectory, [turns] each; their sum is its return."""

    @property
    def largest(self) -> float:
        """Return the largest magnitude of a reward."""
        return max((float(np.abs(one).max(initial=0.0)) for one in self.rewards), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Returns that are compared with one another, and the turns that receive the result."""

    returns: Values
    """[n]"""
    trajectories: Sequence[int]
    """Numbers of the n trajectories in their group."""
    turns: Sequence[slice | int]
    """Turns of each of the n trajectories that receive the advantage."""
    weight: float = 1.0
    """Factor of the advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """Arguments of a baseline and of a scale: the returns of one ``Comparison``, with their context."""

    returns: Values
    """[n]"""
    tokens: Values
    """Tokens sampled by each of the n trajectories."""
    batch: Values
    """All returns of the batch that an advantage is computed for."""
    greedy: float | None = None
    """Return of the group's greedy episode, if one was played."""
    largest: float = 0.0
    """Magnitude of the rewards that the returns sum: if these cancel, the difference is rounding."""


Credit = Callable[[TrajectoryGroup, Shaped], Sequence[Comparison]]
Baseline = Callable[[Siblings], "Values | float"]
Scale = Callable[[Siblings], float]
Units = Callable[[TrajectoryGroup, Sequence[bool], str], Sequence[Values]]
"""Counts the units of equal weight that the advantages of a group have under an aggregation."""


def by_trajectory(group: TrajectoryGroup, shaped: Shaped) -> list[Comparison]:
    """Credit every turn of a trajectory with the return of the whole trajectory."""
    size = len(shaped.returns)
    return [
        Comparison(returns=shaped.returns, trajectories=range(size), turns=[EVERY_TURN] * size),
    ]


def by_turn(group: TrajectoryGroup, shaped: Shaped, *, gamma: float = 1.0) -> list[Comparison]:
    """Credit each turn with its reward-to-go, ``sum over v >= u of gamma^(v - u) r_v``.

    It is compared with the reward-to-go of the siblings' turns with the same number. If no sibling reached
    that turn, it is compared with the siblings' returns minus the rewards that the trajectory got before.
    With ``gamma = 1`` the advantage is then that of ``by_trajectory``.
    """
    to_go = [rewards_to_go(rewards, gamma) for rewards in shaped.rewards]
    found = []
    for turn in range(max(map(len, to_go), default=0)):
        members = [i for i, values in enumerate(to_go) if len(values) > turn]
        if len(members) > 1:
            returns = np.array([to_go[i][turn] for i in members])
            found.append(Comparison(returns=returns, trajectories=members, turns=[turn] * len(members)))
        else:
            (own,) = members
            earned = shaped.returns[own] - to_go[own][turn]
            turns: list[slice | int] = [turn if i == own else NO_TURN for i in range(len(to_go))]
            found.append(
                Comparison(returns=shaped.returns - earned, trajectories=range(len(to_go)), turns=turns)
            )
    return found


def by_state(
    group: TrajectoryGroup, shaped: Shaped, *, gamma: float = 0.95, weight: float = 1.0
) -> list[Comparison]:
    """Credit turns with the trajectory's return, plus ``weight`` times a comparison at equal states.

    GiGPO (arXiv 2505.10978): the discounted rewards-to-go of all turns of the group that follow the same
    observation are compared with one another. A state that occurs once adds nothing.
    """
    to_go = [rewards_to_go(rewards, gamma) for rewards in shaped.rewards]
    states: defaultdict[object, list[tuple[int, int]]] = defaultdict(list)
    for i, trajectory in enumerate(group.trajectories):
        for turn in range(len(trajectory.turns)):
            states[observation(trajectory, turn)].append((i, turn))
    recurring = [places for places in states.values() if len(places) > 1]
    return by_trajectory(group, shaped) + [
        Comparison(
            returns=np.array([to_go[i][turn] for i, turn in places]),
            trajectories=[i for i, _ in places],
            turns=[turn for _, turn in places],
            weight=weight,
        )
        for places in recurring
    ]


def rewards_to_go(rewards: Values, gamma: float = 1.0) -> Values:
    """Return ``sum over v >= u of gamma^(v - u) rewards[v]`` for every turn u."""
    total, found = 0.0, np.zeros(len(rewards))
    for turn in reversed(range(len(rewards))):
        total = float(rewards[turn]) + gamma * total
        found[turn] = total
    return found


def observation(trajectory: Trajectory, turn: int) -> tuple[tuple[str, str], ...]:
    """Return the agent of a turn and the messages that it answers. Equal results count as the same state."""
    segment = trajectory.turns[turn].segment
    before = [one for one in trajectory.turns[:turn] if one.segment == segment]
    opening = trajectory.segments[segment].opening if segment else trajectory.opening
    messages = before[-1].reply if before else opening
    agent = ("agent", trajectory.segments[segment].agent)
    return (agent, *((message.role, str(message.content)) for message in messages))


def none(siblings: Siblings) -> float:
    """No baseline: 0 (REINFORCE)."""
    return 0.0


def mean(siblings: Siblings) -> float:
    """Return the mean of the siblings (GRPO, arXiv 2402.03300)."""
    return float(siblings.returns.mean())


def leave_one_out(siblings: Siblings) -> Values | float:
    """Return the mean of the other siblings (RLOO, arXiv 2402.14740); a single one is compared with itself.

    The advantage is n / (n - 1) times that of ``mean``, and the gradient is unbiased.
    """
    count = siblings.returns.size
    if count == 1:
        return mean(siblings)
    others: Values = (siblings.returns.sum() - siblings.returns) / (count - 1)
    return others


def length_weighted(siblings: Siblings) -> float:
    """Return the mean weighted by length, ``sum(L R) / sum(L)`` (OPO, arXiv 2505.23585)."""
    total = float(siblings.tokens.sum())
    return float((siblings.tokens * siblings.returns).sum()) / total if total else mean(siblings)


def greedy(siblings: Siblings) -> float:
    """Return the return of the group's greedy episode (ReMax, arXiv 2310.10505)."""
    if siblings.greedy is None:
        raise ValueError("baseline 'greedy' needs a greedy episode in every group.")
    return siblings.greedy


def batch_mean(siblings: Siblings) -> float:
    """Return the mean of all returns of the batch."""
    return float(siblings.batch.mean())


def unscaled(siblings: Siblings) -> float:
    """No scale: 1 (Dr. GRPO, arXiv 2503.20783)."""
    return 1.0


def std(siblings: Siblings) -> float:
    """Return the unbiased standard deviation of the siblings (GRPO); 1 without spread."""
    return _spread(siblings.returns)


def batch_std(siblings: Siblings) -> float:
    """Return the unbiased standard deviation of all returns of the batch (LitePPO, arXiv 2508.08221)."""
    return _spread(siblings.batch)


def mean_return(siblings: Siblings) -> float:
    """Return the mean of the siblings as the divisor (MaxRL); 1 where it is not positive."""
    return found if (found := mean(siblings)) > 0.0 else 1.0


def advantages(
    groups: Sequence[TrajectoryGroup],
    *,
    credit: Credit = by_trajectory,
    baseline: Baseline = mean,
    scale: Scale = std,
    normalization: Normalization = "task",
    aggregation: str = "token_mean",
    keep_groups: float = 1.0,
    leave_out: Sequence[Callable[[Trajectory], bool]] = (),
    invalid_call_penalty: float = 0.0,
    truncation_penalty: float = 0.0,
    incomplete: float | None = None,
    overlong: tuple[int, int, float] | None = None,
) -> list[list[Values | None]]:
    """Return the advantages of the turns of each trajectory of each group, [turns] each.

    Args:
        groups: groups of one batch.
        credit: returns, and the returns that each is compared with.
        baseline: subtracted from the returns of a comparison.
        scale: divisor of the differences.
        normalization: scope of mean 0 and std 1 (``normalized``): every task, the batch, or none.
            "task_exact" is AgentRL's equation, which shifts groups without signal as well.
        aggregation: aggregation of the loss, whose weights the normalization uses.
        keep_groups: share of the groups of each task to keep. Groups with the largest spread are kept.
        leave_out: functions that are true for the trajectories to omit, after they have counted in the
            baseline.
        invalid_call_penalty: subtracted once from a trajectory with invalid calls, at the first of them.
        truncation_penalty: subtracted at the end of a trajectory that a limit ended.
        incomplete: replaces the rewards of a trajectory that a limit ended or that has invalid calls; None
            keeps them.
        overlong: arguments of ``overlong_penalty`` after the number of tokens: limit, buffer, most.

    Returns:
        None in place of a trajectory that is not trained on. A group without signal has advantages of 0.

    Raises:
        ValueError: a failed trajectory, a reward that is not finite, or an unknown normalization.
    """
    if normalization not in get_args(Normalization):
        options = ", ".join(get_args(Normalization))
        raise ValueError(f"normalization is {normalization!r}; use one of {options}.")
    shaped = [
        shaped_rewards(
            group,
            invalid_call_penalty=invalid_call_penalty,
            truncation_penalty=truncation_penalty,
            incomplete=incomplete,
            overlong=overlong,
        )
        for group in groups
    ]
    credited = [credit(group, one) for group, one in zip(groups, shaped, strict=True)]
    returns = [
        one.returns[[turns != NO_TURN for turns in one.turns]]
        for comparisons in credited
        for one in comparisons
    ]
    batch = np.concatenate([np.zeros(0), *returns])
    values: list[Sequence[Values]] = [
        _compare(group, comparisons, baseline=baseline, scale=scale, batch=batch, largest=largest)
        for group, comparisons, largest in zip(groups, credited, _magnitudes(groups, shaped), strict=True)
    ]
    return normalize_and_mask(
        groups,
        shaped,
        values,
        normalization=normalization,
        aggregation=aggregation,
        everything=baseline is none,
        keep_groups=keep_groups,
        leave_out=leave_out,
    )


def shaped_rewards(
    group: TrajectoryGroup,
    *,
    invalid_call_penalty: float = 0.0,
    truncation_penalty: float = 0.0,
    incomplete: float | None = None,
    overlong: tuple[int, int, float] | None = None,
) -> Shaped:
    """Return the rewards of a group less the penalties; raises ``ValueError`` for a failed trajectory.

    The rewards of an incomplete trajectory are ``incomplete`` at its last turn and 0 before, if it is given.
    """
    returns, rewards = [], []
    for trajectory in group.trajectories:
        reward = _reward(trajectory, group)
        if incomplete is not None and (truncated(trajectory) or trajectory.invalid_calls):
            returns.append(incomplete)
            rewards.append(np.zeros(len(trajectory.turns)))
            rewards[-1][-1:] = incomplete
            continue
        invalid = invalid_call_penalty * (trajectory.invalid_calls > 0)
        at_end = truncation_penalty * truncated(trajectory)
        if overlong is not None:
            at_end += overlong_penalty(_length(trajectory), *overlong)
        returns.append(reward - invalid - at_end)
        turns = np.array([turn.reward for turn in trajectory.turns], dtype=np.float64)
        if trajectory.scores:  # they judge the whole episode
            turns[-1:] += trajectory.reward - turns.sum()
        if invalid:
            turns[next(u for u, turn in enumerate(trajectory.turns) if turn.invalid_calls)] -= invalid
        if at_end:
            turns[-1:] -= at_end
        rewards.append(turns)
    return Shaped(returns=np.array(returns, dtype=np.float64), rewards=rewards)


def truncated(trajectory: Trajectory) -> bool:
    """Return True if a limit ended a trajectory."""
    return trajectory.end in TRUNCATED


def overlong_penalty(tokens: int, limit: int, buffer: int, most: float) -> float:
    """Return the soft penalty of a long trajectory (DAPO, arXiv 2503.14476, equation 13).

    It is 0 up to ``limit - buffer`` tokens, and rises linearly to ``most`` at ``limit``.
    """
    return most * min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer))


def compared(siblings: Siblings, *, baseline: Baseline = mean, scale: Scale = std) -> Values:
    """Return the advantages [n] of the returns of a comparison; exactly 0 if they have no signal."""
    if not siblings.returns.size:
        return siblings.returns
    centred = siblings.returns - baseline(siblings)
    if not _signal(centred, siblings.returns, siblings.largest):
        return np.zeros_like(siblings.returns)
    scaled: Values = centred / scale(siblings)
    return scaled


def differ(returns: Values, largest: float = 0.0) -> bool:
    """Return True if returns differ by more than rounding. ``largest`` is the largest reward in the sums."""
    return returns.size > 0 and _signal(returns - returns.mean(), returns, largest)


def most_varied(groups: Sequence[TrajectoryGroup], shaped: Sequence[Shaped], *, share: float) -> list[bool]:
    """Return which groups are in the ``share`` of their task with the largest spread of returns.

    At least one group of each task is kept (StarPO-S, arXiv 2504.20073).
    """
    if share >= 1.0:
        return [True] * len(groups)
    tasks: defaultdict[str, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        tasks[group.task].append(number)
    chosen: set[int] = set()
    for numbers in tasks.values():
        spread = {n: float(shaped[n].returns.std()) if shaped[n].returns.size else 0.0 for n in numbers}
        ordered = sorted(numbers, key=lambda n: -spread[n])
        chosen.update(ordered[: max(1, int(share * len(numbers)))])
    return [number in chosen for number in range(len(groups))]


def normalize_and_mask(
    groups: Sequence[TrajectoryGroup],
    shaped: Sequence[Shaped],
    values: Sequence[Sequence[Values]],
    *,
    units: Units | None = None,
    everything: bool = True,
    normalization: Normalization = "batch",
    aggregation: str = "token_mean",
    keep_groups: float = 1.0,
    leave_out: Sequence[Callable[[Trajectory], bool]] = (),
) -> list[list[Values | None]]:
    """Normalize advantages, and replace those of trajectories that are not trained on by None.

    ``values[g][i]`` belongs to ``groups[g].trajectories[i]``, and ``units`` counts the units of equal weight
    in each of its entries (by default ``units_of_turns``). ``everything`` is an argument of ``normalized``.
    The others are arguments of ``advantages``.
    """
    trained = [
        [kept and not any(out(one) for out in leave_out) for one in group.trajectories]
        for group, kept in zip(groups, most_varied(groups, shaped, share=keep_groups), strict=True)
    ]
    everything = everything or normalization == "task_exact"
    scaled, scopes = list(values), defaultdict[str, list[int]](list)
    for g, group in enumerate(groups if normalization != "none" else ()):
        scopes["" if normalization == "batch" else group.task].append(g)
    for members in scopes.values():
        counts = [(units or units_of_turns)(groups[g], trained[g], aggregation) for g in members]
        parts = normalized(
            [values[g] for g in members], counts, aggregation=aggregation, everything=everything
        )
        for g, part in zip(members, parts, strict=True):
            scaled[g] = part
    return [
        [value if on else None for value, on in zip(*pair, strict=True)]
        for pair in zip(scaled, trained, strict=True)
    ]


def normalized(
    values: Sequence[Sequence[Values]],
    units: Sequence[Sequence[Values]],
    *,
    aggregation: str = "token_mean",
    everything: bool = False,
) -> list[Sequence[Values]]:
    """Return advantages with mean 0 and std 1 under the weights that the loss gives them.

    With equal weights of tokens and ``everything``, this is AgentRL's task advantage normalization (arXiv
    2510.04206, equation 1; unbiased std). Without ``everything``, a group without signal stays 0. The others
    are centred among themselves, and the spread is over all units, so that the squares of every task add up
    to the same number, however few of its groups have a signal. A scope with fewer than 2 units or without
    spread is unchanged. ``aggregation`` must be that of the loss (``batch.token_weights``). Otherwise the
    weighted sum of the advantages would not be 0, and the loss would push all actions up or down.

    Args:
        values: advantages of the turns of trajectory i of group g, ``values[g][i]``.
        units: the number of units of equal weight in each of those turns: tokens, or parts of trajectories
            or segments; 0 omits the turn from the statistics.
        aggregation: aggregation of the loss.
        everything: also centre groups whose advantages are all 0.
    """
    live = [everything or any(bool(np.any(one)) for one in group) for group in values]
    if not any(live):
        return list(values)
    value = np.concatenate([one for group, on in zip(values, live, strict=True) if on for one in group])
    counts = [np.concatenate([np.zeros(0), *group]) for group in units]
    if (number := sum(float(one.sum()) for one in counts)) < 2:
        return list(values)
    if aggregation == "group_mean":
        counts = [one / max(1.0, one.sum()) for one in counts]
    weight = np.concatenate([one for one, on in zip(counts, live, strict=True) if on])
    weight /= sum(float(one.sum()) for one in counts)
    if not weight.any():
        return list(values)
    middle = float((weight * value).sum() / weight.sum())
    spread = float(np.sqrt((weight * (value - middle) ** 2).sum() * number / (number - 1)))
    if spread <= RESOLUTION * float(np.abs(value).max()):
        return list(values)
    return [
        [(one - middle) / spread for one in group] if on else group
        for group, on in zip(values, live, strict=True)
    ]


def _compare(
    group: TrajectoryGroup,
    comparisons: Sequence[Comparison],
    *,
    baseline: Baseline,
    scale: Scale,
    batch: Values,
    largest: float,
) -> list[Values]:
    """Return the advantages of the turns of each trajectory of a group."""
    values = [np.zeros(len(one.turns)) for one in group.trajectories]
    tokens = np.array([one.num_sampled_tokens for one in group.trajectories], dtype=np.float64)
    likeliest = None if group.greedy is None else _reward(group.greedy, group)
    for one in comparisons:
        siblings = Siblings(
            returns=one.returns,
            tokens=tokens[list(one.trajectories)],
            batch=batch,
            greedy=likeliest,
            largest=largest,
        )
        found = one.weight * compared(siblings, baseline=baseline, scale=scale)
        for number, turns, value in zip(one.trajectories, one.turns, found, strict=True):
            values[number][turns] += value
    return values


def units_of_turns(group: TrajectoryGroup, trained: Sequence[bool], aggregation: str) -> list[Values]:
    """Return the number of units of equal weight in each turn: tokens, or parts of rollouts or segments.

    It is 0 in trajectories that are not trained on.
    """
    found = []
    for one, on in zip(group.trajectories, trained, strict=True):
        tokens = np.array([on * len(turn.completion.token_ids) for turn in one.turns], dtype=np.float64)
        if aggregation == "rollout_mean":
            tokens /= max(1.0, float(tokens.sum()))
        if aggregation in ("sequence_mean", "segment_mean"):
            numbers = np.array([turn.segment for turn in one.turns], dtype=np.int64)
            by_segment = np.bincount(numbers, weights=tokens, minlength=1)
            tokens /= np.maximum(1.0, by_segment)[numbers]
            if aggregation == "sequence_mean":
                tokens /= max(1, int(np.count_nonzero(by_segment)))
        found.append(tokens)
    return found


def _magnitudes(groups: Sequence[TrajectoryGroup], shaped: Sequence[Shaped]) -> list[float]:
    """Return the magnitude of the rewards of each group: its largest, or the mean of its task's groups."""
    tasks: defaultdict[str, list[float]] = defaultdict(list)
    for group, one in zip(groups, shaped, strict=True):
        tasks[group.task].append(one.largest)
    return [
        max(one.largest, sum(tasks[group.task]) / len(tasks[group.task]))
        for group, one in zip(groups, shaped, strict=True)
    ]


def _length(trajectory: Trajectory) -> int:
    """Return the number of tokens of the longest segment, prompts and replies included."""
    lengths = [0] * len(trajectory.segments)
    for turn in trajectory.turns:
        lengths[turn.segment] += len(turn.prompt_ids) + len(turn.completion.token_ids)
    return max(lengths)


def _reward(trajectory: Trajectory, group: TrajectoryGroup) -> float:
    where = f"group {group.group_id} of task {group.task!r}"
    if trajectory.end.failed:
        raise ValueError(
            f"{where} contains a failed trajectory ({trajectory.end.value}); drop it before training."
        )
    if not np.isfinite(trajectory.reward):
        raise ValueError(f"{where} contains a reward of {trajectory.reward}; rewards must be finite numbers.")
    return trajectory.reward


def _spread(returns: Values) -> float:
    """Return the unbiased standard deviation, or 1 for returns without spread."""
    return float(returns.std(ddof=1)) or 1.0 if differ(returns) else 1.0  # squares of tiny numbers are 0


def _signal(centred: Values, returns: Values, largest: float) -> bool:
    return bool(np.any(np.abs(centred) > RESOLUTION * np.abs(returns).max(initial=largest)))
