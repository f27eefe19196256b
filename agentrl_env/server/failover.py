"""Failover on the server: sends checkpoints of sessions and adopts sessions of lost servers.

Before the server answers a step, it sends a checkpoint of the session to the controller. If the server is
lost, another server restores the checkpoint and continues the session under its id. A step that was in
progress is played again there, so its effects outside the session's own state might happen twice.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Protocol
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from agentrl_env.author_code import describe
from agentrl_env.errors import AUTHOR_ERRORS, EnvironmentFailed, InvalidRequest, StateError, WireError
from agentrl_env.fast_wire import FastBatch, Step
from agentrl_env.server.api import Api
from agentrl_env.server.auth import Caller
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.server.websocket import CallSocket
from agentrl_env.session.executor import Executor
from agentrl_env.session.pool import SessionPool
from agentrl_env.session.session import History, Session
from agentrl_env.session.state_codec import decode, encode
from agentrl_env.types import Message, TaskSample
from agentrl_env.wire import FORK, OPEN, STEP, Call, SessionRow, StepBatch

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

logger = logging.getLogger("agentrl_env")

MAX_CHECKPOINT_BYTES = 1024 * 1024
"""Maximum size of a frame with a checkpoint. A session with a larger checkpoint has no failover."""
MAX_TURNS_BYTES = 256 * 1024
"""Maximum size of the turns in a checkpoint. The oldest turns are dropped first."""
MIN_TURNS = 2
"""Number of last turns that are kept regardless of size, because clients can repeat their steps."""
_NEVER = 1 << 62
_MESSAGES = TypeAdapter(tuple[Message, ...])

Turn = tuple[str, str, str]
"""Message and StepResult as JSON, and their seal."""


class Checkpoint(Struct, frozen=True):
    """A session between two steps. Its seals are MACs that only holders of the link token can make.

    A controller stores it and passes it on unchanged. ``{"checkpoint": {...}}`` is the frame that a server
    sends. The call ``adopt`` has the same fields.
    """

    session_id: str
    seq: Annotated[int, msgspec.Meta(ge=0)]
    """Number of steps taken."""
    task: str
    client: str
    """Name of the caller that opened it."""
    sample: Raw = Raw(b"null")
    opening: Raw = Raw(b"null")
    episode_return: float | None = None
    """Sum of the rewards so far. Null if the sum is infinite."""
    elapsed_s: float = 0.0
    """Seconds of the session's time limit that have passed."""
    state: str | None = None
    """Snapshot, encoded by ``state_codec``. Null if the session can no longer be continued."""
    seal: str = ""
    """Seal of the fields above."""
    turns: tuple[Turn, ...] = ()
    """The last turns. A frame contains only the turns since the previous frame."""


class _Frame(Struct, frozen=True):
    checkpoint: Checkpoint


class _Answer(Struct):
    """Answer of ``step``, ``open`` or ``fork``."""

    session_id: str = ""
    sessions: tuple[_Answer, ...] = ()


def read_frame(frame: bytes) -> Checkpoint:
    """Return the checkpoint of a server's frame. Raises ValueError."""
    return msgspec.json.decode(frame, type=_Frame).checkpoint


def last_turns(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Return the last turns that fit into a checkpoint."""
    while len(turns) > MIN_TURNS and sum(len(turn[0]) + len(turn[1]) for turn in turns) > MAX_TURNS_BYTES:
        turns = turns[1:]
    return turns


class Line(Protocol):
    """A link to a controller."""

    async def send_frame(self, frame: str) -> None:
        """Send a frame that is not an answer."""


class FailoverApi(Api):
    """Answers the calls of a controller, and sends it a checkpoint before each answer.

    Sessions have no failover if their task cannot fork, or if their state cannot be encoded or is too large.
    Such sessions are lost with their server.

    Args:
        pool: the sessions.
        metrics: counts calls and errors.
        line: link to the controller.
        token: link token. Its holders trust each other's checkpoints.
        warned: names of tasks without failover for which a warning was logged.
    """

    def __init__(self, pool: SessionPool, metrics: Metrics, line: Line, token: str, warned: set[str]) -> None:
        super().__init__(pool, metrics)
        self._pool = pool
        self._line = line
        self._seal_key = token.encode()
        self._warned = warned
        self._sent: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        """The turn of the controller's last checkpoint of each session."""

    async def answer(self, call: Call, request: Any, who: Caller) -> bytes:
        """Make a call and return its answer as JSON. Raises WireError."""
        answer = await super().answer(call, request, who)
        if call in (STEP, OPEN, FORK):
            answered = msgspec.json.decode(answer, type=_Answer)
            await self._send_checkpoints(one.session_id for one in answered.sessions or (answered,))
        return answer

    async def play_batch(self, request: FastBatch | StepBatch) -> Sequence[bytes | WireError]:
        """Step a batch and send the checkpoints of its sessions."""
        answers = await super().play_batch(request)
        pairs: Iterable[tuple[Step, bytes | WireError]] = zip(request.steps, answers, strict=True)
        await self._send_checkpoints({step.session_id for step, answer in pairs if isinstance(answer, bytes)})
        return answers

    async def adopt(self, checkpoint: Checkpoint) -> None:
        """Continue a session of a lost server. Idempotent.

        Raises:
            InvalidRequest: a seal is wrong, or the turns are not the session's last turns.
            EnvironmentFailed: the state is malformed, or the task cannot restore it.
            UnknownTask, ServerFull, ServerDraining: as for an opening.
        """
        pair = (msgspec.json.encode(checkpoint), msgspec.json.encode(self.seal(checkpoint)))
        if not hmac.compare_digest(*pair):
            raise InvalidRequest("the session's state was not sealed with this fleet's token")
        history = History.of((message, result) for message, result, _ in checkpoint.turns)
        try:
            sample = TaskSample.model_validate_json(bytes(checkpoint.sample))
            opening = _MESSAGES.validate_json(bytes(checkpoint.opening))
            answered = [(result.session_id, result.seq) for _, result in history]
        except ValidationError as error:
            raise InvalidRequest("the session's state is malformed") from error
        session_id, turn = checkpoint.session_id, checkpoint.seq
        state, total = checkpoint.state, checkpoint.episode_return
        last = [(session_id, turn - number) for number in reversed(range(len(answered)))]
        if state is None or total is None or answered != last:
            raise InvalidRequest("the session's state does not belong to this session, task and step")
        began = self._pool.now() - checkpoint.elapsed_s

        def prepare(session: Session) -> None:
            session.continue_from(
                lambda environment: environment.restore(decode(state.encode(), type(environment))),
                opening=opening,
                turn=turn,
                episode_return=total,
                began=began,
                history=history,
            )

        await self._pool.adopt(session_id, checkpoint.client, sample, prepare)

    def seal(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a sealed checkpoint. Each turn has its own seal, because controllers join frames."""

        def mac(*texts: str) -> str:
            return hmac.digest(self._seal_key, b"checkpoint\0" + to_json(texts), sha256).hex()

        body = msgspec.json.encode(replace(checkpoint, seal="", turns=())).decode()
        turns = tuple((*turn, mac(checkpoint.session_id, *turn)) for *turn, _ in checkpoint.turns)
        return replace(checkpoint, seal=mac(body), turns=turns)

    async def take(self, session: Session, client: str, since: int = -1) -> Checkpoint:
        """Return a checkpoint of a session that ``client`` opened, with the turns after turn ``since``.

        Raises EnvironmentFailed, NotSupported, SessionEnded, SessionExpired.
        """
        session.check_fork()

        async def ask(environment: Environment, executor: Executor) -> Checkpoint:
            timeout = environment.tool_timeout
            try:
                state = await executor.run(environment.snapshot, timeout)
                encoded: bytes = await executor.run(lambda: encode(state, type(environment)), timeout)
            except AUTHOR_ERRORS as error:
                raise EnvironmentFailed(describe(error)) from error
            turns = session.history.tail(session.turn - since)
            checkpoint = Checkpoint(
                session_id=session.session_id,
                seq=session.turn,
                task=session.sample.task,
                client=client,
                sample=Raw(session.sample.model_dump_json().encode()),
                opening=Raw(_MESSAGES.dump_json(session.opening)),
                episode_return=session.episode_return,
                elapsed_s=self._pool.now() - session.began,
                state=encoded.decode("ascii"),
                turns=last_turns(tuple((*turn, "") for turn in turns)),
            )
            return self.seal(checkpoint)

        return await session.between_steps(ask)

    async def _send_checkpoints(self, session_ids: Iterable[str]) -> None:
        """Send a checkpoint of each open session that has changed since the last one."""
        sending = []
        for row in filter(None, map(self._pool.row, session_ids)):
            session = self._pool.session(row.session_id)
            sent = self._sent.get(session, -1)
            if session.turn > sent:
                sending.append(self._send(row, session, sent))
        if sending:
            await asyncio.gather(*sending)

    async def _send(self, row: SessionRow, session: Session, sent: int) -> None:
        try:
            checkpoint = await self.take(session, row.client, sent)
            frame = msgspec.json.encode(_Frame(checkpoint))
            if len(frame) > MAX_CHECKPOINT_BYTES:
                reason = f"it takes {len(frame)} bytes; at most {MAX_CHECKPOINT_BYTES} are kept"
                raise EnvironmentFailed(reason)
            self._sent[session] = checkpoint.seq
        except EnvironmentFailed as error:
            if row.task not in self._warned:
                self._warned.add(row.task)
                own = error.__cause__ is None or isinstance(error.__cause__, StateError)
                why = error.message if own else "snapshot() failed"  # the author's text might quote the agent
                facts = {"facts": {"task": row.task, "session_id": row.session_id}}
                words = "sessions of task %s have no failover: %s"
                logger.warning(words, row.task, why, exc_info=None if own else error, extra=facts)
            self._sent[session] = _NEVER  # the controller's last checkpoint is now out of date
            gone = Checkpoint(session_id=row.session_id, seq=session.turn, task=row.task, client=row.client)
            frame = msgspec.json.encode(_Frame(gone))
        except WireError:
            self._sent[session] = _NEVER  # the task cannot fork, or the session has ended
            return
        await self._line.send_frame(frame.decode())


class FailoverSocket(CallSocket):
    """The socket of a controller that keeps checkpoints: it adds the call ``adopt``."""

    _api: FailoverApi

    async def run(self, call: str, text: str | bytes) -> bytes:
        """Make the call ``call`` and return its result as JSON. Raises WireError."""
        if call != "adopt":
            return await super().run(call, text)
        try:
            checkpoint = msgspec.json.decode(text, type=Checkpoint)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"adopt: {error}") from error
        await self._api.adopt(checkpoint)
        return b"null"
