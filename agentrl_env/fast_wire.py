"""What is said in a step, as it crosses the wire: read as far as a step needs it, and written at once.

The models of ``agentrl_env.types`` say the same; making and writing those took a third of a step's time.
They still are what reads leniently, and what tells what is wrong with a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from pydantic_core import PydanticSerializationError

from agentrl_env.types import TRUNCATED, Message, SessionStatus, ToolCall
from agentrl_env.wire import StepBody, StepRequest

_Seq = Annotated[int, Meta(ge=1, le=2**63 - 1)]
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What reading one of these structures raises, where its model may still read it or tells what is wrong."""
_UNWRITABLE = (ValueError, OverflowError, RecursionError, TypeError)
_ENCODE = msgspec.json.Encoder().encode
# What ``model_dump_json`` calls in the end, without the way through a str.
MESSAGE_JSON: Callable[[Message], bytes] = Message.__pydantic_serializer__.to_json


class FunctionSaid(Struct, frozen=True, gc=False):
    """A ``FunctionCall``."""

    name: str
    arguments: str = "{}"


class CallSaid(Struct, frozen=True, gc=False):
    """A ``ToolCall``."""

    id: str
    function: FunctionSaid
    type: Literal["function"] = "function"

    @classmethod
    def of(cls, call: ToolCall) -> CallSaid:
        """Return the same call."""
        return cls(call.id, FunctionSaid(call.function.name, call.function.arguments))


class Said(Struct, frozen=True, gc=False):
    """A ``Message``; in a step, the assistant's."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: tuple[CallSaid, ...] | UnsetType | None = UNSET
    tool_call_id: str | UnsetType | None = UNSET
    name: str | UnsetType | None = UNSET

    @classmethod
    def of(cls, message: Message) -> Said:
        """Return what a message says."""
        calls, answers, name = message.tool_calls, message.tool_call_id, message.name
        return cls(
            message.role,
            message.content,
            UNSET if calls is None else tuple(map(CallSaid.of, calls)),
            UNSET if answers is None else answers,
            UNSET if name is None else name,
        )

    def json(self) -> bytes:
        """Return the message as JSON; what JSON cannot carry in it is replaced."""
        return _written(self)


class StepSaid(Struct, frozen=True, gc=False):
    """A ``StepBody``."""

    seq: _Seq
    message: Said

    @classmethod
    def of(cls, step: StepBody) -> StepSaid:
        """Return the same step."""
        return cls(step.seq, Said.of(step.message))


class StepItem(Struct, frozen=True, gc=False):
    """A ``StepRequest``: one item of a batch."""

    session_id: str
    seq: _Seq
    message: Said

    @classmethod
    def of(cls, step: StepRequest) -> StepItem:
        """Return the same step."""
        return cls(step.session_id, step.seq, Said.of(step.message))

    def json(self) -> bytes:
        """Return the step as JSON."""
        return _written(self)


class StepItems(Struct, frozen=True, gc=False):
    """A ``StepBatch``."""

    steps: list[StepItem]
    wait_s: Annotated[float, Meta(ge=0)] | None = None


class ToolAnswer(Struct, frozen=True, gc=False):
    """A message that answers a tool call with text."""

    content: str
    tool_call_id: str
    role: Literal["tool"] = "tool"


class _StepAnswer(Struct, frozen=True, gc=False):
    """A ``StepResult``."""

    session_id: str
    seq: int
    messages: list[ToolAnswer | Raw]
    reward: float
    terminated: bool
    truncated: bool
    status: SessionStatus
    metrics: dict[str, float]
    info: dict[str, Any]


def step_answer(
    session_id: str,
    seq: int,
    messages: Sequence[ToolAnswer | Message],
    *,
    reward: float,
    status: SessionStatus,
    metrics: dict[str, float],
    info: dict[str, Any],
) -> bytes:
    """Return a ``StepResult`` as JSON."""
    return _written(
        _StepAnswer(
            session_id,
            seq,
            [
                message if isinstance(message, ToolAnswer) else Raw(message_json(message))
                for message in messages
            ],
            reward,
            status is SessionStatus.COMPLETED,
            status in TRUNCATED,
            status,
            metrics,
            info,
        )
    )


def message_json(message: Message) -> bytes:
    """Return a message as JSON; what JSON cannot carry in it, such as lone surrogates, is replaced."""
    try:
        return MESSAGE_JSON(message)
    except PydanticSerializationError:
        return _forced(message.model_dump())


def _written(structure: Struct) -> bytes:
    try:
        return _ENCODE(structure)
    except _UNWRITABLE:  # an integer of more than 64 bits, or text that came from no wire
        return _forced(msgspec.to_builtins(structure, enc_hook=_plain))


def _forced(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=_plain).encode("utf-8", "replace")


def _plain(value: object) -> object:
    return json.loads(bytes(value)) if isinstance(value, Raw) else str(value)
