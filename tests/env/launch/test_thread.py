import asyncio
import threading

import pytest

from agentrl_env import EnvClient
from agentrl_env.errors import ServeError, TargetError
from agentrl_env.launch.process import ServerHandle, ServerThread
from tests.env.tasks import Quick


def handle(server: ServerHandle) -> ServerHandle:
    """Return the server, typed as the protocol that it implements."""
    return server


async def test_class_of_this_process_is_served_until_stop():
    before = threading.active_count()
    server = handle(ServerThread(Quick, token="s3cret"))
    with server:
        assert server.running
        async with EnvClient.connect(server.url, token="s3cret") as client:
            session = await client.open(Quick.name)
            await session.close()
        assert server.start() is server
    assert not server.running
    server.stop()
    assert threading.active_count() <= before + 1  # the client's event loop


def test_server_can_be_restarted():
    server = ServerThread(Quick)
    for _ in range(2):
        with server:
            assert server.running


def test_start_raises_the_servers_error():
    with pytest.raises(TargetError, match="no such folder"):
        ServerThread("nowhere").start()
    with ServerThread(Quick) as server, pytest.raises(ServeError, match="choose another port"):
        ServerThread(Quick, port=int(server.url.rpartition(":")[2])).start()


async def test_hurry_cuts_the_drain_of_stop_short():
    server = ServerThread(Quick, drain=6000.0).start()
    async with EnvClient.connect(server.url) as client:
        await client.open(Quick.name)
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        async with asyncio.timeout(60):
            while not stopping.done():
                server.stop_waiting()
                await asyncio.sleep(0.05)
    assert not server.running
