"""``[reward]`` in a run: scores finished episodes, and combines the scores of a group into rewards."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np

from agentrl_train.config.functions import described
from agentrl_train.errors import USER_ERRORS, RewardUnavailable, raise_own_cancellation
from agentrl_train.reward.combining import Combination, weighted
from agentrl_train.types import EpisodeEnd, Trajectory

Scores = float | Mapping[str, float]
"""One score, or several scores by name."""
RewardFunction = Callable[[Trajectory], "Scores | Awaitable[Scores]"]
ENVIRONMENT = "environment"
"""Name of the score that is the environment's own reward."""
MAX_SCORE = 1e12
"""Largest magnitude of a score. Its square still fits into the learner's float32."""
MAX_REASON = 2_000
"""Maximum number of characters of an error message to keep."""


def reward(function: Callable[..., Any]) -> RewardFunction:
    """Turn a function of a trajectory and of fields of its sample into a reward. A decorator.

    The arguments after the first are taken from ``trajectory.sample.data`` by name, as in AgentFly (arXiv
    2507.14897). Arguments with a default can be missing there. The function returns a number, or several
    numbers by name. Functions that are not async run in a thread.
    """
    _, *fields = inspect.signature(function).parameters.values()

    def arguments(trajectory: Trajectory) -> dict[str, Any]:
        data = trajectory.sample.data
        for field in fields:
            if field.name not in data and field.default is field.empty:
                raise KeyError(f"the sample has no field {field.name!r}")
        return {field.name: data[field.name] for field in fields if field.name in data}

    @wraps(function)
    def bound(trajectory: Trajectory) -> Any:
        return function(trajectory, **arguments(trajectory))

    @wraps(function)
    async def bound_async(trajectory: Trajectory) -> Any:
        return await function(trajectory, **arguments(trajectory))

    return bound_async if inspect.iscoroutinefunction(function) else bound


class Rewards:
    """Scores episodes, and combines the scores of siblings.

    Args:
        functions: name -> function of a trajectory. If a function returns several scores, their names are
            ``<name>.<key>``.
        weights: weights of scores by name, by default 1. ``environment`` is the environment's reward.
        combine: scores and weights of a group -> rewards.
        fade_steps: number of steps in which the weight of a score falls to 0.
        timeout_s: deadline of all functions for one episode.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        *,
        weights: Mapping[str, float],
        combine: Combination = weighted,
        fade_steps: Mapping[str, int],
        timeout_s: float,
    ) -> None:
        self._functions = functions
        self._weights = weights
        self._combine = combine
        self._fade_steps = fade_steps
        self._timeout_s = timeout_s

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """Return an episode with its scores. If a score is missing, return a failed episode."""
        scores, name = {ENVIRONMENT: trajectory.reward}, ""
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                for name, function in self._functions.items():
                    scores |= named(name, await _value(function, trajectory))
        except USER_ERRORS as error:
            raise_own_cancellation(error)
            late = limit.expired()
            reason = f"no score within {self._timeout_s:g} s" if late else described(error)
            missing = f"reward {name!r}: {reason}"[:MAX_REASON]
            return replace(trajectory, end=EpisodeEnd.FAILED_REWARD, error=missing)
        return replace(trajectory, scores=scores)

    def combined(self, trajectories: Sequence[Trajectory], *, version: int) -> list[Trajectory]:
        """Return the scored siblings of a group that was admitted at a policy version, with their rewards.

        Raises:
            RewardUnavailable: the siblings have scores with different names.
        """
        if not trajectories:
            return []
        names = trajectories[0].scores.keys()
        if other := next((one for one in trajectories if one.scores.keys() != names), None):
            raise RewardUnavailable(
                f"a reward function returned the scores {sorted(names)} for one episode and "
                f"{sorted(other.scores)} for its sibling: return the same names for all"
            )
        scores = {name: np.array([one.scores[name] for one in trajectories]) for name in names}
        weights = {name: self._weight(name, version=version) for name in names}
        rewards = self._combine(scores, weights)
        return [replace(one, reward=float(value)) for one, value in zip(trajectories, rewards, strict=True)]

    def _weight(self, name: str, *, version: int) -> float:
        """Return the weight at a step, times ``(1 + cos(pi s / T)) / 2`` until step T and then 0."""
        weight, last = self._weights.get(name, 1.0), self._fade_steps.get(name)
        return weight * (1.0 - cosine_rise(version, last)) if last else weight


def cosine_rise(step: int, last: int) -> float:
    """Return ``(1 - cos(pi s / T)) / 2``, which rises from 0 at step 0 to 1 at step T and stays 1."""
    return 1.0 if step >= last else (1.0 - math.cos(math.pi * step / last)) / 2.0


def named(name: str, value: Any) -> dict[str, float]:
    """Return the value of a reward function as scores. Raises ``ValueError`` if it has another type."""
    parts = value if isinstance(value, Mapping) else {"": value}
    scores = {f"{name}.{key}" if key else name: float(part) for key, part in parts.items()}
    for each, score in scores.items():
        if not -MAX_SCORE <= score <= MAX_SCORE:
            raise ValueError(f"the score {each} is {score:g}; it must be finite, and at most {MAX_SCORE:g}")
    return scores


async def _value(function: RewardFunction, trajectory: Trajectory) -> Any:
    """Return the value of a reward function. Functions that are not async run in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(trajectory)
    found = await asyncio.to_thread(function, trajectory)
    return await found if inspect.isawaitable(found) else found
