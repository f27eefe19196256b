"""Steps of the sessions of a table: one, or many at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agentrl_env.errors import StepPending, WireError
from agentrl_env.server.table import Entry, SessionTable
from agentrl_env.session.runner import settled
from agentrl_env.session.speech import Said, StepItem

ASK_AGAIN = "the step is still under way; ask again with the same seq"


class Stepper:
    """Plays steps, and keeps the leases of their sessions from running meanwhile.

    Args:
        table: the sessions.
        retire: is given the id of a session that has ended.
    """

    def __init__(self, table: SessionTable, retire: Callable[[str], None]) -> None:
        self._table = table
        self._retire = retire

    async def step(self, session_id: str, seq: int | None, message: Said) -> bytes:
        """Play one assistant message; return the StepResult as JSON.

        Raises what ``Session.step`` does, and UnknownSession.
        """
        entry = self._table.find(session_id)
        self._table.enter(session_id, entry)
        try:
            return await entry.session.answer(message, seq)
        finally:
            self.leave(session_id, entry)

    async def step_many(self, steps: Sequence[StepItem], wait_s: float | None) -> list[bytes | WireError]:
        """Step many sessions at once, those of one session in order; return the StepResults as JSON.

        Args:
            steps: what to play.
            wait_s: answer after so many seconds, with StepPending for what is not ready.
        """
        batch = _Batch(steps)
        if len({step.session_id for step in steps}) == len(steps):
            for position in range(len(steps)):
                self._begin(batch, position)
        else:
            groups: dict[str, list[int]] = {}
            for position, step in enumerate(steps):
                groups.setdefault(step.session_id, []).append(position)
            for group in groups.values():
                batch.add(asyncio.create_task(self._step_group(batch, group)))
        return await batch.answered(math.inf if wait_s is None else wait_s)

    def leave(self, session_id: str, entry: Entry) -> None:
        """Let a session's lease run again, or retire it where it has ended."""
        self._table.leave(session_id, entry)
        if entry.session.status.final:
            self._retire(session_id)

    def _begin(self, batch: _Batch, position: int) -> None:
        """Begin one step of a batch whose sessions are all different."""
        step = batch.steps[position]
        try:
            entry = self._table.find(step.session_id)
            begun = entry.session.begin_step(step.message, step.seq)
        except WireError as error:
            batch.answers[position] = error
            return
        if isinstance(begun, bytes):
            batch.answers[position] = begun
            self._table.touch(step.session_id, entry)
            if entry.session.status.final:
                self._retire(step.session_id)
        elif begun is None:  # another step of the session is under way
            batch.add(asyncio.create_task(self._step_group(batch, [position])))
        else:
            self._table.enter(step.session_id, entry)
            batch.add(begun, partial(self._end, batch, position, entry))

    def _end(self, batch: _Batch, position: int, entry: Entry, step: asyncio.Future[bytes]) -> None:
        session = entry.session
        try:
            batch.answers[position] = session.finished(step)
        except WireError as error:
            batch.answers[position] = error
        finally:
            self.leave(session.session_id, entry)

    async def _step_group(self, batch: _Batch, positions: list[int]) -> None:
        """Play the steps of one session, one after another."""
        for position in positions:
            step = batch.steps[position]
            try:
                batch.answers[position] = await self.step(step.session_id, step.seq, step.message)
            except WireError as error:
                batch.answers[position] = error


class _Batch:
    """Steps that are answered together."""

    def __init__(self, steps: Sequence[StepItem]) -> None:
        self.steps = steps
        self.answers: list[bytes | WireError | None] = [None] * len(steps)
        self._under_way = 0
        self._all: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(
        self, work: asyncio.Future[Any], end: Callable[[asyncio.Future[Any]], None] | None = None
    ) -> None:
        """Wait for some work too; ``end`` is called when it is done."""

        def count(done: asyncio.Future[Any]) -> None:
            self._under_way -= 1
            if self._under_way == 0 and not self._all.done():
                self._all.set_result(None)
            if end is not None:
                end(done)

        self._under_way += 1
        work.add_done_callback(count)

    async def answered(self, seconds: float) -> list[bytes | WireError]:
        """Return the answers once they are all there, at most so many seconds later."""
        if self._under_way:
            await settled(self._all, seconds)
        pending = StepPending(ASK_AGAIN)
        return [pending if answer is None else answer for answer in self.answers]
