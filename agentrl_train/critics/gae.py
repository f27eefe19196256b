"""Generalized advantage estimation (arXiv 1506.02438): rewards and values -> advantages of tokens.

Pure functions of numpy arrays, float64. An episode is given by the rewards of its turns [U], the values of
its tokens [T] and the numbers of their turns [T]. The number is -1 if the policy did not sample the token.
The value of a token is the value of the state before it. Tokens that were not sampled have no value and are
skipped::

    tokens      o  a  a  o  o  a  a           turns   -1  0  0  -1  -1  1  1

    token       delta = r + gamma V' - V      V' is the value of the next sampled token
    turn        delta = R + gamma V' - V      V' is the value at the start of the next turn
    bi-level    both: by turn between the last tokens of turns, by token within a turn
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl_train.advantage import TRUNCATED, Values, units_of_turns
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
        lam: weight of longer returns. 0 is the one-step difference, and 1 is the return minus the value.
        bootstrap: value of the state after the last action; 0 if the episode terminated.
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
    """Return the advantages of tokens as actions. The reward of a turn comes after its last token."""
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

    The value of a turn is the value of its first token.
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

    The advantages of turns are estimated between their last tokens, with ``gamma``. Then each turn is treated
    as an episode of its tokens, with ``token_gamma``. Its reward is the advantage plus the value of its last
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


def estimate(estimator: Estimator, trajectory: Trajectory, rewards: Values, values: Values) -> Values:
    """Return the advantages of the sampled tokens of a trajectory.

    The value after a terminated episode is 0. After an episode that a limit ended, it is the value of its
    last token, which is the last state that the critic has seen.

    Args:
        estimator: computes the advantages of an episode.
        trajectory: the episode.
        rewards: rewards of its turns, [U].
        values: values of its sampled tokens in the order of its rows.
    """
    turns, bootstrap = turn_numbers(trajectory), 0.0
    if trajectory.end in TRUNCATED and len(values):
        bootstrap = float(values[turns == turns.max()][-1])
    return estimator(rewards, values, turns, bootstrap)


def turn_order(trajectory: Trajectory) -> Numbers:
    """Return the numbers of a trajectory's turns in the order of its rows."""
    return np.argsort([turn.segment for turn in trajectory.turns], kind="stable")


def turn_numbers(trajectory: Trajectory) -> Numbers:
    """Return the number of the turn of each sampled token of a trajectory, in the order of its rows."""
    order = turn_order(trajectory)
    return np.repeat(order, _sizes(trajectory)[order])


def units_of_tokens(group: TrajectoryGroup, trained: Sequence[bool], aggregation: str) -> list[Values]:
    """Return the number of units of equal weight in each sampled token (``advantage.units_of_turns``)."""
    by_turn = units_of_turns(group, trained, aggregation)
    return [
        (units / np.maximum(1, _sizes(one)))[turn_numbers(one)]
        for one, units in zip(group.trajectories, by_turn, strict=True)
    ]


def _sizes(trajectory: Trajectory) -> Numbers:
    """Return the number of tokens that each turn sampled, [U]."""
    return np.array([len(turn.completion.token_ids) for turn in trajectory.turns], dtype=np.int64)


def fit_metrics(values: Values, returns: Values) -> dict[str, float]:
    """Return metrics of the values before an update, and of the returns that the critic learns.

    ``explained_variance`` is ``1 - Var(returns - values) / Var(returns)``. It is 1 if the values are exact,
    and 0 if they are only as good as the mean return.
    """
    variance = float(returns.var())
    return {
        "explained_variance": 1.0 - float((returns - values).var()) / variance if variance > 0.0 else 0.0,
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
    }


class _Places(NamedTuple):
    """Positions of sampled tokens in a row, and the turns that have such tokens."""

    sampled: Numbers
    """Positions of the sampled tokens, by turn, [n]."""
    turns: Numbers
    """Turn of each sampled token, numbered without gaps, [n]."""
    starts: Numbers
    """Position of the first token of each turn, [m]."""
    ends: Numbers
    """Position of the last token of each turn, [m]."""
    rewards: Values
    """Rewards of the turns, including the rewards of following turns without tokens, [m]."""


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
