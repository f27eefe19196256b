"""Requests and answers of wire protocol 1, as they cross HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl_env.types import Message, SessionInfo, SessionStatus, StepResult, TaskInfo, TaskSample, ToolSpec

PROTOCOL_VERSION = 1
_INT64 = 2**63
PROTOCOL_HEADER = "x-agentrl-protocol"
SOCKET_HEADER = "x-agentrl-socket"
"""On answers over HTTP: the path of the WebSocket that takes the same calls."""
SOCKET_PATH = "/v1/ws"


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class OpenRequest(_Request):
    """Body of ``POST /v1/sessions``.

    ``wait_s`` is how long to wait in the fair queue of a full server (0: be refused at once).
    ``request_id`` makes the call idempotent: the same id again gives the same session.
    """

    task: str
    split: str = "train"
    index: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | str | None = None
    seed: int | None = Field(default=None, ge=0, lt=_INT64)
    sample: dict[str, Any] | None = None
    wait_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    request_id: str | None = Field(default=None, max_length=128)
    client: str = Field(default="", max_length=128)
    """Who opens; a controller's limits count by it."""


class StepBody(_Request):
    """Body of ``POST /v1/sessions/{id}/step``."""

    seq: int = Field(ge=1, lt=_INT64)
    message: Message


class StepRequest(StepBody):
    """One item of ``POST /v1/step``."""

    session_id: str


class StepBatch(_Request):
    """Body of ``POST /v1/step``: many sessions in one request.

    With ``wait_s`` the answer comes after that many seconds at the latest, and carries a
    ``step_pending`` error for each item still under way; the same ``seq`` again waits for it.
    """

    steps: list[StepRequest]
    wait_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class ForkRequest(_Request):
    """Body of ``POST /v1/sessions/{id}/fork``.

    ``request_id`` makes the call idempotent: the same id again gives the same sessions.
    """

    n: int = Field(default=1, ge=1)
    request_id: str | None = Field(default=None, max_length=128)


class ForkAnswer(_Request):
    """Answer of ``POST /v1/sessions/{id}/fork``: the new sessions, where they stand."""

    sessions: tuple[SessionInfo, ...]


class TaskList(_Request):
    """Answer of ``GET /v1/tasks``."""

    protocol: int = PROTOCOL_VERSION
    tasks: tuple[TaskInfo, ...] = ()


class ExpertAnswer(_Request):
    """Answer of ``POST /v1/sessions/{id}/expert``."""

    message: Message


class SessionQuery(_Request):
    """Query of ``GET /v1/sessions``; ``after`` is the ``next`` of the page before."""

    task: str | None = None
    status: SessionStatus | None = None
    limit: int = Field(default=100, ge=1, le=1000)
    after: str | None = Field(default=None, max_length=256)


class SessionSummary(_Request):
    """One session, open or ended lately, as ``GET /v1/sessions`` lists it."""

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
    """When it was opened, in seconds since 1970 by its server's clock; the list's order, newest first."""
    age_s: float
    idle_s: float | None = None
    """Since its last call, or its end; null while a call is under way."""


class SessionList(_Request):
    """Answer of ``GET /v1/sessions``: one page, and how many sessions the query means in all."""

    sessions: tuple[SessionSummary, ...] = ()
    total: int = 0
    next: str | None = None
    """Where the next page begins; null on the last."""


class TranscriptQuery(_Request):
    """Query of ``GET /v1/sessions/{id}/transcript``: the turns after one; null: and how it began."""

    after: int | None = Field(default=None, ge=0, lt=_INT64)


class TranscriptTurn(_Request):
    """One turn: what the agent said, and the environment's answer."""

    message: Message
    result: StepResult


class Transcript(_Request):
    """Answer of ``GET /v1/sessions/{id}/transcript``: the last turns that the server still keeps."""

    session_id: str
    sample: TaskSample
    status: SessionStatus
    turn: int
    """Number of steps taken."""
    reward: float
    """Sum of the rewards so far."""
    messages: tuple[Message, ...] = ()
    """The opening messages, where asked for."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools, where the opening messages are asked for."""
    turns: tuple[TranscriptTurn, ...] = ()


class ServerSummary(_Request):
    """One server, as ``GET /v1/fleet`` lists it."""

    server_id: str
    place: str = ""
    """Host and process, for people."""
    tasks: tuple[str, ...] = ()
    capacity: int
    open: int
    waiting: int = 0
    """Openings that wait for room."""
    draining: bool = False
    heard_s: float = 0.0
    """Seconds since its last sign of life."""
    version: str = ""


class FleetInfo(_Request):
    """Answer of ``GET /v1/fleet``; a single server is a fleet of itself."""

    kind: Literal["server", "controller"]
    name: str = ""
    version: str = ""
    draining: bool = False
    waiting: int = 0
    """Openings that wait for room anywhere."""
    servers: tuple[ServerSummary, ...] = ()


SOCKET_PROTOCOL = "agentrl.v1"
"""The subprotocol of ``/v1/ws``."""


class _Call(_Request):
    """One call over ``/v1/ws``: its fields are those of the HTTP call, with ``id`` and ``call``."""

    id: Annotated[int, Field(strict=True, ge=-_INT64, lt=_INT64)] | Annotated[str, Field(max_length=128)]
    """Chosen by the caller; the answer carries it: ``{"id", "result"}`` or ``{"id", "error"}``."""
    traceparent: str | None = Field(default=None, max_length=128)
    """The caller's span, as the HTTP header of that name has it."""


class _SessionCall(_Call):
    session_id: str


class TasksCall(_Call):
    """``GET /v1/tasks``."""

    call: Literal["tasks"]


class OpenCall(OpenRequest, _Call):
    """``POST /v1/sessions``."""

    call: Literal["open"]


class StepCall(StepRequest, _Call):
    """``POST /v1/sessions/{id}/step``."""

    call: Literal["step"]


class StepManyCall(StepBatch, _Call):
    """``POST /v1/step``."""

    call: Literal["step_many"]


class InfoCall(_SessionCall):
    """``GET /v1/sessions/{id}``."""

    call: Literal["info"]


class CloseCall(_SessionCall):
    """``DELETE /v1/sessions/{id}``; the result is null."""

    call: Literal["close"]


class ExpertCall(_SessionCall):
    """``POST /v1/sessions/{id}/expert``."""

    call: Literal["expert"]


class ForkCall(ForkRequest, _SessionCall):
    """``POST /v1/sessions/{id}/fork``."""

    call: Literal["fork"]


class SessionsCall(SessionQuery, _Call):
    """``GET /v1/sessions``."""

    call: Literal["sessions"]


class TranscriptCall(TranscriptQuery, _SessionCall):
    """``GET /v1/sessions/{id}/transcript``."""

    call: Literal["transcript"]


SocketCall = Annotated[
    TasksCall
    | OpenCall
    | StepCall
    | StepManyCall
    | InfoCall
    | CloseCall
    | ExpertCall
    | ForkCall
    | SessionsCall
    | TranscriptCall,
    Field(discriminator="call"),
]


LINK_PATH = "/v1/link"
"""Where a controller takes the WebSocket of a server that dials in; it carries calls the other way."""


class SessionRow(_Request):
    """One open session, as its server reports it to a controller."""

    session_id: str
    task: str
    client: str = ""


class Hello(_Request):
    """What a server says first on a link: ``{"hello": {...}}``."""

    server_id: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    protocol: int = PROTOCOL_VERSION
    tasks: tuple[TaskInfo, ...]
    capacity: int = Field(ge=1)
    sessions: tuple[SessionRow, ...] = ()
    draining: bool = False
    place: str = ""
    """Host and process, for people."""
    version: str = ""


class Beat(_Request):
    """What a server says every second, and before an answer that a change led to: ``{"beat": {...}}``."""

    opened: tuple[SessionRow, ...] = ()
    ended: tuple[str, ...] = ()
    draining: bool = False
    leaving: bool = False
    """The server is about to end in order; no session is left on it."""


class Welcome(_Request):
    """A controller's answer to a hello: ``{"welcome": {...}}``, or ``{"lost": true}``.

    ``lost`` tells a server that it was away for too long: what it holds has been reported lost, so it
    ends its sessions and comes back under another id.
    """

    beat_s: float
    keep: bool = False
    """Whether the server is to tell, after every step, what another needs to go on with the session."""


class Standing(BaseModel):
    """Where a session stands between two steps: all that another server needs to go on from there."""

    model_config = ConfigDict(frozen=True)

    sample: TaskSample
    opening: tuple[Message, ...]
    turn: int = Field(ge=0)
    total: float
    """Sum of the rewards so far."""
    used_s: float
    """Seconds of its time limit that are over."""
    turns: tuple[tuple[str, str], ...] = ()
    """The last turns, what was said and answered, as JSON; a ``Kept`` carries them beside it."""
    state: bytes
    """What ``snapshot`` returned, as ``agentrl_env.session.state_codec`` encodes it: JSON in ASCII."""


class Kept(_Request):
    """What a server says before the answer of a step, to a controller that keeps: ``{"kept": {...}}``.

    Without a ``standing`` the session cannot be gone on with elsewhere.
    """

    session_id: str
    task: str
    client: str = ""
    seq: int = 0
    """Number of steps taken."""
    standing: Standing | None = None
    seal: str = ""
    """MAC of all other fields but ``turns``, under the fleet's token."""
    turns: tuple[tuple[str, str, str], ...] = ()
    """The turns that the controller has not been told of yet; to an adopter, all that are kept.

    Of each the message, the answer, and a MAC of the session's id and both.
    """


class KeptHead(_Request):
    """What a controller reads of a ``Kept``."""

    session_id: str
    task: str
    client: str = ""
    seq: int = 0
    seal: str = ""


class AdoptCall(Kept, _Call):
    """Go on with a session of a server that is gone, under the same id; over a link alone."""

    call: Literal["adopt"]


LinkCall = Annotated[SocketCall | AdoptCall, Field(discriminator="call")]
"""What a controller may ask of a server over its link."""
