"""Failover on the server: checkpoints after steps, and sessions adopted from servers that are lost.

Before each answer that a step led to, the server sends a checkpoint of the session to the controller. Where
the server is lost, another one restores it and continues the session under its id. A step that was under way
is played again there: its effects outside the session's own state may happen twice.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Raw, Struct
from pydantic import ValidationError
from pydantic_core import to_json

from agentrl_env.errors import (
    EnvironmentFailed,
    InvalidRequest,
    SessionEnded,
    SessionExpired,
    UnknownSession,
    WireError,
)
from agentrl_env.fast_wire import FastBatch, Step
from agentrl_env.server.api import Api
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.server.websocket import CallSocket, Channel
from agentrl_env.session.checkpoint import Checkpoint, take_checkpoint
from agentrl_env.session.history import History
from agentrl_env.session.pool import SessionPool
from agentrl_env.session.session import Session
from agentrl_env.wire import FORK, OPEN, STEP, Call, Frame, SessionRow, StepBatch

logger = logging.getLogger("agentrl_env")

MAX_CHECKPOINT_BYTES = 1024 * 1024
"""Size of a frame with a checkpoint; a session whose checkpoint is larger has no failover."""
MAX_TURNS_BYTES = 256 * 1024
"""Size of the turns that are kept with a checkpoint; the oldest are dropped first."""
MIN_TURNS = 2
"""Number of last turns that are kept whatever their size: clients may repeat their steps."""
_NEVER = 1 << 62

SealedTurn = tuple[str, str, str]
"""Message and StepResult as JSON, and their seal."""


class SealedCheckpoint(Struct, frozen=True):
    """Checkpoint of a session with seals, which only holders of the link token can make.

    A controller stores it and passes it on as it is. ``{"checkpoint": {...}}`` is the frame that a server
    sends; the call ``adopt`` has the same fields.
    """

    session_id: str
    seq: int
    """Number of steps taken."""
    task: str
    client: str
    checkpoint: Raw = Raw(b"null")
    """A ``Checkpoint``; null where the session cannot be continued any more."""
    seal: str = ""
    """MAC of the session's id and the checkpoint."""
    turns: tuple[SealedTurn, ...] = ()
    """Last turns; in a frame, those since the previous one."""

    @property
    def usable(self) -> bool:
        """True if the session can be continued from here."""
        return bytes(self.checkpoint) != b"null"


class _Frame(Struct, frozen=True):
    checkpoint: SealedCheckpoint


class _Opened(Struct):
    session_id: str


class _Forked(Struct):
    sessions: tuple[_Opened, ...]


def read_frame(frame: bytes) -> SealedCheckpoint:
    """Return the checkpoint of a server's frame. Raises ValueError."""
    return msgspec.json.decode(frame, type=_Frame).checkpoint


class Line(Channel, Protocol):
    """A link, as failover uses it."""

    async def send_frame(self, frame: str) -> None:
        """Send a frame that is no answer."""


class FailoverApi(Api):
    """Answers the calls of a controller that keeps checkpoints, and sends it one before each answer.

    Sessions of tasks that cannot fork have no failover, nor those whose state cannot be encoded or is too
    large: they are lost with their server.

    Args:
        pool: the sessions.
        metrics: counts calls and errors.
        line: link to the controller.
        token: link token; its holders trust each other's checkpoints.
        warned: tasks whose sessions have no failover, and which the log has named.
    """

    def __init__(self, pool: SessionPool, metrics: Metrics, line: Line, token: str, warned: set[str]) -> None:
        super().__init__(pool, metrics)
        self._pool = pool
        self._line = line
        self._seal_key = token.encode()
        self._warned = warned
        self._forkable: frozenset[str] | None = None
        """Tasks that can fork, once known."""
        self._sent: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        """Last turn of each session that the controller has a checkpoint of."""

    async def answer(self, call: Call, request: Any) -> bytes:
        """Make a call; return its answer as JSON. Raises WireError."""
        answer = await super().answer(call, request)
        if call is STEP:
            await self._checkpoint((request.session_id,))
        elif call is OPEN:
            await self._checkpoint((msgspec.json.decode(answer, type=_Opened).session_id,))
        elif call is FORK:
            forks = msgspec.json.decode(answer, type=_Forked).sessions
            await self._checkpoint(fork.session_id for fork in forks)
        return answer

    async def adopt(self, sealed: SealedCheckpoint) -> None:
        """Continue a session of a server that is lost; idempotent.

        Raises:
            InvalidRequest: a seal is wrong, or the turns are not the last of the session.
            EnvironmentFailed: the state is malformed, or the task cannot restore it.
            UnknownTask, ServerFull, ServerDraining: as for an opening.
        """
        session_id, body = sealed.session_id, bytes(sealed.checkpoint)
        seals = [(seal, self._seal(session_id, *turn)) for *turn, seal in sealed.turns]
        seals.append((sealed.seal, self._seal(session_id, body.decode())))
        if not all(hmac.compare_digest(*map(str.encode, pair)) for pair in seals):
            raise InvalidRequest("the session's state was not sealed with this fleet's token")
        history = History.of((message, result) for message, result, _ in sealed.turns)
        try:
            checkpoint = Checkpoint.model_validate_json(body)
            answered = [(result.session_id, result.seq) for _, result in history]
        except ValidationError as error:
            raise InvalidRequest("the session's state is malformed") from error
        first = checkpoint.turn - len(answered) + 1
        if answered != [(session_id, seq) for seq in range(first, checkpoint.turn + 1)]:
            raise InvalidRequest("the session's state does not belong to this session, task and step")
        await self._pool.adopt(
            session_id,
            checkpoint.client,
            checkpoint.sample,
            lambda session: checkpoint.restore(session, history, self._pool.now()),
        )

    async def play_batch(self, request: FastBatch | StepBatch) -> Sequence[bytes | WireError]:
        """Step a batch, and checkpoint its sessions."""
        answers = await super().play_batch(request)
        steps: Sequence[Step] = request.steps
        pairs = zip(steps, answers, strict=True)
        await self._checkpoint({step.session_id for step, answer in pairs if isinstance(answer, bytes)})
        return answers

    async def _checkpoint(self, session_ids: Iterable[str]) -> None:
        """Send a checkpoint of each session that has changed since the last one."""
        if self._forkable is None:
            tasks = (await self._pool.tasks()).tasks
            self._forkable = frozenset(task.name for task in tasks if "fork" in task.capabilities)
        rows = [row for row in map(self._pool.row, session_ids) if row and row.task in self._forkable]
        await asyncio.gather(*map(self._send_checkpoint, rows))

    async def _send_checkpoint(self, row: SessionRow) -> None:
        try:
            session = self._pool.session(row.session_id)
            sent = self._sent.get(session, -1)
            if session.turn <= sent:
                return
            checkpoint, turns = await take_checkpoint(session, self._pool.now(), row.client, sent)
        except (SessionEnded, SessionExpired, UnknownSession):
            return
        except EnvironmentFailed as error:
            await self._disable(row, session, error.message)
            return
        body = checkpoint.model_dump_json()
        sealed = SealedCheckpoint(
            session_id=row.session_id,
            seq=checkpoint.turn,
            task=row.task,
            client=row.client,
            checkpoint=Raw(body.encode()),
            seal=self._seal(row.session_id, body),
            turns=last_turns((*turn, self._seal(row.session_id, *turn)) for turn in turns),
        )
        frame = msgspec.json.encode(_Frame(sealed))
        if len(frame) > MAX_CHECKPOINT_BYTES:
            reason = f"it takes {len(frame)} bytes; at most {MAX_CHECKPOINT_BYTES} are kept"
            await self._disable(row, session, reason)
            return
        self._sent[session] = checkpoint.turn
        await self._line.send_frame(frame.decode())

    async def _disable(self, row: SessionRow, session: Session, reason: str) -> None:
        """Let a session be lost with its server, because its last checkpoint is out of date now."""
        if row.task not in self._warned:
            self._warned.add(row.task)
            facts = {"facts": {"task": row.task, "session_id": row.session_id, "why": reason}}
            logger.warning("sessions of task %s have no failover: %s", row.task, reason, extra=facts)
        self._sent[session] = _NEVER
        gone = SealedCheckpoint(session_id=row.session_id, seq=session.turn, task=row.task, client=row.client)
        await self._line.send_frame(msgspec.json.encode(_Frame(gone)).decode())

    def _seal(self, *texts: str) -> str:
        return hmac.digest(self._seal_key, b"checkpoint\0" + to_json(texts), sha256).hex()


class FailoverSocket(CallSocket):
    """The calls of a controller that keeps checkpoints: those of every caller, and ``adopt``."""

    def __init__(self, api: FailoverApi, channel: Channel, max_bytes: int, max_calls: int) -> None:
        super().__init__(api, channel, max_bytes, max_calls)
        self._failover = api

    async def run(self, frame: Frame, text: str | bytes) -> bytes:
        """Make a call that is not a well-formed step; return its result as JSON. Raises WireError."""
        if frame.call != "adopt":
            return await super().run(frame, text)
        try:
            sealed = msgspec.json.decode(text, type=SealedCheckpoint)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"adopt: {error}") from error
        await self._failover.adopt(sealed)
        return b"null"


def last_turns(turns: Iterable[SealedTurn]) -> tuple[SealedTurn, ...]:
    """Return the last turns, as many as are kept with a checkpoint."""
    kept = list(turns)
    size = sum(len(turn[0]) + len(turn[1]) for turn in kept)
    while size > MAX_TURNS_BYTES and len(kept) > MIN_TURNS:
        message, result, _ = kept.pop(0)
        size -= len(message) + len(result)
    return tuple(kept)
