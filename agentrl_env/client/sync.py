"""A synchronous client: ``EnvClient`` for scripts and notebooks.

Example::

    with EnvClient.connect_sync("http://127.0.0.1:8000") as client:
        with client.open("guess", index=3) as session:
            result = session.step(ToolCall.of("guess", n=7))

The calls run on an event loop in a background thread, so they also work while another event loop is running,
as in a notebook. Inside a coroutine they block its loop, so use ``EnvClient`` there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Self

from agentrl_env.client.client import ClientSession, EnvClient, OpenedSession
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.errors import ClientClosed
from agentrl_env.types import (
    Message,
    SessionStatus,
    StepResult,
    TaskInfo,
    ToolCall,
)


class SyncEnvClient:
    """The methods of ``EnvClient`` as blocking calls. The first call connects.

    Args:
        client: An unused client. It belongs to this object and is closed with it.
    """

    def __init__(self, client: EnvClient) -> None:
        self._client = client
        self._loop = LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release connections and, with a local client, its sessions. Idempotent.

        Later calls raise ClientClosed.
        """
        try:
            with contextlib.suppress(ClientClosed):
                self._loop.run(self._client.aclose())
        finally:
            self._loop.close()

    def tasks(self) -> dict[str, TaskInfo]:
        """Return the served tasks by name."""
        return self._loop.run(self._client.tasks())

    def open(
        self,
        task: str = "",
        split: str = "train",
        index: int | str | None = None,
        seed: int | None = None,
        sample: dict[str, Any] | None = None,
        wait: float = 0.0,
    ) -> SyncClientSession:
        """Open a session. See ``EnvClient.open`` for the arguments."""
        opening = self._client.open(task, split=split, index=index, seed=seed, sample=sample, wait=wait)
        return SyncClientSession(self._loop.run(opening), self._loop)

    def open_many(
        self,
        n: int,
        task: str = "",
        split: str = "train",
        index: int | str | None = None,
        seed: int | None = None,
        sample: dict[str, Any] | None = None,
        wait: float = 0.0,
    ) -> list[SyncClientSession]:
        """Open ``n`` sibling sessions of the same problem. See ``EnvClient.open_many`` for the arguments."""
        opening = self._client.open_many(
            n, task, split=split, index=index, seed=seed, sample=sample, wait=wait
        )
        return [SyncClientSession(session, self._loop) for session in self._loop.run(opening)]

    def resume(self, session_id: str) -> SyncClientSession:
        """Return a session that is already open, in its current state."""
        return SyncClientSession(self._loop.run(self._client.resume(session_id)), self._loop)


class SyncClientSession(OpenedSession):
    """The methods of ``ClientSession`` as blocking calls. ``SyncEnvClient.open`` returns it.

    Args:
        session: The session.
        loop: The event loop that the session belongs to.
        client: A client to close together with the session.
    """

    def __init__(self, session: ClientSession, loop: LoopThread, client: SyncEnvClient | None = None) -> None:
        self.info = session.info
        self._session = session
        self._loop = loop
        self._client = client

    @classmethod
    def single(cls, client: EnvClient, task: str, **choice: Any) -> Self:
        """Open a session of an unused client. The client is closed together with the session.

        Args:
            client: The client.
            task: Name of the task.
            choice: Further arguments of ``EnvClient.open``.
        """
        owner = SyncEnvClient(client)
        try:
            return cls(owner._loop.run(client.open(task, **choice)), owner._loop, owner)
        except BaseException:
            owner.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._session).replace("<ClientSession", "<SyncClientSession")

    @property
    def turn(self) -> int:
        """The number of steps taken."""
        return self._session.turn

    @property
    def status(self) -> SessionStatus:
        """The status after the last step."""
        return self._session.status

    @property
    def last(self) -> StepResult | None:
        """The result of the last step, or None before the first."""
        return self._session.last

    def step(self, message: Message | ToolCall | str | Mapping[str, Any]) -> StepResult:
        """Play one assistant message, given as a message, a tool call, text or a dict in chat format."""
        return self._loop.run(self._session.step(message))

    def expert(self) -> Message:
        """Return the expert's next move without taking a step. Raises NotSupported."""
        return self._loop.run(self._session.expert())

    def fork(self, n: int = 1) -> list[SyncClientSession]:
        """Return ``n`` new sessions in the state of this one. Raises NotSupported."""
        return [SyncClientSession(fork, self._loop) for fork in self._loop.run(self._session.fork(n))]

    def close(self) -> None:
        """End the session. Idempotent."""
        try:
            with contextlib.suppress(ClientClosed):
                self._loop.run(self._session.close())
        finally:
            if self._client is not None:
                self._client.close()
