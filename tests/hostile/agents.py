"""Agents that try to read solutions through every route and frame."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from agentrl_env import ToolCall
from agentrl_env.errors import AgentRLError
from agentrl_env.wire import CALLS
from tests.hostile.site import ANSWER_S, Ground, Kind, Victim, named
from tests.hostile.tasks import ANSWER, METRIC, ON_PURPOSE, PRIVATE, SAID
from tests.hostile.tokens import STEP, guess


def call(name: str, /, **arguments: object) -> dict[str, object]:
    """Return an assistant message with one tool call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {**STEP, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


class Reader:
    """Looks for secrets in everything that an agent receives.

    Args:
        ground: counts each leaked secret once.
        own: session of the agent.
        others: other sessions, which must stay hidden.
    """

    def __init__(self, ground: Ground, own: Victim, others: list[Victim]) -> None:
        self._ground, self.own = ground, own
        self._secrets = {
            ANSWER.encode(): "a solution",
            PRIVATE.encode(): "what a neighbour holds",
            str(METRIC).encode(): "a metric",
            ground.site.token.encode(): "the operator's token",
            str(own.seed).encode(): "the seed",
            b"Traceback (most recent": "a traceback",
            b"tests/hostile": "a path of the server",
        }
        for other in others:
            self._secrets[other.id.encode()] = "the id of another session"
            self._secrets[other.token.encode()] = "the token of another session"
            self._secrets[str(other.seed).encode()] = "the seed of another session"

    def read(self, content: bytes, what: str, sent: bytes = b"") -> None:
        """Count the secrets in an answer, except those that the agent itself sent."""
        for secret, name in self._secrets.items():
            if secret in content and secret not in sent:
                at = content.index(secret)
                shown = content[max(0, at - 60) : at + 60]
                self._ground.find("answers_read", f"{name} in the answer of {what}: {shown!r}")
        self._ground.check(content, what)

    async def ask(self, method: str, path: str, **options: object) -> httpx.Response | None:
        """Send a request with the agent's token and read the answer."""
        answer = await self._ground.ask(method, path, token=self.own.token, **options)  # type: ignore[arg-type]
        if answer is not None:
            sent = f"{path} {json.dumps(options, default=str)}".encode()
            self.read(answer.content + str(answer.headers.raw).encode(), f"{method} {path[:60]}", sent)
        return answer


async def routes(ground: Ground) -> None:
    """Request the agent's session, another session and all sessions from every route."""
    async with ground.vaults(2) as (own, other):
        reader = Reader(ground, own, [other])
        document = await ground.ask("GET", "/openapi.json", token=ground.site.token)
        paths = json.loads(document.content)["paths"] if document is not None else {}
        asked = [(method.upper(), path) for path, methods in paths.items() for method in methods]
        pages = [
            "/",
            "/app.js",
            "/docs",
            "/redoc",
            "/debug",
            "/.env",
            "/..%2f..%2fetc/passwd",
            "/v1",
            "/v1/link",
        ]
        asked += [("GET", path) for path in pages]
        ground.rng.shuffle(asked)
        queries = ["", "?limit=1000", "?after=0", "?token=x&agent=false&view=operator&fields=sample"]
        for method, path in asked:
            if method == "DELETE":
                continue
            for session in (own.id, other.id):
                body = {"seq": 1, "message": guess(), "task": "vault", "index": 0, "n": 2, "steps": []}
                url = path.replace("{id}", session) + ground.rng.choice(queries)
                headers = {"x-agentrl-client": ground.rng.choice(["", "operator"]), "accept": "*/*"}
                options = {"headers": headers} | ({"json": body} if method == "POST" else {})
                await reader.ask(method, url, **options)
                if "{id}" not in path:
                    break


async def conversation(ground: Ground) -> None:
    """Play with right and wrong guesses, with tools whose errors contain the solution, and past the end."""
    async with ground.vaults(2) as (own, other):
        reader = Reader(ground, own, [other])
        text = f"{SAID}{ground.rng.randrange(10**9)}\n\x1b[2J2030-01-01T00:00:00Z ERROR forged line"
        messages = [guess("nothing"), call("echo", text=text), call("nope", text=text), call("guess", text=7)]
        messages += [call("guess"), {"role": "assistant", "content": text}, call("expert"), call("snapshot")]
        messages += [call("reset"), call("close"), call("__class__"), call("samples", split="train")]
        ground.rng.shuffle(messages)
        last = ground.rng.choice([call("crack"), call("complain", text=text)])
        path = f"/v1/sessions/{own.id}/step"
        for seq, message in enumerate([*messages, last], 1):
            await reader.ask("POST", path, json={"seq": seq, "message": message})
            await reader.ask("POST", path, json={"seq": seq, "message": message})
        await reader.ask("GET", f"/v1/sessions/{own.id}")
        await reader.ask("GET", f"/v1/sessions/{own.id}/transcript")
        steps = [
            {"session_id": one.id, "seq": n, "message": guess()} for one in (own, other) for n in (0, 1, 99)
        ]
        await reader.ask("POST", "/v1/step", json={"steps": steps})


async def frames(ground: Ground) -> None:
    """Make every call over a WebSocket, including the calls of a controller's link."""
    async with ground.vaults(2) as (own, other):
        reader = Reader(ground, own, [other])
        names = [*CALLS, "adopt", "expert", "snapshot", "cancel", "checkpoint", "hello", "beat", "", "x"]
        url = ground.url.replace("http", "ws", 1)
        for path in ("/v1/ws", "/v1/link"):
            with suppress(OSError, WebSocketException):
                async with connect(
                    url + path, additional_headers={"authorization": f"Bearer {own.token}"}, proxy=None
                ) as socket:
                    for number, name in enumerate(names * 2):
                        session = own.id if number % 2 else other.id
                        frame = {"id": number, "call": name, "session_id": session, "seq": 1, "n": 1}
                        frame |= {"message": guess(), "task": "vault", "steps": [], "state": "{}"}
                        sent = json.dumps(frame)
                        await socket.send(sent)
                        if name == "cancel":
                            continue
                        with suppress(TimeoutError):
                            async with asyncio.timeout(ANSWER_S):
                                reader.read(str(await socket.recv()).encode(), f"frame {name}", sent.encode())


async def after_failover(ground: Ground) -> None:
    """Read the agent's session through the client, before and after its end."""
    async with ground.vaults() as (own,), ground.connect(own.token) as client:
        reader = Reader(ground, own, [])
        for _ in range(2):
            with suppress(AgentRLError):
                session = await client.resume(own.id)
                shown = session.info.model_copy(update={"agent_token": None}).model_dump_json()
                reader.read(shown.encode(), "resume")
                result = await session.step(ToolCall.of("guess", text="x"))
                reader.read(result.model_dump_json().encode(), "step")
                result = await session.step(ToolCall.of("crack"))
                reader.read(result.model_dump_json().encode(), "a step that fails")
            with suppress(AgentRLError):
                await client.open("vault", index=0)
                ground.find("breaches", "an agent opened a session")


async def logs(ground: Ground) -> None:
    """Try to forge log lines. The log must not contain the agents' text either."""
    mark = f"forged-{ground.rng.randrange(10**9)}"
    async with ground.vaults() as (own,):
        lines = f"\r\n2030-01-01T00:00:00.000Z ERROR {mark}\x1b[31m"
        text = f"{SAID}{ON_PURPOSE}{lines}"
        step = {"seq": 1, "message": call("complain", text=text)}
        await ground.ask("POST", f"/v1/sessions/{own.id}/step", token=own.token, json=step)
        odd = lines.encode().replace(b"\r\n", b"%0d%0a").replace(b"\x1b", b"%1b").decode().replace(" ", "%20")
        await ground.ask("GET", f"/v1/sessions/{odd}", token=ground.site.token)
        await ground.ask("POST", "/v1/sessions", token=ground.site.token, json={"task": f"vault{lines}"})
        await ground.send_raw(b"GET /\x1b[31m" + mark.encode() + b" HTTP/1.1\r\n\r\n", wait_s=5)
    for part in ground.site.parts:
        log = part.log.read_bytes()
        if b"\x1b" in log or any(line.startswith(b"2030-01-01") for line in log.splitlines()):
            ground.find("breaches", f"the log of {part.name} holds a forged line or a control character")


KIND = Kind(
    name="agents",
    lane="calls",
    sites=("single", "workers", "fleet"),
    share=10,
    attacks=named(routes, conversation, frames, after_failover, logs),
)
