"""History of ended sessions."""

import pytest

from agentrl_env import Message, ToolCall, tool
from agentrl_env.session.pool import SessionPool
from agentrl_env.wire import OpenRequest
from tests.env.tasks import Quick, close_session, play_step


def says(name, **arguments):
    return Message.assistant(None, ToolCall.of(name, **arguments))


async def opened(pool):
    return (await pool.open(OpenRequest(task="long"))).session_id


@pytest.fixture
async def pool():
    pool = SessionPool([Long])
    yield pool
    await pool.aclose()


class Long(Quick):
    """Returns large results."""

    max_turns = 20

    @tool
    def say(self):
        """Return a large result."""
        return "x" * 20_000


async def test_ended_session_keeps_only_its_last_large_results(pool):
    session_id = await opened(pool)
    for seq in range(1, 6):
        last = await play_step(pool, session_id, seq, says("say"))
    assert len(list(pool.session(session_id).history)) == 5
    await close_session(pool, session_id)
    assert [result.seq for _, result in pool.session(session_id).history] == [4, 5]
    assert await play_step(pool, session_id, 5, says("say")) == last


async def test_ended_session_keeps_all_small_results(pool):
    session_id = await opened(pool)
    for seq in range(1, 6):
        await play_step(pool, session_id, seq, says("note", text="x"))
    await close_session(pool, session_id)
    assert len(list(pool.session(session_id).history)) == 5
