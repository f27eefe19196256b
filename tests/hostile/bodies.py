"""Bodies and messages with too many values, deep nesting, excessive size or wrong types."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from contextlib import suppress

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from tests.hostile.site import ANSWER_S, Ground, Kind, Victim, named
from tests.hostile.tokens import guess

HELD_BYTES = 192 << 20
"""Maximum memory that one agent can make a server hold."""
PARTS = 60
"""Number of unfinished bodies, each below the size limit."""
HISTORY_BYTES = 128 << 20
"""Maximum memory for the messages of one session."""
WRONG = (
    None,
    True,
    -1,
    0,
    2**63,
    2**64,
    -(2**70),
    1e308,
    "",
    "1",
    "\ud800",
    "\x00",
    [],
    {},
    [[]],
    {"a": None},
    [None] * 100,
)
RAW = (
    b"",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e400",
    b"9" * 5000,
    b"-" + b"9" * 100_000,
    b"0." + b"1" * 100_000,
    b"1e" + b"9" * 5000,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 200 + b"]" * 200,
    b'"\\ud800"',
    b'"\xff"',
    b"\xef\xbb\xbf{}",
    b'"' + b"\\u0000" * 10_000 + b'"',
    b"{}{}",
    b"{" + b'"a":1,' * 30_000 + b'"a":1}',
    b"'",
    b"\x00",
)


def _step(message: object = None, seq: object = 1) -> dict[str, object]:
    return {"seq": seq, "message": guess() if message is None else message}


async def send(ground: Ground, victim: Victim, bodies: list[bytes], *, agent: bool) -> None:
    """Send bodies to all routes that accept one, and as WebSocket frames."""
    token = victim.token if agent else ground.site.token
    paths = [f"/v1/sessions/{victim.id}/step", "/v1/step"]
    paths += [] if agent else ["/v1/sessions", f"/v1/sessions/{victim.id}/fork"]
    json_header = {"content-type": "application/json"}
    for body in bodies:
        path = ground.rng.choice(paths)
        await ground.ask("POST", path, token=token, content=body, headers=json_header)
    url = ground.url.replace("http", "ws", 1) + "/v1/ws"
    with suppress(OSError, WebSocketException):
        async with connect(
            url, additional_headers={"authorization": f"Bearer {token}"}, proxy=None, max_size=None
        ) as socket:
            for body in bodies:
                frame = body.decode("latin-1")
                if ground.rng.random() < 0.7:
                    name = ground.rng.choice(["step", "step_many", "open", "fork", "info"])
                    frame = f'{{"id":1,"call":"{name}","session_id":"{victim.id}","seq":1,"message":{frame}}}'
                await socket.send(frame)
                try:
                    async with asyncio.timeout(ANSWER_S):
                        ground.check(str(await socket.recv()).encode(), f"frame {frame[:80]!r}")
                except TimeoutError:
                    ground.find("hung", f"a frame was not answered: {frame[:80]!r}")
                    return


async def malformed(ground: Ground) -> None:
    """Send malformed JSON, and values of wrong types in every place."""
    async with ground.vaults() as (victim,):
        bodies = list(RAW)
        for wrong in ground.rng.sample(WRONG, 6):
            for body in (
                _step(seq=wrong),
                _step({**guess(), "role": wrong}),
                _step({**guess(), "content": wrong}),
                _step({**guess(), "tool_calls": wrong}),
                _step({**guess(), "tool_calls": [wrong]}),
                {"steps": wrong},
                {"steps": [wrong, {"session_id": wrong, **_step()}], "wait_s": wrong},
                {"task": wrong, "index": wrong, "sample": wrong, "seed": wrong, "n": wrong},
                {"sessions": wrong},
                {"n": wrong, "request_id": wrong},
            ):
                bodies.append(json.dumps(body).encode())
        message = json.dumps(guess()).encode()
        bodies += [b'{"seq":%b,"message":%b}' % (raw, message) for raw in RAW]
        bodies += [b'{"seq":1,"seq":2,"message":%b,"message":null}' % message]
        ground.rng.shuffle(bodies)
        await send(ground, victim, bodies[:60], agent=ground.rng.random() < 0.5)


async def many_values(ground: Ground) -> None:
    """Send small bodies that decode to many objects."""
    async with ground.vaults() as (victim,):
        number = ground.rng.choice([400_000, 1_000_000])
        zeros, empty = b"0," * number + b"0", b"[]," * (number // 2) + b"[]"
        bodies = [
            b'{"steps":[' + zeros + b"]}",
            b'{"steps":[' + b"{}," * (number // 2) + b"{}]}",
            b'{"seq":1,"message":{"role":"assistant","content":[' + zeros + b"]}}",
            b'{"seq":1,"message":{"role":"assistant","tool_calls":[' + empty + b"]}}",
            b'{"seq":1,"x":[' + empty + b'],"message":{"role":"assistant","content":"x"}}',
            b'{"sessions":[' + zeros + b"]}",
        ]
        await send(ground, victim, ground.rng.sample(bodies, 3), agent=ground.rng.random() < 0.5)


async def arguments(ground: Ground) -> None:
    """Send tool calls with hostile JSON as arguments, and many calls in one message."""
    async with ground.vaults() as (victim,):
        texts = [raw.decode("latin-1") for raw in RAW]
        texts += ['{"text":' + "[" * 5000 + "]" * 5000 + "}", "[" + "0," * 300_000 + "0]", '{"text":1e999}']
        calls = []
        for text in texts:
            function = {"name": ground.rng.choice(["guess", "echo", "nope"]), "arguments": text}
            calls.append({"id": "c", "type": "function", "function": function})
        messages = [{**guess(), "tool_calls": [call]} for call in calls]
        messages += [{**guess(), "tool_calls": guess()["tool_calls"] * 128}]  # type: ignore[operator]
        messages += [{**guess(), "tool_calls": guess()["tool_calls"] * 100_000}]  # type: ignore[operator]
        seq = 1
        for message in messages:
            path = f"/v1/sessions/{victim.id}/step"
            answer = await ground.ask("POST", path, token=victim.token, json=_step(message, seq))
            seq += answer is not None and answer.status_code == 200


async def large(ground: Ground) -> None:
    """Send bodies beyond the limit: with a length, in chunks, and compressed."""
    async with ground.vaults() as (victim,):
        path = f"/v1/sessions/{victim.id}/step"
        text = b"x" * (12 << 20)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {victim.token}\r\n".encode()
        chunk = b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20))
        answers = [
            await ground.send_raw(head + b"content-length: %d\r\n\r\n" % 2**40, wait_s=20),
            await ground.send_raw(head + b"transfer-encoding: chunked\r\n\r\n" + chunk * 24, wait_s=20),
            await ground.send_raw(head + b"content-length: %d\r\n\r\n" % len(text) + text, wait_s=20),
        ]
        for answer in answers:
            if answer is None:
                ground.find("hung", "a body beyond the limit is neither refused nor answered")
            elif b" 200 " in answer[:20]:
                ground.find("breaches", "a body beyond the limit was accepted")
        bomb = gzip.compress(json.dumps(_step({**guess(), "content": "x" * (16 << 20)})).encode())
        await ground.ask("POST", path, token=victim.token, content=bomb, headers={"content-encoding": "gzip"})


async def unfinished(ground: Ground) -> None:
    """Keep many unfinished bodies open, each below the size limit."""
    async with ground.vaults() as (victim,):
        size = 7_900_000
        head = f"POST /v1/sessions/{victim.id}/step HTTP/1.1\r\nhost: localhost\r\n"
        head += f"authorization: Bearer {victim.token}"
        data = head.encode() + b"\r\ncontent-length: %d\r\n\r\n" % size + b" " * (size - 1)
        before = ground.memory()
        peak = await _peak_memory(ground, [ground.send_raw(data, wait_s=20) for _ in range(PARTS)])
        if peak - before > HELD_BYTES:
            what = f"{PARTS} unfinished bodies of one agent hold {(peak - before) >> 20} MB"
            ground.find("breaches", what)


async def history(ground: Ground) -> None:
    """Fill the transcript of a session with valid messages."""
    async with ground.vaults() as (victim,):
        before, path = ground.memory(), f"/v1/sessions/{victim.id}/step"
        for seq in range(1, 49):
            message = {"role": "assistant", "content": "\U0001f600" * 999_000}
            body = json.dumps(_step(message, seq), ensure_ascii=False).encode()
            answer = await ground.ask("POST", path, token=victim.token, content=body)
            if answer is None or answer.status_code != 200:
                break
        held = ground.memory() - before
        if held > HISTORY_BYTES:
            ground.find("breaches", f"the messages of one session hold {held >> 20} MB")


async def _peak_memory(ground: Ground, sending: list) -> int:  # type: ignore[type-arg]
    """Run attacks and return the peak memory of the site."""
    peak, tasks = ground.memory(), [asyncio.ensure_future(one) for one in sending]
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end and not all(task.done() for task in tasks):
        await asyncio.sleep(0.2)
        peak = max(peak, ground.memory())
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if outcome is None:
            ground.find("hung", "an unfinished body is not given up")
    return peak


KIND = Kind(
    name="bodies",
    lane="calls",
    sites=("single", "workers", "fleet"),
    share=14,
    attacks=named(malformed, many_values, arguments, large, unfinished, history),
    only_on=dict.fromkeys(("large", "unfinished", "history"), ("single", "fleet")),
)
