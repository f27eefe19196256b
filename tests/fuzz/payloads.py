"""Random requests with faults that parsers often mishandle."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass
from random import Random

ROUTES = (
    ("POST", "/v1/step"),
    ("POST", "/v1/step"),
    ("POST", "/v1/sessions/{id}/step"),
    ("POST", "/v1/sessions/{id}/step"),
    ("POST", "/v1/sessions"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/{id}"),
    ("DELETE", "/v1/sessions/{id}"),
    ("POST", "/v1/sessions/{id}/fork"),
    ("POST", "/v1/sessions/{id}/expert"),
    ("GET", "/v1/sessions/{id}/transcript"),
    ("GET", "/v1/tasks"),
    ("GET", "/v1/fleet"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/nowhere"),
)
METHODS = ("POST", "GET", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "BREW", "get")
CALLS = (
    "step",
    "step_many",
    "open",
    "info",
    "close",
    "expert",
    "fork",
    "tasks",
    "sessions",
    "transcript",
    "x",
)
ODD_JSON = (
    b"NaN",
    b"-Infinity",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"1e400",
    b"-0",
    b"1.0000000000000000000000001",
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b'"\\u0000"',
    b'"\xff\xfe"',
    b'"\xed\xa0\x80"',
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"[" * 5000,
    b"[" * 150 + b"]" * 150,
    b'{"a":' * 300 + b"1" + b"}" * 300,
    b'"' + b"x" * 20_000 + b'"',
    b"9" * 5000,
    b"{",
    b'{"a"',
    b'{"a":1,}',
    b"// comment",
    b"\xef\xbb\xbf{}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """Bytes to send on one connection."""

    data: bytes
    answered: bool
    """True if the protocol requires an answer. Otherwise the client can disconnect."""


def body(random: Random, session_ids: list[str]) -> bytes:
    """Return the body of a random call, valid or invalid."""
    kind = random.randrange(6)
    text = json.dumps(fields(random, session_ids)).encode()
    if kind == 0:
        return text
    if kind == 1:  # an odd value
        parts = text.split(b":")
        at = random.randrange(1, len(parts)) if len(parts) > 1 else 0
        rest = parts[at].partition(b",")
        parts[at] = random.choice(ODD_JSON) + rest[1] + rest[2]
        return b":".join(parts)
    if kind == 2:  # duplicate keys
        return b'{"seq":1,"task":"fuzzed","steps":[],"id":1,"call":"step",' + text[1:]
    if kind == 3:
        return random.choice(ODD_JSON)
    if kind == 4:
        return mutated(random, text)
    return random.randbytes(random.randrange(200))


def fields(random: Random, session_ids: list[str]) -> dict[str, object]:
    """Return the fields of a random call. Most are valid."""
    arguments = random.choice(['{"anything": 1}', "{}", "", "[" * 500, '{"text": "\\ud800"}', "\x00", "NaN"])
    name = random.choice(["take", "refuse", "end", "nope", "", "take" * 100])
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    message = {
        "role": random.choice(["assistant"] * 6 + ["user", "tool", "x", None]),
        "content": random.choice([None, "text", "\u2028", "😀", [{"type": "text", "text": "x"}], 7]),
        "tool_calls": random.choice([[call], [call] * 3, [], None, [call] * 200]),
    }
    step = {"seq": random.choice([1, 1, 1, 2, 3, 0, -1, 2**64]), "message": message}
    one = random.choice(session_ids) if session_ids else "none"
    opening = {
        "task": random.choice(["fuzzed"] * 5 + ["nope"]),
        "index": random.choice([0, 4, 99, -1, "a", 2**70]),
    }
    batch = {
        "steps": [{"session_id": random.choice(session_ids), **step} for _ in range(random.randrange(4))]
    }
    return random.choice(
        [{**step, "session_id": one}, opening, batch, {"n": random.choice([1, 2, 0, 10**9])}]
    )


def mutated(random: Random, data: bytes) -> bytes:
    """Return the bytes with a few changed, removed or repeated."""
    changed = bytearray(data)
    for _ in range(random.randrange(1, 6)):
        if not changed:
            break
        at = random.randrange(len(changed))
        match random.randrange(4):
            case 0:
                changed[at] = random.randrange(256)
            case 1:
                del changed[at : at + random.randrange(1, 8)]
            case 2:
                changed[at:at] = changed[at : at + random.randrange(1, 16)]
            case _:
                changed[at:at] = random.randbytes(random.randrange(1, 5))
    return bytes(changed)


def http_request(random: Random, session_ids: list[str]) -> RawRequest:
    """Return one HTTP request with valid or invalid framing."""
    method, path = random.choice(ROUTES)
    if random.random() < 0.1:
        method = random.choice(METHODS)
    odd = random.choice(["none", "%00", "..", "%ff", "a/b"])
    path = path.replace("{id}", odd if random.random() < 0.2 else random.choice(session_ids))
    content = b"" if method in ("GET", "HEAD") else body(random, session_ids)
    head = [f"{method} {path} HTTP/1.1".encode(), b"host: localhost"]
    kind = random.randrange(12)
    if kind <= 4:
        return RawRequest(data=_request(head, content), answered=True)
    if kind == 5:
        return RawRequest(data=_request(head, content)[: random.randrange(1, 200)], answered=False)
    if kind == 6:  # an incomplete body
        head.append(b"content-length: %d" % (len(content) + random.randrange(1, 10**6)))
        return RawRequest(data=b"\r\n".join(head) + b"\r\n\r\n" + content, answered=False)
    if kind == 7:
        size = b"%x" % len(content)
        chunks = random.choice([size, b"-1", b"fffffffffffffffff", b"x", b"", size + b";" + b"e" * 500])
        head.append(b"transfer-encoding: chunked")
        data = b"\r\n".join(head) + b"\r\n\r\n" + chunks + b"\r\n" + content + b"\r\n0\r\n\r\n"
        return RawRequest(data=data, answered=chunks == size and len(content) > 0)
    if kind == 8:
        big = [
            b"x-%d: %b" % (n, b"y" * random.choice([10, 1000, 9000])) for n in range(random.choice([5, 50]))
        ]
        return RawRequest(data=_request(head + big, content), answered=False)
    if kind == 9:
        lengths = [b"content-length: 5", b"content-length: 6", b"transfer-encoding: chunked"]
        odd = [
            *random.sample(lengths, 2),
            random.choice([b"content-length: -1", b" folded: x", b"a\x00b: c"]),
        ]
        return RawRequest(data=_request(head + odd, content), answered=False)
    if kind == 10:  # pipelined
        return RawRequest(data=_request(head, content) * 3, answered=True)
    return RawRequest(data=mutated(random, _request(head, content)), answered=False)


def _request(head: list[bytes], content: bytes) -> bytes:
    return b"\r\n".join([*head, b"content-length: %d" % len(content)]) + b"\r\n\r\n" + content


def handshake(random: Random) -> bytes:
    """Return the request of a WebSocket handshake."""
    key = base64.b64encode(random.randbytes(16))
    lines = [
        b"GET /v1/ws HTTP/1.1",
        b"host: localhost",
        b"upgrade: websocket",
        b"connection: Upgrade",
        b"sec-websocket-version: 13",
        b"sec-websocket-key: " + key,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def frames(random: Random, session_ids: list[str]) -> RawRequest:
    """Return one WebSocket call with valid or invalid framing."""
    call = {"id": random.choice([1, "a", 2**70, None, -1]), "call": random.choice(CALLS)}
    call |= {
        "session_id": random.choice(session_ids) if session_ids else "none",
        **fields(random, session_ids),
    }
    text = random.choice([json.dumps(call).encode()] * 3 + [body(random, session_ids)])
    kind = random.randrange(8)
    if kind <= 3:
        return RawRequest(data=frame(random, 1, text), answered=True)
    if kind == 4:
        at = random.randrange(len(text) + 1)
        data = frame(random, 1, text[:at], last=False) + frame(random, 0, text[at:])
        return RawRequest(data=data, answered=True)
    if kind == 5:
        opcode = random.choice([0, 2, 3, 7, 8, 9, 10, 11, 15])
        return RawRequest(
            data=frame(random, opcode, text[: random.choice([0, 1, 2, 125, 126])]), answered=False
        )
    if kind == 6:
        head = bytes([0x81 | random.choice([0, 0x10, 0x40]), 0x80 | 127])
        return RawRequest(
            data=head + struct.pack("!Q", random.choice([2**63, 2**40, 10**6, 5])) + text, answered=False
        )
    return RawRequest(data=mutated(random, frame(random, 1, text)), answered=False)


def frame(random: Random, opcode: int, payload: bytes, *, last: bool = True) -> bytes:
    mask = random.randbytes(4)
    size = len(payload)
    first = bytes([(0x80 if last else 0) | opcode])
    if size < 126:
        head = first + bytes([0x80 | size])
    elif size < 2**16:
        head = first + bytes([0x80 | 126]) + struct.pack("!H", size)
    else:
        head = first + bytes([0x80 | 127]) + struct.pack("!Q", size)
    repeated = mask * (size // 4 + 1)
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated[:size], "big")).to_bytes(size, "big")
    return head + mask + masked
