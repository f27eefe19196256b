"""Data models shared by environments, servers and trainers.

All of them cross a wire, so they are frozen pydantic models in OpenAI chat format. They carry messages only:
no token id is ever seen in this package.

Example, one turn of a session::

    result = await session.step(Message.assistant("Let me try.", ToolCall.of("guess", n=7)))
    result.messages  # (Message(role="tool", tool_call_id=..., content="higher"),)
    result.reward, result.terminated, result.status  # 0.0, False, SessionStatus.RUNNING
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import partial
from html import escape
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, field_validator
from pydantic_core import CoreSchema, core_schema


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


Finite = Annotated[float, Field(allow_inf_nan=False)]

_absent = partial(operator.is_, None)
"""True if a field is omitted from the dumped message, as in OpenAI's format."""


class FunctionCall(_Frozen):
    """The function part of a tool call; ``arguments`` is the unparsed JSON text from the model."""

    name: str
    arguments: str = "{}"


class _Nullable:
    """Accepts null as well. A validator would call Python for every value, and this does not."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.nullable_schema(handler(source))


class ToolCall(_Frozen):
    """One call of one tool in an assistant message."""

    id: Annotated[str, Field(coerce_numbers_to_str=True), _Nullable()] = cast(str, None)
    """A number is written as text. In a message, a call without an id is named by its position."""
    type: Literal["function"] = "function"
    function: FunctionCall

    @classmethod
    def of(cls, name: str, /, *, call_id: str = "call_0", **arguments: Any) -> ToolCall:
        """Build a call from plain values: ``ToolCall.of("guess", n=7)``."""
        return cls(id=call_id, function=FunctionCall(name=name, arguments=json.dumps(arguments)))


class Message(_Frozen):
    """One chat message in OpenAI format; ``content`` is text, a list of content parts, or null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Field(fail_fast=True)] | None = Field(
        default=None, exclude_if=_absent
    )
    tool_call_id: str | None = Field(default=None, exclude_if=_absent)
    name: str | None = Field(default=None, exclude_if=_absent)

    @field_validator("tool_calls")
    @classmethod
    def _named(cls, calls: tuple[ToolCall, ...] | None) -> tuple[ToolCall, ...] | None:
        """Name calls without an id by their position: some models name none."""
        # Not before the fields are validated, which makes each step of a batch 70 % slower to read.
        if calls is None or all(call.id is not None for call in calls):
            return calls
        return tuple(
            call.model_copy(update={"id": f"call_{n}"}) if call.id is None else call
            for n, call in enumerate(calls)
        )

    @classmethod
    def assistant(cls, content: str | None = None, *calls: ToolCall) -> Message:
        """Build an assistant message from text and tool calls."""
        return cls(role="assistant", content=content, tool_calls=calls or None)

    def wire(self) -> dict[str, Any]:
        """Return the OpenAI chat form: absent fields are omitted, except ``content``."""
        return self.model_dump()

    def _repr_html_(self) -> str:
        return notebook_html("", [self])


_COLOURS = {"assistant": "#8a5fc0", "tool": "#2e8b57", "user": "#3f7fd0"}
_ENTRY = '<div style="border-left:3px solid {};padding:.1em .8em;margin:.4em 0"><b>{}</b>{}</div>'
_TEXT = '<pre style="white-space:pre-wrap;margin:0">{}</pre>'


def notebook_html(heading: str, messages: Iterable[Message]) -> str:
    """Return a heading and messages as HTML, which notebooks show; text in them is escaped."""
    parts = [f"<p>{escape(heading)}</p>"] if heading else []
    for message in messages:
        texts = [f"{call.function.name}({call.function.arguments})" for call in message.tool_calls or ()]
        if message.content is not None:
            text = message.content if isinstance(message.content, str) else json.dumps(message.content)
            texts.insert(0, text)
        inner = "".join(_TEXT.format(escape(text)) for text in texts)
        parts.append(_ENTRY.format(_COLOURS.get(message.role, "#888"), message.role, inner))
    return "".join(parts)


class FunctionSpec(_Frozen):
    """Name, description and JSON Schema of one tool's arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)


class ToolSpec(_Frozen):
    """The definition of a tool in OpenAI format."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class TaskSample(_Frozen):
    """One problem of one task: its identity (``task, split, index``), seed and data."""

    task: str
    split: str = "train"
    index: int | str | None = None
    seed: int = 0
    data: dict[str, Any] = Field(default_factory=dict)


class SplitInfo(_Frozen):
    """Number of samples in a split; null if it is endless."""

    num_samples: int | None = None
    ids: tuple[str, ...] | None = Field(default=None, exclude_if=_absent)
    """Names of the samples in order, if they have names and are not too many; numbers select them too."""


class TaskInfo(_Frozen):
    """Description of one task."""

    name: str
    description: str = ""
    splits: dict[str, SplitInfo] = Field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = ()
    max_turns: int
    capabilities: tuple[str, ...] = ()


_Count = Annotated[int, Field(ge=0, le=2**53)]
_Seconds = Annotated[float, Field(ge=0, le=2**53)]


class Durations(_Frozen):
    """Durations, counted in the buckets of ``/metrics``."""

    buckets: tuple[_Count, ...] = ()
    seconds: _Seconds = 0.0
    """Their sum."""


class TaskCounts(_Frozen):
    """Counts of one task since its servers have started."""

    opened: _Count = 0
    ended: dict[str, _Count] = Field(default_factory=dict)
    """Ended sessions by status."""
    steps: _Count = 0
    invalid_calls: _Count = 0
    scored: _Count = 0
    """Sessions that ended with a reward: those that the task or a limit has ended."""
    succeeded: _Count = 0
    reward: float = Field(default=0.0, ge=-1e300, le=1e300)
    """Sum of the rewards of the scored sessions."""


class Counts(_Frozen):
    """Everything that one serving process has counted since its start; it goes with heartbeats."""

    source: str = Field(min_length=1, max_length=64)
    """Id of the process; it stays the same if the server takes another id."""
    tasks: dict[str, TaskCounts] = Field(default_factory=dict)
    tools: dict[str, dict[str, Durations]] = Field(default_factory=dict)
    """Durations of tool calls by task and tool."""
    step_seconds: Durations = Durations()


class ServerSummary(_Frozen):
    """One server in ``GET /v1/fleet``."""

    server_id: str
    place: str = ""
    """Host name and process id."""
    tasks: tuple[str, ...] = ()
    capacity: int
    open: int
    waiting: int = 0
    """Number of openings that wait for capacity."""
    draining: bool = False
    stale: bool = False
    """True if the operator has stopped new sessions here."""
    heard_s: float = 0.0
    """Seconds since the last heartbeat."""
    version: str = ""
    steps: int = 0
    """Steps since its start."""


class LostServer(_Frozen):
    """One server that was lost in the last minutes, in ``GET /v1/fleet``."""

    server_id: str
    place: str = ""
    """Host name and process id."""
    tasks: tuple[str, ...] = ()
    open: int = 0
    """Number of its open sessions when it was lost."""
    reason: str = ""
    lost_s: float = 0.0
    """Seconds since then."""


class FleetPoint(_Frozen):
    """The state of a server or fleet at one time; counts are sums since the start of the process."""

    time: float
    """Unix time, in seconds, by the clock of the process that answers."""
    servers: int = 0
    open: int = 0
    waiting: int = 0
    capacity: int = 0
    steps: int = 0
    scored: int = 0
    succeeded: int = 0
    failed: int = 0
    """Sessions that ended because the environment failed or their server was lost."""


class FleetInfo(_Frozen):
    """Answer of ``GET /v1/fleet``; a single server is a fleet of one."""

    kind: Literal["server", "controller"]
    name: str = ""
    version: str = ""
    draining: bool = False
    waiting: int = 0
    """Number of openings that wait for capacity anywhere."""
    servers: tuple[ServerSummary, ...] = ()
    lost: tuple[LostServer, ...] = ()
    counts: dict[str, TaskCounts] = Field(default_factory=dict)
    """Counts by task."""
    history: tuple[FleetPoint, ...] = ()
    """Points after ``since``, oldest first, if the request has it; at most one hour of points."""


class SessionStatus(StrEnum):
    """Status of a session; all but RUNNING are final."""

    RUNNING = "running"
    COMPLETED = "completed"
    """The task ended, in success or failure (``terminated``)."""
    TRUNCATED_TURNS = "truncated_turns"
    """The turn limit was reached (``truncated``)."""
    TRUNCATED_TIME = "truncated_time"
    """The session's time limit was reached (``truncated``)."""
    FAILED_ENVIRONMENT = "failed_environment"
    """The environment failed; the reward is meaningless and must not be trained on."""
    CANCELLED = "cancelled"
    """Closed by the client before its end."""
    EXPIRED = "expired"
    """Idle past its lease."""

    @property
    def final(self) -> bool:
        """True if no further step is possible."""
        return self is not _RUNNING


_RUNNING = SessionStatus.RUNNING  # looking up an enum's member is slow
TRUNCATED = (SessionStatus.TRUNCATED_TURNS, SessionStatus.TRUNCATED_TIME)


class StepResult(_Frozen):
    """The environment's answer to one assistant message; ``reward`` is the reward of this step only."""

    session_id: str
    seq: int
    messages: tuple[Message, ...] = ()
    reward: Finite = 0.0
    terminated: bool = False
    truncated: bool = False
    status: SessionStatus = SessionStatus.RUNNING
    metrics: dict[str, Finite] = Field(default_factory=dict)
    info: dict[str, Any] = Field(default_factory=dict)

    @property
    def final(self) -> bool:
        """True if this was the session's last step."""
        return self.status.final

    @property
    def done(self) -> bool:
        """``final`` by the name that reinforcement learning gives it."""
        return self.status.final

    def _repr_html_(self) -> str:
        return notebook_html(f"step {self.seq}: reward {self.reward:g}, {self.status}", self.messages)


class SessionInfo(_Frozen):
    """State of a session, when it was opened or now (``GET /v1/sessions/{id}``)."""

    session_id: Annotated[str, Field(min_length=1, max_length=256)]
    task: str
    sample: TaskSample
    messages: tuple[Message, ...] = ()
    """The opening messages of the episode."""
    tools: tuple[ToolSpec, ...] = ()
    status: SessionStatus = SessionStatus.RUNNING
    turn: int = 0
    """Number of steps taken; the next step has ``seq = turn + 1``."""
    last: StepResult | None = None
    info: Mapping[str, Any] = Field(default_factory=dict)
    agent_token: str | None = Field(default=None, exclude_if=_absent)
    """Token that permits only to step and read this session; present only in the answer that opened it,
    if the server requires a token."""
