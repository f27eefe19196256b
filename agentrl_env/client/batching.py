"""Batches the concurrent steps of one event loop into shared requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from agentrl_env.errors import BodyTooLarge, InvalidRequest, StepPending, WireError
from agentrl_env.fast_wire import message_to_json
from agentrl_env.types import Message, StepResult

MIN_STEPS = 32
"""Steps that a batch may always hold; smaller batches cost more requests than they save time."""
MAX_STEPS = 128
MAX_BYTES = 1024 * 1024
MAX_UNDER_WAY = 4
"""Batches under way at once; further steps wait and fill the next ones."""
EARLY_ANSWER_S = 0.25
"""Seconds until a batch is answered; steps that are not ready are requested again one by one."""
MAX_SLOW = 4096

SendBatch = Callable[[Sequence["QueuedStep"]], Awaitable[list[StepResult | WireError]]]
SendAlone = Callable[["QueuedStep"], Awaitable[StepResult]]


@dataclass(slots=True)
class QueuedStep:
    """A step that waits to be sent."""

    session_id: str
    seq: int
    body: bytes
    answer: asyncio.Future[StepResult] = field(repr=False)


class Batcher:
    """Queue of the steps of one event loop.

    Steps of one tick share two requests, so that the server plays one half while the client reads the other.
    While ``MAX_UNDER_WAY`` batches are under way, further steps queue; a single step is sent alone. A batch
    is answered early: slower steps are requested again one by one (the same ``seq`` waits for the first), and
    their sessions stay out of batches until they are fast again, so that a slow tool delays no other session.
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
        """Send one step, in a batch where there are others.

        Raises what the senders raise, and InvalidRequest where the message cannot be sent as JSON.
        """
        loop = asyncio.get_running_loop()
        try:
            text = message_to_json(message)
        except PydanticSerializationError as error:
            raise InvalidRequest(f"the message cannot be sent as JSON: {error}") from error
        body = b'{"session_id":%b,"seq":%d,"message":%b}' % (to_json(session_id), seq, text)
        item = QueuedStep(session_id, seq, body, loop.create_future())
        if session_id in self._slow:
            return await self._step_alone(item)
        self._queue.append(item)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)
        return await item.answer

    def _flush(self) -> None:
        self._scheduled = False
        number = min(max(MIN_STEPS, (len(self._queue) + 1) // 2), MAX_STEPS)
        while self._queue and self._under_way < MAX_UNDER_WAY:
            items = self._take(number)
            if items:
                self._under_way += 1
                self._spawn(self._deliver(items) if len(items) > 1 else self._deliver_single(items[0]))

    def _take(self, number: int) -> list[QueuedStep]:
        items: list[QueuedStep] = []
        size = 0
        while self._queue and len(items) < number and size < MAX_BYTES:
            item = self._queue.popleft()
            if not item.answer.done():
                items.append(item)
                size += len(item.body)
        return items

    async def _deliver(self, items: list[QueuedStep]) -> None:
        try:
            results = await self._send_batch(items)
            pending = [isinstance(result, StepPending) for result in results]
            # Where most are late, the server is busy rather than a session slow.
            some_are_slow = 2 * sum(pending) < len(items)
            for item, result, late in zip(items, results, pending, strict=True):
                if late:
                    self._spawn(self._deliver_alone(item, some_are_slow))
                else:
                    _settle(item, result)
        except BodyTooLarge:  # nothing was played; one of the steps is too large by itself
            for item in items:
                self._spawn(self._deliver_alone(item, False))
        except Exception as error:
            for item in items:
                _settle(item, error)
        finally:
            self._under_way -= 1
            self._flush()

    async def _deliver_single(self, item: QueuedStep) -> None:
        """Send a single step; once late, it no longer counts as a batch under way."""
        counted = [True]

        def end() -> None:
            if counted:
                counted.clear()
                self._under_way -= 1
                self._flush()

        late = asyncio.get_running_loop().call_later(EARLY_ANSWER_S, end)
        try:
            _settle(item, await self._send_alone(item))
        except Exception as error:
            _settle(item, error)
        finally:
            late.cancel()
            end()

    async def _deliver_alone(self, item: QueuedStep, slow: bool) -> None:
        if slow:
            self._slow[item.session_id] = None
            if len(self._slow) > MAX_SLOW:
                del self._slow[next(iter(self._slow))]
        try:
            _settle(item, await self._send_alone(item))
        except Exception as error:
            _settle(item, error)

    async def _step_alone(self, item: QueuedStep) -> StepResult:
        begin = self._clock()
        result = await self._send_alone(item)
        if result.final or self._clock() - begin < EARLY_ANSWER_S:
            self._slow.pop(item.session_id, None)
        return result

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _settle(item: QueuedStep, result: StepResult | Exception) -> None:
    if item.answer.done():
        return
    if isinstance(result, StepResult):
        item.answer.set_result(result)
    else:
        item.answer.set_exception(result)
