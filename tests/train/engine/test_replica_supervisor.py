"""Supervision of one engine process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.process import EngineLost
from agentrl_train.engine.replica_supervisor import ReplicaSupervisor
from agentrl_train.engine.rpc import Frame
from agentrl_train.errors import EngineError
from agentrl_train.types import SamplingParams

OPTIONS = ServingOptions(model="", stop_token_ids=(), max_sessions=4, max_context=64)
COMPLETION = {"token_ids": [7], "logprobs": [-1.0], "versions": [0], "finish_reason": "length"}


class Link:
    """An engine with a scripted start."""

    process_id = 0

    def __init__(self, begin: Callable[[], None], ready: asyncio.Event) -> None:
        self.beat: Frame = {}
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.operations: list[str] = []
        self._begin, self._ready = begin, ready

    async def start(self, *, within_s: float) -> None:
        self._begin()
        await self._ready.wait()
        self.beat = {"kv_usage": 0.0, "sampled": 5}

    async def ask(self, operation: str, **fields: object) -> Frame:
        if self.lost.done():
            raise EngineLost(self.lost.result())
        self.operations.append(operation)
        return dict(COMPLETION)

    load = ask

    def check(self) -> None:
        """Accept any silence."""

    async def stop(self) -> None:
        if not self.lost.done():
            self.lost.set_result("it was stopped")


class Site:
    """Creates links. The n-th start calls the n-th function of ``begins``."""

    def __init__(self, *begins: Callable[[], None]) -> None:
        self.links: list[Link] = []
        self.ready = asyncio.Event()
        self.ready.set()
        self._begins = begins

    def __call__(self, options: ServingOptions, *, python: str, liveness_s: float) -> Link:
        begin = self._begins[min(len(self.links), len(self._begins) - 1)]
        self.links.append(Link(begin, self.ready))
        return self.links[-1]

    async def replica(self) -> AsyncIterator[ReplicaSupervisor]:
        replica = ReplicaSupervisor(
            OPTIONS,
            name="one",
            policy="current",
            python="",
            start_s=60.0,
            liveness_s=60.0,
            weights=lambda: None,
            spawn=self,
        )
        yield replica
        await replica.close()


def well() -> None:
    """Start."""


def no_memory() -> None:
    raise OSError(12, "Cannot allocate memory")


async def generate(replica: ReplicaSupervisor) -> list[int]:
    sampling = SamplingParams(max_new_tokens=1)
    async with asyncio.timeout(60):
        return list((await replica.generate([1], sampling=sampling, session_key="a")).token_ids)


async def test_engine_is_restarted_after_failed_start() -> None:
    site = Site(well, no_memory, well)
    async for replica in site.replica():
        assert await generate(replica) == [7]
        site.links[0].lost.set_result("it died")
        async with asyncio.timeout(60):
            while len(site.links) < 3:  # noqa: ASYNC110 (the supervisor counts)
                await asyncio.sleep(0.01)
        assert await generate(replica) == [7]
        assert replica.restarts == 2
        assert replica.total("sampled") == 5 + 5


async def test_engine_that_never_starts_fails_with_reason() -> None:
    site = Site(well, no_memory)
    async for replica in site.replica():
        assert await generate(replica) == [7]
        site.links[0].lost.set_result("it died")
        with pytest.raises(EngineError, match=r"not restarted any more: OSError: .*Cannot allocate memory"):
            await until_lost(replica)


async def until_lost(replica: ReplicaSupervisor) -> None:
    """Send requests until the supervisor detects the loss."""
    while True:
        try:
            await generate(replica)
        except EngineLost:
            await asyncio.sleep(0.01)


async def test_starting_engine_sleeps_before_the_learner_runs() -> None:
    site = Site(well)
    site.ready.clear()
    async for replica in site.replica():
        falling = asyncio.create_task(replica.sleep())
        await asyncio.sleep(0.05)
        assert not falling.done()
        site.ready.set()
        await falling
        assert site.links[0].operations == ["sleep"]
        await replica.wake()
        assert site.links[0].operations == ["sleep", "wake"]
