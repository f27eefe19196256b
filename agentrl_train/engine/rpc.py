"""Length-prefixed JSON frames between the trainer and an engine process, and that process's server loop."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Frame = dict[str, Any]


async def receive(reader: asyncio.StreamReader) -> Frame | None:
    """Return the next frame, or None once the connection is closed."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        frame: Frame = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return frame


def send(writer: asyncio.StreamWriter, frame: Mapping[str, Any]) -> None:
    """Write one frame; it is dropped if the connection is closed."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    if not writer.is_closing():
        writer.write(len(body).to_bytes(4, "big") + body)


HEARTBEAT_INTERVAL_S = 0.25


async def connect(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open the inherited socket and keep child processes from inheriting it."""
    os.set_inheritable(descriptor, False)
    return await asyncio.open_connection(sock=socket.socket(fileno=descriptor))


async def answer_frames(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    answer: Callable[[Frame], Awaitable[Frame]],
    beat: Callable[[], Awaitable[Frame]],
) -> None:
    """Answer requests until the trainer closes the connection.

    Args:
        reader: requests of the trainer; ``op = "abort"`` cancels the request with the same id.
        writer: receives answers and heartbeats.
        answer: answers one request; requests run concurrently. An exception ends the engine.
        beat: returns running totals. It queries the engine, so that a hung engine sends no heartbeats.
    """
    running: dict[int, asyncio.Task[None]] = {}

    async def work(frame: Frame) -> None:
        try:
            result = await answer(frame)
        finally:
            running.pop(frame["id"], None)
        send(writer, {"id": frame["id"], **result})
        await writer.drain()

    async def send_heartbeats() -> None:
        while True:
            send(writer, {"event": "beat", **await beat()})
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async with asyncio.TaskGroup() as tasks:
        heartbeats = tasks.create_task(send_heartbeats())
        while (frame := await receive(reader)) is not None:
            number = frame["id"]
            if frame["op"] != "abort":
                running[number] = tasks.create_task(work(frame))
            elif (task := running.get(number)) is not None:
                task.cancel()
        for task in [heartbeats, *running.values()]:
            task.cancel()
