import asyncio
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, SessionStatus, SyncEnvClient, ToolCall
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.errors import (
    CallTimeout,
    ClientClosed,
    NotSupported,
    ServerUnreachable,
    SessionEnded,
    UnknownSample,
    UnknownTask,
)
from agentrl_env.launch.process import ServerProcess
from tests.env.tasks import Guess, Quick, Slow

TASKS = "tests/env/tasks.py"
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server():
    with ServerProcess(f"{TASKS}:Guess", f"{TASKS}:Quick", token="s3cret", oracle=True) as server:
        yield server


@pytest.fixture(params=["local", "remote"])
def client(request):
    if request.param == "local":
        client = EnvClient.local_sync(Guess, Quick)
    else:
        server = request.getfixturevalue("server")
        client = EnvClient.connect_sync(server.url, token=server.token)
    with client:
        yield client


def play(client):
    with client.open("guess", seed=7, split="test") as session:
        while not session.status.final:
            result = session.step(session.expert())
    return result


def client_threads():
    return [thread for thread in threading.enumerate() if thread.name == "agentrl-env-client"]


def test_episode_is_played_to_its_end(client):
    assert set(client.tasks()) == {"guess", "quick"}
    result = play(client)
    assert (result.reward, result.terminated) == (1.0, True)


def test_works_inside_a_running_event_loop(client):
    async def notebook_cell():
        return play(client)

    assert asyncio.run(notebook_cell()).terminated


def test_session_has_the_attributes_of_the_async_session(client):
    with client.open("quick", index=3) as session:
        assert session.messages[0] == Message(role="system", content="Be quick.")
        assert (session.sample.index, session.tools) == (3, Quick.tool_specs())
        assert (session.turn, session.status, session.last) == (0, SessionStatus.RUNNING, None)
        assert session.session_id == session.info.session_id
        assert session.agent_token == session.info.agent_token
        result = session.step("hello")
        assert (session.turn, session.last) == (1, result)


def test_sessions_are_resumed(client):
    with client.open("quick") as session:
        session.step(ToolCall.of("note", text="a"))
        again = client.resume(session.session_id)
        assert (again.turn, again.last) == (1, session.last)
        assert again.step(ToolCall.of("note", text="b")).messages[0].content.startswith("2 ")


def test_close_is_idempotent(client):
    session = client.open("quick")
    session.close()
    session.close()
    assert session.status is SessionStatus.CANCELLED
    with pytest.raises(SessionEnded):
        session.step("hello")


def test_errors_are_raised_in_the_calling_thread(client):
    with pytest.raises(UnknownTask):
        client.open("chess")
    with pytest.raises(UnknownSample):
        client.open("quick", index=99)
    with client.open("guess") as session, pytest.raises(NotSupported):
        session.fork()


def test_sessions_are_forked():
    from tests.fuzz.tasks import Fuzzed

    with EnvClient.local_sync(Fuzzed) as client, client.open("fuzzed") as session:
        session.step(ToolCall.of("take"))
        first, second = session.fork(2)
        assert first.turn == second.turn == 1
        assert first.step(ToolCall.of("take")).messages[0].content.startswith("2")
        assert second.step(ToolCall.of("take")).messages[0].content.startswith("2")


def test_nothing_connects_before_the_first_call():
    with EnvClient.connect_sync("http://127.0.0.1:9", timeout=0.5) as client:
        assert isinstance(client, SyncEnvClient)
        with pytest.raises((ServerUnreachable, CallTimeout)):
            client.tasks()


def test_close_ends_the_sessions_and_the_thread():
    before = client_threads()
    client = EnvClient.local_sync(Slow)
    client.open("slow")
    assert len(client_threads()) == len(before) + 1
    client.close()
    client.close()
    assert len(Slow.closed) == 1
    assert client_threads() == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_stopped_thread_has_left_the_process():
    """A fork while OpenSSL's destructors of the thread run would leave their locks closed in the child."""

    async def use_openssl():
        ssl.create_default_context()
        return threading.get_native_id()

    for _ in range(50):
        loop = LoopThread()
        thread = loop.run(use_openssl())
        loop.stop()
        assert not Path(f"/proc/self/task/{thread}").exists()


def test_closed_client_raises_client_closed(client):
    before = client_threads()
    session = client.open("guess", seed=7)
    client.close()
    for call in (
        lambda: client.open("guess"),
        lambda: client.open_many(2, "guess"),
        client.tasks,
        lambda: client.resume(session.session_id),
        lambda: session.step(ToolCall.of("guess", n=1)),
        session.expert,
    ):
        with pytest.raises(ClientClosed, match="the client is closed; make another"):
            call()
    session.close()
    client.close()
    assert client_threads() == before


@pytest.mark.parametrize("scheme", ["local", "http", "ws"])
async def test_closed_async_client_raises_client_closed(server, scheme):
    client = EnvClient.local(Guess)
    if scheme != "local":
        url = server.url.replace("http", scheme, 1)
        client = EnvClient.connect(url, token=server.token)
    async with client:
        session = await client.open("guess", seed=7)
    for call in (client.tasks, lambda: client.open("guess"), lambda: client.open_many(2), session.expert):
        with pytest.raises(ClientClosed, match="is closed"):
            await call()
    await session.close()
    await client.aclose()


def test_environment_session_is_one_episode():
    with Guess.session(seed=7, split="test") as session:
        assert session.messages[0].content.startswith("I picked a number")
        assert (session.sample.seed, session.sample.split) == (7, "test")
        assert session.step(ToolCall.of("guess", n=0)).messages[0].content == "higher"
        assert session.step(session.expert()).terminated
    with Quick.session(index=4) as session:
        assert session.sample.data["n"] == 4
    with Quick.session(sample={"own": True}) as session:
        assert session.sample.data == {"own": True}


def test_environment_session_works_inside_a_running_event_loop():
    async def notebook_cell():
        with Guess.session(seed=7) as session:
            return session.step(session.expert())

    assert asyncio.run(notebook_cell()).terminated


def test_environment_session_releases_everything_when_closed():
    before = client_threads()
    session = Slow.session()
    session.close()
    session.close()
    assert len(Slow.closed) == 1
    assert client_threads() == before


def test_environment_session_releases_everything_if_it_cannot_be_opened():
    before = client_threads()
    with pytest.raises(UnknownSample):
        Quick.session(index=99)
    assert client_threads() == before


FORKED = """
import os, sys
from agentrl_env import EnvClient
from agentrl_env.errors import ClientClosed
from tests.env.tasks import Guess

client = EnvClient.local_sync(Guess)
client.tasks()
if os.fork():
    client.close()
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
try:
    client.tasks()
except ClientClosed as error:
    assert "forked" in str(error)
    client.close()
    with EnvClient.local_sync(Guess) as own:
        assert "guess" in own.tasks()
    os._exit(0)
os._exit(1)
"""


def test_client_of_the_parent_is_refused_in_a_forked_process():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
