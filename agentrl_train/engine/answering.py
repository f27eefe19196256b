"""The engine's end of the socket: it answers the frames of one trainer, and tells that it lives."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

from agentrl_train.engine.wire import Frame, receive, send

BEAT_S = 0.25


async def connect(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open the inherited socket; what the engine starts does not inherit it too."""
    os.set_inheritable(descriptor, False)
    return await asyncio.open_connection(sock=socket.socket(fileno=descriptor))


async def answer_frames(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    answer: Callable[[Frame], Awaitable[Frame]],
    beat: Callable[[], Awaitable[Frame]],
) -> None:
    """Work until the trainer is gone.

    Args:
        reader: the trainer's requests. One of ``op = "abort"`` cancels the one whose number it has.
        writer: where answers and beats go.
        answer: answers a request; requests are worked on at the same time. What it raises ends the engine.
        beat: returns running totals. It asks the engine itself: one that hangs is not heard any more.
    """
    running: dict[int, asyncio.Task[None]] = {}

    async def work(frame: Frame) -> None:
        try:
            answered = await answer(frame)
        finally:
            running.pop(frame["id"], None)
        send(writer, {"id": frame["id"], **answered})
        await writer.drain()

    async def tell() -> None:
        while True:
            send(writer, {"event": "beat", **await beat()})
            await asyncio.sleep(BEAT_S)

    async with asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(tell())
        while (frame := await receive(reader)) is not None:
            number = frame["id"]
            if frame["op"] != "abort":
                running[number] = tasks.create_task(work(frame))
            elif (task := running.get(number)) is not None:
                task.cancel()
        for task in [telling, *running.values()]:
            task.cancel()
