"""A hostile fleet member that holds the link token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from agentrl_env.errors import AgentRLError
from tests.chaos.site import agentrl
from tests.hostile.redis_writer import FAMILY, on_one_server, step
from tests.hostile.site import ANSWER_S, Ground, Kind, Skipped, named
from tests.hostile.tokens import mutations, refused

JOINED_S = 4.0
"""Seconds that the member stays linked."""
FORGET_S = 6.0
"""Seconds after which a controller forgets an ended session."""
Answers = Callable[[dict[str, Any]], str | None]


async def link_token(ground: Ground) -> str:
    """Return the token with which servers join the fleet."""
    process = await asyncio.create_subprocess_exec(
        *agentrl("controller", "--print-link-token"),
        env={**os.environ, **ground.site.environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    words = out.decode().split()
    if process.returncode != 0 or not words:
        raise Skipped(f"no link token: {errors.decode()[-150:]}")
    return words[-1]


class Evil:
    """A link between the attacker and one controller.

    Args:
        ground: provides the site.
        token: link token.
        answer: returns the answer to a call, or None to stay silent.
        hello: additional fields of the first frame.
    """

    def __init__(self, ground: Ground, token: str, answer: Answers | None = None, **hello: Any) -> None:
        self.heard: list[dict[str, Any]] = []
        self.welcomed = False
        self.closed = False
        self._ground, self._token = ground, token
        self._answer = answer or (lambda call: None)
        name = f"evil{ground.rng.randrange(10**9)}"
        self._hello = {"server_id": name, "capacity": 2000, "place": f"evil:{os.getpid()}", **hello}
        self._url = ground.url

    async def __aenter__(self) -> Self:
        tasks = await self._ground.ask("GET", "/v1/tasks", token=self._ground.site.token)
        self._hello["tasks"] = tasks.json()["tasks"] if tasks is not None else []
        address = self._url.replace("http", "ws", 1) + "/v1/link"
        headers = {"authorization": f"Bearer {self._token}"}
        self._tasks: list[asyncio.Task[None]] = []
        try:
            self._socket: ClientConnection | None = await connect(
                address, additional_headers=headers, proxy=None, max_size=None
            )
            await self._socket.send(json.dumps({"hello": self._hello}))
            async with asyncio.timeout(ANSWER_S):
                self.welcomed = "welcome" in json.loads(await self._socket.recv())
        except (OSError, WebSocketException, TimeoutError):
            self._socket = None
            return self
        self._tasks = [asyncio.create_task(self._hear()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.transport.abort()

    async def send(self, frame: str) -> None:
        """Send a frame if the link is still open."""
        if self._socket is not None:
            with suppress(WebSocketException):
                await self._socket.send(frame)

    async def _hear(self) -> None:
        assert self._socket is not None
        with suppress(WebSocketException):
            async for text in self._socket:
                with suppress(ValueError):
                    frame = json.loads(text)
                    self.heard.append(frame)
                    answer = self._answer(frame)
                    if answer is not None:
                        await self._socket.send(answer)
        self.closed = True

    async def _beat(self) -> None:
        while True:
            await self.send('{"beat":{}}')
            await asyncio.sleep(0.5)


async def _honest_calls(ground: Ground, evil: Evil) -> None:
    """Open and list sessions as an honest client. Each call must be answered or refused in time."""
    end = time.monotonic() + JOINED_S

    async def opening() -> None:
        body = {"task": "vault", "index": 0, "wait_s": 5}
        token = ground.site.token
        while time.monotonic() < end:
            answer = await ground.ask("POST", "/v1/sessions", token=token, json=body)
            if answer is None:
                return
            if answer.status_code == 201:
                session = answer.json()["session_id"]
                await ground.ask("DELETE", f"/v1/sessions/{session}", token=token)

    async def listing() -> None:
        while time.monotonic() < end:
            for path in ("/v1/sessions", "/v1/fleet", "/metrics", "/ready"):
                await ground.ask("GET", path, token=ground.site.token)
            await asyncio.sleep(0.3)

    await asyncio.gather(opening(), opening(), listing())


async def silent(ground: Ground) -> None:
    """Send heartbeats but never answer a call."""
    async with Evil(ground, await link_token(ground)) as evil:
        await _honest_calls(ground, evil)


async def garbage(ground: Ground) -> None:
    """Answer every call with garbage."""

    def answer(call: dict[str, Any]) -> str | None:
        number = call.get("id")
        results = ['"garbage"', "null", "[]", "{}", "7", '{"session_id":7}', '{"results":[]}', "{", '"' * 3]
        results += ['{"session_id":"other.1","task":"vault","messages":[{"role":"x"}]}', "[" * 5000]
        results += ['{"sessions":[{}],"total":"many"}', '{"session_id":"x","status":"odd"}', "NaN"]
        kind = ground.rng.randrange(4)
        if kind == 0:
            return f'{{"id":{number},"error":{ground.rng.choice([*results, json.dumps({"type": 7})])}}}'
        if kind == 1:
            frames = ["", "x", "{}", '{"id":', f'{{"id":{number}}}', '{"beat":7}', '{"id":-1,"result":1}']
            return ground.rng.choice(frames)
        return f'{{"id":{number},"result":{ground.rng.choice(results)}}}'

    token = await link_token(ground)
    for _ in range(2):
        async with Evil(ground, token, answer) as evil:
            await _honest_calls(ground, evil)
            if not evil.welcomed:
                return


async def always_full(ground: Ground) -> None:
    """Refuse every opening although the other servers have room."""

    def answer(call: dict[str, Any]) -> str | None:
        kind = ground.rng.choice(["server_full", "server_draining"])
        error = {"type": kind, "message": "x" * 1000, "retry_after": ground.rng.choice(["soon", -1, 1e99])}
        return json.dumps({"id": call.get("id"), "error": error}, separators=(",", ":"))

    async with Evil(ground, await link_token(ground), answer) as evil:
        await _honest_calls(ground, evil)


async def forged_frames(ground: Ground) -> None:
    """Send checkpoints, ends and answers for the sessions of other servers."""
    token = await link_token(ground)
    async with ground.vaults(FAMILY) as victims:
        family, part = await on_one_server(ground, victims)
        for victim in family:
            await step(ground, victim, 1)
        async with Evil(ground, token) as evil:
            for victim in family:
                state = {"session_id": victim.id, "seq": 77, "task": "vault", "client": "", "state": "{}"}
                gone = {"session_id": victim.id, "seq": 77, "task": "vault", "client": ""}
                frames: list[object] = [{"checkpoint": gone}, {"checkpoint": {**state, "seal": "00" * 32}}]
                frames += [{"beat": {"ended": [victim.id]}}]
                for frame in frames:
                    await evil.send(json.dumps(frame, separators=(",", ":")))
            for number in range(1, 200):
                await evil.send(f'{{"id":{number},"result":{{"session_id":"{family[0].id}"}}}}')
            await asyncio.sleep(FORGET_S)
        part.send(signal.SIGKILL)
        for status, text in await asyncio.gather(*(step(ground, victim, 2) for victim in family)):
            if status != 200 or "wrong 2" not in text:
                what = f"frames of another server ended or changed a session: {status} {text[:200]}"
                ground.find("breaches", what)


async def claims(ground: Ground) -> None:
    """Claim the sessions of other servers, and wait for their calls after their server dies."""
    token = await link_token(ground)
    async with ground.vaults(FAMILY) as victims:
        family, part = await on_one_server(ground, victims)
        rows = [{"session_id": victim.id, "task": "vault", "client": ""} for victim in family]

        def answer(call: dict[str, Any]) -> str | None:
            result = {"session_id": call.get("session_id"), "seq": call.get("seq", 1), "reward": 77.0}
            return json.dumps({"id": call.get("id"), "result": result}, separators=(",", ":"))

        # It has no room and gets no sessions, so it can only receive calls for sessions that it claims.
        async with Evil(ground, token, answer, sessions=rows, capacity=1) as evil:
            await evil.send(json.dumps({"beat": {"opened": rows}}, separators=(",", ":")))
            part.send(signal.SIGKILL)
            for _, text in await asyncio.gather(*(step(ground, victim, 1) for victim in family)):
                if '"reward":77' in text:
                    ground.find("breaches", "a member answered a step of a session that it had only claimed")
            if any(call.get("call") == "step" for call in evil.heard):
                ground.find("breaches", "a member received a step of a session that it had only claimed")


async def impostor(ground: Ground) -> None:
    """Join with the id and place of a linked server."""
    token = await link_token(ground)
    answer = await ground.ask("GET", "/v1/fleet", token=ground.site.token)
    servers = answer.json()["servers"] if answer is not None else []
    for server in ground.rng.sample(servers, min(1, len(servers))):
        for place in ("evil:1", server["place"]):
            async with Evil(ground, token, server_id=server["server_id"], place=place) as evil:
                await asyncio.sleep(1.0)
                if evil.welcomed:
                    ground.find("breaches", f"a member took the id of another server (place {place})")


async def bad_hello(ground: Ground) -> None:
    """Start a link without a valid hello."""
    token = await link_token(ground)
    starts = ["", "{}", '{"hello":7}', '{"hello":{"server_id":"../x","tasks":[],"capacity":1}}', "[" * 9999]
    starts += ['{"hello":{"server_id":"x","tasks":[],"capacity":-1}}', '{"beat":{}}', "x" * (1 << 20)]
    starts += ['{"hello":{"server_id":"' + "x" * 9999 + '","tasks":[{"name":"vault"}],"capacity":1e99}}']

    async def begin(start: str) -> None:
        url = ground.url.replace("http", "ws", 1) + "/v1/link"
        headers = {"authorization": f"Bearer {token}"}
        with suppress(OSError, WebSocketException, TimeoutError):
            async with (
                asyncio.timeout(ANSWER_S),
                connect(url, additional_headers=headers, proxy=None) as socket,
            ):
                await socket.send(start)
                if "welcome" in str(await socket.recv()):
                    ground.find("breaches", f"a link begins with {start[:60]!r}")

    await asyncio.gather(*map(begin, starts))


async def calls(ground: Ground) -> None:
    """Make calls with the link token, and join with invalid tokens."""
    token = await link_token(ground)
    async with ground.vaults() as (victim,):
        await refused(ground, victim, [("authorization", f"Bearer {token}")], "the link token")
        bad = [victim.token, "", "link.", *mutations(token, ground.rng)[:10]]
        for one in bad:
            with suppress(AgentRLError, ValueError):
                async with Evil(ground, one) as evil:
                    if evil.welcomed:
                        ground.find("breaches", f"a server joined with the token {one[:50]!r}")


KIND = Kind(
    name="member",
    lane="fleet",
    sites=("fleet",),
    share=14,
    attacks=named(silent, garbage, always_full, forged_frames, claims, impostor, bad_hello, calls),
)
