"""Many sessions as one ``gymnasium.vector.VectorEnv``, over one client.

Example::

    env = gymnasium.make_vec("agentrl_env:agentrl/Env-v0", num_envs=64, url=..., task="guess")
    conversations, infos = env.reset(seed=7)
    while True:
        actions = policy(conversations)
        conversations, rewards, terminated, truncated, infos = env.step(actions)
        if (over := terminated | truncated).any():
            conversations, infos = env.reset(options={"reset_mask": over})

The steps of one call leave together, so that they share requests; ``areset`` and ``astep`` are the
same for callers that live on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from agentrl_env.client.client import EnvClient
from agentrl_env.errors import AgentRLError, SessionLost, UnknownSession
from agentrl_env.gym.connection import Connection
from agentrl_env.gym.episode import LOST, Episode, Turn, choose
from agentrl_env.gym.infos import stack_infos
from agentrl_env.gym.resets import Seeds, options_of_each, seeds_of_each, whom_to_reset
from agentrl_env.gym.spaces import ChatMessage, Conversation, ToolCallSpace
from agentrl_env.types import TaskInfo, ToolSpec

T = TypeVar("T")
Conversations: TypeAlias = tuple[tuple[ChatMessage, ...], ...]
Bools: TypeAlias = npt.NDArray[np.bool_]
Steps: TypeAlias = tuple[Conversations, npt.NDArray[np.float64], Bools, Bools, dict[str, Any]]

LOSSES = (*LOST.values(), SessionLost, UnknownSession)
"""What may befall one episode alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lost(Turn):
    error: AgentRLError


class GymVectorEnv(VectorEnv[Conversations, Sequence[Any], npt.NDArray[Any]]):
    """``num_envs`` episodes of one task of a server (``url``) or of a local client (``client``).

    Observations are a tuple of conversations, actions any sequence of ``num_envs`` actions as
    ``GymEnv`` takes them; rewards are float64, ``terminated`` and ``truncated`` bool arrays.

    Autoreset is DISABLED unless asked for: after ``terminated | truncated`` the caller resets with
    ``options={"reset_mask": ...}``, and no action of a policy is thrown away. NEXT_STEP and
    SAME_STEP are as in Gymnasium.

    Seeds: an int gives environment ``i`` the seed ``seed + i``, a list gives each its own, None
    goes on with each one's stream. Besides ``reset_mask`` the options are those of ``GymEnv``
    (``split``, ``index``, ``sample``), one value for all or a list of one for each.

    An episode that is lost (``EnvironmentFailed``, ``SessionExpired``, no server, ...) leaves the
    others alone: its reward is NaN, it is truncated, and ``infos["failed"][i]`` and
    ``infos["error"][i]`` (the exception) are set. It has no outcome: drop it, and reset. Where a
    call came to nothing for all, for a reason that is not the episodes' own, ``step`` raises it.

    The connection is made at the first use and not carried over by pickle or fork.

    Args:
        num_envs: How many.
        url: Address of a server. Give either this or ``client``.
        task: Name of the task; not needed where there is one only.
        client: A callable that makes an EnvClient, such as ``Guess.local``, or a new EnvClient.
        token: The server's token.
        split: Where samples come from unless ``reset`` says otherwise.
        autoreset_mode: An AutoresetMode or its value: "Disabled", "NextStep", "SameStep".
        render_mode: ``"ansi"`` makes ``render()`` return the conversations as texts.
        wait: Seconds to wait for free sessions on a full server.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  -- declared so by Gymnasium

    def __init__(
        self,
        num_envs: int = 1,
        url: str | None = None,
        task: str | None = None,
        *,
        client: EnvClient | Callable[[], EnvClient] | None = None,
        token: str | None = None,
        split: str = "train",
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
        render_mode: str | None = None,
        wait: float = 30.0,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, not {num_envs}.")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"There is no render mode {render_mode!r}; use 'ansi' or none.")
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self._connection = Connection(url, task, client=client, token=token)
        self._split, self._wait = split, wait
        self._streams = [seeding.np_random() for _ in range(num_envs)]
        self._episodes = [Episode() for _ in range(num_envs)]
        # Whom the next step resets, each with the reason if the last try failed.
        self._due: dict[int, AgentRLError | None] = {}
        self._pending: tuple[str, asyncio.Task[Any]] | None = None

    @cached_property
    def task_info(self) -> TaskInfo:
        """What the server says of the task. Raises UnknownTask."""
        return self._connection.run(self._connection.task_info())

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools a policy may call, in OpenAI format."""
        return self.task_info.tools

    @cached_property
    def single_action_space(self) -> ToolCallSpace:  # type: ignore[override]
        """Tool calls; ``step`` takes assistant messages and text as well."""
        return ToolCallSpace(self.tools)

    @cached_property
    def action_space(self) -> gymnasium.Space[Any]:  # type: ignore[override]
        """One action for each environment."""
        return batch_space(self.single_action_space, self.num_envs)

    @cached_property
    def single_observation_space(self) -> Conversation:  # type: ignore[override]
        """A conversation."""
        return Conversation()

    @cached_property
    def observation_space(self) -> gymnasium.Space[Any]:  # type: ignore[override]
        """One conversation for each environment."""
        return batch_space(self.single_observation_space, self.num_envs)

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Each environment's generator, from which it draws the seeds it is not given."""
        return tuple(rng for rng, _ in self._streams)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """What each environment's generator was seeded with."""
        return tuple(seed for _, seed in self._streams)

    @property
    def running(self) -> Bools:
        """Which environments have an episode that can be stepped."""
        return np.array([episode.running for episode in self._episodes], dtype=np.bool_)

    def reset(
        self, *, seed: Seeds = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Conversations, dict[str, Any]]:
        """Open new episodes and return all conversations, and an ``infos`` of those that are new.

        Raises:
            ValueError, TypeError: seeds or options are not as they should be; nothing was done.
            AgentRLError: a session could not be opened. The others were; ``running`` says which.
        """
        return self._connection.run(self._reset(seed, options))

    async def areset(
        self, *, seed: Seeds = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Conversations, dict[str, Any]]:
        """Do as ``reset``, from any event loop. Cancelled, it leaves no new episode running."""
        return await self._connection.arun(self._reset(seed, options))

    def step(self, actions: Iterable[Any]) -> Steps:
        """Take one turn in each environment, all at once.

        Raises:
            ResetNeeded: an environment has no running episode; none was stepped.
            ValueError: there is not one action for each; none was stepped.
            AgentRLError: nothing was achieved, for this reason. All episodes are over: reset.
        """
        return self._connection.run(self._step(actions))

    async def astep(self, actions: Iterable[Any]) -> Steps:
        """Do as ``step``, from any event loop. Cancelled, it ends all episodes."""
        return await self._connection.arun(self._step(actions))

    def render(self) -> tuple[str, ...] | None:
        """Return the conversations as texts in render mode ``"ansi"``, None otherwise."""
        if self.render_mode is None:
            return None
        return tuple(episode.text() for episode in self._episodes)

    def close_extras(self, **kwargs: Any) -> None:
        """Close sessions and connection; ``close()`` calls it."""
        self._connection.close(self._end_all)
        self._due = {}

    async def aclose(self) -> None:
        """Do as ``close``, from any event loop."""
        await asyncio.to_thread(self.close)

    async def _reset(
        self, seed: Seeds, options: Mapping[str, Any] | None
    ) -> tuple[Conversations, dict[str, Any]]:
        async with self._alone("reset"):
            choices = self._choices(seed, dict(options or {}))
            self.closed = False
            await self._connection.ready()
            for i in choices:
                self._due.pop(i, None)
            try:
                begun = await _all_of(self._begin(i, choice) for i, choice in choices.items())
            except asyncio.CancelledError:
                self._lose(choices)  # nobody will see how they begin
                raise
            infos = dict(zip(choices, begun, strict=True))
            return self._observations(), stack_infos([infos.get(i, {}) for i in range(self.num_envs)])

    def _choices(self, seed: Seeds, options: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Return what to open, by environment, and seed the streams of those."""
        n = self.num_envs
        seeds = seeds_of_each(seed, n)
        chosen = whom_to_reset(options.pop("reset_mask", None), n)
        each = options_of_each(options, n)
        streams = {i: seeding.np_random(s) for i in chosen if (s := seeds[i]) is not None}
        streams = {i: streams.get(i, self._streams[i]) for i in chosen}
        choices = {
            i: choose(each[i], seed=seeds[i], split=self._split, rng=rng) for i, (rng, _) in streams.items()
        }
        for i, stream in streams.items():
            self._streams[i] = stream
        return choices

    async def _begin(self, i: int, choice: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._episodes[i].begin(self._connection, choice, wait=self._wait)
        except AgentRLError as error:
            error.add_note(f"This is environment {i} of {self.num_envs}.")
            raise

    async def _step(self, actions: Iterable[Any]) -> Steps:
        async with self._alone("step"):
            each = self._actions(actions)
            self._refuse_unbegun()
            due, self._due = self._due, {}
            try:
                turns = await _all_of(self._turn(i, action, due) for i, action in enumerate(each))
                self._raise_if_all_failed(turns)
            except BaseException:
                self._lose(range(self.num_envs))  # nobody will hear what the others answered
                raise
            if self.autoreset_mode is not AutoresetMode.DISABLED:
                over = np.flatnonzero(~self.running).tolist()
                self._due = {i: turns[i].info.get("error") for i in over}
            return (
                self._observations(),
                np.array([turn.reward for turn in turns], dtype=np.float64),
                np.array([turn.terminated for turn in turns], dtype=np.bool_),
                np.array([turn.truncated for turn in turns], dtype=np.bool_),
                stack_infos([turn.info for turn in turns]),
            )

    def _actions(self, actions: Iterable[Any]) -> list[Any]:
        each = [actions] if isinstance(actions, str | bytes | Mapping) else list(actions)
        if len(each) != self.num_envs:
            raise ValueError(f"Give one action for each of {self.num_envs} environments, not {len(each)}.")
        return each

    def _refuse_unbegun(self) -> None:
        over = [i for i, episode in enumerate(self._episodes) if not episode.running and i not in self._due]
        if over:
            raise ResetNeeded(
                f"No episode is running in {over}: reset all, or these with options={{'reset_mask': ...}}."
            )

    async def _turn(self, i: int, action: Any, due: Mapping[int, AgentRLError | None]) -> Turn:
        if i in due and self.autoreset_mode is AutoresetMode.NEXT_STEP:
            return await self._autoreset(i)
        # In SAME_STEP an environment is due only where no new episode could be opened.
        reason = due.get(i)
        turn = _lost(reason) if reason is not None else await self._play(i, action)
        if self.autoreset_mode is not AutoresetMode.SAME_STEP or not turn.over:
            return turn
        final = {"final_obs": self._episodes[i].observation(), "final_info": turn.info}
        begun = await self._autoreset(i)
        return replace(turn, info={**final, **begun.info})

    async def _play(self, i: int, action: Any) -> Turn:
        try:
            return await self._episodes[i].step(action)
        except AgentRLError as error:
            return _lost(error)

    async def _autoreset(self, i: int) -> Turn:
        choice = choose({}, seed=None, split=self._split, rng=self._streams[i][0])
        try:
            info = await self._begin(i, choice)
        except AgentRLError as error:
            return _lost(error)
        return Turn(reward=0.0, terminated=False, truncated=False, info=info)

    def _raise_if_all_failed(self, turns: Sequence[Turn]) -> None:
        errors = [turn.error for turn in turns if isinstance(turn, _Lost)]
        if len(errors) == self.num_envs and not self.running.any():
            for error in errors:
                if not isinstance(error, LOSSES):
                    raise error

    def _lose(self, indices: Iterable[int]) -> None:
        for i in indices:
            self._episodes[i].lose()

    def _observations(self) -> Conversations:
        return tuple(episode.observation() for episode in self._episodes)

    async def _end_all(self) -> None:
        await _all_of(episode.end() for episode in self._episodes)

    @contextlib.asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        while self._pending is not None:
            other, pending = self._pending
            if not pending.cancelling():
                raise AlreadyPendingCallError(f"{name}() was called while {other}() is under way.", other)
            await asyncio.wait((pending,))
        task = asyncio.current_task()
        assert task is not None
        self._pending = name, task
        try:
            yield
        finally:
            self._pending = None


def _lost(error: AgentRLError) -> _Lost:
    info: dict[str, Any] = {"failed": True, "error": error}
    for status, kind in LOST.items():
        if isinstance(error, kind):
            info["status"] = str(status)
    return _Lost(reward=math.nan, terminated=False, truncated=True, info=info, error=error)


async def _all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what they return, or raise the first error, once all have ended."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
