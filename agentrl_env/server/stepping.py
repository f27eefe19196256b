"""Steps of the sessions of a table: one, or many at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agentrl_env.errors import StepPending, WireError
from agentrl_env.runner import all_settled
from agentrl_env.server.table import Entry, SessionTable
from agentrl_env.types import Message
from agentrl_env.wire import StepRequest

Answers = list[bytes | WireError | None]


class Stepper:
    """Plays steps, and keeps the leases of their sessions from running meanwhile.

    Args:
        table: the sessions.
        retire: is given the id of a session that has ended.
    """

    def __init__(self, table: SessionTable, retire: Callable[[str], None]) -> None:
        self._table = table
        self._retire = retire

    async def step(self, session_id: str, seq: int | None, message: Message) -> bytes:
        """Play one assistant message; return the StepResult as JSON.

        Raises what ``Session.step`` does, and UnknownSession.
        """
        entry = self._table.find(session_id)
        self._table.enter(session_id, entry)
        try:
            return await entry.session.answer(message, seq)
        finally:
            self.leave(session_id, entry)

    async def step_many(self, steps: Sequence[StepRequest], wait_s: float | None) -> list[bytes | WireError]:
        """Step many sessions at once, those of one session in order; return the StepResults as JSON.

        Args:
            steps: what to play.
            wait_s: answer after so many seconds, with StepPending for what is not ready.
        """
        answers: Answers = [None] * len(steps)
        if len({step.session_id for step in steps}) == len(steps):
            waiting = self._step_each(steps, answers)
        else:
            waiting = self._step_groups(steps, answers)
        if waiting:
            await all_settled(waiting, math.inf if wait_s is None else wait_s)
        pending = StepPending("the step is still under way; ask again with the same seq")
        return [pending if answer is None else answer for answer in answers]

    def leave(self, session_id: str, entry: Entry) -> None:
        """Let a session's lease run again, or retire it where it has ended."""
        self._table.leave(session_id, entry)
        if entry.session.status.final:
            self._retire(session_id)

    def _step_each(self, steps: Sequence[StepRequest], answers: Answers) -> list[asyncio.Task[Any]]:
        """Step sessions that are all different; return the tasks that steps were left to."""
        tasks: list[asyncio.Task[Any]] = []
        for position, step in enumerate(steps):
            session_id = step.session_id
            try:
                entry = self._table.find(session_id)
                begun = entry.session.begin_step(step.message, step.seq)
            except WireError as error:
                answers[position] = error
                continue
            self._table.enter(session_id, entry)
            if isinstance(begun, bytes):
                answers[position] = begun
                self.leave(session_id, entry)
            elif begun is None:
                self.leave(session_id, entry)
                tasks.append(asyncio.create_task(self._step_group(steps, [position], answers)))
            else:
                begun.add_done_callback(partial(self._end_step, entry, answers, position))
                tasks.append(begun)
        return tasks

    def _end_step(self, entry: Entry, answers: Answers, position: int, step: asyncio.Task[bytes]) -> None:
        session = entry.session
        try:
            answers[position] = session.finished(step)
        except WireError as error:
            answers[position] = error
        finally:
            self.leave(session.session_id, entry)

    def _step_groups(self, steps: Sequence[StepRequest], answers: Answers) -> list[asyncio.Task[Any]]:
        groups: dict[str, list[int]] = {}
        for position, step in enumerate(steps):
            groups.setdefault(step.session_id, []).append(position)
        return [asyncio.create_task(self._step_group(steps, group, answers)) for group in groups.values()]

    async def _step_group(self, steps: Sequence[StepRequest], positions: list[int], answers: Answers) -> None:
        """Play the steps of one session, one after another."""
        for position in positions:
            step = steps[position]
            try:
                answers[position] = await self.step(step.session_id, step.seq, step.message)
            except WireError as error:
                answers[position] = error
