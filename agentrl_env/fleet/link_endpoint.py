"""The controller's end of a link: a server connects, introduces itself, and answers calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentrl_env.fleet.remote_server import Outbox
from agentrl_env.wire import Beat, Hello

if TYPE_CHECKING:
    from agentrl_env.fleet.registry import Registry

HELLO_S = 10.0
"""Seconds within which the first frame must arrive."""


class _FirstFrame(BaseModel):
    hello: Hello


class _BeatFrame(BaseModel):
    model_config = ConfigDict(extra="forbid")
    beat: Beat


def link_endpoint(registry: Registry) -> Callable[[WebSocket], Awaitable[None]]:
    """Return the endpoint of ``/v1/link``."""

    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            async with asyncio.timeout(HELLO_S):
                hello = _FirstFrame.model_validate_json(await _receive(websocket)).hello
        except (WebSocketDisconnect, TimeoutError):
            return
        except ValidationError as error:
            await websocket.close(1008, f"the first frame must be a hello: {error.errors()[0]['msg']}"[:120])
            return
        if not hello.is_genuine:
            await websocket.close(1008, "the key does not belong to this server's id")
            return
        if registry.is_taken(hello):
            await websocket.close(1008, "another process has this server's id")
            return
        outbox = Outbox()
        if not await registry.join(hello, outbox):
            with suppress(WebSocketDisconnect, RuntimeError):  # the server is gone already
                await websocket.send_text('{"lost":true}')
            return
        directions = (
            asyncio.create_task(_write(websocket, outbox)),
            asyncio.create_task(_read(websocket, registry, hello.server_id, outbox)),
        )
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            registry.unlink(hello.server_id, outbox)
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    return endpoint


async def _receive(websocket: WebSocket) -> bytes:
    """Return the next frame. Raises WebSocketDisconnect."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    text = message.get("text")
    frame: bytes = message["bytes"] if text is None else text.encode()
    return frame


async def _write(websocket: WebSocket, outbox: Outbox) -> None:
    """Send the frames of an outbox until the link must end."""
    with suppress(WebSocketDisconnect, RuntimeError):  # the reader notices the disconnect too
        while (frame := await outbox.take()) is not None:
            await websocket.send_text(frame.decode())
        await websocket.close(1012, "connect again")


async def _read(websocket: WebSocket, registry: Registry, server_id: str, outbox: Outbox) -> None:
    """Handle frames until the server disconnects or sends a malformed frame."""
    while True:
        try:
            frame = await _receive(websocket)
        except WebSocketDisconnect:
            return
        if outbox.closed:
            return  # frames of an old link might be out of date
        try:
            if frame.startswith(b'{"beat":'):
                registry.hear_beat(server_id, _BeatFrame.model_validate_json(frame).beat)
            elif frame.startswith(b'{"id":'):
                registry.hear_answer(server_id, frame)
            else:
                registry.routing.hear(server_id, frame)
        except ValueError:
            await registry.lose(server_id, "it sent a malformed frame")
            await websocket.close(1008, "malformed frame")
            return
