"""What a server in a container may do, how it ends, and that nothing of it stays behind."""

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
from agentrl_env.launch.docker import DockerServer
from agentrl_env.launch.docker_daemon import FOLDER_PREFIX, sweep
from agentrl_env.launch.placement import Limits
from tests.docker.conftest import until

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def server(probe):
    """Serve the probing task, as tightly as the default is."""
    limits = Limits(memory="512m", pids=64, tmp="16m")
    with DockerServer(image=probe, limits=limits, environment={"COLOUR": "blue"}) as server:
        yield server


async def call(server, tool, **arguments):
    """Call one tool in a session of its own."""
    async with EnvClient.connect(server.url, token=server.token, timeout=60.0) as client:
        session = await client.open("probe")
        result = await session.step(ToolCall.of(tool, **arguments))
        await session.close()
        return result.messages[0].content


async def test_it_is_nobody_and_knows_only_what_it_was_given(server):
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


async def test_it_writes_nothing_but_a_little_in_tmp(server):
    for path in ("/srv/probe/x", "/opt/agentrl/x", "/etc/x", "/run/x", "/var/tmp/x", "/run/agentrl/x"):
        assert (await call(server, "write", path=path)).split()[0] in ("OSError", "PermissionError"), path
    assert await call(server, "write", path="/tmp/small", size=1 << 20) == "written"
    assert await call(server, "write", path="/tmp/large", size=32 << 20) == "OSError 28"
    assert await call(server, "write", path="/dev/shm/large", size=128 << 20) == "OSError 28"


async def test_it_has_no_network(server):
    assert await call(server, "read", path="/sys/class/net") == "lo"
    assert "unreachable" in await call(server, "connect", host="10.213.0.1", port=80)
    assert "unreachable" in await call(server, "connect", host="1.1.1.1", port=443)


async def test_it_starts_no_more_processes_than_it_may(server):
    spawned = int(await call(server, "spawn", processes=200))
    assert 16 < spawned < 64
    assert await call(server, "eat", megabytes=1) == str(1 << 20)


async def test_what_takes_too_much_memory_dies_alone(server, probe):
    with DockerServer(image=probe, limits=Limits(memory="160m")) as other:
        with pytest.raises(AgentRLError):
            await call(other, "eat", megabytes=400)
        until(lambda: not other.running, "the hog is dead")
        assert await call(server, "eat", megabytes=1) == str(1 << 20)
        other.start()
        assert await call(other, "eat", megabytes=1) == str(1 << 20)


async def test_many_sessions_and_large_messages_go_through(server):
    async with EnvClient.connect(server.url, token=server.token, timeout=60.0) as client:

        async def play(number):
            session = await client.open("probe")
            text = f"{number}." * 50_000
            result = await session.step(Message(role="assistant", content=text))
            assert result.messages[0].content == f"{len(text)}:{text[::-1]}"
            await session.close()

        await asyncio.gather(*map(play, range(200)))


async def test_with_a_network_a_token_is_asked_for(probe):
    with DockerServer(image=probe, network="bridge") as server:
        assert sorted((await call(server, "read", path="/sys/class/net")).split()) == ["eth0", "lo"]
        async with EnvClient.connect(server.url) as client:
            with pytest.raises(Unauthorized):
                await client.open("probe")


async def open_and_close(caller):
    """Open one session after the other until the server takes no more."""
    while True:
        await (await caller.open("probe")).close()


async def test_a_terminated_server_finishes_what_it_has(client, probe):
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
print(server.name, server._keeper.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launcher(probe):
    """Start a process that starts a container."""
    command = [sys.executable, "-c", LAUNCHER, probe]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        name, keeper = process.stdout.readline().split()
        yield process, name, int(keeper)
        process.kill()


def names(client):
    return {container.name for container in client.containers.list(all=True)}


def folders():
    return set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))


def test_a_killed_launcher_leaves_nothing(client, launcher):
    process, name, keeper = launcher
    before = folders()
    assert name in names(client)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: name not in names(client), "the container is removed")
    until(lambda: not Path(f"/proc/{keeper}").exists() or is_zombie(keeper), "the keeper has ended")
    assert len(folders()) == len(before) - 1


def is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_a_killed_keeper_left_is_swept_by_the_next_start(client, launcher, probe):
    process, name, keeper = launcher
    assert sweep(client) == []
    os.kill(keeper, signal.SIGKILL)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert name in names(client)
    with DockerServer(image=probe) as server:
        assert names(client) & {name, server.name} == {server.name}


def test_a_server_that_ends_says_why(probe):
    with pytest.raises(ServeError, match=r"the server in the container ended: .*No such option: --fly"):
        DockerServer(image=probe, arguments=("--fly",)).start()


def test_a_server_that_is_too_slow_is_removed(probe):
    with pytest.raises(ServeError, match="did not answer within 0 s"):
        DockerServer(image=probe, start_timeout=0.0).start()


def test_a_server_without_enough_memory_to_start_says_so(probe):
    with pytest.raises(ServeError, match="it took more than its 32 MiB of memory"):
        DockerServer(image=probe, limits=Limits(memory="32m")).start()


def test_an_image_that_is_not_there_is_one_sentence(daemon):
    with pytest.raises(LaunchError, match="there is no image nobody/has-this:1 here and it cannot be pulled"):
        DockerServer(image="nobody/has-this:1").start()


def test_stopping_twice_and_starting_again(probe):
    server = DockerServer(image=probe)
    with server:
        first = server.name
        assert server.start() is server
        assert server.name == first
    server.stop()
    assert not server.running
    with server:
        assert server.name != first
