"""Raw HTTP requests and WebSocket frames, most of them malformed."""

from __future__ import annotations

import asyncio
import json
import struct
from random import Random
from urllib.parse import urlsplit

from tests.fuzz.account import Account
from tests.fuzz.payloads import RawRequest, frames, handshake, http_request

ANSWER_S = 20.0
"""Maximum seconds for a required answer. A longer wait counts as hung."""
LISTEN_S = 0.003
"""Seconds to wait for an optional answer before disconnecting."""
FRAMES_EACH = 25
BROKEN = ("internal_error", "environment_failed")


class RawCaller:
    """Sends raw bytes to one server.

    Args:
        url: The server's address.
        random: The source of all random choices.
        session_ids: Ids of open sessions.
        account: Counts the results.
    """

    def __init__(self, url: str, random: Random, session_ids: list[str], account: Account) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or 80
        self._random = random
        self._sessions = session_ids
        self._account = account

    async def send_http(self, number: int) -> None:
        """Send ``number`` HTTP requests, each on its own connection."""
        for _ in range(number):
            sent = http_request(self._random, self._sessions)
            self._account.sent["raw_http"] += 1
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                await self._write(writer, sent.data)
                await self._read_status(reader, sent)
            except ConnectionError:
                continue  # the server closes the connection on malformed requests
            finally:
                writer.transport.abort()

    async def send_frames(self, number: int) -> None:
        """Send ``number`` WebSocket frames, a few on each connection."""
        left = number
        while left > 0:
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                writer.write(handshake(self._random))
                async with asyncio.timeout(ANSWER_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 101"), head
                usable = True
                for _ in range(min(left, FRAMES_EACH)):
                    if not usable:
                        break
                    left -= 1
                    usable = await self._one_frame(reader, writer)
            except TimeoutError:
                self._account.note_hang("handshake")
                return
            except (ConnectionError, asyncio.IncompleteReadError):
                continue  # the server closes the connection on malformed frames
            finally:
                writer.transport.abort()

    async def _one_frame(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send one frame. Return False if the connection can no longer be used."""
        sent = frames(self._random, self._sessions)
        self._account.sent["raw_frames"] += 1
        await self._write(writer, sent.data)
        try:
            async with asyncio.timeout(ANSWER_S if sent.answered else LISTEN_S):
                opcode, payload = await _frame(reader)
                while opcode == 9:
                    opcode, payload = await _frame(reader)
        except TimeoutError:
            if sent.answered:
                self._account.note_hang(sent.data[:300])
            return False
        if opcode == 1:
            error = json.loads(payload).get("error")
            kind = error["type"] if error else None
            self._account.note_status(
                500 if kind in BROKEN else 422 if error else 200, (kind, sent.data[:300])
            )
        return opcode == 1 and sent.answered

    async def _read_status(self, reader: asyncio.StreamReader, sent: RawRequest) -> None:
        try:
            async with asyncio.timeout(ANSWER_S if sent.answered else LISTEN_S):
                line = await reader.readline()
        except TimeoutError:
            if sent.answered:
                self._account.note_hang(sent.data[:300])
            return
        if line:
            self._account.note_status(int(line.split(b" ")[1]), sent.data[:300])

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Write the data in one or two parts."""
        if self._random.random() < 0.2 and len(data) > 1:
            at = self._random.randrange(1, len(data))
            writer.write(data[:at])
            await writer.drain()
            await asyncio.sleep(0)
            data = data[at:]
        writer.write(data)
        await writer.drain()


async def _frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    first, second = await reader.readexactly(2)
    size = second & 0x7F
    if size == 126:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
    elif size == 127:
        (size,) = struct.unpack("!Q", await reader.readexactly(8))
    return first & 0x0F, await reader.readexactly(size)
