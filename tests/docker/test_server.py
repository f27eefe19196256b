"""Servers in containers: isolation, limits, shutdown, cleanup."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.errors import AgentRLError, LaunchError, ServeError, ServerDraining, Unauthorized
from agentrl_env.launch.docker import ContainerLimits, DockerServer
from agentrl_env.sandbox.docker_daemon import FOLDER_PREFIX, remove_orphans
from tests.processes import alive, until

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def server(probe):
    """Serve the probing task with tight limits."""
    limits = ContainerLimits(memory="512m", pids=64, tmp="16m")
    with DockerServer(image=probe, limits=limits, environment={"COLOUR": "blue"}) as server:
        yield server


async def call(server, tool, **arguments):
    """Call one tool in a new session."""
    async with EnvClient.connect(server.url, token=server.token, timeout=60.0) as client:
        session = await client.open("probe")
        result = await session.step(ToolCall.of(tool, **arguments))
        await session.close()
        return result.messages[0].content


async def test_server_has_no_privileges_and_only_the_given_environment(server):
    identity, *names = (await call(server, "identity")).split()
    assert identity == "65532:65532"
    ours = {"COLOUR", "HOME", "HOSTNAME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
    assert set(names) - {"LC_CTYPE", "PYGAME_HIDE_SUPPORT_PROMPT"} == ours  # Python and Gymnasium set them
    status = dict(
        line.split(":\t", 1) for line in (await call(server, "read", path="/proc/self/status")).splitlines()
    )
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


async def test_only_tmp_is_writable_and_limited(server):
    for path in ("/srv/probe/x", "/opt/agentrl/x", "/etc/x", "/run/x", "/var/tmp/x", "/run/agentrl/x"):
        assert (await call(server, "write", path=path)).split()[0] in ("OSError", "PermissionError"), path
    assert await call(server, "write", path="/tmp/small", size=1 << 20) == "written"
    assert await call(server, "write", path="/tmp/large", size=32 << 20) == "OSError 28"
    assert await call(server, "write", path="/dev/shm/large", size=128 << 20) == "OSError 28"


async def test_there_is_no_network(server):
    assert await call(server, "read", path="/sys/class/net") == "lo"
    assert "unreachable" in await call(server, "connect", host="10.213.0.1", port=80)
    assert "unreachable" in await call(server, "connect", host="1.1.1.1", port=443)


async def test_processes_are_limited(server):
    spawned = int(await call(server, "spawn", processes=200))
    assert 16 < spawned < 64
    assert await call(server, "eat", megabytes=1) == str(1 << 20)


async def test_exceeding_memory_ends_only_that_server(server, probe):
    with DockerServer(image=probe, limits=ContainerLimits(memory="160m")) as other:
        with pytest.raises(AgentRLError):
            await call(other, "eat", megabytes=400)
        until(lambda: not other.running, "the container was killed")
        assert await call(server, "eat", megabytes=1) == str(1 << 20)
        other.start()
        assert await call(other, "eat", megabytes=1) == str(1 << 20)


async def test_many_sessions_and_large_messages_are_forwarded(server):
    async with EnvClient.connect(server.url, token=server.token, timeout=60.0) as client:

        async def play(number):
            session = await client.open("probe")
            text = f"{number}." * 50_000
            result = await session.step(Message(role="assistant", content=text))
            assert result.messages[0].content == f"{len(text)}:{text[::-1]}"
            await session.close()

        await asyncio.gather(*map(play, range(200)))


async def test_server_with_a_network_requires_a_token(bridge, probe):
    with DockerServer(image=probe, network="bridge") as server:
        assert sorted((await call(server, "read", path="/sys/class/net")).split()) == ["eth0", "lo"]
        async with EnvClient.connect(server.url) as client:
            with pytest.raises(Unauthorized):
                await client.open("probe")


async def open_and_close(caller):
    """Open sessions until the server is full."""
    while True:
        await (await caller.open("probe")).close()


async def test_stop_drains_open_sessions(client, probe):
    server = DockerServer(image=probe, drain=60.0).start()
    async with EnvClient.connect(server.url) as caller:
        session = await caller.open("probe")
        container = client.containers.get(server.name)
        stopping = threading.Thread(target=server.stop)
        stopping.start()

        async with asyncio.timeout(60):
            with pytest.raises(ServerDraining):
                await open_and_close(caller)
        result = await session.step(ToolCall.of("eat", megabytes=1))
        assert result.messages[0].content == str(1 << 20)
        ended = asyncio.create_task(asyncio.to_thread(container.wait, timeout=60))
        await session.close()
        assert (await ended)["StatusCode"] == 0
        await asyncio.to_thread(stopping.join, 60)
    assert not server.running
    assert "serving probe" in server.output()


LAUNCHER = """
import sys
from agentrl_env.launch.docker import DockerServer
server = DockerServer(image=sys.argv[1]).start()
print(server.name, server._sidecar.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launcher(probe):
    """Start a process that starts a container."""
    command = [sys.executable, "-c", LAUNCHER, probe]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        name, sidecar = process.stdout.readline().split()
        yield process, name, int(sidecar)
        process.kill()


def names(client):
    return {container.name for container in client.containers.list(all=True, ignore_removed=True)}


def folders():
    return set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))


def test_killed_launcher_leaves_nothing(client, launcher):
    process, name, sidecar = launcher
    before = folders()
    assert name in names(client)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: name not in names(client), "the container is removed")
    until(lambda: not alive(sidecar), "the sidecar has ended")
    assert len(folders()) == len(before) - 1


def test_container_of_a_killed_sidecar_is_removed_by_the_next_start(client, launcher, probe):
    process, name, sidecar = launcher
    assert remove_orphans(client) == []
    os.kill(sidecar, signal.SIGKILL)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert name in names(client)
    with DockerServer(image=probe) as server:
        assert names(client) & {name, server.name} == {server.name}


def test_server_that_ends_raises_its_error(probe):
    with pytest.raises(ServeError, match=r"the server in the container ended: .*No such option: --fly"):
        DockerServer(image=probe, arguments=("--fly",)).start()


def test_server_that_starts_too_slowly_is_removed(probe):
    with pytest.raises(ServeError, match="did not answer within 0 s"):
        DockerServer(image=probe, start_timeout=0.0).start()


def test_server_without_enough_memory_raises(probe):
    with pytest.raises(ServeError, match="it exceeded its 32 MiB of memory"):
        DockerServer(image=probe, limits=ContainerLimits(memory="32m")).start()


def test_missing_image_is_a_clear_error(daemon):
    with pytest.raises(LaunchError, match="nobody/has-this:1 is not on this machine and cannot be pulled"):
        DockerServer(image="nobody/has-this:1").start()


def test_stop_is_idempotent_and_server_can_be_restarted(probe):
    server = DockerServer(image=probe)
    with server:
        first = server.name
        assert server.start() is server
        assert server.name == first
    server.stop()
    assert not server.running
    with server:
        assert server.name != first
