"""The async client: opens and steps sessions."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from pydantic import BaseModel, ValidationError

from agentrl_env.client.http import HttpBackend
from agentrl_env.dataset import plain_json
from agentrl_env.errors import ClientClosed, InvalidRequest, WireError, explain, from_wire
from agentrl_env.types import (
    Message,
    SessionInfo,
    SessionStatus,
    StepResult,
    TaskInfo,
    TaskSample,
    ToolCall,
    ToolSpec,
    notebook_html,
)
from agentrl_env.wire import (
    CLOSE,
    EMPTY,
    EXPERT,
    FORK,
    INFO,
    MAX_WAIT_S,
    OPEN,
    OPEN_MANY,
    TASKS,
    Call,
    ExpertAnswer,
    ForkAnswer,
    ForkRequest,
    OpenBatch,
    OpenBatchAnswer,
    OpenRequest,
    SessionRequest,
    TaskList,
    siblings,
)

if TYPE_CHECKING:
    from agentrl_env.client.sync import SyncEnvClient
    from agentrl_env.environment import Environment


class SessionBackend(Protocol):
    """Makes the calls of the protocol.

    Methods raise the WireError in the answer. Over a network they also raise ServerUnreachable, CallTimeout
    and ProtocolError.
    """

    async def call(self, call: Call, request: BaseModel) -> Any:
        """Make a call and return its answer, a ``call.answer``."""

    async def step(self, session_id: str, seq: int, message: Message) -> StepResult:
        """Play one assistant message. Repeating a ``seq`` returns the same result."""

    async def aclose(self) -> None:
        """Close the connections, or the sessions if they live in this process."""


class EnvClient:
    """Opens sessions of served tasks. The connection is made by the first call.

    Example::

        async with EnvClient.connect("http://127.0.0.1:8000") as client:
            async with await client.open("guess", index=3) as session:
                result = await session.step(ToolCall.of("guess", n=7))
    """

    def __init__(self, backend: SessionBackend) -> None:
        self.backend = backend

    @classmethod
    def connect(cls, url: str, token: str | None = None, timeout: float = 120.0) -> Self:
        """Return a client of the server at ``url``.

        Args:
            url: address of the server, such as ``http://127.0.0.1:8000``. With ``ws://`` every call uses the
                WebSocket. Separate several controllers of a fleet by commas.
            token: token of the server. By default the variable AGENTRL_TOKEN is used.
            timeout: seconds for one call, including retries.
        """
        return cls(HttpBackend(url, token=token, timeout=timeout))

    @classmethod
    def local(cls, *environments: type[Environment] | str, **options: Any) -> Self:
        """Return a client whose sessions live in this process.

        Args:
            environments: the tasks: classes, or targets such as a folder with an ``environment.py``.
            options: options of ``SessionPool``, such as ``max_sessions``.
        """
        from agentrl_env.client.local import LocalBackend
        from agentrl_env.environment import find_class
        from agentrl_env.session.pool import SessionPool

        options.setdefault("oracle", True)
        return cls(LocalBackend(SessionPool(map(find_class, environments), **options)))

    @classmethod
    def connect_sync(cls, url: str, token: str | None = None, timeout: float = 120.0) -> SyncEnvClient:
        """Return a synchronous client of the server at ``url``. See ``connect`` for the arguments."""
        from agentrl_env.client.sync import SyncEnvClient

        return SyncEnvClient(cls.connect(url, token=token, timeout=timeout))

    @classmethod
    def local_sync(cls, *environments: type[Environment] | str, **options: Any) -> SyncEnvClient:
        """Return a synchronous client with sessions in this process. See ``local`` for the arguments."""
        from agentrl_env.client.sync import SyncEnvClient

        return SyncEnvClient(cls.local(*environments, **options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. A local client closes its sessions. Later calls raise ClientClosed."""
        await self.backend.aclose()

    async def tasks(self) -> dict[str, TaskInfo]:
        """Return the served tasks by name."""
        served: TaskList = await self.backend.call(TASKS, EMPTY)
        return {task.name: task for task in served.tasks}

    async def open(
        self,
        task: str = "",
        split: str = "train",
        index: int | str | None = None,
        seed: int | None = None,
        sample: dict[str, Any] | None = None,
        wait: float = 0.0,
    ) -> ClientSession:
        """Open a session.

        Args:
            task: name of the task. Optional if there is only one.
            split: split of the dataset.
            index: sample of the split. None picks a sample, using the seed if it is given.
            seed: seed of the episode. None derives it from the sample.
            sample: data to use instead of the dataset's.
            wait: seconds to wait in the fair queue of a full server. In a request this is ``wait_s``. 0
                raises ServerFull immediately.
        """
        request = _request(task, split, index, seed, sample, wait)
        return ClientSession(self.backend, await self.backend.call(OPEN, request))

    async def open_many(
        self,
        n: int,
        task: str = "",
        split: str = "train",
        index: int | str | None = None,
        seed: int | None = None,
        sample: dict[str, Any] | None = None,
        wait: float = 0.0,
    ) -> list[ClientSession]:
        """Open ``n`` sibling sessions of the same problem in one call.

        If one of them cannot be opened, the others are closed and the first error is raised. The other
        arguments are the same as for ``open``.
        """
        request = _request(task, split, index, seed, sample, wait)
        opened = await self.open_batch(siblings(request, n))
        failed = [outcome for outcome in opened if isinstance(outcome, WireError)]
        sessions = [outcome for outcome in opened if isinstance(outcome, ClientSession)]
        if failed:
            for session in sessions:
                await session.close()
            raise failed[0]
        return sessions

    async def open_batch(self, requests: Sequence[OpenRequest]) -> list[ClientSession | WireError]:
        """Open many sessions in one call. Return the session or the error of each, in order."""
        batch = OpenBatch(sessions=list(requests))
        answer: OpenBatchAnswer = await self.backend.call(OPEN_MANY, batch)
        return [
            ClientSession(self.backend, item)
            if isinstance(item, SessionInfo)
            else from_wire(item.model_dump()) or WireError(item.error.message)
            for item in answer.sessions
        ]

    async def resume(self, session_id: str) -> ClientSession:
        """Return a session that is already open, in its current state."""
        return ClientSession(
            self.backend, await self.backend.call(INFO, SessionRequest(session_id=session_id))
        )


class OpenedSession:
    """The properties of a session that do not change with its steps."""

    info: SessionInfo
    """The session as it was opened or resumed."""

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.info.session_id

    @property
    def agent_token(self) -> str | None:
        """Token that only allows stepping and reading this session.

        None if the server has no token, or if the session was resumed rather than opened.
        """
        return self.info.agent_token

    @property
    def sample(self) -> TaskSample:
        """The problem of this session."""
        return self.info.sample

    @property
    def messages(self) -> tuple[Message, ...]:
        """The opening messages of the episode."""
        return self.info.messages

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the model can call."""
        return self.info.tools

    def _repr_html_(self) -> str:
        tools = ", ".join(tool.function.name for tool in self.tools)
        return notebook_html(f"{self!r}. Tools: {tools or 'none'}", self.messages)


class ClientSession(OpenedSession):
    """One session. It numbers the steps, so that a retry never takes a step twice."""

    def __init__(self, backend: SessionBackend, info: SessionInfo) -> None:
        self._backend = backend
        self.info = info
        self.turn = info.turn
        self.status = info.status
        self.last = info.last

    def __repr__(self) -> str:
        return f"<ClientSession {self.session_id} of {self.info.task!r}: {self.status}, turn {self.turn}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def step(self, message: Message | ToolCall | str | Mapping[str, Any]) -> StepResult:
        """Play one assistant message, given as a message, one call, text, or a dict in OpenAI chat format.

        Raises TypeError for any other type. Raises WireError (SessionEnded, SessionExpired, ...),
        ServerUnreachable or CallTimeout. After the last two, the step might have been taken. It is safe to
        repeat the same ``step``.
        """
        if not isinstance(message, Message):
            message = _assistant_message(message)
        result = await self._backend.step(self.session_id, self.turn + 1, message)
        self.turn, self.status, self.last = result.seq, result.status, result
        return result

    async def expert(self) -> Message:
        """Return the next message of the task's expert without taking a step. Raises NotSupported."""
        answer: ExpertAnswer = await self._backend.call(EXPERT, SessionRequest(session_id=self.session_id))
        return answer.message

    async def fork(self, n: int = 1) -> list[ClientSession]:
        """Return ``n`` new sessions that continue from the state of this one.

        Each new session counts as an open session of the server and must be closed.

        Raises NotSupported if the task has no ``snapshot`` (capability ``fork``), ServerFull if the
        server has no room for all of them, SessionEnded, or InvalidRequest.
        """
        if n < 1:
            raise InvalidRequest(f"n: must be at least 1, got {n}")
        request = ForkRequest(session_id=self.session_id, n=n, request_id=secrets.token_urlsafe(12))
        answer: ForkAnswer = await self._backend.call(FORK, request)
        return [ClientSession(self._backend, info) for info in answer.sessions]

    async def close(self) -> None:
        """End the session. Idempotent. Makes no call if the episode has ended.

        If the client is closed, a session on a server ends when its lease expires.
        """
        if not self.status.final:
            with contextlib.suppress(ClientClosed):
                await self._backend.call(CLOSE, SessionRequest(session_id=self.session_id))
            self.status = SessionStatus.CANCELLED


def _assistant_message(value: object) -> Message:
    """Convert an argument of ``step`` to an assistant message. Raises TypeError."""
    if isinstance(value, str):
        return Message.assistant(value)
    if isinstance(value, ToolCall):
        return Message.assistant(None, value)
    problem = f"not {type(value).__name__}"
    if isinstance(value, Mapping):
        try:
            return Message.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = f"but {'.'.join(map(str, first['loc']))!r} of the dict: {first['msg']}"
    raise TypeError(
        'step() takes a ToolCall, text, a Message, or a dict like {"role": "assistant", "content": ..., '
        f'"tool_calls": [...]}}, {problem}; ToolCall.of("name", key=value) makes a call'
    )


def _request(
    task: str,
    split: str,
    index: int | str | None,
    seed: int | None,
    sample: dict[str, Any] | None,
    wait: float,
) -> OpenRequest:
    try:
        sample = plain_json(sample) if isinstance(sample, Mapping) else sample
    except ValueError as error:
        raise InvalidRequest(f"sample cannot be sent as JSON: it {error}") from None
    try:
        return OpenRequest(
            task=task,
            split=split,
            index=index,
            seed=seed,
            sample=sample,
            wait_s=min(wait, MAX_WAIT_S),
            request_id=secrets.token_urlsafe(12),
        )
    except ValidationError as error:
        raise InvalidRequest(explain(error)) from error
