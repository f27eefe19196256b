"""Uvicorn embedded in a program, and requests that are cancelled when their client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import uvicorn
from starlette.requests import Request

from agentrl_env.errors import InvalidRequest, ServeError
from agentrl_env.session.single_flight import abandon

T = TypeVar("T")


class EmbeddedServer(uvicorn.Server):
    """Uvicorn without its signal handlers, so that the program decides when it stops."""

    _serving: asyncio.Task[None]

    async def start(self, bound: socket.socket) -> None:
        """Return once requests are answered. Raises ServeError."""
        self._serving = asyncio.create_task(self.serve(sockets=[bound]))
        while not self.started:
            if self._serving.done():
                raise ServeError("the server did not start; see the log above")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Answer the requests in progress, then stop. Idempotent."""
        self.should_exit = True
        await asyncio.wait((self._serving,))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handler."""
        yield


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of an opening. Cancel the opening if the caller disconnects.

    The body of the request must have been read. Raises InvalidRequest if the work was cancelled.
    """
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(until_disconnected(request))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnect.cancel()
        if not working.done():
            abandon(working)
    if not working.done():
        await asyncio.wait((working,))
        if working.cancelled():
            raise InvalidRequest("the caller disconnected")
    return working.result()


async def until_disconnected(request: Request) -> None:
    """Return once the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
