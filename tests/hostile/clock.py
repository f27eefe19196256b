"""Controllers and servers with a clock that runs ahead, behind, or jumps."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.chaos.site import free_ports
from tests.hostile.redis_writer import step
from tests.hostile.site import ANSWER_S, Ground, Kind, controller, member

SKEWS = (30.0, 3600.0, -30.0, -3600.0, 1e9)
STAYS_S = 7.0
"""Seconds that the process takes part, longer than the timeout after which a silent server is lost."""


@asynccontextmanager
async def skewed(ground: Ground, command: list[str], ready: bytes) -> AsyncIterator[None]:
    """Run a process of the fleet with a wrong clock."""
    seconds, after = ground.rng.choice(SKEWS), ground.rng.choice([0.0, 4.0])
    log = ground.site.folder / f"skewed-{ground.rng.randrange(10**9)}.log"
    words = [sys.executable, "-m", "tests.hostile.skewed", str(seconds), str(after), *command[3:]]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *words, env={**os.environ, **ground.site.environment}, stdout=output, stderr=output
        )
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            while ready not in log.read_bytes():
                if process.returncode is not None:
                    raise RuntimeError(log.read_text()[-500:])
                await asyncio.sleep(0.1)
        yield
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(ANSWER_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            ground.find("hung", "a process with a wrong clock did not stop")
        if b"Traceback" in log.read_bytes():
            ground.find("uncaught", f"a process with a wrong clock: {log.read_text()[-300:]}")


async def controller_ahead(ground: Ground) -> None:
    """Request sessions of healthy servers from a controller with a wrong clock and no server."""
    (port,) = free_ports(1)
    async with ground.vaults(6) as victims:
        for victim in victims:
            await step(ground, victim, 1)
        async with skewed(ground, controller(ground.site, port), b"controlling "):
            url = f"http://127.0.0.1:{port}"
            asked = [
                ground.ask("GET", f"/v1/sessions/{victim.id}", token=ground.site.token, url=url)
                for victim in victims
            ]
            await asyncio.gather(*asked, asyncio.sleep(STAYS_S))
            for path in ("/v1/sessions", "/v1/fleet"):
                await ground.ask("GET", path, token=ground.site.token, url=url)
        for victim in victims:
            status, text = await step(ground, victim, 2)
            if status != 200 or "wrong 2" not in text:
                ground.find("neighbours_lost", f"a session of a healthy server ended: {status} {text[:200]}")


async def server_ahead(ground: Ground) -> None:
    """Let a server with a wrong clock join and leave. Its sessions continue on other servers."""
    async with skewed(ground, member(ground.site), b"serving "):
        async with ground.vaults(8) as victims:
            await asyncio.sleep(STAYS_S)
            for victim in victims:
                status, text = await step(ground, victim, 1)
                if status != 200:
                    ground.find("neighbours_lost", f"a session ended: {status} {text[:200]}")
        await ground.ask("GET", "/v1/sessions?limit=1000", token=ground.site.token)


KIND = Kind(
    name="clock",
    lane="fleet",
    sites=("fleet",),
    share=6,
    attacks={"controller_ahead": controller_ahead, "server_ahead": server_ahead},
)
