import threading

import pytest

from agentrl_env import EnvClient
from agentrl_env.errors import ServeError, TargetError
from agentrl_env.launch.placement import Placed
from agentrl_env.launch.thread import ServerThread
from tests.env.tasks import Quick


def placed(server: Placed) -> Placed:
    """Accept what is a server placed somewhere; the types say that each way is."""
    return server


async def test_a_class_of_this_process_is_served_until_it_is_stopped():
    before = threading.active_count()
    server = placed(ServerThread(Quick, token="s3cret"))
    with server:
        assert server.running
        async with EnvClient.connect(server.url, token="s3cret") as client:
            session = await client.open(Quick.name)
            await session.close()
        assert server.start() is server
    assert not server.running
    server.stop()
    assert threading.active_count() <= before + 1  # the client's own loop


def test_it_can_be_started_again():
    server = ServerThread(Quick)
    for _ in range(2):
        with server:
            assert server.running


def test_what_cannot_be_served_is_told_to_the_caller():
    with pytest.raises(TargetError, match="no such folder"):
        ServerThread("nowhere").start()
    with ServerThread(Quick) as server, pytest.raises(ServeError, match="choose another port"):
        ServerThread(Quick, port=int(server.url.rpartition(":")[2])).start()
