"""Sandboxes behind a server: attacks in one session do not affect other sessions or the server."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from agentrl_env import EnvClient, Message, SessionStatus, ToolCall
from agentrl_env.errors import EnvironmentFailed, SandboxUnavailable
from agentrl_env.launch.process import ServerProcess
from agentrl_env.sandbox import cgroups
from agentrl_env.sandbox.bubblewrap import check_available
from agentrl_env.sandbox.orphans import PREFIX
from tests.processes import until, until_dead

try:
    check_available()
except SandboxUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

TASKS = str(Path(__file__).with_name("tasks.py"))
ATTACKS = {
    "fork bomb": ":(){ :|:& };:",
    "waiting fork bomb": "while true; do sleep 1000 & done; wait",
    "memory hog": "python3 -c 'x = bytearray(10**10)'; tail /dev/zero",
    "endless cat": "cat /dev/zero",
    "endless lines": "yes",
    "disk filler": "dd if=/dev/zero of=big bs=1M; seq 100000 | xargs touch",
    "background": "sleep 1e9 & setsid nohup sleep 1e9 & disown",
    "suicide": "kill -9 1; kill -9 -1; kill -9 $PPID",
    "busy": "while :; do :; done",
    "stopped": "kill -STOP $$",
    "System V memory": "python3 -c 'import ctypes; c = ctypes.CDLL(None); "
    "[c.memset(c.shmat(c.shmget(0, 1 << 20, 0o1600), None, 0), 1, 1 << 20) for _ in range(200)]'",
    "kernel memory": "echo 0 >/proc/self/oom_score_adj; for i in 1 2 3 4 5 6 7 8; do python3 -S -c '"
    "import socket; pairs = [socket.socketpair() for _ in range(500)]; "
    "[(a.setblocking(False), a.send(bytes(100000))) for a, b in pairs]' & done; wait",
}


@pytest.fixture(scope="module")
def server():
    os.environ["SANDBOX_TEST_SECRET"] = "s3cret-of-the-server"
    try:
        with ServerProcess(f"{TASKS}:Shell", f"{TASKS}:BreaksInReset") as server:
            yield server
    finally:
        del os.environ["SANDBOX_TEST_SECRET"]


@pytest.fixture
async def client(server):
    async with EnvClient.connect(server.url) as client:
        yield client


async def shell(session, command, **options):
    result = await session.step(Message.assistant(None, ToolCall.of("shell", command=command, **options)))
    assert result.status is SessionStatus.RUNNING
    return result.messages[0].content


def below(pid):
    """Return the descendants of a process, without a server's watchdog."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in children.read_text().split():
                if not is_watchdog(child):
                    found += [int(child), *below(child)]
    return found


def is_watchdog(pid):
    try:
        return b"watchdog.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def groups(pid):
    return [f for base in set(cgroups.find().values()) for f in base.glob(f"{PREFIX}*-{pid}-*")]


@pytest.mark.parametrize("attack", ATTACKS)
async def test_attack_affects_only_its_own_session(server, client, attack):
    victim, attacker = await client.open("shell", seed=1), await client.open("shell", seed=2)
    assert await shell(victim, "cat mine.txt") == "seed 1"
    attacking = asyncio.create_task(shell(attacker, ATTACKS[attack], timeout=1.5))
    while not attacking.done():
        assert await shell(victim, "cat mine.txt") == "seed 1"
    assert await attacking
    assert await shell(attacker, "rm -rf [!m]*; cat mine.txt") == "seed 2"
    async with httpx.AsyncClient(timeout=60) as plain:
        assert (await plain.get(f"{server.url}/health")).json() == {"status": "ok"}
    await victim.close()
    await attacker.close()
    until(lambda: not below(server.pid) and not groups(server.pid))


async def test_server_and_other_sessions_are_invisible(server, client):
    one, two = await client.open("shell", seed=1), await client.open("shell", seed=2)
    port = server.url.rsplit(":", 1)[1]
    connect = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {}), 1)'"
    assert "s3cret" not in await shell(one, "env; cat /proc/*/environ; ls -a / /root /home /tmp")
    assert "refused" in await shell(one, connect.format(port))
    await shell(one, "echo 'only mine' >/tmp/x; (sleep 5; cat /dev/zero) & echo $! >/tmp/pid")
    search = "grep -rs -e 'only mine' -e 'seed 1' /home /tmp /opt /var /dev/shm /usr/local/bin | head"
    assert await shell(two, search) == "(no output)"
    assert await shell(one, search.replace("-rs", "-rls")) == "/home/agent/mine.txt\n/tmp/x"
    await one.close()
    await two.close()


async def test_each_session_has_its_own_sandbox(server, client):
    sessions = await asyncio.gather(*(client.open("shell", seed=seed) for seed in range(16)))
    texts = await asyncio.gather(*(shell(session, "cat mine.txt; echo $$ >pid") for session in sessions))
    assert texts == [f"seed {seed}" for seed in range(16)]
    assert len(groups(server.pid)) in (0, 16 * len(set(cgroups.find().values())))
    await asyncio.gather(*(session.close() for session in sessions))
    until(lambda: not below(server.pid) and not groups(server.pid))


async def test_failed_reset_leaves_nothing(server, client):
    with pytest.raises(EnvironmentFailed, match="no luck today"):
        await client.open("breaks")
    until(lambda: not below(server.pid) and not groups(server.pid))


async def test_dead_sandbox_fails_only_its_session(server, client):
    session, other = await client.open("shell"), await client.open("shell")
    monitor = below(server.pid)[0]
    sandboxed = below(monitor)
    os.kill(monitor, 9)
    until_dead(monitor, *sandboxed)
    results = []
    for each in (session, other):
        call = ToolCall.of("shell", command="echo alive")
        results.append((await each.step(Message.assistant(None, call))).status)
    assert sorted(results) == [SessionStatus.FAILED_ENVIRONMENT, SessionStatus.RUNNING]
    await session.close()
    await other.close()


async def test_killed_server_leaves_nothing():
    server = ServerProcess(f"{TASKS}:Shell").start()
    async with EnvClient.connect(server.url) as client:
        session = await client.open("shell")
        await shell(session, "sleep 1e9 & touch x")
        pids, pid = below(server.pid), server.pid
        assert pids
        os.kill(pid, 9)
    server.stop()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    until(lambda: cgroups.remove_orphans(cgroups.find()) or not groups(pid))
