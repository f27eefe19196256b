"""Fixtures for the SDK's tests: servers, and tasks with a duration that the test controls."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest
import uvicorn.server

from agentrl_env.hosting.serve import EnvServer
from agentrl_env.server.limits import Limits
from tests.env.tasks import Quick, Slow

UNHURRIED = Limits(loop_share=1.0)
"""On a busy machine, agents seem to block the event loop."""


@pytest.fixture(autouse=True, scope="session")
def quick_stops():
    """Make uvicorn check for shutdown ten times as often, because tests stop hundreds of servers."""
    often = SimpleNamespace(**{**vars(asyncio), "sleep": lambda delay: asyncio.sleep(delay / 10)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", often)
        yield


@pytest.fixture(autouse=True)
def slow():
    """Prepare the task ``slow``. Release all waiting calls at the end."""
    Slow.prepare()
    yield Slow
    Slow.blocker.set()
    Slow.gate.set()


@pytest.fixture
async def serving():
    """Return a function that starts a server, by default of ``Quick``."""
    async with AsyncExitStack() as stack:

        async def start(*environments, **options):
            server = EnvServer(
                environments or (Quick,), **{"port": 0, "drain_s": 0.0, "limits": UNHURRIED, **options}
            )
            await server.start()
            stack.push_async_callback(server.stop)
            return server

        yield start
