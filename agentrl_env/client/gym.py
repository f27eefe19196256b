"""A session as a ``gymnasium.Env``, over HTTP or in-process.

Example::

    env = gymnasium.make("agentrl_env:agentrl/Env-v0", url="http://localhost:8000", task="guess")
    observation, info = env.reset(seed=7)
    call = {"name": "guess", "arguments": {"n": 7}}
    observation, reward, terminated, truncated, info = env.step(call)

The observation is the whole conversation so far, a tuple of messages in OpenAI chat format, so a
chat model can be called with ``messages=observation, tools=info["tools"]``. An action is a tool
call, an assistant message or plain text; anything else is an unusable turn, which the environment
answers as it answers a model that forgot to call a tool.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.client.spaces import ChatMessage, Conversation, ToolCallSpace
from agentrl_env.client.transcript import format_messages
from agentrl_env.dataset import SEED_BITS
from agentrl_env.errors import (
    EnvironmentFailed,
    SessionEnded,
    SessionExpired,
    UnknownTask,
    WireError,
)
from agentrl_env.types import (
    FunctionCall,
    Message,
    SessionStatus,
    StepResult,
    TaskInfo,
    ToolCall,
    ToolSpec,
)

ENV_ID = "agentrl/Env-v0"
_OPTIONS = {"index", "sample", "split"}
_LOST: dict[SessionStatus, type[WireError]] = {
    SessionStatus.FAILED_ENVIRONMENT: EnvironmentFailed,
    SessionStatus.EXPIRED: SessionExpired,
    SessionStatus.CANCELLED: SessionEnded,
}


class GymEnv(gymnasium.Env[tuple[ChatMessage, ...], Any]):
    """One task of a server (``url``) or of a local client (``client``) as a Gymnasium environment.

    ``reset(seed=s)`` opens an episode with exactly that seed; a ``reset()`` after it draws the
    next seed from the generator that ``s`` started, so a run repeats from its first seed.
    ``reset(options={"split", "index", "sample"})`` chooses the problem; with an index and no seed
    the sample keeps its own seed.

    ``terminated`` means that the task ended, ``truncated`` that a turn or time limit was reached.
    An infrastructure failure is neither: ``step`` raises it (``EnvironmentFailed``,
    ``SessionExpired``), so it can never pass for an episode of reward zero. ``reset()`` goes on.

    The connection is made at the first use and not carried over by pickle or fork.

    Args:
        url: Address of a server. Give either this or ``client``.
        task: Name of the task; not needed where there is one only.
        client: A callable that makes an EnvClient, such as ``Guess.local``, or a new EnvClient.
        token: The server's token.
        split: Where samples come from unless ``reset`` says otherwise.
        render_mode: ``"ansi"`` makes ``render()`` return the conversation as text.
        wait: Seconds to wait for a free session on a full server.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  -- declared so by Gymnasium

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
    ) -> None:
        if (url is None) == (client is None):
            raise ValueError("Give either url= (a server) or client= (such as Guess.local).")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"There is no render mode {render_mode!r}; use 'ansi' or none.")
        self.render_mode = render_mode
        self._url, self._token, self._source = url, token, client
        self._task, self._split, self._wait = task, split, wait
        self._forget()

    def _forget(self) -> None:
        """Drop everything that belongs to one process: thread, connection, session."""
        self._pid = os.getpid()
        self._loop = LoopThread()
        self._client: EnvClient | None = None
        self._session: ClientSession | None = None
        self._conversation: list[Message] = []
        self._running = False

    def _forget_if_forked(self) -> None:
        if self._pid != os.getpid():
            self._forget()

    @cached_property
    def task_info(self) -> TaskInfo:
        """What the server says of the task. Raises UnknownTask."""
        return self._loop.run(self._find_task())

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools a policy may call, in OpenAI format."""
        return self.task_info.tools

    @cached_property
    def action_space(self) -> ToolCallSpace:  # type: ignore[override]
        """Tool calls; ``step`` takes assistant messages and text as well."""
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
            AgentRLError: no session could be opened, for the reason that the error's class says.
        """
        super().reset(seed=seed)
        choice = dict(options or {})
        if unknown := sorted(choice.keys() - _OPTIONS):
            raise ValueError(f"Unknown reset option {unknown[0]!r}; known: {sorted(_OPTIONS)}.")
        if seed is None and not choice.keys() & {"index", "sample"}:
            seed = int(self.np_random.integers(2**SEED_BITS))
        self._forget_if_forked()
        session = self._loop.run(self._reopen(choice, seed))
        self._session, self._running = session, True
        self._conversation = list(session.messages)
        sample = session.info.sample
        info = {
            "task": sample.task,
            "split": sample.split,
            "index": sample.index,
            "seed": sample.seed,
            "status": str(session.status),
            "tools": [tool.model_dump() for tool in session.tools],
        }
        return self._observation(), info

    def step(self, action: Any) -> tuple[tuple[ChatMessage, ...], float, bool, bool, dict[str, Any]]:
        """Take one turn.

        Raises:
            ResetNeeded: no episode is running.
            EnvironmentFailed: the environment broke; the episode has no outcome.
            SessionExpired: the session was idle past its lease.
        """
        self._forget_if_forked()
        if self._session is None or not self._running:
            raise ResetNeeded("No episode is running: call reset() before step().")
        message = as_message(action, call_id=f"call_{len(self._conversation)}")
        result = self._loop.run(self._session.step(message))
        self._running = not result.final
        if result.status in _LOST:
            raise _lost(result)
        self._conversation += [message, *result.messages]
        info = {**result.info, "status": str(result.status), "metrics": dict(result.metrics)}
        return (
            self._observation(),
            float(result.reward),
            result.terminated,
            result.truncated,
            info,
        )

    def render(self) -> str | None:
        """Return the conversation as text in render mode ``"ansi"``, None otherwise."""
        if self.render_mode is None:
            return None
        return format_messages(self._conversation)

    def close(self) -> None:
        """Close the session and the connection; again and again does no harm."""
        self._forget_if_forked()
        if self._client is not None:
            self._loop.run(self._disconnect())
        self._loop.stop()
        self._forget()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        private = ("_pid", "_loop", "_client", "_session", "_conversation", "_running")
        return {key: value for key, value in self.__dict__.items() if key not in private}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _observation(self) -> tuple[ChatMessage, ...]:
        return tuple(message.wire() for message in self._conversation)

    async def _connect(self) -> EnvClient:
        if self._client is None:
            if isinstance(self._source, EnvClient):
                client = self._source
            elif self._source is not None:
                client = self._source()
            else:
                client = EnvClient.connect(str(self._url), token=self._token)
            self._client = await client.__aenter__()
        return self._client

    async def _find_task(self) -> TaskInfo:
        tasks = await (await self._connect()).tasks()
        if self._task is None and len(tasks) == 1:
            return next(iter(tasks.values()))
        if self._task not in tasks:
            wanted = "Several tasks are served" if self._task is None else f"No task {self._task!r}"
            raise UnknownTask(f"{wanted}; give task= one of: {', '.join(tasks)}.")
        return tasks[self._task]

    async def _reopen(self, choice: dict[str, Any], seed: int | None) -> ClientSession:
        client = await self._connect()
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()
        task = self._task or (await self._find_task()).name
        choice.setdefault("split", self._split)
        return await client.open(task, seed=seed, wait=self._wait, **choice)

    async def _disconnect(self) -> None:
        session, client = self._session, self._client
        self._session = self._client = None
        try:
            if session is not None:
                await session.close()
        finally:
            if client is not None:
                await client.__aexit__(None, None, None)


def as_message(action: Any, call_id: str = "call_0") -> Message:
    """Read an action as an assistant message; what is none becomes the text of an unusable turn.

    Taken are: an assistant message, a tool call in OpenAI form or as ``{"name", "arguments"}``
    (each as a dict or as a pydantic object, the OpenAI client's own included), and plain text.
    """
    try:
        fields = action.model_dump(exclude_none=True) if isinstance(action, BaseModel) else action
        message = _structured(fields, call_id) if isinstance(fields, dict) else None
    except (TypeError, ValueError, RecursionError):  # no JSON, or no message (ValidationError)
        message = None
    text = action if isinstance(action, str) else repr(action)
    return _encodable(message or Message.assistant(text))


def _structured(fields: dict[str, Any], call_id: str) -> Message | None:
    if fields.get("role") == "assistant":
        return Message.model_validate(fields)
    if "function" in fields:
        return Message.assistant(None, ToolCall.model_validate({"id": call_id, **fields}))
    if not isinstance(fields.get("name"), str):
        return None
    arguments = fields.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, default=_plain)
    function = FunctionCall(name=fields["name"], arguments=arguments)
    return Message.assistant(None, ToolCall(id=call_id, function=function))


def _encodable(message: Message) -> Message:
    """Replace lone surrogates, which Python strings may hold and UTF-8 may not."""
    try:
        message.model_dump_json()
    except PydanticSerializationError:
        text = json.dumps(message.wire(), ensure_ascii=False).encode(errors="replace")
        return Message.model_validate_json(text)
    return message


def _plain(value: Any) -> Any:
    """Turn what JSON does not know into something it does: numpy values, then anything as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _lost(result: StepResult) -> WireError:
    error = result.info.get("error")
    reason = error.get("message") if isinstance(error, dict) else error
    return _LOST[result.status](f"The episode is lost ({result.status}): {reason or 'no reason was given'}")


if ENV_ID not in gymnasium.registry:
    gymnasium.register(ENV_ID, entry_point="agentrl_env.client.gym:GymEnv")
