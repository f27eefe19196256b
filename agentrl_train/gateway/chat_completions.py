"""``/v1/chat/completions``: its requests, its answers, and the chunks of a streamed answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from agentrl_env.types import FunctionCall, FunctionSpec, Message, ToolCall, ToolSpec
from agentrl_train.chat import ChatFormat
from agentrl_train.gateway.constraints import schema_of, tool_choice_fields
from agentrl_train.gateway.errors import InvalidRequest, ignoring
from agentrl_train.gateway.recorder import Call
from agentrl_train.tool_calls.grammars import Constraint

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
}
"""Unsupported parameters that would change the answer, with the values that have no effect."""
HARMLESS = frozenset(
    {
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Parameters that are not read: labels, and hints to hosted models."""
SETTINGS = {"chat_template_kwargs": "model.template_kwargs", "stop_token_ids": "model.stop"}
"""Settings of the run with the same effect as a parameter."""
MOST_CHOICES = 128
"""Largest ``n``, as in OpenAI's API."""
MAX_TOP_K = 2**31 - 1
SAMPLING = ("temperature", "top_p", "top_k", "min_p")

_Model = TypeVar("_Model", bound=BaseModel)


class SamplingFields(BaseModel):
    """The sampling parameters of both APIs. None uses the setting of the run."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    min_p: float | None = None

    def stated(self) -> dict[str, float]:
        """Return the parameters in the request. A ``top_k`` of -1 means all tokens, like 0."""
        values = {name: getattr(self, name) for name in SAMPLING}
        if values["top_k"] == -1:
            values["top_k"] = 0
        return {name: value for name, value in values.items() if value is not None}


class _Call(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class _ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    name: str | None = None

    def message(self, legacy_id: str) -> Message:
        """Return the message with its content as text.

        Args:
            legacy_id: id for a ``function_call`` and its result of role "function", which have no ids.
        """
        calls = [ToolCall(id=call.id, function=call.function) for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append(ToolCall(id=legacy_id, function=self.function_call))
        return Message(
            role="tool" if self.role == "function" else self.role,
            content=text_of(self.content),
            tool_calls=tuple(calls) or None,
            tool_call_id=legacy_id if self.role == "function" else self.tool_call_id,
            name=self.name,
        )


class Function(BaseModel):
    """A function as described by clients. Null fields count as omitted."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def spec(self) -> ToolSpec:
        """Return the tool."""
        return ToolSpec(
            function=FunctionSpec(
                name=self.name, description=self.description or "", parameters=self.parameters or {}
            )
        )


class _Tool(BaseModel):
    type: Literal["function"] = "function"
    function: Function


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class ChatRequest(SamplingFields):
    """The fields of a request that the server reads."""

    model: str = "policy"
    messages: list[_ChatMessage] = Field(min_length=1)
    tools: list[_Tool] | None = None
    functions: list[Function] | None = None
    function_call: Any = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    tool_choice: Any = None
    response_format: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def constraint(self) -> Constraint:
        """Return the required form of the answer. Raises ``InvalidRequest`` for an unknown form."""
        name, choice = "tool_choice", self.tool_choice
        if self.legacy:
            name, choice = "function_call", self.function_call
            if isinstance(choice, Mapping):
                choice = {"type": "function", **choice}
        return Constraint(
            **tool_choice_fields(choice, self.specs, param=name),
            choice_parameter=name,
            schema=schema_of(self.response_format, param="response_format"),
            parallel=self.parallel_tool_calls is not False and not self.legacy,
        )

    @property
    def legacy(self) -> bool:
        """True if the request has ``functions``. The answer then has ``function_call``."""
        return bool(self.functions)

    def check(self) -> None:
        """Raise ``InvalidRequest`` for a mixture of tools and functions."""
        other = ("tools", "tool_choice") if self.legacy else ("function_call",)
        for name in other:
            if getattr(self, name) not in (None, [], "auto", "none"):
                raise InvalidRequest(
                    f"{name} is not supported {'with' if self.legacy else 'without'} functions: use "
                    "functions and function_call, or tools and tool_choice",
                    param=name,
                )

    @property
    def specs(self) -> list[ToolSpec]:
        """Return the tools."""
        functions = self.functions or [tool.function for tool in self.tools or ()]
        return [function.spec() for function in functions]

    @property
    def conversation(self) -> list[Message]:
        """Return the messages. Legacy calls get ids, so that their results can refer to them."""
        found, calls = [], 0
        for one in self.messages:
            calls += one.function_call is not None
            # Mistral's templates require ids of nine letters and digits.
            found.append(one.message(legacy_id=f"call{calls:05}"))
        return found

    @property
    def limit(self) -> int | None:
        """Return the token limit of the request."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields that the body of a request can have."""

    read: Collection[str]
    unread: Collection[str]
    """Fields that do not affect the answer."""
    unsupported: Mapping[str, tuple[Any, ...]]
    """Unsupported fields that would change the answer, with the values that have no effect."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise ``InvalidRequest`` for a field that would be ignored. Null counts as omitted."""
        for name, value in body.items():
            if value is None or name in self.read or name in self.unread:
                continue
            if name not in self.unsupported:
                raise InvalidRequest(
                    f"{name!r:.100} is not a parameter of this API and could change the answer: leave it "
                    f"out, or {ignoring(name[:100])}",
                    param=name[:100],
                )
            harmless = self.unsupported[name]
            if value not in harmless:
                words = [f"use {harmless[0]!r}"] if harmless and harmless[0] else []
                words += [f"set {SETTINGS[name]} of the run"] if name in SETTINGS else []
                words += [ignoring(name)]
                advice = ", or ".join(["leave it out", *words])
                raise InvalidRequest(f"{name} = {value!r:.200} is not supported: {advice}", param=name)


FIELDS = Fields(read=ChatRequest.model_fields, unread=HARMLESS, unsupported=UNSUPPORTED)


def validate_as(model: type[_Model], value: Any, *, within: str = "") -> _Model:
    """Return a value of a request as a model. Raises ``InvalidRequest`` with the location of an error.

    Args:
        model: the model.
        value: the value.
        within: location of the value in the request.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(filter(None, (within, *map(str, first["loc"]))))
        raise InvalidRequest(f"{where}: {first['msg']}", param=where or None) from error


def text_of(content: Any) -> str | None:
    """Return content as text. Raises ``InvalidRequest`` if a part is not text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"a content of type {type(content).__name__} is not supported: write text, or a list of parts",
            param="messages",
        )
    return "\n".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    kind, text = type(part).__name__, None
    if isinstance(part, dict):
        kind, text = str(part.get("type")), part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise InvalidRequest(
            f"a content part of type {kind!r} without text is not supported: the policy reads text only",
            param="messages",
        )
    return text


def finish_reason(call: Call, *, cut: bool, legacy: bool = False) -> str:
    """Return why an answer ended, as the API spells it."""
    if call.message.tool_calls:
        return "function_call" if legacy else "tool_calls"
    return "length" if cut else "stop"


def usage(calls: Sequence[Call]) -> dict[str, int]:
    """Return the token counts of the calls of a request, which share one prompt."""
    prompt = len(calls[0].context)
    sampled = sum(len(call.completion.token_ids) for call in calls if call.completion)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _legacy_call(call: Call) -> dict[str, str]:
    """Return the first call of an answer in the legacy format, which has only one call."""
    assert call.message.tool_calls is not None
    return call.message.tool_calls[0].function.model_dump()


class ChatAnswer:
    """The answer to a request, whole or in chunks.

    Args:
        calls: the answered calls, one for each choice.
        request: the request.
        chat: chat format of the policy.
        created: Unix time.
    """

    def __init__(
        self, calls: Sequence[Call], *, request: ChatRequest, chat: ChatFormat, created: int
    ) -> None:
        self._calls = calls
        self._request = request
        self._chat = chat
        self._head = {"id": f"chatcmpl-{calls[0].uid}", "created": created, "model": request.model}

    def body(self) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [self._choice(index, call) for index, call in enumerate(self._calls)]
        body = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(self._calls)}
        if self._request.return_token_ids:
            body["prompt_token_ids"] = list(self._calls[0].context)
        return body

    def _choice(self, index: int, call: Call) -> dict[str, Any]:
        message: dict[str, Any] = call.message.wire() | {"refusal": None}
        if self._request.legacy and message.pop("tool_calls", None):
            message["function_call"] = _legacy_call(call)
        if not call.message.tool_calls:  # null is only for answers with calls; programs read the text
            message["content"] = call.message.content or ""
        if call.thought is not None:
            message["reasoning_content"] = call.thought
        reason = finish_reason(call, cut=call.cut, legacy=self._request.legacy)
        return {"index": index, "message": message, **self._tokens(call), "finish_reason": reason}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the choices in chunks, one after another, and the token counts if requested."""
        for index, call in enumerate(self._calls):
            yield from self._chunks(index, call)
        if self._request.stream_options and self._request.stream_options.include_usage:
            yield self._chunk(0, None) | {"usage": usage(self._calls)}

    def _chunks(self, index: int, call: Call) -> Iterator[dict[str, Any]]:
        """Yield a choice in chunks: thought, content, calls and end."""
        message = call.message
        yield self._chunk(index, {"role": "assistant", "content": ""})
        if call.thought is not None:
            yield self._chunk(index, {"reasoning_content": call.thought})
        if message.content:
            yield self._chunk(index, {"content": message.content})
        if self._request.legacy and message.tool_calls:
            yield self._chunk(index, {"function_call": _legacy_call(call)})
        else:
            for number, one in enumerate(message.tool_calls or ()):
                yield self._chunk(index, {"tool_calls": [{"index": number, **one.model_dump()}]})
        reason = finish_reason(call, cut=call.cut, legacy=self._request.legacy)
        last = self._chunk(index, {}, reason=reason)
        last["choices"][0] |= self._tokens(call)
        if self._request.return_token_ids:
            last["prompt_token_ids"] = list(call.context)
        yield last

    def _chunk(
        self, index: int, delta: dict[str, Any] | None, *, reason: str | None = None
    ) -> dict[str, Any]:
        choices = [] if delta is None else [{"index": index, "delta": delta, "finish_reason": reason}]
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _tokens(self, call: Call) -> dict[str, Any]:
        """Return the requested token details of a choice."""
        completion = call.completion
        assert completion is not None
        found: dict[str, Any] = {"logprobs": None}
        if self._request.logprobs:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            found["logprobs"] = {"content": [self._logprob(*pair) for pair in pairs], "refusal": None}
        if self._request.return_token_ids:
            found |= {"token_ids": list(completion.token_ids), "versions": list(completion.versions)}
        return found

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._chat.text([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
