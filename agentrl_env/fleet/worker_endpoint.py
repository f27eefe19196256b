"""The controller's end of a link: a server dials in, says what it has, and is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json, to_json
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentrl_env.fleet.worker import Outbox
from agentrl_env.wire import Beat, Hello, KeptHead

if TYPE_CHECKING:
    from agentrl_env.fleet.registry import Roster

HELLO_S = 10.0
"""How long a server may take to say who it is."""
_KEPT, _TURNS = b'{"kept":', b',"turns":'


class _FirstFrame(BaseModel):
    hello: Hello


class _BeatFrame(BaseModel):
    model_config = ConfigDict(extra="forbid")
    beat: Beat


def link_endpoint(roster: Roster) -> Callable[[WebSocket], Awaitable[None]]:
    """Return what serves ``/v1/link``."""

    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            async with asyncio.timeout(HELLO_S):
                hello = _FirstFrame.model_validate_json(await _frame(websocket)).hello
        except (WebSocketDisconnect, TimeoutError):
            return
        except ValidationError as error:
            await websocket.close(1008, f"the first frame must be a hello: {error.errors()[0]['msg']}"[:120])
            return
        if roster.is_taken(hello):
            await websocket.close(1008, "another process has this server's id")
            return
        outbox = Outbox()
        if not await roster.join(hello, outbox):
            await websocket.send_text('{"lost":true}')
            return
        ways = (
            asyncio.create_task(_write(websocket, outbox)),
            asyncio.create_task(_read(websocket, roster, hello.server_id, outbox)),
        )
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            roster.part(hello.server_id, outbox)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    return endpoint


def split_kept(kept: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    """Return a ``Kept`` without its turns, and these, each as JSON. Raises ValueError."""
    head, _, turns = kept.rpartition(_TURNS)  # the last field, and there are no such quotes in its strings
    return head + b"}", tuple(map(to_json, from_json(turns[:-1])))


async def _frame(websocket: WebSocket) -> bytes:
    """Return the next frame. Raises WebSocketDisconnect."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    text = message.get("text")
    frame: bytes = message["bytes"] if text is None else text.encode()
    return frame


async def _write(websocket: WebSocket, outbox: Outbox) -> None:
    """Send what there is to send, until the link is to end."""
    with suppress(WebSocketDisconnect, RuntimeError):  # of that the reader hears too
        while (frame := await outbox.take()) is not None:
            await websocket.send_text(frame.decode())
        await websocket.close(1012, "dial again")


async def _read(websocket: WebSocket, roster: Roster, server_id: str, outbox: Outbox) -> None:
    """Take in frames until the server is gone, or says something that is no frame of a link."""
    while True:
        try:
            frame = await _frame(websocket)
        except WebSocketDisconnect:
            return
        if outbox.closed:
            return  # what comes late over an old link may be out of date
        try:
            if frame.startswith(b'{"beat":'):
                await roster.hear_beat(server_id, _BeatFrame.model_validate_json(frame).beat)
            elif frame.startswith(_KEPT):
                kept, turns = split_kept(frame[len(_KEPT) : -1])
                roster.hear_kept(server_id, KeptHead.model_validate_json(kept), kept, turns)
            else:
                roster.hear_answer(server_id, frame)
        except ValueError:
            await websocket.close(1008, "not a frame of a link")
            return
