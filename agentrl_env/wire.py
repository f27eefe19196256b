"""Wire protocol 1: the requests and answers of every call, and the table of calls.

``CALLS`` defines the HTTP routes, the WebSocket calls, the authorization, the OpenAPI document and the
client. A new call needs models and a row here, and a method with the same name on each ``Service``.
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
"""WebSocket endpoint of a controller. Servers connect to it, and the controller sends the calls."""
SEED_BITS = 53
"""Seeds are below 2**53, so that every JSON parser represents them exactly."""
MAX_WAIT_S = 3600.0
"""Maximum number of seconds that a call can request to wait."""
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
    """Name of the task. Optional if the server has a single task."""
    split: str = "train"
    index: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | str | None = None
    seed: int | None = Field(default=None, ge=0, lt=_INT64)
    sample: dict[str, Any] | None = None
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S, allow_inf_nan=False)
    """Seconds to wait in the fair queue of a full server. 0 fails immediately."""
    request_id: str | None = Field(default=None, max_length=128)
    """Idempotency key. A repeated id returns the same session. With another request it is a conflict."""
    digest: SkipJsonSchema[str] = Field(default="", max_length=64)
    """``payload_digest`` of the client's request, sent from a controller to a server."""
    client: str = Field(default="", max_length=128)
    """Name of the caller, for the limits of a controller."""
    n: int | None = Field(default=None, ge=1, le=16_384)
    """Number of sibling sessions of the same problem. The answer is then an ``OpenBatchAnswer``."""


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

    With ``wait_s``, the answer arrives within this number of seconds, with a ``step_pending`` error for
    each step that is still running. Repeating its ``seq`` waits for the step.
    """

    steps: Annotated[list[StepRequest], FailFast()]
    wait_s: float | None = Field(default=None, ge=0, le=MAX_WAIT_S, allow_inf_nan=False)


class ForkBody(_Model):
    """Body of ``POST /v1/sessions/{id}/fork``."""

    n: int = Field(default=1, ge=1)
    request_id: str | None = Field(default=None, max_length=128)
    """Idempotency key. A repeated id returns the same sessions. With another ``n`` it is a conflict."""


class ForkRequest(ForkBody):
    """A fork of one session."""

    session_id: str


class SessionQuery(_Model):
    """Query of ``GET /v1/sessions``."""

    task: str | None = None
    status: SessionStatus | None = None
    search: str = Field(default="", max_length=256)
    """Text to search for in the id, task, split, index or seed of a session. Case is ignored."""
    limit: int = Field(default=100, ge=1, le=1000)
    after: str | None = Field(default=None, max_length=256)
    """``next`` of the previous page."""


class FleetQuery(_Model):
    """Query of ``GET /v1/fleet``."""

    since: float | None = Field(default=None, allow_inf_nan=False)
    """Unix time after which points of the history are returned. Null returns no points."""


FLEET_NOW = FleetQuery()


class DrainRequest(_Model):
    """Body of ``POST /v1/fleet/drain``."""

    server_id: str
    draining: bool = True
    """False lets the server accept new sessions again."""


class TranscriptQuery(_Model):
    """Query of ``GET /v1/sessions/{id}/transcript``."""

    after: int | None = Field(default=None, ge=0, lt=_INT64)
    """Return the turns after this turn. Null returns all turns and the opening."""


class TranscriptRequest(TranscriptQuery):
    """The transcript of one session."""

    session_id: str


class ErrorDetail(_Model):
    """Type and message of an error. Some types have more fields, such as ``retry_after`` or ``expected``."""

    model_config = ConfigDict(extra="allow")

    type: str
    message: str


class Error(_Model):
    """Body of every error. Each type has one HTTP status."""

    error: ErrorDetail


class Health(_Model):
    """Answer of ``GET /health`` and ``GET /ready``."""

    status: Literal["ok", "ready", "draining"]


class TaskList(_Model):
    """Answer of ``GET /v1/tasks``."""

    protocol: int = PROTOCOL_VERSION
    tasks: tuple[TaskInfo, ...]


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
    """Unix time of the opening in seconds, by the server's clock. The list is sorted by it, newest first."""
    age_s: float
    idle_s: float | None = None
    """Seconds since the last call or the end. Null while a call is running."""
    error: str = ""
    """Reason of the failure if the session ended as ``failed_environment``."""


class SessionList(_Model):
    """Answer of ``GET /v1/sessions``: one page, and the number of matching sessions."""

    sessions: tuple[SessionSummary, ...]
    total: int
    next: str | None = None
    """Start of the next page. Null on the last page."""


class TranscriptTurn(_Model):
    """One turn: the assistant message and its result."""

    message: Message
    result: StepResult


class Transcript(_Model):
    """Answer of ``GET /v1/sessions/{id}/transcript``: the last turns, as far as the server keeps them."""

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
    """Return the name of a task. If ``name`` is empty, return the only task. Raises UnknownTask."""
    if name and name in known:
        return name
    if not name and len(known) == 1:
        return next(iter(known))
    if not name and not known:
        raise e.UnknownTask("no task is served here; is a server linked to the controller?")
    names = ", ".join(known) or "none"
    if name:
        raise e.UnknownTask(f"no task {name!r} here; tasks: {names}")
    raise e.UnknownTask(f"several tasks are served; choose one with task= or --task: {names}")


def is_header_value(text: str) -> bool:
    """Return True if a text is printable ASCII, so that it can be the value of an HTTP header."""
    return text.isascii() and text.isprintable()


def payload_digest(request: OpenRequest) -> str:
    """Return the hash of a request's payload, to which its ``request_id`` is bound."""
    if request.request_id is None:
        return ""
    payload = request.model_dump(include={"task", "split", "index", "seed", "sample", "n"})
    return sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()


def siblings(request: OpenRequest, n: int) -> list[OpenRequest]:
    """Return ``n`` requests for the same problem, each with its own idempotency key."""
    update: dict[str, Any] = {"n": None}
    key = request.request_id
    if request.index is None and request.seed is None and request.sample is None:
        # Siblings need a common seed for the same problem. A repeated request gets the same seed.
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
        request: arguments of the call, as a ``Service`` receives them.
        body: the arguments in the HTTP body.
        query: the arguments in the HTTP query.
        answer: model of the answer. None for an empty answer.
        status: HTTP status of the answer.
        agent: True if the session's agent token allows this call.
        summary: one line for the OpenAPI document.
        errors: errors in addition to the errors that every call can return.
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
    summary="Step many sessions. The steps of one session run in order.",
    request=StepBatch,
    body=StepBatch,
    answer=StepBatchAnswer,
    agent=True,
)
STEP = Call(
    name="step",
    method="POST",
    path=f"{_SESSION}/step",
    summary="Play one assistant message. Repeating a seq returns the same answer.",
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
    summary="End a session. Idempotent.",
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
    summary="Issue a new agent token of this session and revoke earlier ones.",
    request=SessionRequest,
    answer=AgentToken,
    status=201,
    errors=(e.NotSupported, e.StateUnavailable, *_GONE),
)
REVOKE = Call(
    name="revoke_tokens",
    method="DELETE",
    path=f"{_SESSION}/token",
    summary="Revoke all agent tokens of this session, which continues. Idempotent.",
    request=SessionRequest,
    status=204,
    errors=(e.NotSupported, e.StateUnavailable, *_GONE),
)
EXPERT = Call(
    name="expert",
    method="POST",
    path=f"{_SESSION}/expert",
    summary="Return the next message of the task's expert without taking a step.",
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
    summary="Stop or resume opening sessions on a server. Open sessions continue.",
    request=DrainRequest,
    body=DrainRequest,
    answer=FleetInfo,
    errors=(e.UnknownServer,),
)

CANCEL = "cancel"
"""``call`` of a WebSocket frame that cancels the call ``target`` of the same socket, without an answer."""

CALLS: Mapping[str, Call] = {
    call.name: call
    for call in (
        *(TASKS, OPEN, OPEN_MANY, SESSIONS, STEP_MANY, STEP, INFO, CLOSE, FORK),
        *(RENEW, REVOKE, EXPERT, TRANSCRIPT, FLEET, DRAIN_SERVER),
    )
}


class Frame(_Model):
    """Envelope of a WebSocket frame ``{"id", "call", ...}``. The other fields are the call's request."""

    id: Annotated[int, Field(strict=True, ge=-_INT64, lt=_INT64)] | Annotated[str, Field(max_length=128)]
    """Correlation id. The answer is ``{"id", "result"}`` or ``{"id", "error"}``."""
    call: str
    traceparent: str | None = Field(default=None, max_length=128)
    """W3C trace context of the caller."""
    target: int | str | None = None
    """Id of the call to cancel. Only for ``cancel``."""


class SessionRow(_Model):
    """One open session, as reported by its server to a controller."""

    session_id: str
    task: str
    client: str = ""


_ID_CHARS = 32


def server_id_of(server_key: str) -> str:
    """Return the id of a server, which is the hash of its key, so that no other server can claim it."""
    return sha256(server_key.encode()).hexdigest()[:_ID_CHARS]


class Hello(_Model):
    """First frame of a server on a link: ``{"hello": {...}}``."""

    server_id: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    server_key: str = Field(default="", max_length=128)
    """Secret of the server's process. The server's id is the hash of this key."""
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
        """True if the key belongs to the id. Earlier versions of servers have shorter ids and no key."""
        return len(self.server_id) < _ID_CHARS or self.server_id == server_id_of(self.server_key)


class Beat(_Model):
    """Heartbeat of a server, every second and before answers that change sessions: ``{"beat": {...}}``."""

    opened: tuple[SessionRow, ...] = ()
    ended: tuple[str, ...] = ()
    draining: bool = False
    leaving: bool = False
    """True if the server is shutting down gracefully and has no open session."""
    counts: Counts | None = None
    """Counts of the server, if they have changed since the last heartbeat with counts."""


class Welcome(_Model):
    """Answer of a controller to a hello: ``{"welcome": {...}}``, or ``{"lost": true}``.

    ``lost`` means that the server was disconnected for too long and its sessions are reported lost. The
    server ends them and reconnects with another id.
    """

    beat_s: float
    keep: bool = False
    """True if the server sends a checkpoint of the session after every step."""
