"""Author code that hangs, exits its process, or raises exceptions that nothing catches."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from contextlib import suppress

import httpx

from agentrl_env import EnvClient, ToolCall
from agentrl_env.errors import AgentRLError, ServerFull
from tests.chaos.site import MARK, agentrl, free_ports, left_processes
from tests.hostile.agents import call
from tests.hostile.neighbours import CALL_S
from tests.hostile.site import ANSWER_S, END_S, TASKS_FILE, Attack, Ground, Kind
from tests.hostile.tasks import HANG_S

STUCK_S = 45.0
"""Maximum seconds (``Site.within``) until a blocked worker is replaced and its call answered."""
HANGING = 64


async def step_into(ground: Ground, task: str, message: dict[str, object], what: str) -> None:
    """Open a session of a trap and play one message. It must be answered or refused in time."""
    async with httpx.AsyncClient(
        base_url=ground.url,
        timeout=None,
        trust_env=False,
        verify=False,  # do not load certificates for each of 64 clients
        headers={"authorization": f"Bearer {ground.site.token}"},
        limits=httpx.Limits(max_keepalive_connections=0),  # the server closes idle connections after 3 s
    ) as http:
        session = ""
        try:
            async with ground.site.within(ANSWER_S + STUCK_S):
                opened = await http.post("/v1/sessions", json={"task": task, "wait_s": ANSWER_S})
                ground.check(opened.content, f"open {task}")
                if opened.status_code != 201:
                    return
                session = opened.json()["session_id"]
                body = {"seq": 1, "message": message}
                answer = await http.post(f"/v1/sessions/{session}/step", json=body)
                ground.check(answer.content, what)
                if answer.status_code == 200 and answer.json()["reward"] == 0 and answer.json()["terminated"]:
                    ground.find("breaches", f"{what}: a failure became a reward of zero")
        except TimeoutError:
            ground.find("hung", f"{what} was not answered in time")
        except httpx.TransportError as error:
            ground.find("hung", f"{what}: the server closed the connection: {error!r}")
        finally:
            with suppress(httpx.HTTPError):
                await http.delete(f"/v1/sessions/{session}", timeout=5)


def trap(*tools: str, tasks: tuple[str, ...] = ("trap", "thread_trap"), **arguments: object) -> Attack:
    """Return an attack that calls one of these tools of a trap. Both workers must serve afterwards."""

    async def attack(ground: Ground) -> None:
        task, tool = ground.rng.choice(tasks), ground.rng.choice(tools)
        await step_into(ground, task, call(tool, **arguments), f"{task}.{tool}")
        await _both_serve(ground, f"{task}.{tool}")

    return attack


async def _both_serve(ground: Ground, when: str) -> None:
    """Count a breach unless both workers answer again."""
    with suppress(TimeoutError):
        async with ground.site.within(ANSWER_S):
            while True:
                answer = await ground.ask("GET", "/v1/fleet", token=ground.site.token)
                servers = answer.json().get("servers", []) if answer is not None else []
                if sum(server["heard_s"] < 3 for server in servers) >= 2:
                    return
                await asyncio.sleep(0.5)
    ground.find("breaches", f"after {when} a stuck or dead worker is not replaced")
    await ground.site.restart()


async def many_slow_calls(ground: Ground) -> None:
    """Send a message with the maximum number of slow calls."""
    slow = call("slow")
    message = {**slow, "tool_calls": slow["tool_calls"] * 127}  # type: ignore[operator]
    await step_into(ground, "trap", message, "127 slow calls in one message")
    await _both_serve(ground, "127 slow calls")


async def base_exceptions(ground: Ground) -> None:
    """Raise exceptions that ``except Exception`` does not catch."""
    for name in ("KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError", "Leak"):
        task = ground.rng.choice(["trap", "thread_trap"])
        await step_into(ground, task, call("fail", name=name), f"{task} raises {name}")


async def crowd_of_loops(ground: Ground) -> None:
    """Run endless loops in several sessions, so that every worker is stuck."""
    tries = [step_into(ground, "trap", call("loop"), "four loops") for _ in range(4)]
    await asyncio.gather(*tries)
    await _both_serve(ground, "four loops at once")


async def orphans(ground: Ground) -> None:
    """Kill the parent of a stuck worker. The worker must not outlive it."""
    (port,) = free_ports(1)
    mark = secrets.token_hex(8)
    log = ground.site.folder / f"orphans-{port}.log"
    options = ["--workers", "2", "--port", str(port), f"{TASKS_FILE}:Trap"]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *agentrl("serve", *options),
            env={**os.environ, **ground.site.environment, MARK: mark},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            while b"serving " not in log.read_bytes():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        async with ground.connect(url=f"http://127.0.0.1:{port}") as client:
            session = await client.open("trap")
            looping = asyncio.create_task(session.step(ToolCall.of("loop")))
            await asyncio.sleep(1.0)
            process.send_signal(signal.SIGKILL)
            looping.cancel()
            with suppress(AgentRLError, asyncio.CancelledError):
                await looping
        end = time.monotonic() + END_S
        while left_processes(mark) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        if left := left_processes(mark):
            ground.find("breaches", f"{len(left)} workers outlived their killed parent by {END_S:g} s")
    finally:
        for pid in left_processes(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()


async def hanging_threads(ground: Ground) -> None:
    """Hang many threads for longer than their timeout."""
    tries = [step_into(ground, "thread_trap", call("hang"), "a hanging call") for _ in range(HANGING)]
    await asyncio.gather(*tries)
    await _others_served(ground)


async def hanging_within_timeout(ground: Ground) -> None:
    """Hang as many threads as the server accepts, with a long timeout."""
    async with ground.connect() as client:
        sessions = []
        with suppress(ServerFull):
            for _ in range(4 * HANGING):
                sessions.append(await client.open("thread_trap"))
        hanging = [asyncio.create_task(one.step(ToolCall.of("hang_long"))) for one in sessions]
        await asyncio.sleep(HANG_S)
        await _others_served(ground)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def _others_served(ground: Ground) -> None:
    """Count a loss if other sessions are not served although ``/ready`` reports readiness."""
    refused: Exception | None = None
    async with EnvClient.connect(ground.url, token=ground.site.token, timeout=CALL_S) as client:
        try:
            async with ground.site.within(ANSWER_S):
                session = await client.open("thread_tally")
                await session.step(ToolCall.of("add", n=1))
        except (AgentRLError, TimeoutError) as error:
            refused = error
    ready = await ground.ask("GET", "/ready")
    if refused is not None and ready is not None and ready.status_code == 200:
        what = f"hanging calls block the sessions of another task, and /ready says 200: {refused!r}"
        ground.find("neighbours_lost", what)


KIND = Kind(
    name="stuck",
    lane="tasks",
    sites=("workers",),
    share=24,
    attacks={
        "loop": trap("loop", "backtrack"),
        "block_async": trap("block_async"),
        "death": trap("exit", "kill", "crash"),
        "death_in_order": trap("exit", code=0),
        "fork": trap("fork", tasks=("thread_trap",)),
        "fork_inline": trap("fork", tasks=("trap",)),
        "hog": trap("hog"),
        "shout": trap("shout"),
        "recurse": trap("recurse"),
        "no_text": trap("call_me"),
        "base_exceptions": base_exceptions,
        "many_slow_calls": many_slow_calls,
        "crowd_of_loops": crowd_of_loops,
        "orphans": orphans,
    },
)
THREADS = Kind(
    name="threads",
    lane="threads",
    sites=("threads",),
    share=4,
    attacks={"hanging_threads": hanging_threads, "hanging_within_timeout": hanging_within_timeout},
)
