"""Generalized advantage estimation (arXiv 1506.02438): rewards and values -> advantages of tokens.

Pure functions of numpy arrays, float64. An episode is given by the rewards of its turns [U], the values of
its tokens [T] and the numbers of their turns [T], -1 where the policy did not sample the token. The value of
a token is that of the state before it. Tokens that were not sampled have no value and are skipped::

    tokens      o  a  a  o  o  a  a           turns   -1  0  0  -1  -1  1  1

    token       delta = r + gamma V' - V      V' is the value of the next sampled token
    turn        delta = R + gamma V' - V      V' is the value at the start of the next turn
    bi-level    both: by turn between the last tokens of turns, by token within a turn
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl_train.advantage import (
    TRUNCATED,
    Normalization,
    Shaped,
    Values,
    normalized,
    shaped_rewards,
    trained_on,
    units_of_turns,
)
from agentrl_train.types import Trajectory, TrajectoryGroup

Numbers = NDArray[np.int64]
Estimator = Callable[[Values, Values, Numbers, float], Values]
"""``(rewards [U], values [T], turns [T], value of the last state) -> advantages [T]``."""


def gae(
    rewards: Values, values: Values, *, gamma: float = 1.0, lam: float = 1.0, bootstrap: float = 0.0
) -> Values:
    """Return ``A_t = delta_t + gamma lam A_(t+1)`` with ``delta_t = r_t + gamma V_(t+1) - V_t``.

    Args:
        rewards: reward after each action, [n].
        values: value of the state before each action, [n].
        gamma: discount of an action.
        lam: weight of longer returns; 0 is the one-step difference, 1 the return minus the value.
        bootstrap: value of the state after the last action; 0 where the episode terminated.
    """
    found, after, running = np.zeros(len(rewards)), bootstrap, 0.0
    for t in reversed(range(len(rewards))):
        running = float(rewards[t] + gamma * after - values[t]) + gamma * lam * running
        found[t], after = running, float(values[t])
    return found


def token_gae(
    rewards: Values,
    values: Values,
    turns: Numbers,
    bootstrap: float = 0.0,
    *,
    token_gamma: float = 1.0,
    lam: float = 1.0,
) -> Values:
    """Return the advantages of tokens as actions; the reward of a turn comes after its last token."""
    places = _places(turns, rewards)
    earned, found = np.zeros(len(turns)), np.zeros(len(turns))
    earned[places.ends] = places.rewards
    own = places.sampled
    found[own] = gae(earned[own], values[own], gamma=token_gamma, lam=lam, bootstrap=bootstrap)
    return found


def turn_gae(
    rewards: Values,
    values: Values,
    turns: Numbers,
    bootstrap: float = 0.0,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Values:
    """Return the advantages of turns as actions, on every token of the turn (Turn-PPO, arXiv 2512.17008).

    The value of a turn is that of its first token.
    """
    places = _places(turns, rewards)
    by_turn = gae(places.rewards, values[places.starts], gamma=gamma, lam=lam, bootstrap=bootstrap)
    found = np.zeros(len(turns))
    found[places.sampled] = by_turn[places.turns]
    return found


def bi_level_gae(
    rewards: Values,
    values: Values,
    turns: Numbers,
    bootstrap: float = 0.0,
    *,
    gamma: float = 0.95,
    token_gamma: float = 1.0,
    lam: float = 1.0,
) -> Values:
    """Return advantages of turns, spread over the tokens of each turn (RAGEN, arXiv 2504.20073).

    The advantages of turns are estimated between their last tokens, with ``gamma``. Then each turn is an
    episode of its tokens, with ``token_gamma``, whose reward is the advantage plus the value of its last
    token.
    """
    places = _places(turns, rewards)
    at_ends = values[places.ends]
    by_turn = gae(places.rewards, at_ends, gamma=gamma, lam=lam, bootstrap=bootstrap)
    found = np.zeros(len(turns))
    for number, reward in enumerate(by_turn + at_ends):
        own = places.sampled[places.turns == number]
        earned = np.zeros(len(own))
        earned[-1] = reward
        found[own] = gae(earned, values[own], gamma=token_gamma, lam=lam)
    return found


def advantages_and_returns(
    groups: Sequence[TrajectoryGroup],
    values: Sequence[Sequence[Values]],
    *,
    estimator: Estimator = token_gae,
    normalization: Normalization = "batch",
    aggregation: str = "token_mean",
    keep_groups: float = 1.0,
    leave_out: Sequence[Callable[[Trajectory], bool]] = (),
    **penalties: Any,
) -> tuple[list[list[Values | None]], list[list[Values]]]:
    """Return the advantages of the sampled tokens of each trajectory of each group, and the critic's targets.

    An episode that terminated has nothing after it. One that a limit ended goes on from the value of its last
    token, the last state that the critic knows.

    Args:
        groups: groups of one batch.
        values: values of the sampled tokens of trajectory i of group g, ``values[g][i]``.
        estimator: returns the advantages of an episode.
        normalization: scope of mean 0 and std 1, as in ``advantage.advantages``, for the advantages alone.
        aggregation: aggregation of the loss, whose weights the normalization uses.
        keep_groups: share of the groups of each task that is trained on.
        leave_out: functions that tell which trajectories are left out.
        **penalties: arguments of ``advantage.shaped_rewards``.

    Returns:
        None in place of the advantages of a trajectory that is not trained on; and for each trajectory the
        returns that its values are to become: advantage plus value, before the normalization.

    Raises:
        ValueError: a failed trajectory, or a reward that is not finite.
    """
    shaped = [shaped_rewards(group, **penalties) for group in groups]
    found = [
        [
            estimator(rewards, of_tokens, turn_numbers(one), _last_value(one, of_tokens))
            for one, rewards, of_tokens in zip(group.trajectories, own.rewards, per_group, strict=True)
        ]
        for group, own, per_group in zip(groups, shaped, values, strict=True)
    ]
    targets = [
        [advantage + value for advantage, value in zip(*pair, strict=True)]
        for pair in zip(found, values, strict=True)
    ]
    advantages = selected(
        groups,
        shaped,
        found,
        normalization=normalization,
        aggregation=aggregation,
        keep_groups=keep_groups,
        leave_out=leave_out,
    )
    return advantages, targets


def selected(
    groups: Sequence[TrajectoryGroup],
    shaped: Sequence[Shaped],
    advantages: Sequence[Sequence[Values]],
    *,
    normalization: Normalization = "batch",
    aggregation: str = "token_mean",
    keep_groups: float = 1.0,
    leave_out: Sequence[Callable[[Trajectory], bool]] = (),
) -> list[list[Values | None]]:
    """Return advantages of tokens, normalized, with None for trajectories that are not trained on.

    The arguments are those of ``advantages_and_returns``; ``shaped`` are the rewards of the groups.
    """
    found = [list(per_group) for per_group in advantages]
    trained = trained_on(groups, shaped, keep_groups=keep_groups, leave_out=leave_out)
    scopes: defaultdict[str, list[int]] = defaultdict(list)
    for g, group in enumerate(groups):
        scopes[group.task if normalization == "task" else ""].append(g)
    for members in scopes.values() if normalization != "none" else ():
        counts = [
            [
                (units / np.maximum(1, _sizes(one)))[turn_numbers(one)]
                for one, units in zip(
                    groups[g].trajectories,
                    units_of_turns(groups[g], trained[g], aggregation),
                    strict=True,
                )
            ]
            for g in members
        ]
        scaled = normalized([found[g] for g in members], counts, aggregation=aggregation, everything=True)
        for g, per_group in zip(members, scaled, strict=True):
            found[g] = list(per_group)
    return [
        [one if on else None for one, on in zip(per_group, masks, strict=True)]
        for per_group, masks in zip(found, trained, strict=True)
    ]


def turn_order(trajectory: Trajectory) -> Numbers:
    """Return the numbers of a trajectory's turns in the order of its rows."""
    return np.argsort([turn.segment for turn in trajectory.turns], kind="stable")


def turn_numbers(trajectory: Trajectory) -> Numbers:
    """Return the number of the turn of each sampled token of a trajectory, in the order of its rows."""
    order = turn_order(trajectory)
    return np.repeat(order, _sizes(trajectory)[order])


def _sizes(trajectory: Trajectory) -> Numbers:
    """Return the number of tokens that each turn sampled, [U]."""
    return np.array([len(turn.completion.token_ids) for turn in trajectory.turns], dtype=np.int64)


def explained_variance(values: Values, returns: Values) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)``: 1 is exact, 0 as good as the mean."""
    spread = float(returns.var()) if returns.size else 0.0
    return 1.0 - float((returns - values).var()) / spread if spread > 0.0 else 0.0


def _last_value(trajectory: Trajectory, values: Values) -> float:
    if trajectory.end not in TRUNCATED or not len(values):
        return 0.0
    turns = turn_numbers(trajectory)
    return float(values[turns == turns.max()][-1])


class _Places(NamedTuple):
    """Places of sampled tokens in a row, and the turns that have some."""

    sampled: Numbers
    """Places of the sampled tokens, by turn, [n]."""
    turns: Numbers
    """Turn of each of them, numbered without gaps, [n]."""
    starts: Numbers
    """Place of the first token of each turn, [m]."""
    ends: Numbers
    """Place of the last token of each turn, [m]."""
    rewards: Values
    """Rewards of the turns, with those of turns without tokens after them, [m]."""


def _places(turns: Numbers, rewards: Values) -> _Places:
    sampled = np.flatnonzero(turns >= 0)
    sampled = sampled[np.argsort(turns[sampled], kind="stable")]
    present, first, numbers = np.unique(turns[sampled], return_index=True, return_inverse=True)
    last = np.append(first[1:], len(sampled))[: len(first)] - 1
    earned = np.zeros(len(present))
    if len(present):
        before = np.searchsorted(present, np.arange(len(rewards)), side="right") - 1
        np.add.at(earned, before.clip(min=0), rewards)
    return _Places(sampled, numbers, sampled[first], sampled[last], earned)
