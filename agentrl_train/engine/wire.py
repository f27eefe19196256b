"""Frames between the trainer and an engine's process: four bytes of length, then JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

Frame = dict[str, Any]


async def receive(reader: asyncio.StreamReader) -> Frame | None:
    """Return the next frame, or None once the other side is gone."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        frame: Frame = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return frame


def send(writer: asyncio.StreamWriter, frame: Mapping[str, Any]) -> None:
    """Write one frame; to a side that is gone it goes nowhere."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    if not writer.is_closing():
        writer.write(len(body).to_bytes(4, "big") + body)
