"""Steps of the sessions of a table: one, or many at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial

from agentrl_env.errors import StepPending, WireError
from agentrl_env.fast_wire import Said, StepItem
from agentrl_env.session.answering import Awaited, settled
from agentrl_env.session.session_table import Entry, SessionTable

SOME = 128
"""So many steps of a batch begin before their threads are given a moment: more at once only fill the
processor's caches with what waits."""
MOMENT_S = 0.002
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
            for begin in range(0, len(steps), SOME):
                for position in range(begin, min(begin + SOME, len(steps))):
                    self._begin(batch, position)
                if batch.under_way >= SOME and batch.quick:
                    await batch.get_on()
        else:
            groups: dict[str, list[int]] = {}
            for position, step in enumerate(steps):
                groups.setdefault(step.session_id, []).append(position)
            for group in groups.values():
                self._begin_group(batch, group)
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
            self._begin_group(batch, [position])
        else:
            self._table.enter(step.session_id, entry)
            batch.begin()
            begun.add_done_callback(partial(self._end, batch, position, entry))

    def _end(self, batch: _Batch, position: int, entry: Entry, step: Awaited[bytes]) -> None:
        session = entry.session
        try:
            batch.answers[position] = session.finished(step)
        except WireError as error:
            batch.answers[position] = error
        finally:
            self.leave(session.session_id, entry)
            batch.end()

    def _begin_group(self, batch: _Batch, positions: list[int]) -> None:
        batch.begin()
        asyncio.create_task(self._step_group(batch, positions)).add_done_callback(batch.end)

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
        self.under_way = 0
        self.quick = True
        """Whether those that have begun have always ended within a moment."""
        self._over: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Wait for some work too."""
        self.under_way += 1

    def end(self, _: object = None) -> None:
        """Take note that work is done."""
        self.under_way -= 1
        if self.under_way == 0 and self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def get_on(self) -> None:
        """Wait a moment for what is under way."""
        self.quick = await self._ended(MOMENT_S)

    async def answered(self, seconds: float) -> list[bytes | WireError]:
        """Return the answers once they are all there, at most so many seconds later."""
        await self._ended(seconds)
        pending = StepPending(ASK_AGAIN)
        return [pending if answer is None else answer for answer in self.answers]

    async def _ended(self, seconds: float) -> bool:
        """Wait until nothing is under way; return whether that is so within so many seconds."""
        if not self.under_way:
            return True
        self._over = asyncio.get_running_loop().create_future()
        return await settled(self._over, seconds)
