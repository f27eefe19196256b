"""Stalled connections: slow headers, unfinished bodies and messages, slow readers, idle clients."""

from __future__ import annotations

import asyncio
import json
import resource
from contextlib import suppress

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from tests.fuzz.payloads import frame, handshake
from tests.hostile.site import ANSWER_S, Ground, Kind, named
from tests.hostile.tokens import guess

TRICKLE_S = 0.3
FLOOD_S = 4.0
CLOSED_S = 20.0
"""Maximum seconds until a stalled connection is closed. The servers' limits are two and three seconds."""


async def _closes(ground: Ground, begin: bytes, more: bytes, what: str, upgrade: bytes = b"") -> None:
    """Send some bytes, then ``more`` repeatedly, until the server closes the connection.

    Args:
        ground: provides the server.
        begin: first bytes to send.
        more: bytes to send repeatedly.
        what: description of the attack.
        upgrade: WebSocket upgrade request to send first.
    """
    try:
        reader, writer = await asyncio.open_connection(*ground.address())
    except OSError:
        return
    try:
        async with asyncio.timeout(CLOSED_S):
            if upgrade:
                writer.write(upgrade)
                await reader.readuntil(b"\r\n\r\n")
            writer.write(begin)
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                await asyncio.wait((reading,), timeout=TRICKLE_S)
                if more:
                    writer.write(more)
            with suppress(OSError):
                ground.check(await reading, what)
    except TimeoutError:
        reading.cancel()
        ground.find("hung", f"{what}: still open after {CLOSED_S:g} s")
    except (OSError, asyncio.IncompleteReadError):
        return
    finally:
        writer.transport.abort()


def _upgrade(ground: Ground, token: str) -> bytes:
    """Return a WebSocket upgrade request with a token."""
    return handshake(ground.rng)[:-2] + f"authorization: Bearer {token}\r\n\r\n".encode()


async def slow_requests(ground: Ground) -> None:
    """Send headers and bodies byte by byte, or stop halfway."""
    async with ground.vaults() as (victim,):
        post = f"POST /v1/sessions/{victim.id}/step HTTP/1.1\r\nhost: localhost\r\n".encode()
        post += f"authorization: Bearer {victim.token}\r\n".encode()
        tries = [
            ("headers by the byte", b"GET /health HTTP/1.1\r\nx: ", b"y"),
            ("one header after another", b"GET /health HTTP/1.1\r\n", b"x: y\r\n"),
            ("nothing", b"", b""),
            ("half a line", b"GET /hea", b""),
            ("line breaks", b"", b"\r\n"),
            ("a body by the byte", post + b"content-length: 100000\r\n\r\n", b" "),
            ("no body", post + b"content-length: 100000\r\n\r\n", b""),
            ("chunks by the byte", post + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
            ("no chunk", post + b"transfer-encoding: chunked\r\n\r\n", b""),
            ("a chunk's size by the byte", post + b"transfer-encoding: chunked\r\n\r\n", b"0"),
            ("trailers", post + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n"),
            ("half an upgrade", handshake(ground.rng)[:-2], b"x: y\r\n"),
        ]
        await asyncio.gather(*(_closes(ground, begin, more, what) for what, begin, more in tries * 4))


async def unfinished_messages(ground: Ground) -> None:
    """Start WebSocket messages and never finish them."""
    async with ground.vaults() as (victim,):
        upgrade, rng = _upgrade(ground, victim.token), ground.rng
        text = b'{"id":1,"call":"step","x":"' + b"y" * 1000
        whole = frame(rng, 1, text)
        begun = frame(rng, 1, text, last=False)
        tries = [
            ("a message without its end", begun, b""),
            ("a message of endless pieces", begun, frame(rng, 0, b"y", last=False)),
            ("half a frame", whole[: len(whole) // 2], b""),
            ("a frame by the byte", frame(rng, 1, b"y" * 60_000)[:10], b"y"),
            ("half a frame's head", whole[:1], b""),
        ]
        closing = [_closes(ground, begin, more, what, upgrade) for what, begin, more in tries * 3]
        await asyncio.gather(*closing)


async def half_open(ground: Ground) -> None:
    """Send requests and disconnect: immediately, after the request, or with a reset."""
    async with ground.vaults() as (victim,):
        body = json.dumps({"seq": 1, "message": guess()}).encode()
        head = f"POST /v1/sessions/{victim.id}/step HTTP/1.1\r\nhost: localhost\r\n"
        head += f"authorization: Bearer {victim.token}"
        request = head.encode() + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        for _ in range(60):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(*ground.address())
                writer.write(request[: ground.rng.randrange(len(request) + 1)])
                if ground.rng.random() < 0.5:
                    await asyncio.sleep(0)
                if ground.rng.random() < 0.5 and not writer.is_closing():
                    writer.write_eof()
                writer.transport.abort()
        closing = [ground.send_raw(request[:n], end=True) for n in (1, 50, len(request) - 1, len(request))]
        if None in await asyncio.gather(*closing):
            ground.find("hung", "a half-closed connection is neither answered nor closed")
    await _still_serving(ground, "after half-open connections")


async def idle(ground: Ground) -> None:
    """Open thousands of connections that send nothing or one request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    writers = []
    try:
        number = min(ground.rng.choice([1500, 3000]), hard // 4)
        for n in range(number):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(5):
                    _, writer = await asyncio.open_connection(*ground.address())
                writers.append(writer)
                if n % 3 == 0:
                    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await _still_serving(ground, f"beside {len(writers)} idle connections")
    finally:
        for writer in writers:
            writer.transport.abort()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def slow_readers(ground: Ground) -> None:
    """Request long answers and do not read them."""
    async with ground.vaults() as (victim,):
        function = {"name": "echo", "arguments": json.dumps({"text": "y" * 500_000})}
        message = {**guess(), "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        writers = []
        try:
            for n in range(1, 21):
                body = json.dumps({"seq": n, "message": message}).encode()
                head = f"POST /v1/sessions/{victim.id}/step HTTP/1.1\r\nhost: localhost\r\n"
                head += f"authorization: Bearer {victim.token}\r\ncontent-length: {len(body)}\r\n\r\n"
                _, writer = await asyncio.open_connection(*ground.address(), limit=1024)
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(head.encode() + body)
                writers.append(writer)
            await _still_serving(ground, "beside slow readers")
        finally:
            for writer in writers:
                writer.transport.abort()


async def socket_floods(ground: Ground) -> None:
    """Flood a WebSocket with pings, empty frames, cancellations and frames with impossible sizes."""
    async with ground.vaults() as (victim,):
        rng = ground.rng
        floods = [
            frame(rng, 9, b"x" * 100) * 5000,
            frame(rng, 10, b"") * 5000,
            frame(rng, 1, b"") * 2000,
            frame(rng, 1, b'{"id":1,"call":"cancel","target":1}') * 2000,
            frame(rng, 0, b"x") * 10,
            bytes([0x81, 0xFF]) + (2**62).to_bytes(8, "big") + b"\0" * 4,
            bytes([0x89, 0xFE]) + (60_000).to_bytes(2, "big") + b"\0" * 60_004,
            bytes([0xF1, 0x81]) + b"\0" * 5,
            bytes([0x81, 0x01]) + b"x",
            frame(rng, 8, b"\xff\xff\xff"),
            frame(rng, 1, b"\xff\xfe"),
        ]
        upgrade = _upgrade(ground, victim.token)
        await asyncio.gather(*(_flood(ground, upgrade, flood) for flood in floods))
        url = ground.url.replace("http", "ws", 1) + "/v1/ws"
        with suppress(OSError, WebSocketException, TimeoutError):
            async with connect(
                url, additional_headers={"authorization": f"Bearer {victim.token}"}, proxy=None
            ) as socket:
                call = {"call": "step", "session_id": victim.id, "seq": 1, "message": guess()}
                for number in range(2000):
                    await socket.send(json.dumps({"id": number, **call}))
                    await socket.send(json.dumps({"id": 0, "call": "cancel", "target": number}))
    await _still_serving(ground, "after floods of frames")


async def _flood(ground: Ground, upgrade: bytes, flood: bytes) -> None:
    """Send bytes over a WebSocket, and read the answers for a while."""
    with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        reader, writer = await asyncio.open_connection(*ground.address())
        try:
            async with asyncio.timeout(FLOOD_S):
                writer.write(upgrade)
                await reader.readuntil(b"\r\n\r\n")
                writer.write(flood)
                while received := await reader.read(1 << 16):
                    ground.check(received, f"flood {flood[:40]!r}")
        finally:
            writer.transport.abort()


async def _still_serving(ground: Ground, when: str) -> None:
    """Count a hang if a new client is not answered."""
    try:
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, verify=False) as http:
            answer = await http.get(f"{ground.url}/health")
            if answer.status_code != 200:
                ground.find("hung", f"{when}: /health answers {answer.status_code}")
    except httpx.TransportError as error:
        ground.find("hung", f"{when}: /health: {error!r}")


KIND = Kind(
    name="sockets",
    lane="calls",
    sites=("single", "workers", "fleet"),
    share=12,
    attacks=named(slow_requests, unfinished_messages, half_open, idle, slow_readers, socket_floods),
    only_on={"idle": ("single", "fleet")},
)
