"""The controller's end of a link: a server dials in, says what it has, and is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentrl_env.controller.member import Outbox
from agentrl_env.wire import Beat, Hello

if TYPE_CHECKING:
    from agentrl_env.controller.fleet import Fleet

HELLO_S = 10.0
"""How long a server may take to say who it is."""


class _FirstFrame(BaseModel):
    hello: Hello


class _BeatFrame(BaseModel):
    model_config = ConfigDict(extra="forbid")
    beat: Beat


def link_endpoint(fleet: Fleet) -> Callable[[WebSocket], Awaitable[None]]:
    """Return what serves ``/v1/link``."""

    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            async with asyncio.timeout(HELLO_S):
                hello = _FirstFrame.model_validate_json(await websocket.receive_text()).hello
        except (WebSocketDisconnect, TimeoutError):
            return
        except ValidationError as error:
            await websocket.close(1008, f"the first frame must be a hello: {error.errors()[0]['msg']}"[:120])
            return
        outbox = Outbox()
        if not await fleet.join(hello, outbox):
            await websocket.send_text('{"lost":true}')
            return
        writing = asyncio.create_task(_write(websocket, outbox))
        try:
            await _read(websocket, fleet, hello.server_id)
        finally:
            writing.cancel()
            fleet.part(hello.server_id, outbox)

    return endpoint


async def _write(websocket: WebSocket, outbox: Outbox) -> None:
    try:
        while True:
            await websocket.send_text((await outbox.take()).decode())
    except (WebSocketDisconnect, RuntimeError):
        return  # the reader hears of it too


async def _read(websocket: WebSocket, fleet: Fleet, server_id: str) -> None:
    """Take in frames until the server is gone, or says something that is no frame of a link."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            return
        text = message.get("text")
        frame: bytes = message["bytes"] if text is None else text.encode()
        try:
            if frame.startswith(b'{"beat":'):
                await fleet.hear_beat(server_id, _BeatFrame.model_validate_json(frame).beat)
            else:
                fleet.hear_answer(server_id, frame)
        except ValueError:
            await websocket.close(1008, "not a frame of a link")
            return
