"""Raw bytes: HTTP requests and WebSocket frames that no library would send."""

from __future__ import annotations

import asyncio
import json
import struct
from random import Random
from urllib.parse import urlsplit

from tests.fuzz.account import Account
from tests.fuzz.payloads import Sent, frames, handshake, http_request

ANSWER_S = 20.0
"""How long an answer that is due may take on a busy machine; longer is a hang."""
LISTEN_S = 0.003
"""How long a caller that is due none listens before it hangs up."""
FRAMES_EACH = 25
BROKEN = ("internal_error", "environment_failed")


class Hostile:
    """Sends raw bytes to one server.

    Args:
        url: where it is.
        random: decides everything.
        session_ids: sessions that are open.
        account: where it counts.
    """

    def __init__(self, url: str, random: Random, session_ids: list[str], account: Account) -> None:
        parts = urlsplit(url)
        self._place = parts.hostname or "", parts.port or 80
        self._random = random
        self._sessions = session_ids
        self._account = account

    async def send_http(self, number: int) -> None:
        """Send so many HTTP requests, each over a connection of its own."""
        for _ in range(number):
            sent = http_request(self._random, self._sessions)
            self._account.sent["raw_http"] += 1
            reader, writer = await asyncio.open_connection(*self._place)
            try:
                await self._write(writer, sent.data)
                await self._hear_http(reader, sent)
            except ConnectionError:
                continue  # the server hangs up on what it cannot read
            finally:
                writer.transport.abort()

    async def send_frames(self, number: int) -> None:
        """Send so many WebSocket frames, a few over each connection."""
        left = number
        while left > 0:
            reader, writer = await asyncio.open_connection(*self._place)
            try:
                writer.write(handshake(self._random))
                async with asyncio.timeout(ANSWER_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 101"), head
                sound = True
                for _ in range(min(left, FRAMES_EACH)):
                    if not sound:
                        break
                    left -= 1
                    sound = await self._one_frame(reader, writer)
            except TimeoutError:
                self._account.note_hang("handshake")
                return
            except (ConnectionError, asyncio.IncompleteReadError):
                continue  # closed, as what cannot be read is
            finally:
                writer.transport.abort()

    async def _one_frame(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send one; return whether the connection is still of use."""
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

    async def _hear_http(self, reader: asyncio.StreamReader, sent: Sent) -> None:
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
        """Write in one go, or in two with a pause between."""
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
