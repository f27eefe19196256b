"""HTTP and WebSocket framing: smuggled requests, ambiguous lengths, upgrades with a body, huge headers."""

from __future__ import annotations

import asyncio
from random import Random

from tests.fuzz.payloads import handshake
from tests.hostile.site import Attack, Ground, Kind

INNER = b"GET /health HTTP/1.1\r\nhost: inner\r\n\r\n"
"""The smuggled request. It needs no token."""
INNER_ANSWER = b'{"status":"ok"}'
POST = b"POST /v1/sessions/none/step HTTP/1.1\r\nhost: outer\r\n"
CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)
AMBIGUOUS = {
    "length and chunks": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + INNER,
    "chunks and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n" + INNER,
    "two lengths": POST + b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(INNER) + INNER,
    "a list of lengths": POST + b"content-length: 0, %d\r\n\r\n" % len(INNER) + INNER,
    "a signed length": POST + b"content-length: +0\r\n\r\n" + INNER,
    "a negative length": POST + b"content-length: -1\r\n\r\n" + INNER,
    "a length in hex": POST + b"content-length: 0x0\r\n\r\n" + INNER,
    "a huge length": POST + b"content-length: 18446744073709551616\r\n\r\n" + INNER,
    "an underscore": POST + b"content-length: 0_0\r\n\r\n" + INNER,
    "unknown coding": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + INNER,
    "two codings": POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + INNER,
    "coding twice": POST
    + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n0\r\n\r\n"
    + INNER,
    "space before colon": POST + b"transfer-encoding : chunked\r\ncontent-length: 0\r\n\r\n" + INNER,
    "tab in coding": POST + b"transfer-encoding:\x0bchunked\r\ncontent-length: 0\r\n\r\n" + INNER,
    "folded header": POST + b"x: y\r\n content-length: 5\r\ncontent-length: 0\r\n\r\n" + INNER,
    "NUL in a header": POST + b"x: a\0b\r\ncontent-length: 0\r\n\r\n" + INNER,
    "bare CR": POST + b"x: a\rcontent-length: 9\r\ncontent-length: 0\r\n\r\n" + INNER,
    "negative chunk": POST + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n" + INNER,
    "overflowing chunk": POST + b"transfer-encoding: chunked\r\n\r\n10000000000000000\r\n" + INNER,
    "chunk with junk": POST + b"transfer-encoding: chunked\r\n\r\n0x0\r\n\r\n" + INNER,
    "short chunk": POST + b"transfer-encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n" + INNER,
    "HTTP/1.0 in chunks": POST.replace(b"1.1", b"1.0")
    + b"transfer-encoding: chunked\r\nconnection: keep-alive\r\n\r\n0\r\n\r\n"
    + INNER,
    "HTTP/0.9": b"GET /\r\n" + INNER,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + INNER,
    "HTTP/9.9": b"GET /nothing HTTP/9.9\r\n\r\n" + INNER,
    "no method": b"/nothing HTTP/1.1\r\nhost: localhost\r\n\r\n" + INNER,
    "request in a target": b"GET /a HTTP/1.1\r\nx: y HTTP/1.1\r\n\r\n".replace(b"\r\nx", b"\nx") + INNER,
}
"""Requests that parsers can end at different places. The server must not answer the rest."""
INSIDE = {
    "in a body": POST + b"content-length: %d\r\n\r\n" % len(INNER) + INNER,
    "in a chunk": POST + b"transfer-encoding: chunked\r\n\r\n" + CHUNK,
    "in a trailer": POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: GET /health HTTP/1.1\r\n\r\n",
    "in an extension": POST + b"transfer-encoding: chunked\r\n\r\n0;GET /health HTTP/1.1\r\n\r\n",
    "in a header": b"GET /nothing HTTP/1.1\r\nx: GET /health HTTP/1.1\r\n\r\n",
    "in a GET": b"GET /nothing HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(INNER) + INNER,
    "in a DELETE": b"DELETE /nothing HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(INNER) + INNER,
}
"""Well-formed requests that contain another request, which must not be answered."""


def smuggle(variants: dict[str, bytes]) -> Attack:
    """Return an attack that sends all variants."""

    async def attack(ground: Ground) -> None:
        names = list(variants)
        ground.rng.shuffle(names)

        async def send(name: str) -> None:
            data = variants[name]
            received = await ground.send_raw(_split(data, ground.rng), wait_s=20)
            if received is None:
                ground.find("hung", f"{name}: neither answered nor closed")
            elif INNER_ANSWER in received:
                ground.find("breaches", f"{name}: the smuggled request was answered")
            else:
                ground.check(received, name)

        await asyncio.gather(*map(send, names))

    return attack


def _split(data: bytes, rng: Random) -> bytes:
    """Insert a header that shifts the boundaries of the server's buffer."""
    line, end, rest = data.partition(b"\r\n")
    pad = b"x-pad: " + b"y" * rng.choice([1, 100, 4000, 16_000]) + b"\r\n"
    return line + end + pad + rest if line.endswith(b"HTTP/1.1") else data


async def upgrade_with_body(ground: Ground) -> None:
    """Request a WebSocket upgrade with a body. The server must close the connection."""
    token = b"authorization: Bearer " + ground.site.token.encode()
    head = handshake(ground.rng)[:-2]
    unknown, known = head, head + token + b"\r\n"
    bodies = [
        b"content-length: 1\r\n\r\n",
        b"content-length: 100000\r\n\r\nx",
        b"transfer-encoding: chunked\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n5\r\nhello",
        b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n",
        b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n",
    ]
    tries = [start + body for body in bodies for start in (unknown, known)] * 2
    tries += [unknown.replace(b"/v1/ws", path) + b"\r\n" for path in (b"/health", b"/v1/step", b"/v1/link")]
    tries += [head.replace(b"13", b"99") + b"\r\n", head.replace(b"websocket", b"h2c") + b"\r\n"]
    received = await asyncio.gather(*(ground.send_raw(data, wait_s=20) for data in tries))
    for data, answer in zip(tries, received, strict=True):
        if answer is None:
            ground.find("hung", f"an upgrade is neither answered nor closed: {data[-60:]!r}")
        else:
            ground.check(answer, "upgrade")


async def pipelines(ground: Ground) -> None:
    """Pipeline many requests. Each is answered once, in order, or the connection is closed."""
    number = ground.rng.choice([50, 300, 2000])
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    received = await ground.send_raw(health * number, wait_s=20)
    if received is None:
        ground.find("hung", f"{number} requests in one go are not answered")
    elif received.count(INNER_ANSWER) > number:
        ground.find("breaches", f"{number} requests got {received.count(INNER_ANSWER)} answers")


async def headers(ground: Ground) -> None:
    """Send huge, many and endless headers."""
    start = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    tries = [
        start + b"x: " + b"y" * 1_000_000 + b"\r\n\r\n",
        start + b"x: y\r\n" * 100_000 + b"\r\n",
        start + b"cookie: " + b"a=b;" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /?" + b"a=b&" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"A" * 1_000_000,
        start + b"x" * 100_000 + b": y\r\n\r\n",
        start + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 50_000,
        POST + b"transfer-encoding: chunked\r\n\r\n1;" + b"e" * 1_000_000,
        ground.rng.randbytes(100_000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + ground.rng.randbytes(300),
    ]
    for data, answer in zip(
        tries, await asyncio.gather(*(ground.send_raw(data, wait_s=20) for data in tries)), strict=True
    ):
        if answer is None:
            ground.find("hung", f"neither answered nor closed: {data[:60]!r}")
        else:
            ground.check(answer, "headers")


KIND = Kind(
    name="framing",
    lane="calls",
    sites=("single", "workers", "fleet"),
    share=8,
    attacks={
        "ambiguous": smuggle(AMBIGUOUS),
        "inside": smuggle(INSIDE),
        "upgrade_with_body": upgrade_with_body,
        "pipelines": pipelines,
        "headers": headers,
    },
)
