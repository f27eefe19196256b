"""``/v1/messages`` of Anthropic: its requests as chat messages, its answers, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from agentrl_env.types import FunctionCall, FunctionSpec, Message, ToolCall, ToolSpec
from agentrl_train.chat import ChatFormat
from agentrl_train.gateway.chat_completions import Fields, SamplingFields, text_of, validate_as
from agentrl_train.gateway.constraints import schema_of, tool_choice_fields
from agentrl_train.gateway.errors import GatewayError, InvalidRequest, ignoring
from agentrl_train.gateway.recorder import Call
from agentrl_train.tool_calls.grammars import Constraint

UNSUPPORTED: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
"""Unsupported parameters that would change the answer, with the values that have no effect."""
HARMLESS = frozenset({"betas", "cache_control", "inference_geo", "metadata", "service_tier", "speed"})
"""Parameters that are not read: labels, and hints to hosted models."""
THOUGHTS = ("thinking", "redacted_thinking")
"""Types of the blocks of earlier thoughts, which the policy does not read."""
CLEARED_THOUGHTS = "clear_thinking"
"""Start of the type of a context edit that omits earlier thoughts."""
UNREADABLE = "INVALID_JSON"
"""Key that wraps arguments that are not a JSON object, when they are sent to the client and read back."""
KINDS = {401: "authentication_error", 404: "not_found_error"}
"""Status of a response -> type of its error. Any other status below 500 is an invalid request."""


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Tool(BaseModel):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Choice(BaseModel):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(BaseModel):
    type: str


class _Edits(BaseModel):
    edits: list[dict[str, Any]] | None = None


class _ToolUse(BaseModel):
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)

    def call(self) -> ToolCall:
        """Return the call. Arguments that were not an object are returned as the policy wrote them."""
        unreadable = self.input.get(UNREADABLE) if len(self.input) == 1 else None
        arguments = unreadable if isinstance(unreadable, str) else json.dumps(self.input, ensure_ascii=False)
        return ToolCall(id=self.id, function=FunctionCall(name=self.name, arguments=arguments))


class MessagesRequest(SamplingFields):
    """The fields of a request that the server reads."""

    model: str = "policy"
    messages: list[_Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop_sequences: list[str] | None = None
    thinking: _Thinking | None = None
    output_config: dict[str, Any] | None = None
    context_management: _Edits | None = None
    stream: bool | None = None

    def check(self) -> None:
        """Raise ``InvalidRequest`` for a value that would be ignored."""
        if self.messages[-1].role == "assistant":
            raise InvalidRequest(
                "the last message is the assistant's, and a started answer cannot be continued: end with a "
                "user message",
                param="messages",
            )
        for edit in (self.context_management and self.context_management.edits) or ():
            if not str(edit.get("type")).startswith(CLEARED_THOUGHTS):
                raise InvalidRequest(
                    f"an edit of the context of type {edit.get('type')!r} is not supported: shorten the "
                    f"messages in the program, or {ignoring('context_management')}",
                    param="context_management",
                )

    @property
    def constraint(self) -> Constraint:
        """Return the required form of the answer. Raises ``InvalidRequest`` for an unknown form."""
        choice = self.tool_choice or _Choice(type="auto")
        words: Any = {"any": "required", "tool": {"type": "function", "name": choice.name}}
        return Constraint(
            **tool_choice_fields(words.get(choice.type, choice.type), self.specs),
            schema=schema_of((self.output_config or {}).get("format"), param="output_config"),
            schema_parameter="output_config",
            parallel=not choice.disable_parallel_tool_use,
        )

    @property
    def specs(self) -> list[ToolSpec]:
        """Return the tools. Raises ``InvalidRequest`` for a tool without its own schema."""
        return [_spec(tool) for tool in self.tools or ()]

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return tuple(text for text in self.stop_sequences or () if text)

    @property
    def conversation(self) -> list[Message]:
        """Return the conversation as chat messages, the system message first."""
        head = [Message(role="system", content=text_of(self.system))] if self.system else []
        found = [_chat_messages(one, f"messages.{number}") for number, one in enumerate(self.messages)]
        return [*head, *(message for part in found for message in part)]


FIELDS = Fields(read=MessagesRequest.model_fields, unread=HARMLESS, unsupported=UNSUPPORTED)


def _spec(tool: _Tool) -> ToolSpec:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"a tool of type {tool.type!r} is not supported: describe it with an input_schema, and execute "
            "it in the program",
            param="tools",
        )
    function = FunctionSpec(
        name=tool.name, description=tool.description or "", parameters=tool.input_schema or {}
    )
    return ToolSpec(function=function)


def _chat_messages(message: _Message, where: str) -> Iterator[Message]:
    """Yield a message as chat messages. Results of tools are separate messages before the text."""
    if isinstance(message.content, str):
        yield Message(role=message.role, content=message.content)
        return
    blocks = [block for block in message.content if block.get("type") not in THOUGHTS]
    texts = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result")]
    content = text_of(texts) if texts else None
    if message.role == "assistant":
        uses = [block for block in blocks if block.get("type") == "tool_use"]
        yield Message.assistant(content, *(validate_as(_ToolUse, use, within=where).call() for use in uses))
        return
    for block in blocks:
        if block.get("type") == "tool_result":
            yield Message(
                role="tool",
                content=text_of(block.get("content")) or "",
                tool_call_id=str(block.get("tool_use_id")),
            )
    if texts:
        yield Message(role=message.role, content=content)


class MessageAnswer:
    """The answer to a request, whole or as events.

    Args:
        call: the answered call.
        request: the request.
        chat: chat format of the policy.
    """

    def __init__(self, call: Call, *, request: MessagesRequest, chat: ChatFormat) -> None:
        assert call.completion is not None
        self._call = call
        self._request = request
        self._sampled = call.completion.token_ids
        said = chat.text(self._sampled)
        self._stop: str | None = None
        if call.completion.finish_reason == "length" and not call.cut:
            self._stop = min((text for text in request.stops if text in said), key=said.find, default=None)

    def body(self) -> dict[str, Any]:
        """Return the whole answer."""
        return self._message(
            content=self._blocks(),
            stop_reason=self._reason,
            stop_sequence=self._stop,
            output_tokens=len(self._sampled),
        )

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer."""
        begun = self._message(content=[], stop_reason=None, stop_sequence=None, output_tokens=0)
        yield {"type": "message_start", "message": begun}
        for index, block in enumerate(self._blocks()):
            empty, deltas = _parts(block)
            yield {"type": "content_block_start", "index": index, "content_block": empty}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": self._reason, "stop_sequence": self._stop},
            "usage": {"output_tokens": len(self._sampled)},
        }
        yield {"type": "message_stop"}

    @property
    def _reason(self) -> str:
        if self._call.message.tool_calls:
            return "tool_use"
        if self._stop is not None:
            return "stop_sequence"
        return "max_tokens" if self._call.cut else "end_turn"

    def _message(
        self,
        *,
        content: Sequence[Mapping[str, Any]],
        stop_reason: str | None,
        stop_sequence: str | None,
        output_tokens: int,
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._call.uid}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": list(content),
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": {
                "input_tokens": len(self._call.context),
                "output_tokens": output_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    def _blocks(self) -> list[dict[str, Any]]:
        """Return the content: the thought if the request enables thoughts, the text and the calls."""
        message, thinking = self._call.message, self._request.thinking
        blocks: list[dict[str, Any]] = []
        if self._call.thought is not None and thinking and thinking.type != "disabled":
            blocks.append({"type": "thinking", "thinking": self._call.thought, "signature": self._call.uid})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        for call in message.tool_calls or ():
            arguments = _object(call.function.arguments)
            blocks.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments})
        return blocks


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {UNREADABLE: arguments}


def _parts(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the initial state of a block, and the deltas that complete it."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": "", "signature": ""}, [thought, signed]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def error_body(error: GatewayError, *, status: int) -> dict[str, Any]:
    """Return the body of the response to a request that failed."""
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
