"""Author code that blocks an event loop is reported with its file and line."""

import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Environment, ToolCall, tool
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.session import loop_watch
from agentrl_env.session.loop_watch import Block, LoopWatch, warn_of_blocks

HERE = str(Path(__file__).relative_to(Path.cwd()))
release = threading.Event()


class Stuck(Environment):
    """Waits for something else."""

    def reset(self, sample, rng):
        return "Wait."

    @tool
    async def wait(self):
        """Wait."""
        release.wait(30)
        return "done"


WAITING = f"Stuck.wait() blocks the event loop at {HERE}:{Stuck.wait.__code__.co_firstlineno + 3}"


@pytest.fixture(autouse=True)
def held():
    release.clear()
    yield
    release.set()


def release_on(message: str):
    class Handler(logging.Handler):
        def emit(self, record):
            lines.append(record)
            if message in record.getMessage():
                release.set()

    lines: list[logging.LogRecord] = []
    return Handler(), lines


async def test_server_logs_a_warning_that_names_the_tool(monkeypatch):
    monkeypatch.setattr(loop_watch, "BLOCKED_S", 0.1)
    handler, lines = release_on("blocks the event loop")
    logger = logging.getLogger("agentrl_env")
    logger.addHandler(handler)
    server = EnvServer([Stuck], port=0, drain_s=0.0)
    await server.start()
    try:
        async with EnvClient.connect(server.url) as client:
            session = await client.open("stuck")
            result = await session.step(ToolCall.of("wait"))
    finally:
        await server.stop()
        logger.removeHandler(handler)
    assert result.messages[0].content == "done"
    (record,) = [line for line in lines if "blocks" in line.getMessage()]
    assert record.getMessage().startswith(WAITING)
    assert "all sessions of this process wait" in record.getMessage()
    assert record.levelno == logging.WARNING
    assert record.facts["function"] == "Stuck.wait"


async def test_place_is_named_once_a_minute(caplog):
    watch = warn_of_blocks(0.5)
    block = Block(function="Stuck.wait", place="environment.py:7")
    for _ in range(3):
        watch._report(block)
    watch._report(Block(function="Stuck.wait", place="environment.py:9"))
    assert [record.facts["place"] for record in caplog.records] == ["environment.py:7", "environment.py:9"]


async def test_each_call_that_blocks_is_reported_once():
    found: list[Block] = []
    seen = threading.Event()

    def report(block: Block) -> None:
        found.append(block)
        seen.set()

    def block_until_reported() -> None:
        assert seen.wait(30)
        seen.clear()
        release.wait(0.3)  # the same call continues

    watch = LoopWatch(0.05, report)
    watch.start()
    for _ in range(3):
        block_until_reported()
        await asyncio.sleep(0.2)
    watch.stop()
    assert len(found) == 3
    assert {block.function for block in found} == {"test_each_call_that_blocks_is_reported_once"}


async def test_busy_loop_of_short_calls_is_not_reported():
    found: list[Block] = []
    watch = LoopWatch(0.5, found.append)  # far more than other load takes from one short call
    watch.start()

    def short() -> None:
        time.sleep(0.001)

    loop = asyncio.get_running_loop()
    for _ in range(700):
        loop.call_soon(short)
    await asyncio.sleep(1.0)
    watch.stop()
    assert found == []


async def test_code_of_the_package_itself_is_not_reported_as_the_authors():
    stack = None

    def look() -> None:
        nonlocal stack
        stack = loop_watch.author_code(None)

    look()
    assert stack == (None, None)
