"""The connection of a Gymnasium environment: made at its first use, in each process anew."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from agentrl_env.client.client import EnvClient
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.errors import UnknownTask
from agentrl_env.types import TaskInfo

T = TypeVar("T")


class Connection:
    """A client of one task, and the event loop in a thread of its own that it lives on.

    Neither pickle nor fork carries client and thread over. The coroutine methods run on that loop,
    through ``run`` or ``arun``.

    Args:
        url: Address of a server. Give either this or ``client``.
        task: Name of the task; not needed where there is one only.
        client: A callable that makes an EnvClient, or a new EnvClient.
        token: The server's token.
    """

    def __init__(
        self,
        url: str | None,
        task: str | None,
        *,
        client: EnvClient | Callable[[], EnvClient] | None,
        token: str | None,
    ) -> None:
        if (url is None) == (client is None):
            raise ValueError("Give either url= (a server) or client= (such as Guess.local).")
        self._url, self._task, self._source, self._token = url, task, client, token
        self._info: TaskInfo | None = None
        self._forget()

    def _forget(self) -> None:
        """Drop everything that belongs to one process."""
        self._pid = os.getpid()
        self._loop = LoopThread()
        self._client: EnvClient | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return what it returns."""
        self._forget_if_forked()
        return self._loop.run(coroutine)

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that runs on this connection's loop; being cancelled cancels it."""
        self._forget_if_forked()
        return await self._loop.arun(coroutine)

    def close(self, goodbye: Callable[[], Awaitable[None]]) -> None:
        """Await ``goodbye()`` where there is a connection, and drop it; idempotent."""
        self._forget_if_forked()
        try:
            if self._client is not None:
                self._loop.run(self._disconnect(self._client, goodbye))
        finally:
            self._loop.stop()
            self._forget()

    def _forget_if_forked(self) -> None:
        if self._pid != os.getpid():
            self._forget()

    async def client(self) -> EnvClient:
        """Return the client, made now where there is none yet."""
        if self._client is None:
            if isinstance(self._source, EnvClient):
                client = self._source
            elif self._source is not None:
                client = self._source()
            else:
                client = EnvClient.connect(str(self._url), token=self._token)
            self._client = await client.__aenter__()
        return self._client

    async def task_info(self) -> TaskInfo:
        """Return what the server says of the task, asked once. Raises UnknownTask."""
        if self._info is None:
            tasks = await (await self.client()).tasks()
            if self._task is None and len(tasks) == 1:
                self._task = next(iter(tasks))
            if self._task not in tasks:
                wanted = "Several tasks are served" if self._task is None else f"No task {self._task!r}"
                raise UnknownTask(f"{wanted}; give task= one of: {', '.join(tasks)}.")
            self._info = tasks[self._task]
        return self._info

    async def task(self) -> str:
        """Return the task's name. Raises UnknownTask where none was given and there are several."""
        return self._task or (await self.task_info()).name

    async def ready(self) -> None:
        """Do once what many would do at the same time: make the client, find the task."""
        await self.client()
        await self.task()

    async def _disconnect(self, client: EnvClient, goodbye: Callable[[], Awaitable[None]]) -> None:
        try:
            await goodbye()
        finally:
            await client.__aexit__(None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        private = ("_pid", "_loop", "_client")
        return {key: value for key, value in self.__dict__.items() if key not in private}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
