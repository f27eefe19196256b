"""Wire protocol 1: the requests and answers of every call, and the table of the calls.

``CALLS`` drives the HTTP routes, the WebSocket, authorization, the OpenAPI document and the client. A new
call takes its models and its row here, and a method of that name on each ``Service``.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field
from pydantic.json_schema import SkipJsonSchema

from agentrl_env import errors as e
from agentrl_env.types import (
    Counts,
    FleetInfo,
    Message,
    SessionInfo,
    SessionStatus,
    StepResult,
    TaskInfo,
    TaskSample,
    ToolSpec,
)

PROTOCOL_VERSION = 1
PROTOCOL_HEADER = "x-agentrl-protocol"
SOCKET_HEADER = "x-agentrl-socket"
"""Response header with the path of the WebSocket that accepts the same calls."""
SOCKET_PATH = "/v1/ws"
SOCKET_PROTOCOL = "agentrl.v1"
"""WebSocket subprotocol of ``/v1/ws``."""
ANSWER_FRAME = re.compile(rb'\{"id":(\d+),"(result|error)":')
LINK_PATH = "/v1/link"
"""WebSocket endpoint of a controller to which servers connect; the controller sends the calls."""
SEED_BITS = 53
"""Seeds are below 2**53, so that every JSON parser represents them exactly."""
MAX_WAIT_S = 3600.0
"""Seconds that a call may ask to wait."""
_INT64 = 2**63


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class EmptyRequest(_Model):
    """A call without arguments."""


EMPTY = EmptyRequest()


class SessionRequest(_Model):
    """A call of one session without further arguments."""

    session_id: str


class OpenRequest(_Model):
    """Body of ``POST /v1/sessions``."""

    task: str = ""
    """Optional if the server has a single task."""
    split: str = "train"
    index: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | str | None = None
    seed: int | None = Field(default=None, ge=0, lt=_INT64)
    sample: dict[str, Any] | None = None
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S, allow_inf_nan=False)
    """Seconds to wait in the fair queue of a full server; 0 fails at once."""
    request_id: str | None = Field(default=None, max_length=128)
    """Idempotency key: the same id again returns the same session; with another request it is a conflict."""
    digest: SkipJsonSchema[str] = Field(default="", max_length=64)
    """Between controller and server: ``payload_digest`` of the client's request."""
    client: str = Field(default="", max_length=128)
    """Name of the caller, for the limits of a controller."""
    n: int | None = Field(default=None, ge=1, le=16_384)
    """Number of sibling sessions of the same problem; the answer is then an ``OpenBatchAnswer``."""


class OpenBatch(_Model):
    """Body of ``POST /v1/sessions`` that opens many sessions."""

    sessions: Annotated[list[OpenRequest], FailFast()]


class StepBody(_Model):
    """Body of ``POST /v1/sessions/{id}/step``."""

    seq: int = Field(ge=1, lt=_INT64)
    message: Message


class StepRequest(StepBody):
    """A step of one session."""

    session_id: str


class StepBatch(_Model):
    """Body of ``POST /v1/step``: steps of many sessions.

    With ``wait_s`` the answer arrives after that many seconds at the latest, with a ``step_pending``
    error for each item that is still running; repeating its ``seq`` waits for it.
    """

    steps: Annotated[list[StepRequest], FailFast()]
    wait_s: float | None = Field(default=None, ge=0, le=MAX_WAIT_S, allow_inf_nan=False)


class ForkBody(_Model):
    """Body of ``POST /v1/sessions/{id}/fork``."""

    n: int = Field(default=1, ge=1)
    request_id: str | None = Field(default=None, max_length=128)
    """Idempotency key: the same id again returns the same sessions; with another ``n`` it is a conflict."""


class ForkRequest(ForkBody):
    """A fork of one session."""

    session_id: str


class SessionQuery(_Model):
    """Query of ``GET /v1/sessions``."""

    task: str | None = None
    status: SessionStatus | None = None
    search: str = Field(default="", max_length=256)
    """Text that the id, task, split, index or seed of a session contains; upper and lower case are equal."""
    limit: int = Field(default=100, ge=1, le=1000)
    after: str | None = Field(default=None, max_length=256)
    """``next`` of the previous page."""


class FleetQuery(_Model):
    """Query of ``GET /v1/fleet``."""

    since: float | None = Field(default=None, allow_inf_nan=False)
    """Unix time after which points of the history are returned; null returns none."""


FLEET_NOW = FleetQuery()


class DrainRequest(_Model):
    """Body of ``POST /v1/fleet/drain``."""

    server_id: str
    draining: bool = True
    """False lets the server take new sessions again."""


class TranscriptQuery(_Model):
    """Query of ``GET /v1/sessions/{id}/transcript``."""

    after: int | None = Field(default=None, ge=0, lt=_INT64)
    """Return the turns after this one; null returns all of them, and the opening."""


class TranscriptRequest(TranscriptQuery):
    """The transcript of one session."""

    session_id: str


class ErrorDetail(_Model):
    """Type and message of an error; some types carry more fields, such as ``retry_after`` or ``expected``."""

    model_config = ConfigDict(extra="allow")

    type: str
    message: str


class Error(_Model):
    """Body of every error; each type has one HTTP status."""

    error: ErrorDetail


class Health(_Model):
    """Answer of ``GET /health`` and ``GET /ready``."""

    status: Literal["ok", "ready", "draining"]


class TaskList(_Model):
    """Answer of ``GET /v1/tasks``."""

    protocol: int = PROTOCOL_VERSION
    tasks: tuple[TaskInfo, ...] = ()


class OpenBatchAnswer(_Model):
    """Answer to an ``OpenBatch``: the session or the error of each item, in order."""

    sessions: tuple[SessionInfo | Error, ...]


class StepBatchAnswer(_Model):
    """Answer of ``POST /v1/step``: the result or the error of each item, in order."""

    results: tuple[StepResult | Error, ...]


class ForkAnswer(_Model):
    """Answer of ``POST /v1/sessions/{id}/fork``: the new sessions."""

    sessions: tuple[SessionInfo, ...]


class ExpertAnswer(_Model):
    """Answer of ``POST /v1/sessions/{id}/expert``."""

    message: Message


class AgentToken(_Model):
    """Answer of ``POST /v1/sessions/{id}/token``."""

    agent_token: str


class SessionSummary(_Model):
    """One session, open or recently ended, in ``GET /v1/sessions``."""

    session_id: str
    server: str
    task: str
    split: str = "train"
    index: int | str | None = None
    seed: int = 0
    status: SessionStatus = SessionStatus.RUNNING
    turn: int = 0
    reward: float = 0.0
    """Sum of the rewards so far."""
    began: float
    """Unix time of the opening, in seconds, by the server's clock; the list is sorted by it, newest first."""
    age_s: float
    idle_s: float | None = None
    """Seconds since the last call, or the end; null while a call is running."""
    error: str = ""
    """Reason of a session that has ended as ``failed_environment``."""


class SessionList(_Model):
    """Answer of ``GET /v1/sessions``: one page, and the number of sessions that match."""

    sessions: tuple[SessionSummary, ...] = ()
    total: int = 0
    next: str | None = None
    """Start of the next page; null on the last."""


class TranscriptTurn(_Model):
    """One turn: the assistant message and its result."""

    message: Message
    result: StepResult


class Transcript(_Model):
    """Answer of ``GET /v1/sessions/{id}/transcript``: the last turns that the server keeps."""

    session_id: str
    sample: TaskSample
    status: SessionStatus
    turn: int
    """Number of steps taken."""
    reward: float
    """Sum of the rewards so far."""
    messages: tuple[Message, ...] = ()
    """The opening messages, if requested."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools, if the opening messages are requested."""
    turns: tuple[TranscriptTurn, ...] = ()


def choose_task(name: str | None, known: Collection[str]) -> str:
    """Return the name of a task; without a name, that of the only one. Raises UnknownTask."""
    if name and name in known:
        return name
    if not name and len(known) == 1:
        return next(iter(known))
    names = ", ".join(known) or "none"
    if name:
        raise e.UnknownTask(f"no task {name!r} here; tasks: {names}")
    raise e.UnknownTask(f"several tasks are served; choose one with task= or --task: {names}")


def payload_digest(request: OpenRequest) -> str:
    """Return the hash of what a request opens, to which its ``request_id`` is bound."""
    if request.request_id is None:
        return ""
    payload = request.model_dump(include={"task", "split", "index", "seed", "sample", "n"})
    return sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()


def siblings(request: OpenRequest, n: int) -> list[OpenRequest]:
    """Return ``n`` requests for the same problem, each with its own idempotency key."""
    update: dict[str, Any] = {"n": None}
    key = request.request_id
    if request.index is None and request.seed is None and request.sample is None:
        # Without a common seed, each sibling gets another problem. A repeated request gets the same seed.
        random = secrets.token_bytes(8) if key is None else sha256(key.encode()).digest()
        update["seed"] = int.from_bytes(random[:8]) >> (64 - SEED_BITS)
    return [
        request.model_copy(update={**update, "request_id": key and f"{key}/{number}"}) for number in range(n)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the protocol.

    Args:
        name: method of ``Service``, and ``call`` of a WebSocket frame.
        method: HTTP method.
        path: HTTP path, with ``{id}`` for the session.
        request: arguments of the call, as a ``Service`` takes them.
        body: part of them in the HTTP body.
        query: part of them in the HTTP query.
        answer: model of the answer; None for an empty one.
        status: HTTP status of the answer.
        agent: whether the agent token of the session may make this call.
        summary: one line for the OpenAPI document.
        errors: errors beside those that every call may answer.
    """

    name: str
    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    request: type[BaseModel] = EmptyRequest
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    status: int = 200
    agent: bool = False
    errors: tuple[type[e.WireError], ...] = ()


_SESSION = "/v1/sessions/{id}"
_GONE = (e.UnknownSession, e.SessionExpired, e.SessionLost)
_OPENS = (e.ServerFull, e.ServerDraining, e.EnvironmentFailed)

TASKS = Call(name="tasks", method="GET", path="/v1/tasks", summary="List the tasks.", answer=TaskList)
OPEN = Call(
    name="open",
    method="POST",
    path="/v1/sessions",
    summary="Open a session, or many with `sessions`.",
    request=OpenRequest,
    body=OpenRequest,
    answer=SessionInfo,
    status=201,
    errors=(e.UnknownTask, e.UnknownSample, e.IdempotencyConflict, e.SessionExpired, *_OPENS),
)
OPEN_MANY = Call(
    name="open_many",
    method="POST",
    path="/v1/sessions",
    summary=OPEN.summary,
    request=OpenBatch,
    body=OpenBatch,
    answer=OpenBatchAnswer,
    status=201,
    errors=OPEN.errors,
)
SESSIONS = Call(
    name="sessions",
    method="GET",
    path="/v1/sessions",
    summary="List the sessions that are open or have ended recently, newest first.",
    request=SessionQuery,
    query=SessionQuery,
    answer=SessionList,
)
STEP_MANY = Call(
    name="step_many",
    method="POST",
    path="/v1/step",
    summary="Step many sessions; the steps of one session run in order.",
    request=StepBatch,
    body=StepBatch,
    answer=StepBatchAnswer,
    agent=True,
)
STEP = Call(
    name="step",
    method="POST",
    path=f"{_SESSION}/step",
    summary="Play one assistant message; repeating a seq returns the same answer.",
    request=StepRequest,
    body=StepBody,
    answer=StepResult,
    agent=True,
    errors=(e.SeqConflict, e.IdempotencyConflict, e.SessionEnded, *_GONE),
)
INFO = Call(
    name="info",
    method="GET",
    path=_SESSION,
    summary="Return the state of a session.",
    request=SessionRequest,
    answer=SessionInfo,
    agent=True,
    errors=_GONE,
)
CLOSE = Call(
    name="close",
    method="DELETE",
    path=_SESSION,
    summary="End a session; idempotent.",
    request=SessionRequest,
    status=204,
)
FORK = Call(
    name="fork",
    method="POST",
    path=f"{_SESSION}/fork",
    summary="Open sessions that continue from the state of this one.",
    request=ForkRequest,
    body=ForkBody,
    answer=ForkAnswer,
    status=201,
    errors=(e.IdempotencyConflict, e.SessionEnded, e.NotSupported, *_GONE, *_OPENS),
)
RENEW = Call(
    name="renew_token",
    method="POST",
    path=f"{_SESSION}/token",
    summary="Issue a new agent token of this session, and revoke those before.",
    request=SessionRequest,
    answer=AgentToken,
    status=201,
    errors=(e.NotSupported, e.StateUnavailable, *_GONE),
)
REVOKE = Call(
    name="revoke_tokens",
    method="DELETE",
    path=f"{_SESSION}/token",
    summary="Revoke all agent tokens of this session, which goes on; idempotent.",
    request=SessionRequest,
    status=204,
    errors=(e.NotSupported, e.StateUnavailable, *_GONE),
)
EXPERT = Call(
    name="expert",
    method="POST",
    path=f"{_SESSION}/expert",
    summary="Return the next message of the task's expert, without taking a step.",
    request=SessionRequest,
    answer=ExpertAnswer,
    errors=(e.SessionEnded, e.NotSupported, e.EnvironmentFailed, *_GONE),
)
TRANSCRIPT = Call(
    name="transcript",
    method="GET",
    path=f"{_SESSION}/transcript",
    summary="Return the last turns of a session.",
    request=TranscriptRequest,
    query=TranscriptQuery,
    answer=Transcript,
    errors=_GONE,
)
FLEET = Call(
    name="fleet",
    method="GET",
    path="/v1/fleet",
    summary="List the servers.",
    request=FleetQuery,
    query=FleetQuery,
    answer=FleetInfo,
)
DRAIN_SERVER = Call(
    name="drain_server",
    method="POST",
    path="/v1/fleet/drain",
    summary="Open no new sessions on a server, which finishes those it has, or open them again.",
    request=DrainRequest,
    body=DrainRequest,
    answer=FleetInfo,
    errors=(e.UnknownServer,),
)

CANCEL = "cancel"
"""``call`` of a WebSocket frame that cancels the call ``target`` of the same socket; it has no answer."""

CALLS: Mapping[str, Call] = {
    call.name: call
    for call in (
        *(TASKS, OPEN, OPEN_MANY, SESSIONS, STEP_MANY, STEP, INFO, CLOSE, FORK),
        *(RENEW, REVOKE, EXPERT, TRANSCRIPT, FLEET, DRAIN_SERVER),
    )
}


class Frame(_Model):
    """Envelope of a WebSocket frame ``{"id", "call", ...}``; the other fields are the call's request."""

    id: Annotated[int, Field(strict=True, ge=-_INT64, lt=_INT64)] | Annotated[str, Field(max_length=128)]
    """Correlation id; the answer is ``{"id", "result"}`` or ``{"id", "error"}``."""
    call: str
    traceparent: str | None = Field(default=None, max_length=128)
    """W3C trace context of the caller."""
    target: int | str | None = None
    """Id of the call to cancel, for ``cancel``."""


class SessionRow(_Model):
    """One open session, as reported by its server to a controller."""

    session_id: str
    task: str
    client: str = ""


_ID_CHARS = 32


def server_id_of(server_key: str) -> str:
    """Return the id of a server: the hash of its key, so that no other server can claim it."""
    return sha256(server_key.encode()).hexdigest()[:_ID_CHARS]


class Hello(_Model):
    """First frame of a server on a link: ``{"hello": {...}}``."""

    server_id: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    server_key: str = Field(default="", max_length=128)
    """Secret of the server's process, of which its id is the hash."""
    protocol: int = PROTOCOL_VERSION
    tasks: tuple[TaskInfo, ...]
    capacity: int = Field(ge=1)
    sessions: tuple[SessionRow, ...] = ()
    draining: bool = False
    place: str = ""
    """Host name and process id."""
    version: str = ""

    @property
    def is_genuine(self) -> bool:
        """True if the key is that of the id; earlier servers have shorter ids, and no key."""
        return len(self.server_id) < _ID_CHARS or self.server_id == server_id_of(self.server_key)


class Beat(_Model):
    """Heartbeat of a server, every second and before an answer with consequences: ``{"beat": {...}}``."""

    opened: tuple[SessionRow, ...] = ()
    ended: tuple[str, ...] = ()
    draining: bool = False
    leaving: bool = False
    """True if the server is shutting down gracefully and has no open session."""
    counts: Counts | None = None
    """What the server has counted, if that has changed since the last of its beats that told it."""


class Welcome(_Model):
    """Answer of a controller to a hello: ``{"welcome": {...}}``, or ``{"lost": true}``.

    ``lost`` means that the server was disconnected for too long and its sessions are reported lost: it ends
    them and reconnects with another id.
    """

    beat_s: float
    keep: bool = False
    """True if the server sends a checkpoint of the session after every step."""
