"""Sessions that outlive their server: what it tells a controller that keeps, and how another goes on.

After each step, before its answer, a server tells the controller where the session stands. When it
dies, another server restores that and goes on under the same id. A step that was under way is played
again there: what it has done in the world outside, beyond the session's own state, may happen twice.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, ClassVar

from pydantic import TypeAdapter
from pydantic_core import to_json

from agentrl_env.errors import EnvironmentFailed, InvalidRequest, SessionEnded, SessionExpired, UnknownSession
from agentrl_env.fast_wire import StepItem, StepSaid
from agentrl_env.server.service import PoolService
from agentrl_env.server.websocket import CallSocket, Line
from agentrl_env.session.checkpoint import standing_of
from agentrl_env.session.history import History
from agentrl_env.session.pool import SessionPool
from agentrl_env.types import SessionInfo
from agentrl_env.wire import (
    AdoptCall,
    ForkAnswer,
    ForkRequest,
    Kept,
    LinkCall,
    OpenRequest,
    SessionRow,
)

logger = logging.getLogger("agentrl_env")

MAX_KEPT_BYTES = 1024 * 1024
"""A session whose standing is larger, as JSON, is not kept."""
MAX_TURNS_BYTES = 256 * 1024
"""What a session's earlier turns may take where they are kept; the oldest go first."""
ANSWERS = 2
"""The last turns that are kept whatever they take: an agent may have asked for a step and for the next."""
_NEVER = 1 << 62
_SEALED = {"session_id", "task", "client", "seq", "standing"}


class Keeping(PoolService):
    """The sessions of this process, for a controller that keeps where they stand; a ``Service``.

    Sessions of tasks that cannot fork are not kept, nor are those whose state cannot be encoded or is
    too large: they are lost with their server.

    Args:
        pool: the sessions.
        tell: sends a frame to the controller.
        token: the fleet's, from ``link_token``; it authenticates what is kept.
        complained: the tasks of which the log has said that their sessions cannot be kept.
    """

    def __init__(
        self, pool: SessionPool, tell: Callable[[str], Awaitable[None]], token: str, complained: set[str]
    ) -> None:
        super().__init__(pool)
        self._tell = tell
        self._token = token
        self._complained = complained
        self._able: frozenset[str] | None = None
        """The tasks that can fork, once known."""
        self._told: dict[str, int] = {}
        """Of each session the last turn that was told."""

    async def open(self, request: OpenRequest) -> bytes:
        """Return the ``SessionInfo`` of a new session."""
        answer = await super().open(request)
        await self._keep([SessionInfo.model_validate_json(answer).session_id])
        return answer

    async def step(self, session_id: str, step: StepSaid) -> bytes:
        """Return a ``StepResult``."""
        answer = await super().step(session_id, step)
        await self._keep([session_id])
        return answer

    def never_waits(self, session_id: str) -> bool:
        """Return whether ``step`` would be done at once; a snapshot may wait."""
        row = self.pool.row(session_id)
        kept = row is not None and (self._able is None or row.task in self._able)
        return not kept and super().never_waits(session_id)

    async def step_many(self, steps: Sequence[StepItem], wait_s: float | None) -> list[bytes]:
        """Return for each step its ``StepResult``, or the body of its error."""
        answers = await super().step_many(steps, wait_s)
        pairs = zip(steps, answers, strict=True)
        await self._keep({step.session_id for step, answer in pairs if not answer.startswith(b'{"error":')})
        return answers

    async def fork(self, session_id: str, request: ForkRequest) -> bytes:
        """Return a ``ForkAnswer``."""
        answer = await super().fork(session_id, request)
        await self._keep([fork.session_id for fork in ForkAnswer.model_validate_json(answer).sessions])
        return answer

    async def adopt(self, kept: Kept) -> None:
        """Continue a session of a server that is gone; the same call again changes nothing.

        Raises:
            InvalidRequest: the seal is not right, or the parts are not those of one session.
            EnvironmentFailed: the state is malformed, or the task cannot be restored from it.
            UnknownTask, ServerFull, ServerDraining: as for an opening.
        """
        standing = kept.standing
        seals = [(kept.seal, self._seal_of(kept))]
        seals += [(seal, self._seal(kept.session_id, *turn)) for *turn, seal in kept.turns]
        if standing is None or not all(hmac.compare_digest(*map(str.encode, pair)) for pair in seals):
            raise InvalidRequest("the session's state was not sealed with this fleet's token")
        turns = tuple((said, answer) for said, answer, _ in kept.turns)
        if (kept.task, kept.seq) != (standing.sample.task, standing.turn) or not _are_last(turns, kept):
            raise InvalidRequest("the session's state does not belong to this session, task and step")
        await self.pool.adopt(kept.session_id, kept.client, standing.model_copy(update={"turns": turns}))

    def forget(self, session_id: str) -> None:
        """Take note that a session has ended."""
        self._told.pop(session_id, None)

    async def _keep(self, session_ids: Iterable[str]) -> None:
        if self._able is None:
            tasks = await self.pool.tasks()
            self._able = frozenset(task.name for task in tasks if "fork" in task.capabilities)
        rows = [row for row in map(self.pool.row, session_ids) if row is not None and row.task in self._able]
        if len(rows) == 1:
            await self._keep_one(rows[0])
        elif rows:
            await asyncio.gather(*map(self._keep_one, rows))

    async def _keep_one(self, row: SessionRow) -> None:
        """Tell where a session stands, unless this controller knows."""
        try:
            session = self.pool.session(row.session_id)
            if session.turn <= self._told.get(row.session_id, -1):
                return
            standing = await standing_of(session, self.pool.now, self._told.get(row.session_id, -1))
        except (SessionEnded, SessionExpired, UnknownSession):
            return
        except EnvironmentFailed as error:
            await self._give_up(row, error.message)
            return
        turns = tuple((*turn, self._seal(row.session_id, *turn)) for turn in _recent(standing.turns))
        standing = standing.model_copy(update={"turns": ()})
        kept = Kept(**row.model_dump(), seq=standing.turn, standing=standing, turns=turns)
        frame = _frame(kept.model_copy(update={"seal": self._seal_of(kept)}))
        if len(frame) > MAX_KEPT_BYTES:
            await self._give_up(row, f"it takes {len(frame)} bytes; at most {MAX_KEPT_BYTES} are kept")
            return
        self._told[row.session_id] = standing.turn
        await self._tell(frame)

    async def _give_up(self, row: SessionRow, why: str) -> None:
        """Let a session be lost with its server: what was told of it is out of date from now on."""
        if row.task not in self._complained:
            self._complained.add(row.task)
            facts = {"facts": {"task": row.task, "session_id": row.session_id, "why": why}}
            words = f"sessions of task {row.task} cannot be gone on with elsewhere: {why}"
            logger.warning(words, extra=facts)
        self._told[row.session_id] = _NEVER
        await self._tell(_frame(Kept(**row.model_dump())))

    def _seal_of(self, kept: Kept) -> str:
        return self._seal(kept.model_dump_json(include=_SEALED))

    def _seal(self, *texts: str) -> str:
        return hmac.digest(self._token.encode(), b"kept\0" + to_json(texts), sha256).hex()


class LinkSocket(CallSocket):
    """The calls of a controller that keeps: those that all may make, and to adopt a session."""

    calls: ClassVar[TypeAdapter[Any]] = TypeAdapter(LinkCall)

    def __init__(self, keeping: Keeping, line: Line, max_bytes: int, max_calls: int) -> None:
        super().__init__(keeping, line, max_bytes, max_calls)
        self._keeping = keeping

    async def _run(self, call: Any, text: str | bytes) -> bytes:
        if not isinstance(call, AdoptCall):
            return await super()._run(call, text)
        await self._keeping.adopt(call)
        return b"null"


def _are_last(turns: tuple[tuple[str, str], ...], kept: Kept) -> bool:
    """Return whether these are the last turns of a session, in order."""
    try:
        answered = [(answer.session_id, answer.seq) for _, answer in History.of(turns)]
    except ValueError:
        return False
    first = kept.seq - len(turns) + 1
    return answered == [(kept.session_id, seq) for seq in range(first, kept.seq + 1)]


def _recent(turns: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the last turns, as many as a controller keeps."""
    room, number = MAX_TURNS_BYTES, 0
    for said, answer in reversed(turns):
        room -= len(said) + len(answer)
        if room < 0 and number >= ANSWERS:
            break
        number += 1
    return turns[len(turns) - number :]


def _frame(kept: Kept) -> str:
    return f'{{"kept":{kept.model_dump_json()}}}'
