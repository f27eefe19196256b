"""A session as a ``gymnasium.Env``, over HTTP or in-process.

Example::

    env = gymnasium.make("agentrl_env:agentrl/Env-v0", url="http://localhost:8000", task="guess")
    observation, info = env.reset(seed=7)
    call = {"name": "guess", "arguments": {"n": 7}}
    observation, reward, terminated, truncated, info = env.step(call)

The observation is the whole conversation so far, a tuple of messages in OpenAI chat format, so a chat
model can be called with ``messages=observation, tools=info["tools"]``. An action is a tool call, an
assistant message or plain text. Other types raise TypeError. A malformed dict is an invalid call.

``TaskClient`` owns the connection, ``EpisodeRunner`` plays the episodes of one environment, and ``TaskEnv``
holds the attributes that ``GymEnv`` and ``GymVectorEnv`` share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded

from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.client.formatting import format_messages
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.errors import AgentRLError, EnvironmentFailed, SessionEnded, SessionExpired, WireError
from agentrl_env.gym.spaces import ChatMessage, Conversation, ToolCallSpace, action_message
from agentrl_env.types import Message, SessionStatus, TaskInfo, ToolSpec
from agentrl_env.wire import SEED_BITS, choose_task

T = TypeVar("T")

RESET_OPTIONS = {"index", "sample", "split"}
"""The keys of ``reset(options=...)`` that choose the problem."""
CLOSE_TIMEOUT_S = 10.0
"""Seconds to wait for a session to close. After that, it ends when its lease expires."""
FAILURES: dict[SessionStatus, type[WireError]] = {
    SessionStatus.FAILED_ENVIRONMENT: EnvironmentFailed,
    SessionStatus.EXPIRED: SessionExpired,
    SessionStatus.CANCELLED: SessionEnded,
}
"""Statuses of sessions without an outcome, with the error that is raised for each."""


class TaskClient:
    """A client of one task, on an event loop in a background thread.

    The client is created on first use, and again after pickling or in a forked process. The coroutine
    methods must run on the private loop, through ``run`` or ``arun``. The arguments are those of ``GymEnv``.
    """

    def __init__(
        self,
        url: str | None,
        task: str | None,
        *,
        client: EnvClient | Callable[[], EnvClient] | None,
        token: str | None,
        target: str | None = None,
    ) -> None:
        if [url, client, target].count(None) != 2:
            raise ValueError(
                "Give either url= (a server), target= (such as a task's folder) or client= (such as "
                "Guess.local)."
            )
        if target is not None:
            client = partial(EnvClient.local, target)
        self._url, self._task, self._source, self._token = url, task, client, token
        self._info: TaskInfo | None = None
        self._reset_process_state()

    def _reset_process_state(self) -> None:
        self._pid = os.getpid()
        self._loop = LoopThread()
        self._client: EnvClient | None = None

    def _reset_if_forked(self) -> None:
        if self._pid != os.getpid():
            self._reset_process_state()

    def __getstate__(self) -> dict[str, Any]:
        process_state = ("_pid", "_loop", "_client")
        return {key: value for key, value in self.__dict__.items() if key not in process_state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_process_state()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the private loop and return its result."""
        self._reset_if_forked()
        return self._loop.run(coroutine)

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that runs on the private loop. Cancellation is passed on to it."""
        self._reset_if_forked()
        return await self._loop.arun(coroutine)

    def close(self, before: Callable[[], Awaitable[None]]) -> None:
        """Disconnect, after awaiting ``before()`` if there is a connection. Idempotent."""
        self._reset_if_forked()
        try:
            if self._client is not None:
                self._loop.run(self._disconnect(self._client, before))
        finally:
            self._loop.stop()
            self._reset_process_state()

    async def _disconnect(self, client: EnvClient, before: Callable[[], Awaitable[None]]) -> None:
        try:
            await before()
        finally:
            await client.__aexit__(None, None, None)

    async def connect(self) -> tuple[EnvClient, str]:
        """Return the client, which is created if necessary, and the task's name. Raises UnknownTask."""
        if self._client is None:
            if isinstance(self._source, EnvClient):
                client = self._source
            elif self._source is not None:
                client = self._source()
            else:
                client = EnvClient.connect(str(self._url), token=self._token)
            self._client = await client.__aenter__()
        if self._task is None:
            self._task = (await self._find_task(self._client)).name
        return self._client, self._task

    async def info(self) -> TaskInfo:
        """Return the task's description, which is requested only once. Raises UnknownTask."""
        client, _ = await self.connect()
        return self._info or await self._find_task(client)

    async def _find_task(self, client: EnvClient) -> TaskInfo:
        tasks = await client.tasks()
        self._info = tasks[choose_task(self._task, tasks)]
        return self._info


class TaskEnv:
    """Base class of ``GymEnv`` and ``GymVectorEnv``: one task, reached through a ``TaskClient``."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  -- as in Gymnasium
    render_mode: str | None

    def _configure(
        self,
        url: str | None,
        task: str | None,
        client: EnvClient | Callable[[], EnvClient] | None,
        token: str | None,
        split: str,
        render_mode: str | None,
        wait: float,
        target: str | None,
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(
                f"Unknown render mode {render_mode!r}; an episode is a conversation, so the only one is "
                "'ansi', in which render() returns text."
            )
        self.render_mode = render_mode
        self._client = TaskClient(url, task, client=client, token=token, target=target)
        self._split, self._wait = split, wait

    @cached_property
    def task_info(self) -> TaskInfo:
        """The server's description of the task. Raises UnknownTask."""
        return self._client.run(self._client.info())

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools that a policy can call, in OpenAI format."""
        return self.task_info.tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The result of one step, without the observation."""

    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    error: AgentRLError | None = None
    """Set if the episode failed and has no outcome."""

    @property
    def done(self) -> bool:
        """True after the episode's last step."""
        return self.terminated or self.truncated


class EpisodeRunner:
    """Plays the episodes of one environment, one after another, and keeps the conversation.

    The coroutines run on the client's loop. An exception in a step ends the episode, because the
    environment might have changed without the caller seeing it. Episodes do not survive pickle or fork.
    """

    def __init__(self) -> None:
        self._running = False
        self._pid = os.getpid()
        self._session: ClientSession | None = None
        self._conversation: list[Message] = []

    def __reduce__(self) -> tuple[type[EpisodeRunner], tuple[()]]:
        return EpisodeRunner, ()

    @property
    def running(self) -> bool:
        """True if the episode can be stepped."""
        return self._running and self._pid == os.getpid()

    def abandon(self) -> None:
        """Prevent further steps after an answer has not reached the caller."""
        self._running = False

    def observation(self) -> tuple[ChatMessage, ...]:
        """Return a copy of the conversation so far."""
        return tuple(message.wire() for message in self._conversation)

    def text(self) -> str:
        """Return the conversation as text."""
        return format_messages(self._conversation)

    async def begin(self, task: TaskClient, choice: Mapping[str, Any], *, wait: float) -> dict[str, Any]:
        """Close the current session, open a new one and return the ``info`` of the reset.

        ``choice`` comes from ``open_arguments``. After an AgentRLError no episode is running.
        """
        await self.close()
        self._conversation, self._pid = [], os.getpid()
        client, name = await task.connect()
        session = await client.open(name, wait=wait, **choice)
        self._session, self._running = session, True
        self._conversation = list(session.messages)
        sample = session.sample
        return {
            "task": sample.task,
            "split": sample.split,
            "index": sample.index,
            "seed": sample.seed,
            "status": str(session.status),
            "tools": [tool.model_dump() for tool in session.tools],
        }

    async def step(self, action: Any) -> Transition:
        """Play one action. Raises WireError, ServerUnreachable or CallTimeout if the episode is lost."""
        assert self._session is not None
        message = action_message(action, call_id=f"call_{len(self._conversation)}")
        self._running = False
        result = await self._session.step(message)
        if result.status in FAILURES:
            error = result.info.get("error")
            reason = (error.get("message") if isinstance(error, dict) else error) or "no reason given"
            raise FAILURES[result.status](f"The episode is lost ({result.status}): {reason}")
        self._running = not result.final
        self._conversation += [message, *result.messages]
        return Transition(
            reward=float(result.reward),
            terminated=result.terminated,
            truncated=result.truncated,
            info={**result.info, "status": str(result.status), "metrics": dict(result.metrics)},
        )

    async def close(self) -> None:
        """Close the session. Idempotent. Ignores an unreachable server, since the lease ends the session."""
        session, self._session, self._running = self._session, None, False
        if session is not None and self._pid == os.getpid():
            with contextlib.suppress(AgentRLError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await session.close()


class GymEnv(TaskEnv, gymnasium.Env[tuple[ChatMessage, ...], Any]):
    """One task of a server (``url``) or in this process (``client``, ``target``) as a Gymnasium environment.

    ``reset(seed=s)`` opens an episode with exactly that seed. A later ``reset()`` draws its seed from
    the generator that ``s`` initialized, so a run is reproducible from its first seed.
    ``reset(options={"split", "index", "sample"})`` chooses the problem. With an index and no seed, the
    sample keeps its own seed.

    ``terminated`` means that the task ended, ``truncated`` that a turn or time limit was reached. An
    infrastructure failure is neither: ``step`` raises it (``EnvironmentFailed``, ``SessionExpired``),
    so it cannot be mistaken for an episode of reward zero. Call ``reset()`` to continue.

    The connection is made on first use and does not survive pickle or fork.

    Args:
        url: Address of a server. Give either this or ``client``.
        task: Name of the task. Optional if there is only one.
        client: A callable that returns an EnvClient, such as ``Guess.local``, or an unused EnvClient.
        token: The server's token.
        split: The split that samples come from, unless ``reset`` names one.
        render_mode: With ``"ansi"``, ``render()`` returns the conversation as text.
        wait: Seconds to wait for a free session on a full server.
        target: A folder with an ``environment.py``, ``file.py:Class`` or ``module:Class``, which runs in this
            process. Give it instead of ``url`` and ``client``.
    """

    def __init__(
        self,
        url: str | None = None,
        task: str | None = None,
        *,
        client: EnvClient | Callable[[], EnvClient] | None = None,
        token: str | None = None,
        split: str = "train",
        render_mode: str | None = None,
        wait: float = 30.0,
        target: str | None = None,
    ) -> None:
        self._configure(url, task, client, token, split, render_mode, wait, target)
        self._episode = EpisodeRunner()

    @cached_property
    def action_space(self) -> ToolCallSpace:  # type: ignore[override]
        """Tool calls. ``step`` also accepts assistant messages and text."""
        return ToolCallSpace(self.tools)

    @cached_property
    def observation_space(self) -> Conversation:  # type: ignore[override]
        """The whole conversation so far."""
        return Conversation()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[ChatMessage, ...], dict[str, Any]]:
        """Open a new episode and return its first messages and an ``info`` that names the sample.

        Raises:
            ValueError: ``options`` has an unknown key.
            AgentRLError: The session could not be opened.
        """
        super().reset(seed=seed)
        choice = open_arguments(options or {}, seed=seed, split=self._split, rng=self.np_random)
        info = self._client.run(self._episode.begin(self._client, choice, wait=self._wait))
        return self._episode.observation(), info

    def step(self, action: Any) -> tuple[tuple[ChatMessage, ...], float, bool, bool, dict[str, Any]]:
        """Play one turn. An error ends the episode.

        Raises:
            ResetNeeded: No episode is running.
            EnvironmentFailed: The environment failed, so the episode has no outcome.
            SessionExpired: The session was idle for longer than its lease.
        """
        if not self._episode.running:
            raise ResetNeeded("No episode is running: call reset() before step().")
        result = self._client.run(self._episode.step(action))
        return self._episode.observation(), result.reward, result.terminated, result.truncated, result.info

    def render(self) -> str | None:
        """Return the conversation as text in render mode ``"ansi"``, otherwise None."""
        return None if self.render_mode is None else self._episode.text()

    def close(self) -> None:
        """Close the session and the connection. Idempotent."""
        self._client.close(self._episode.close)
        self._episode = EpisodeRunner()
        super().close()


def open_arguments(
    options: Mapping[str, Any], *, seed: int | None, split: str, rng: np.random.Generator
) -> dict[str, Any]:
    """Return the arguments of ``EnvClient.open`` for a reset with these options and this seed.

    Without a seed, a seed is drawn from ``rng``, unless the options name an index or a sample, which have
    their own seeds.

    Raises ValueError if an option is unknown.
    """
    if unknown := sorted(options.keys() - RESET_OPTIONS, key=str):
        raise ValueError(f"Unknown reset option {unknown[0]!r}; known: {sorted(RESET_OPTIONS)}.")
    choice = {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in options.items()
        if value is not None
    }
    if seed is None and not choice.keys() & {"index", "sample"}:
        seed = int(rng.integers(2**SEED_BITS))
    return {"split": split, **choice, "seed": seed}
