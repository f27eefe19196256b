"""The async client: open sessions, step them, whatever stands behind."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Self

from agentrl_env.client.backend import SessionBackend
from agentrl_env.client.http import HttpBackend
from agentrl_env.session.pool import SessionPool
from agentrl_env.types import (
    Message,
    SessionInfo,
    SessionStatus,
    StepResult,
    TaskInfo,
    TaskSample,
    ToolCall,
    ToolSpec,
)
from agentrl_env.wire import OpenRequest

if TYPE_CHECKING:
    from agentrl_env.environment import Environment


class EnvClient:
    """Opens sessions of served tasks. Nothing connects before the first call.

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
            url: where the server is, such as ``http://127.0.0.1:8000``. What carries a call is
                picked by itself; with ``ws://`` all calls share one WebSocket. A fleet's controllers
                are given with commas between; where one does not answer, the next is asked.
            token: its token, if it has one; the variable AGENTRL_TOKEN by default.
            timeout: seconds any one call may take, retries included.
        """
        return cls(HttpBackend(url, token=token, timeout=timeout))

    @classmethod
    def local(cls, *environments: type[Environment], **options: Any) -> Self:
        """Return a client whose sessions live in this process.

        Args:
            environments: the tasks.
            options: of ``SessionPool``, such as ``max_sessions``.
        """
        options.setdefault("oracle", True)
        return cls(SessionPool(environments, **options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release connections, and with a local client its sessions."""
        await self.backend.aclose()

    async def tasks(self) -> dict[str, TaskInfo]:
        """Return the tasks that are served, by name."""
        return {task.name: task for task in await self.backend.tasks()}

    async def open(
        self,
        task: str,
        split: str = "train",
        index: int | str | None = None,
        seed: int | None = None,
        sample: dict[str, Any] | None = None,
        wait: float = 0.0,
    ) -> ClientSession:
        """Open a session.

        Args:
            task: its name.
            split: of the dataset.
            index: which sample; None picks one, from the seed where there is one.
            seed: of the episode's randomness; None derives it from the sample.
            sample: data to use instead of the dataset's.
            wait: seconds to wait in the fair queue of a full server; 0 raises ServerFull at once.
        """
        info = await self.backend.open(
            OpenRequest(
                task=task,
                split=split,
                index=index,
                seed=seed,
                sample=sample,
                wait_s=wait,
                request_id=secrets.token_urlsafe(12),
            )
        )
        return ClientSession(self.backend, info)

    async def resume(self, session_id: str) -> ClientSession:
        """Return a session that is open already, where it stands."""
        return ClientSession(self.backend, await self.backend.info(session_id))


class ClientSession:
    """One session, seen from the client; numbers the steps itself, so a retry never steps twice."""

    def __init__(self, backend: SessionBackend, info: SessionInfo) -> None:
        self._backend = backend
        self.info = info
        self.turn = info.turn
        self.status = info.status
        self.last = info.last

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.info.session_id

    @property
    def agent_token(self) -> str | None:
        """What lets an agent step this session and read how it stands, and no more.

        None where the server has no token, and in a session that was not opened here but resumed.
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
        """What the model can call."""
        return self.info.tools

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def step(self, message: Message | ToolCall | str) -> StepResult:
        """Play one assistant message, given whole or as one call or as text.

        Raises WireError (SessionEnded, SessionExpired, ...), ServerUnreachable, CallTimeout. After
        the last two the step may have happened: the same ``step`` again is safe.
        """
        if isinstance(message, str):
            message = Message.assistant(message)
        elif isinstance(message, ToolCall):
            message = Message.assistant(None, message)
        result = await self._backend.step(self.session_id, self.turn + 1, message)
        self.turn, self.status, self.last = result.seq, result.status, result
        return result

    async def expert(self) -> Message:
        """Return the oracle's next assistant message; it takes no step. Raises NotSupported."""
        return await self._backend.expert(self.session_id)

    async def fork(self, n: int = 1) -> list[ClientSession]:
        """Return ``n`` new sessions that stand where this one stands and go on apart from it.

        Each takes a session of the server's capacity, and is closed like one that was opened.

        Raises NotSupported where the task has no ``snapshot`` (capability ``fork``), ServerFull
        where there is no room for all of them, SessionEnded, InvalidRequest.
        """
        forks = await self._backend.fork(self.session_id, n, secrets.token_urlsafe(12))
        return [ClientSession(self._backend, info) for info in forks]

    async def close(self) -> None:
        """End the session; idempotent, and free where the episode has ended by itself."""
        if not self.status.final:
            await self._backend.close_session(self.session_id)
            self.status = SessionStatus.CANCELLED
