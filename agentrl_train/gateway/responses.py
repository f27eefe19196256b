"""``/v1/responses``: its requests as chat messages, its answers, and the events of a streamed answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from pydantic import BaseModel, Field

from agentrl_env.types import FunctionCall, Message, ToolCall, ToolSpec
from agentrl_train.gateway import chat_completions
from agentrl_train.gateway.chat_completions import Function, SamplingFields, text_of, validate_as
from agentrl_train.gateway.constraints import schema_of, tool_choice_fields
from agentrl_train.gateway.errors import InvalidRequest
from agentrl_train.gateway.recorder import Call
from agentrl_train.tool_calls.grammars import Constraint

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Unsupported parameters that would change the answer, with the values that have no effect."""
HARMLESS = chat_completions.HARMLESS | {
    *("client_metadata", "include", "max_tool_calls", "reasoning", "seed", "stream_options")
}
"""Parameters that are not read."""


class _Text(BaseModel):
    format: dict[str, Any] | None = None


class ResponseRequest(SamplingFields):
    """The fields of a request that the server reads."""

    model: str = "policy"
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    text: _Text | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    previous_response_id: str | None = None
    stream: bool | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def constraint(self) -> Constraint:
        """Return the required form of the answer. Raises ``InvalidRequest`` for an unknown form."""
        return Constraint(
            **tool_choice_fields(self.tool_choice, self.specs),
            schema=schema_of(self.text.format if self.text else None, param="text"),
            schema_parameter="text",
            parallel=self.parallel_tool_calls is not False,
        )

    @property
    def specs(self) -> list[ToolSpec]:
        """Return the tools. Raises ``InvalidRequest`` if a tool is not a function."""
        return [tool.spec() for tool, _ in self._functions]

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Return the functions of namespaces: name for the policy -> namespace and name in it."""
        return {tool.name: origin for tool, origin in self._functions if origin}

    @cached_property
    def _functions(self) -> list[tuple[Function, tuple[str, str] | None]]:
        """Return each function with its namespace and its name there, or None without a namespace."""
        found: list[tuple[Function, tuple[str, str] | None]] = []
        for number, given in enumerate(self.tools or ()):
            found += _functions(given, within=f"tools.{number}")
        names = [tool.name for tool, _ in found]
        for tool, origin in found:
            if origin and names.count(tool.name) > 1:
                raise InvalidRequest(
                    f"{origin[1]!r:.100} of the namespace {origin[0]!r:.100} is {tool.name!r:.200} for the "
                    "policy, and another tool has this name: rename one",
                    param="tools",
                )
        return found

    def messages(self, earlier: Sequence[Message] = ()) -> list[Message]:
        """Return the conversation as chat messages: instructions, earlier messages and the input."""
        head = [Message(role="system", content=self.instructions)] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        return [*head, *earlier, *_messages(items)]


FIELDS = chat_completions.Fields(read=ResponseRequest.model_fields, unread=HARMLESS, unsupported=UNSUPPORTED)


class _CallItem(BaseModel):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = ""

    def call(self) -> ToolCall:
        """Return the call, as the policy wrote it."""
        name = self.name if self.namespace is None else _join_name(self.namespace, self.name)
        return ToolCall(id=self.call_id, function=FunctionCall(name=name, arguments=self.arguments))


class _Namespace(BaseModel):
    name: str
    description: str | None = None
    tools: list[dict[str, Any]]


def _join_name(namespace: str, name: str) -> str:
    """Return the name of a namespace's function for the policy, which sees only plain functions."""
    return f"{namespace}__{name}"


def _functions(tool: dict[str, Any], *, within: str) -> Iterator[tuple[Function, tuple[str, str] | None]]:
    """Yield the functions of a tool, each with its origin in a namespace or None.

    The description of a namespace opens the descriptions of its functions.
    """
    if tool.get("type") == "function":
        yield validate_as(Function, tool, within=within), None
    elif tool.get("type") == "namespace":
        space = validate_as(_Namespace, tool, within=within)
        for number, one in enumerate(space.tools):
            if one.get("type") != "function":
                raise _no_function(one)
            function = validate_as(Function, one, within=f"{within}.tools.{number}")
            text = "\n".join(filter(None, (space.description, function.description)))
            named = {"name": _join_name(space.name, function.name), "description": text}
            yield function.model_copy(update=named), (space.name, function.name)
    else:
        raise _no_function(tool)


def _no_function(tool: dict[str, Any]) -> InvalidRequest:
    return InvalidRequest(
        f"a tool of type {tool.get('type')!r} is not supported: the policy calls functions only",
        param="tools",
    )


def _messages(items: Sequence[dict[str, Any]]) -> list[Message]:
    """Return input items as chat messages. The text and the calls of an answer are one message."""
    found: list[Message] = []
    open_turn = False
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call_output":
            text = text_of(item.get("output"))
            found.append(Message(role="tool", content=text, tool_call_id=str(item.get("call_id"))))
            open_turn = False
            continue
        if kind == "function_call":
            call = validate_as(_CallItem, item, within=f"input.{number}").call()
            before = found.pop() if open_turn else Message.assistant()
            found.append(Message.assistant(before.content, *(before.tool_calls or ()), call))  # type: ignore[arg-type]
            open_turn = True
            continue
        if kind != "message":
            raise InvalidRequest(
                f"an input item of type {kind!r} is not supported: write messages, calls and their outputs "
                "into the input, or continue with previous_response_id",
                param="input",
            )
        if item.get("role") not in ("system", "developer", "user", "assistant"):
            raise InvalidRequest(
                f"input.{number}: a message of role {item.get('role')!r} is not supported", param="input"
            )
        found.append(Message(role=item["role"], content=text_of(item.get("content"))))
        open_turn = item["role"] == "assistant"
    return found


class ResponseAnswer:
    """The answer to a request, whole or as events.

    Args:
        call: the answered call.
        request: the request.
        created: Unix time.
    """

    def __init__(self, call: Call, *, request: ResponseRequest, created: int) -> None:
        self.id = f"resp_{call.uid}"
        self._call = call
        self._request = request
        self._created = created

    def body(self) -> dict[str, Any]:
        """Return the whole answer."""
        assert self._call.completion is not None
        prompt, sampled = len(self._call.context), len(self._call.completion.token_ids)
        return self._response(
            status="incomplete" if self._call.cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if self._call.cut else None,
            output=self._items(),
            usage={
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        )

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer."""
        for number, event in enumerate(self._events()):
            yield event | {"sequence_number": number}

    def _events(self) -> Iterator[dict[str, Any]]:
        begun = self._response(status="in_progress", output=[])
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, item in enumerate(self._items()):
            place = {"output_index": index, "item_id": item["id"]}
            empty: dict[str, Any] = {"content": []} if item["type"] != "function_call" else {"arguments": ""}
            added = item | empty | {"status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": index, "item": added}
            if item["type"] == "message":
                yield from _text_events(item["content"][0], place | {"content_index": 0})
            if item["type"] == "function_call":
                name, arguments = "response.function_call_arguments", item["arguments"]
                yield {"type": f"{name}.delta", "delta": arguments, **place}
                yield {"type": f"{name}.done", "arguments": arguments, "name": item["name"], **place}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {
            "type": "response.incomplete" if self._call.cut else "response.completed",
            "response": self.body(),
        }

    def _response(self, *, status: str, output: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        request = self._request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": request.model,
            "output": list(output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "temperature": request.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def _items(self) -> list[dict[str, Any]]:
        """Return the output: the thought, the text and the calls."""
        call, message = self._call, self._call.message
        items: list[dict[str, Any]] = []
        if call.thought is not None:
            text = {"type": "reasoning_text", "text": call.thought}
            items.append({"id": f"rs_{call.uid}", "type": "reasoning", "summary": [], "content": [text]})
        if message.content or not message.tool_calls:
            part = {"type": "output_text", "text": message.content or "", "annotations": [], "logprobs": []}
            items.append(
                {
                    "id": f"msg_{call.uid}",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [part],
                }
            )
        namespaces = self._request.namespaces
        for number, one in enumerate(message.tool_calls or ()):
            item = {
                "id": f"fc_{call.uid}_{number}",
                "type": "function_call",
                "status": "completed",
                "call_id": one.id,
                "name": one.function.name,
                "arguments": one.function.arguments,
            }
            if origin := namespaces.get(one.function.name):
                item["namespace"], item["name"] = origin
            items.append(item)
        if call.cut:
            items[-1]["status"] = "incomplete"
        return items


def _text_events(part: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    text = part["text"]
    yield {"type": "response.content_part.added", "part": part | {"text": ""}, **place}
    yield {"type": "response.output_text.delta", "delta": text, "logprobs": [], **place}
    yield {"type": "response.output_text.done", "text": text, "logprobs": [], **place}
    yield {"type": "response.content_part.done", "part": part, **place}
