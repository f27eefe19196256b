"""Data models shared by environments, servers and trainers.

All of them cross a wire, so they are frozen pydantic models in OpenAI chat format. They contain only
messages, never token ids.

Example, one turn of a session::

    result = await session.step(Message.assistant("Let me try.", ToolCall.of("guess", n=7)))
    result.messages  # (Message(role="tool", tool_call_id=..., content="higher"),)
    result.reward, result.terminated, result.status  # 0.0, False, SessionStatus.RUNNING
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import partial
from html import escape
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, field_validator
from pydantic_core import CoreSchema, core_schema


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")

Finite = Annotated[float, Field(allow_inf_nan=False)]

_absent = partial(operator.is_, None)
"""True if a field is omitted from the dumped message, as in OpenAI's format."""


class FunctionCall(_Frozen):
    """The function part of a tool call. ``arguments`` is the unparsed JSON text from the model."""

    name: str
    arguments: str = "{}"


class _Nullable:
    """Also accepts null. Unlike a validator, this does not call Python code for every value."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.nullable_schema(handler(source))


class ToolCall(_Frozen):
    """One call of one tool in an assistant message."""

    id: Annotated[str, Field(coerce_numbers_to_str=True), _Nullable()] = cast(str, None)
    """Id of the call. A number becomes text. In a message, a call without an id gets its position as id."""
    type: Literal["function"] = "function"
    function: FunctionCall

    @classmethod
    def of(cls, name: str, /, *, call_id: str = "call_0", **arguments: Any) -> ToolCall:
        """Return a call with plain values: ``ToolCall.of("guess", n=7)``."""
        return cls(id=call_id, function=FunctionCall(name=name, arguments=json.dumps(arguments)))


class Message(_Frozen):
    """One chat message in OpenAI format. ``content`` is text, a list of content parts, or null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Field(fail_fast=True)] | None = Field(
        default=None, exclude_if=_absent
    )
    tool_call_id: str | None = Field(default=None, exclude_if=_absent)
    name: str | None = Field(default=None, exclude_if=_absent)

    @field_validator("tool_calls")
    @classmethod
    def _number_calls(cls, calls: tuple[ToolCall, ...] | None) -> tuple[ToolCall, ...] | None:
        """Give calls without an id their position as the id, because some models send no ids."""
        # Runs after validation. A "before" validator makes reading each step of a batch 70 % slower.
        if calls is None or all(call.id is not None for call in calls):
            return calls
        return tuple(
            call.model_copy(update={"id": f"call_{n}"}) if call.id is None else call
            for n, call in enumerate(calls)
        )

    @classmethod
    def assistant(cls, content: str | None = None, *calls: ToolCall) -> Message:
        """Return an assistant message with text and tool calls."""
        return cls(role="assistant", content=content, tool_calls=calls or None)

    def wire(self) -> dict[str, Any]:
        """Return the message in OpenAI chat format. Absent fields are omitted, except ``content``."""
        return self.model_dump()

    def _repr_html_(self) -> str:
        return notebook_html("", [self])


_COLOURS = {"assistant": "#8a5fc0", "tool": "#2e8b57", "user": "#3f7fd0"}
_ENTRY = '<div style="border-left:3px solid {};padding:.1em .8em;margin:.4em 0"><b>{}</b>{}</div>'
_TEXT = '<pre style="white-space:pre-wrap;margin:0">{}</pre>'


def notebook_html(heading: str, messages: Iterable[Message]) -> str:
    """Return a heading and messages as HTML for notebooks. Their text is escaped."""
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
    """The number of samples in a split, which is null if the split is endless."""

    num_samples: int | None = None
    ids: tuple[str, ...] | None = Field(default=None, exclude_if=_absent)
    """Names of the samples in order, if they have names and are not too many.

    A number, in contrast to text, selects a sample by its position.
    """


class TaskInfo(_Frozen):
    """Description of one task."""

    name: str
    description: str = ""
    splits: dict[str, SplitInfo] = Field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = ()
    max_turns: int
    capabilities: tuple[str, ...] = ()

    def parse_index(self, split: str, text: str) -> int | str:
        """Return the index that a text means: a name in the split, else a number, else the text itself."""
        known = self.splits.get(split, SplitInfo()).ids or ()
        return int(text) if text not in known and _NUMBER.fullmatch(text) else text


_Count = Annotated[int, Field(ge=0, le=2**53)]
_Seconds = Annotated[float, Field(ge=0, le=2**53)]


class Durations(_Frozen):
    """Durations in the buckets of ``/metrics``."""

    buckets: tuple[_Count, ...] = ()
    seconds: _Seconds = 0.0
    """Sum of the durations."""


class TaskCounts(_Frozen):
    """Counts of one task since its servers have started."""

    opened: _Count = 0
    ended: dict[str, _Count] = Field(default_factory=dict)
    """Ended sessions by status."""
    steps: _Count = 0
    invalid_calls: _Count = 0
    scored: _Count = 0
    """Number of sessions that ended with a reward, because the task or a limit ended them."""
    succeeded: _Count = 0
    reward: float = Field(default=0.0, ge=-1e300, le=1e300)
    """Sum of the rewards of the scored sessions."""


class Counts(_Frozen):
    """All counts of a serving process since its start, sent with heartbeats."""

    source: str = Field(min_length=1, max_length=64)
    """Id of the process. It does not change if the server takes another id."""
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
    """Number of openings waiting for capacity."""
    draining: bool = False
    stale: bool = False
    """True if the operator has stopped new sessions here."""
    heard_s: float = 0.0
    """Seconds since the last heartbeat."""
    version: str = ""
    steps: int = 0
    """Number of steps since the server's start."""


class LostServer(_Frozen):
    """A recently lost server in ``GET /v1/fleet``."""

    server_id: str
    place: str = ""
    """Host name and process id."""
    tasks: tuple[str, ...] = ()
    open: int = 0
    """Number of the server's open sessions when it was lost."""
    reason: str = ""
    lost_s: float = 0.0
    """Seconds since the loss."""


class FleetPoint(_Frozen):
    """The state of a server or fleet at one time. Counts are totals since the start of the process."""

    time: float
    """Unix time in seconds, by the clock of the answering process."""
    servers: int = 0
    open: int = 0
    waiting: int = 0
    capacity: int = 0
    steps: int = 0
    scored: int = 0
    succeeded: int = 0
    failed: int = 0
    """Number of sessions that ended because the environment failed or the server was lost."""


class FleetInfo(_Frozen):
    """Answer of ``GET /v1/fleet``. A single server is a fleet of one."""

    kind: Literal["server", "controller"]
    name: str = ""
    version: str = ""
    draining: bool = False
    waiting: int = 0
    """Number of openings waiting for capacity in the whole fleet."""
    servers: tuple[ServerSummary, ...] = ()
    lost: tuple[LostServer, ...] = ()
    counts: dict[str, TaskCounts] = Field(default_factory=dict)
    """Counts by task."""
    history: tuple[FleetPoint, ...] = ()
    """Points after the request's ``since``, oldest first, for at most one hour. Empty without ``since``."""


class SessionStatus(StrEnum):
    """Status of a session. All statuses except RUNNING are final."""

    RUNNING = "running"
    COMPLETED = "completed"
    """The task ended with success or failure (``terminated``)."""
    TRUNCATED_TURNS = "truncated_turns"
    """The turn limit was reached (``truncated``)."""
    TRUNCATED_TIME = "truncated_time"
    """The session's time limit was reached (``truncated``)."""
    FAILED_ENVIRONMENT = "failed_environment"
    """The environment failed. The reward is meaningless and must not be used for training."""
    CANCELLED = "cancelled"
    """The client closed the session before its end."""
    EXPIRED = "expired"
    """The session was idle past its lease."""

    @property
    def final(self) -> bool:
        """True if no further step is possible."""
        return self is not _RUNNING


_RUNNING = SessionStatus.RUNNING  # looking up an enum member is slow
TRUNCATED = (SessionStatus.TRUNCATED_TURNS, SessionStatus.TRUNCATED_TIME)


class StepResult(_Frozen):
    """The environment's answer to one assistant message. ``reward`` is the reward of this step only."""

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
        """The same as ``final``, under its usual name in reinforcement learning."""
        return self.status.final

    def _repr_html_(self) -> str:
        return notebook_html(f"step {self.seq}: reward {self.reward:g}, {self.status}", self.messages)


class SessionInfo(_Frozen):
    """State of a session, either when it was opened or now (``GET /v1/sessions/{id}``)."""

    session_id: Annotated[str, Field(min_length=1, max_length=256)]
    task: str
    sample: TaskSample
    messages: tuple[Message, ...] = ()
    """The opening messages of the episode."""
    tools: tuple[ToolSpec, ...] = ()
    status: SessionStatus = SessionStatus.RUNNING
    turn: int = 0
    """Number of steps taken. The next step has ``seq = turn + 1``."""
    last: StepResult | None = None
    info: Mapping[str, Any] = Field(default_factory=dict)
    agent_token: str | None = Field(default=None, exclude_if=_absent)
    """Token that only allows stepping and reading this session. Present only in the answer that opened the
    session, if the server requires a token."""
