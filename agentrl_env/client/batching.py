"""Steps that are asked for at the same time travel in one request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from agentrl_env.errors import AgentRLError, StepPending, WireError
from agentrl_env.types import Message, StepResult

MAX_STEPS = 128
MAX_BYTES = 1024 * 1024
MAX_UNDER_WAY = 4
"""Batches under way at once; meanwhile the next ones fill."""
EARLY_ANSWER_S = 0.1
"""A batch is answered after this long at the latest; who is not ready asks again alone."""
MAX_SLOW = 4096

SendBatch = Callable[[Sequence["QueuedStep"]], Awaitable[list[StepResult | WireError]]]
SendAlone = Callable[["QueuedStep"], Awaitable[StepResult]]


@dataclass(slots=True)
class QueuedStep:
    """A step waiting to be sent."""

    session_id: str
    body: bytes
    answer: asyncio.Future[StepResult] = field(repr=False)


class Batcher:
    """Gathers the steps of one event loop.

    What is asked for in one tick goes out together; while ``MAX_UNDER_WAY`` batches are under way
    the rest gathers. A batch is answered early: steps that take longer are asked for again one by
    one (the same ``seq`` waits for the first), and their sessions stay out of batches until they
    are quick again, so that a slow tool delays nobody else.
    """

    def __init__(
        self,
        send_batch: SendBatch,
        send_alone: SendAlone,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send_batch = send_batch
        self._send_alone = send_alone
        self._clock = clock
        self._queue: deque[QueuedStep] = deque()
        self._under_way = 0
        self._scheduled = False
        self._slow: dict[str, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def step(self, session_id: str, seq: int, message: Message) -> StepResult:
        """Send one step, together with others where that helps."""
        loop = asyncio.get_running_loop()
        body = b'{"session_id":%b,"seq":%d,"message":%b}' % (
            to_json(session_id),
            seq,
            message.model_dump_json().encode(),
        )
        item = QueuedStep(session_id, body, loop.create_future())
        if session_id in self._slow:
            return await self._alone(item)
        self._queue.append(item)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)
        return await item.answer

    def _flush(self) -> None:
        self._scheduled = False
        while self._queue and self._under_way < MAX_UNDER_WAY:
            items = self._take()
            if items:
                self._under_way += 1
                self._spawn(self._deliver(items))

    def _take(self) -> list[QueuedStep]:
        items: list[QueuedStep] = []
        size = 0
        while self._queue and len(items) < MAX_STEPS and size < MAX_BYTES:
            item = self._queue.popleft()
            if not item.answer.done():  # else its caller has gone
                items.append(item)
                size += len(item.body)
        return items

    async def _deliver(self, items: list[QueuedStep]) -> None:
        try:
            for item, result in zip(items, await self._send_batch(items), strict=True):
                if isinstance(result, StepPending):
                    self._spawn(self._deliver_alone(item))
                else:
                    _settle(item, result)
        except AgentRLError as error:
            for item in items:
                _settle(item, error)
        finally:
            self._under_way -= 1
            self._flush()

    async def _deliver_alone(self, item: QueuedStep) -> None:
        try:
            _settle(item, await self._alone(item))
        except AgentRLError as error:
            _settle(item, error)

    async def _alone(self, item: QueuedStep) -> StepResult:
        begin = self._clock()
        result = await self._send_alone(item)
        if result.final or self._clock() - begin < EARLY_ANSWER_S:
            self._slow.pop(item.session_id, None)
        else:
            self._slow[item.session_id] = None
            if len(self._slow) > MAX_SLOW:
                del self._slow[next(iter(self._slow))]
        return result

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _settle(item: QueuedStep, result: StepResult | AgentRLError) -> None:
    if item.answer.done():
        return  # its caller has gone
    if isinstance(result, StepResult):
        item.answer.set_result(result)
    else:
        item.answer.set_exception(result)
