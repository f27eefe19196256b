"""Many sessions as one ``gymnasium.vector.VectorEnv``, over one client.

Example::

    env = gymnasium.make_vec("agentrl_env:agentrl/Env-v0", num_envs=64, url=..., task="guess")
    conversations, infos = env.reset(seed=7)
    while True:
        actions = policy(conversations)
        conversations, rewards, terminated, truncated, infos = env.step(actions)

The steps of one call are sent together, so they share requests. ``areset``, ``astep`` and ``aclose`` do the
same for callers on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from agentrl_env.client.client import EnvClient
from agentrl_env.errors import AgentRLError, SessionLost, UnknownSession
from agentrl_env.gym.env import FAILURES, EpisodeRunner, TaskEnv, Transition, open_arguments
from agentrl_env.gym.spaces import ChatMessage, Conversation, ToolCallSpace, check_action

T = TypeVar("T")
Conversations: TypeAlias = tuple[tuple[ChatMessage, ...], ...]
Bools: TypeAlias = npt.NDArray[np.bool_]
Steps: TypeAlias = tuple[Conversations, npt.NDArray[np.float64], Bools, Bools, dict[str, Any]]
Seeds: TypeAlias = SupportsIndex | Iterable[SupportsIndex | None] | None

EPISODE_ERRORS = (*FAILURES.values(), SessionLost, UnknownSession)
"""Errors that concern a single episode, as opposed to the server or the connection."""


class GymVectorEnv(TaskEnv, VectorEnv[Conversations, Sequence[Any], npt.NDArray[Any]]):
    """``num_envs`` episodes of one task of a server (``url``) or of a local client (``client``).

    Observations are a tuple of conversations. Actions are any sequence of ``num_envs`` actions that
    ``GymEnv`` accepts. Rewards are float64, ``terminated`` and ``truncated`` bool arrays.

    Autoreset is NEXT_STEP by default, as in Gymnasium: the step after ``terminated | truncated`` discards the
    action and opens the next episode. Call ``reset(options={"reset_mask": terminated | truncated})`` before
    this step to open the next episode without discarding an action. With DISABLED, the caller must do so.
    SAME_STEP opens the next episode in the step that ends an episode.

    Seeds: an int gives environment ``i`` the seed ``seed + i``, a list gives each environment its seed, and
    None continues each environment's generator. Apart from ``reset_mask``, the options are the same as for
    ``GymEnv`` (``split``, ``index``, ``sample``): one value for all environments, or a list with a value for
    each.

    A failed episode (``EnvironmentFailed``, ``SessionExpired``, server unreachable, ...) does not
    affect the others: its reward is NaN, it is truncated, and ``infos["failed"][i]`` and
    ``infos["error"][i]`` (the exception) are set. It has no outcome: discard it and reset. If a call
    fails in every environment for a reason other than the episodes themselves, ``step`` raises it.

    The connection is made on first use and does not survive pickle or fork.

    Args:
        num_envs: The number of environments.
        url, task, client, token, split, render_mode, wait, target: As for ``GymEnv``.
        autoreset_mode: An AutoresetMode or its value: "NextStep", "SameStep", "Disabled".
    """

    def __init__(
        self,
        num_envs: int = 1,
        url: str | None = None,
        task: str | None = None,
        *,
        client: EnvClient | Callable[[], EnvClient] | None = None,
        token: str | None = None,
        split: str = "train",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        wait: float = 30.0,
        target: str | None = None,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, not {num_envs}.")
        self._configure(url, task, client, token, split, render_mode, wait, target)
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self._generators = [seeding.np_random() for _ in range(num_envs)]
        self._episodes = [EpisodeRunner() for _ in range(num_envs)]
        # Environments that the next step resets, with the error of the last attempt if it failed.
        self._autoresets: dict[int, AgentRLError | None] = {}
        self._pending: tuple[str, asyncio.Task[Any]] | None = None

    @cached_property
    def single_action_space(self) -> ToolCallSpace:  # type: ignore[override]
        """Tool calls. ``step`` also accepts assistant messages and text."""
        return ToolCallSpace(self.tools)

    @cached_property
    def action_space(self) -> gymnasium.Space[Any]:  # type: ignore[override]
        """One action for each environment."""
        return batch_space(self.single_action_space, self.num_envs)

    @cached_property
    def single_observation_space(self) -> Conversation:  # type: ignore[override]
        """The whole conversation so far."""
        return Conversation()

    @cached_property
    def observation_space(self) -> gymnasium.Space[Any]:  # type: ignore[override]
        """One conversation for each environment."""
        return batch_space(self.single_observation_space, self.num_envs)

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generator of each environment, which draws its seeds."""
        return tuple(generator for generator, _ in self._generators)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each environment's generator."""
        return tuple(seed for _, seed in self._generators)

    @property
    def running(self) -> Bools:
        """A mask of the environments whose episode can be stepped."""
        return np.array([episode.running for episode in self._episodes], dtype=np.bool_)

    def reset(
        self, *, seed: Seeds = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Conversations, dict[str, Any]]:
        """Open new episodes and return all conversations, with the ``infos`` of the new ones.

        Raises:
            ValueError, TypeError: Seeds or options are invalid. Nothing changed.
            AgentRLError: A session could not be opened. The others were opened. See ``running``.
        """
        return self._client.run(self._reset(seed, options))

    async def areset(
        self, *, seed: Seeds = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Conversations, dict[str, Any]]:
        """Like ``reset``, for any event loop. If cancelled, none of the new episodes is running."""
        return await self._client.arun(self._reset(seed, options))

    def step(self, actions: Iterable[Any]) -> Steps:
        """Play one turn in every environment concurrently.

        Raises:
            ResetNeeded: An environment has no running episode. No environment was stepped.
            ValueError: The number of actions is wrong. No environment was stepped.
            TypeError: An action is neither a dict, a pydantic object nor text. No environment was stepped.
            AgentRLError: The call failed in every environment. All episodes are over, so reset them.
        """
        return self._client.run(self._step(actions))

    async def astep(self, actions: Iterable[Any]) -> Steps:
        """Like ``step``, for any event loop. If cancelled, all episodes are over."""
        return await self._client.arun(self._step(actions))

    def render(self) -> tuple[str, ...] | None:
        """Return the conversations as text in render mode ``"ansi"``, otherwise None."""
        return None if self.render_mode is None else tuple(episode.text() for episode in self._episodes)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the sessions and the connection. Called by ``close()``."""
        self._client.close(self._close_episodes)
        self._autoresets = {}

    async def aclose(self) -> None:
        """Like ``close``, for any event loop."""
        await asyncio.to_thread(self.close)

    async def _reset(
        self, seed: Seeds, options: Mapping[str, Any] | None
    ) -> tuple[Conversations, dict[str, Any]]:
        async with self._exclusive("reset"):
            choices = self._choices(seed, dict(options or {}))
            self.closed = False
            await self._client.connect()  # connect once, before the episodes do it concurrently
            for i in choices:
                self._autoresets.pop(i, None)
            try:
                begun = await _gather(self._begin(i, choice) for i, choice in choices.items())
            except asyncio.CancelledError:
                self._abandon(choices)  # the caller does not see their first messages
                raise
            infos = dict(zip(choices, begun, strict=True))
            return self._observations(), stack_infos([infos.get(i, {}) for i in range(self.num_envs)])

    def _choices(self, seed: Seeds, options: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Seed the generators and return the arguments of ``open`` for each environment to reset."""
        n = self.num_envs
        seeds = _seed_list(seed, n)
        indices = _reset_indices(options.pop("reset_mask", None), n)
        each = _option_list(options, n)
        generators = {i: seeding.np_random(s) for i in indices if (s := seeds[i]) is not None}
        generators = {i: generators.get(i, self._generators[i]) for i in indices}
        choices = {
            i: open_arguments(each[i], seed=seeds[i], split=self._split, rng=rng)
            for i, (rng, _) in generators.items()
        }
        for i, generator in generators.items():  # last, so that invalid arguments change nothing
            self._generators[i] = generator
        return choices

    async def _begin(self, i: int, choice: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._episodes[i].begin(self._client, choice, wait=self._wait)
        except AgentRLError as error:
            error.add_note(f"This is environment {i} of {self.num_envs}.")
            raise

    async def _step(self, actions: Iterable[Any]) -> Steps:
        async with self._exclusive("step"):
            each = [actions] if isinstance(actions, str | bytes | Mapping) else list(actions)
            if len(each) != self.num_envs:
                n = self.num_envs
                raise ValueError(f"Give one action for each of {n} environments, not {len(each)}.")
            ended = [i for i in np.flatnonzero(~self.running).tolist() if i not in self._autoresets]
            if ended:
                reset = "reset all, or these with options={'reset_mask': ...}"
                later = "After the first reset, autoreset_mode='NextStep' or 'SameStep' resets ended episodes"
                raise ResetNeeded(f"No episode is running in {ended}: {reset}. {later}.")
            ignored = self._autoresets if self.autoreset_mode is AutoresetMode.NEXT_STEP else ()
            for i in range(self.num_envs):
                if i not in ignored:
                    check_action(each[i])
            resets, self._autoresets = self._autoresets, {}
            try:
                results = await _gather(self._turn(i, action, resets) for i, action in enumerate(each))
                self._raise_common_error(results)
            except BaseException:
                self._abandon(range(self.num_envs))  # the caller does not see the others' answers
                raise
            if self.autoreset_mode is not AutoresetMode.DISABLED:
                done = np.flatnonzero(~self.running).tolist()
                self._autoresets = {i: results[i].info.get("error") for i in done}
            return (
                self._observations(),
                np.array([result.reward for result in results], dtype=np.float64),
                np.array([result.terminated for result in results], dtype=np.bool_),
                np.array([result.truncated for result in results], dtype=np.bool_),
                stack_infos([result.info for result in results]),
            )

    async def _turn(self, i: int, action: Any, resets: Mapping[int, AgentRLError | None]) -> Transition:
        if i in resets and self.autoreset_mode is AutoresetMode.NEXT_STEP:
            return await self._autoreset(i)
        # With SAME_STEP a reset is pending only if the last one failed.
        error = resets.get(i)
        result = _failed_transition(error) if error is not None else await self._play(i, action)
        if self.autoreset_mode is not AutoresetMode.SAME_STEP or not result.done:
            return result
        final = {"final_obs": self._episodes[i].observation(), "final_info": result.info}
        begun = await self._autoreset(i)
        return replace(result, info={**final, **begun.info})

    async def _play(self, i: int, action: Any) -> Transition:
        try:
            return await self._episodes[i].step(action)
        except AgentRLError as error:
            return _failed_transition(error)

    async def _autoreset(self, i: int) -> Transition:
        choice = open_arguments({}, seed=None, split=self._split, rng=self._generators[i][0])
        try:
            info = await self._begin(i, choice)
        except AgentRLError as error:
            return _failed_transition(error)
        return Transition(reward=0.0, terminated=False, truncated=False, info=info)

    def _raise_common_error(self, results: Sequence[Transition]) -> None:
        errors = [result.error for result in results if result.error is not None]
        if len(errors) == self.num_envs and not self.running.any():
            for error in errors:
                if not isinstance(error, EPISODE_ERRORS):
                    raise error

    def _abandon(self, indices: Iterable[int]) -> None:
        for i in indices:
            self._episodes[i].abandon()

    def _observations(self) -> Conversations:
        return tuple(episode.observation() for episode in self._episodes)

    async def _close_episodes(self) -> None:
        await _gather(episode.close() for episode in self._episodes)

    @contextlib.asynccontextmanager
    async def _exclusive(self, name: str) -> AsyncIterator[None]:
        """Allow one call at a time. Wait for a cancelled call to finish."""
        while self._pending is not None:
            other, pending = self._pending
            if not pending.cancelling():
                raise AlreadyPendingCallError(f"{name}() was called while {other}() is pending.", other)
            await asyncio.wait((pending,))
        task = asyncio.current_task()
        assert task is not None
        self._pending = name, task
        try:
            yield
        finally:
            self._pending = None


def stack_infos(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return for each key an array of shape ``[n]``, and as ``_key`` a mask of the infos that have it.

    Missing values are 0, False or None. Dicts become dicts of arrays. Gymnasium's own
    ``VectorEnv._add_info`` truncates values to the type of the first value (2.5 after an int) or rejects them
    (a string after an int). Here such values are kept, in an array of a wider type or of objects.
    """
    stacked: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos for key in info):
        present = np.array([key in info for info in infos], dtype=np.bool_)
        values = [info.get(key) for info in infos]
        types = {type(value) for value, there in zip(values, present, strict=True) if there}
        if types == {dict}:
            stacked[key] = stack_infos([value or {} for value in values])
        else:
            stacked[key] = _info_array(values, present, types)
        stacked[f"_{key}"] = present
    return stacked


def _info_array(values: list[Any], present: Bools, types: set[type]) -> npt.NDArray[Any]:
    given = [value for value, there in zip(values, present, strict=True) if there]
    dtype: Any = object
    if types in ({bool}, {float}):
        dtype = types.pop()
    elif types == {int} and all(-(2**63) <= value < 2**63 for value in given):
        dtype = np.int64
    elif types == {int, float} and all(isinstance(value, float) or abs(value) <= 2**53 for value in given):
        dtype = np.float64
    array = np.full(len(values), None, dtype=object) if dtype is object else np.zeros(len(values), dtype)
    for i in np.flatnonzero(present):
        array[i] = values[i]
    return array


def _seed_list(seed: Seeds, n: int) -> list[int | None]:
    """Return one seed for each of ``n`` environments. None continues the generator."""
    if seed is None:
        return [None] * n
    if isinstance(seed, SupportsIndex) and not isinstance(seed, np.ndarray):
        return [operator.index(seed) + i for i in range(n)]
    seeds = [None if each is None else operator.index(each) for each in seed]
    if len(seeds) != n:
        raise ValueError(f"Give one seed for each of {n} environments, not {len(seeds)}.")
    return seeds


def _reset_indices(mask: Any, n: int) -> list[int]:
    """Return the indices where ``mask`` is True, or all if it is None."""
    if mask is None:
        return list(range(n))
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"options['reset_mask'] must be a numpy array of bool, not {mask!r}.")
    if mask.shape != (n,):
        raise ValueError(f"options['reset_mask'] must have the shape ({n},), not {mask.shape}.")
    if not mask.any():
        raise ValueError("options['reset_mask'] must have at least one True.")
    return [int(i) for i in np.flatnonzero(mask)]


def _option_list(options: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """Return the options of each environment. A list, tuple or array has one value for each."""
    columns = {}
    for key, value in options.items():
        each = value if isinstance(value, list | tuple | np.ndarray) else [value] * n
        if len(each) != n:
            raise ValueError(
                f"options[{key!r}] must be one value, or one for each of {n} environments, not {len(each)}."
            )
        columns[key] = each
    return [{key: each[i] for key, each in columns.items()} for i in range(n)]


def _failed_transition(error: AgentRLError) -> Transition:
    """Return the transition of an episode that failed."""
    info: dict[str, Any] = {"failed": True, "error": error}
    for status, kind in FAILURES.items():
        if isinstance(error, kind):
            info["status"] = str(status)
    return Transition(reward=math.nan, terminated=False, truncated=True, info=info, error=error)


async def _gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, or raise the first error after all coroutines have ended."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
