"""Picks what carries a call: batches go over HTTP, lone steps over a WebSocket where there is one.

Measured on two cores with a trivial task, a lone step over the WebSocket takes about three quarters
of its time over HTTP; of batches, several HTTP connections carry as many or more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from agentrl_env.client.transport import Call, Http1Transport, HttpResponse
from agentrl_env.client.websocket import SocketTransport
from agentrl_env.errors import AgentRLError

TRY_AGAIN_S = 60.0
"""After how long a WebSocket that could not be opened is tried again."""


class PickingTransport:
    """Calls to one server over HTTP, and over its WebSocket where it offers one that can be opened.

    Args:
        http: carries everything until an answer has offered a WebSocket.
        socket: carries lone steps from then on.
        clock: seconds, monotonic; tests give their own.
    """

    def __init__(
        self,
        http: Http1Transport,
        socket: SocketTransport,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = http
        self._socket = socket
        self._clock = clock
        self._not_before = 0.0

    async def send(self, call: Call, *, timeout: float) -> HttpResponse:
        """Make one call. Raises what the transport that carries it raises."""
        if call.name == "step" and self._http.offers_socket and await self._socket_is_open(timeout):
            return await self._socket.send(call, timeout=timeout)
        return await self._http.send(call, timeout=timeout)

    async def aclose(self) -> None:
        """Hang up both."""
        await self._socket.aclose()
        await self._http.aclose()

    async def _socket_is_open(self, timeout: float) -> bool:
        if self._socket.connected:
            return True
        if self._clock() < self._not_before:
            return False
        try:
            async with asyncio.timeout(timeout):
                await self._socket.connect()
        except (OSError, AgentRLError):  # whatever is wrong, HTTP will tell or do
            self._not_before = self._clock() + TRY_AGAIN_S
        return self._socket.connected
