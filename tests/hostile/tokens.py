"""Tokens that are forged, guessed, of another session or of another kind."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
from base64 import urlsafe_b64encode
from contextlib import suppress
from hashlib import sha256
from random import Random

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from tests.chaos.site import agentrl, free_ports
from tests.hostile.site import ANSWER_S, TASKS_FILE, Ground, Kind, Victim, named

SHARED_S = 2.5
"""Seconds until every controller of a fleet rejects a token revoked by one of them."""
STEP = {"role": "assistant", "content": None, "tool_calls": []}


def guess(text: str = "x") -> dict[str, object]:
    """Return an assistant message that calls ``guess``."""
    function = {"name": "guess", "arguments": json.dumps({"text": text})}
    return {**STEP, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def operations(victim: Victim) -> list[tuple[str, str, object]]:
    """Return the calls reserved for the operator or the session's agent."""
    own = f"/v1/sessions/{victim.id}"
    step = {"seq": 1, "message": guess()}
    return [
        ("GET", own, None),
        ("POST", f"{own}/step", step),
        ("POST", "/v1/step", {"steps": [{"session_id": victim.id, **step}]}),
        ("GET", f"{own}/transcript", None),
        ("POST", f"{own}/expert", {}),
        ("POST", f"{own}/fork", {"n": 1}),
        ("GET", "/v1/sessions", None),
        ("GET", "/v1/fleet", None),
        ("GET", "/v1/tasks", None),
        ("GET", "/metrics", None),
        ("POST", "/v1/sessions", {"task": "vault"}),
        ("DELETE", own, None),
    ]


async def refused(ground: Ground, victim: Victim, headers: list[tuple[str, str]], what: str) -> None:
    """Make all calls with these headers. Any permitted call is a breach."""
    calls = operations(victim)
    url = ground.url
    try:
        async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False, verify=False) as http:
            for method, path, body in calls:
                answer = await http.request(method, path, json=body, headers=headers)
                ground.check(answer.content, what)
                done = answer.status_code < 300
                if path == "/v1/step" and done:
                    done = "error" not in answer.json()["results"][0]
                if done:
                    ground.find("breaches", f"{what}: {method} {path} was permitted")
                if answer.status_code == 401 and ground.rng.random() < 0.5:
                    return  # an unknown caller stays unknown for all further calls
    except httpx.TimeoutException:
        ground.find("hung", what)
    except (httpx.TransportError, httpx.InvalidURL, UnicodeEncodeError, ValueError):
        return  # the server refused by closing the connection


async def untouched(ground: Ground, victim: Victim, what: str) -> None:
    """Count a breach if a session was stepped or ended."""
    async with ground.connect() as client:
        session = await client.resume(victim.id)
        if session.turn != victim.session.turn or session.status != victim.session.status:
            ground.find("breaches", f"{what}: the session has another state: turn {session.turn}")


def mutations(token: str, rng: Random) -> list[str]:
    """Return variations of a valid token."""
    at = rng.randrange(len(token))
    other = "A" if token[at] != "A" else "B"
    last = "A" if token[-1] != "A" else "E"
    return [
        token[:at] + other + token[at + 1 :],
        token[:-1] + last,
        token[:-1],
        token + "A",
        token + "=",
        token + ".",
        token.upper(),
        token.rpartition(".")[0] + ".",
        token.rpartition(".")[0],
        "agent..",
        "agent.",
        "link.",
        "link." + "A" * 43,
        token.replace("agent.", "link.", 1),
        re.sub(r"\.(\d+)\.", ".99999999999.", token),
        token.replace(".", "%2e"),
        f"{token} {token}",
        "null",
        "undefined",
        "",
        "\u00e9" * 8,
        "A" * 60_000,
    ]


async def forged(ground: Ground) -> None:
    """Send variations of a valid token."""
    async with ground.vaults() as (victim,):
        for token in mutations(victim.token, ground.rng):
            await refused(ground, victim, [("authorization", f"Bearer {token}")], f"token {token[:60]!r}")
        await untouched(ground, victim, "a forged token")


async def other_schemes(ground: Ground) -> None:
    """Send the right token in the wrong place, or two tokens."""
    async with ground.vaults() as (victim,):
        operator, agent = ground.site.token, victim.token
        bad = f"{agent[:-2]}AA"
        tries: list[list[tuple[str, str]]] = [
            [("authorization", f"Basic {operator}")],
            [("authorization", f"bearer\t{agent[:-1]}")],
            [("authorization", operator)],
            [("authorization", f"Bearer {bad}"), ("x-authorization", f"Bearer {operator}")],
            [("cookie", f"token={operator}; authorization=Bearer {operator}")],
            [("proxy-authorization", f"Bearer {operator}")],
            [("x-forwarded-for", "127.0.0.1"), ("x-real-ip", "127.0.0.1")],
            [("x-agentrl-client", operator)],
            [],
        ]
        for headers in tries:
            await refused(ground, victim, headers, f"headers {[name for name, _ in headers]}")
        for path in ("/v1/sessions", "/metrics"):
            answer = await ground.ask("GET", f"{path}?token={operator}&authorization=Bearer {operator}")
            if answer is not None and answer.status_code < 300:
                ground.find("breaches", f"a token in the query permits GET {path}")
        await untouched(ground, victim, "a misplaced token")


async def other_session(ground: Ground) -> None:
    """Use a session's token for another session in paths, bodies, batches and frames."""
    async with ground.vaults(2) as (own, victim):
        step = {"seq": 1, "message": guess()}
        paths = [
            f"/v1/sessions/{own.id}/../{victim.id}/step",
            f"/v1/sessions/{own.id}/%2e%2e/{victim.id}/step",
            f"/v1/sessions/{own.id}%2f..%2f{victim.id}/step",
            f"//v1/sessions/{victim.id}/step",
            f"/v1/sessions/{victim.id}%00/step",
            f"/v1/sessions/{victim.id}/step?session_id={own.id}",
            f"/v1/sessions/{victim.id};{own.id}/step",
            f"/v1/sessions/{victim.id}/step/",
            f"/V1/sessions/{victim.id}/step",
        ]
        for path in paths:
            await ground.ask("POST", path, token=own.token, json=step)
        message = json.dumps(guess())
        bodies = [
            f'{{"session_id":"{own.id}","seq":1,"message":{message},"session_id":"{victim.id}"}}',
            f'{{"session_id":"{victim.id}","seq":1,"message":{message},"session_id":"{own.id}"}}',
            f'{{"session\\u005fid":"{victim.id}","session_id":"{own.id}","seq":1,"message":{message}}}',
        ]
        for body in bodies:
            await ground.ask("POST", f"/v1/sessions/{victim.id}/step", token=own.token, content=body)
            await ground.ask("POST", "/v1/step", token=own.token, content=f'{{"steps":[{body}]}}')
            await ground.ask(
                "POST", "/v1/step", token=own.token, content=f'{{"steps":[],"steps":[{body},{body}]}}'
            )
        frames = [f'{{"id":{n},"call":"step",{body[1:]}' for n, body in enumerate(bodies)]
        frames += [f'{{"call":"info",{frame[1:]}' for frame in frames]
        frames += [f'{{"id":9,"call":"step_many","steps":[{body}]}}' for body in bodies]
        await _send_frames(ground, own.token, frames)
        await refused(ground, victim, [("authorization", f"Bearer {own.token}")], "another session's token")
        await untouched(ground, victim, "another session's token")


async def _send_frames(ground: Ground, token: str, frames: list[str]) -> list[str]:
    """Send frames over a WebSocket and return the answers."""
    answers: list[str] = []
    url = ground.url.replace("http", "ws", 1) + "/v1/ws"
    with suppress(OSError, WebSocketException, TimeoutError):
        async with connect(
            url, additional_headers={"authorization": f"Bearer {token}"}, proxy=None, max_size=None
        ) as socket:
            for frame in frames:
                await socket.send(frame)
                async with asyncio.timeout(ANSWER_S):
                    answers.append(str(await socket.recv()))
                ground.check(answers[-1].encode(), frame[:100])
    return answers


async def operator_guessed(ground: Ground) -> None:
    """Try to derive the agent token from the operator's token, which would allow offline guessing."""
    async with ground.vaults() as (victim,):
        shown = victim.token.encode()
        for salt in (b"", b"\0agent", b"agent", b"agent."):
            digest = hmac.digest(ground.site.token.encode(), salt + victim.id.encode(), sha256)
            for text in (urlsafe_b64encode(digest).rstrip(b"="), digest.hex().encode()):
                if text in shown:
                    what = "an agent token is a plain MAC under the operator's token, to be guessed offline"
                    ground.find("breaches", what)
        token = ground.site.token
        words = ["a", "token", "secret", "T0K", token[:-1], token + "\0", token.swapcase(), token[::-1]]
        words += [token[:n] for n in range(1, len(token), 5)]
        for word in words:
            await refused(ground, victim, [("authorization", f"Bearer {word}")], f"guess {len(word)} long")
        await untouched(ground, victim, "a guessed token")


async def short_token(ground: Ground) -> None:
    """Bind to a public address with a weak token."""
    (port,) = free_ports(1)
    log = ground.site.folder / f"short-{port}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *agentrl("serve", "--host", "0.0.0.0", "--port", str(port), f"{TASKS_FILE}:Tally"),
            env={**os.environ, **ground.site.environment, "AGENTRL_TOKEN": ground.rng.choice(["a", "T0K"])},
            stdout=output,
            stderr=output,
        )
    try:
        async with asyncio.timeout(ANSWER_S):
            while process.returncode is None and b"serving " not in log.read_bytes():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        if process.returncode is None:
            ground.find("breaches", "a token of three characters is accepted on 0.0.0.0")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ended_session(ground: Ground) -> None:
    """Use the token of a closed session."""
    async with ground.vaults() as (victim,):
        await victim.session.close()
        for method, path, body in operations(victim)[1:3]:
            answer = await ground.ask(method, path, token=victim.token, json=body)
            if answer is not None and answer.status_code < 300 and '"messages":[{' in answer.text:
                ground.find("breaches", "a closed session was stepped")


async def revoked(ground: Ground) -> None:
    """Use a replaced agent token on every server of the site."""
    async with ground.vaults() as (victim,):
        path = f"/v1/sessions/{victim.id}/token"
        answer = await ground.ask("POST", path, token=ground.site.token)
        if answer is None or answer.status_code != 201:
            ground.find("breaches", "an agent token can be neither replaced nor revoked")
            return
        await asyncio.sleep(SHARED_S)
        for url in ground.site.urls:
            for method, path, body in operations(victim)[:3]:
                options = {"json": body} if body is not None else {}
                answer = await ground.ask(method, path, token=victim.token, url=url, **options)
                if answer is not None and answer.status_code < 300:
                    ground.find("breaches", f"a revoked token permits {method} {path}")
        await untouched(ground, victim, "a revoked token")


KIND = Kind(
    name="tokens",
    lane="calls",
    sites=("single", "workers", "fleet"),
    share=8,
    attacks=named(
        forged, other_schemes, other_session, operator_guessed, short_token, ended_session, revoked
    ),
    only_on={"short_token": ("single",)},
)
