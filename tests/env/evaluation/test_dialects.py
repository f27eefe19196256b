"""Evaluation against scripted endpoints, each with the format, errors and rules of a provider.

An endpoint rejects conversations that its provider would reject. An episode with the correct answer therefore
proves that messages were sent back in the provider's format.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentrl_env import Done, EnvClient, Environment, Message, ToolCall, tool
from agentrl_env.evaluation import (
    ChatModel,
    EvaluationSettings,
    RunFile,
    chat_model,
    evaluate,
    model_policy,
    runner,
)
from tests.env.evaluation.chat_server import Answer, ChatServer, Sums, completion, numbers

Body = dict[str, Any]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(runner, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(chat_model, "PAUSE_S", 0.0)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A provider's call format, errors, and rules for conversations."""

    identity: str | None
    """Id of a call. None omits it."""
    message: Body
    """Additional fields of a message with a call."""
    errors: tuple[Answer, ...]
    """Answers after which the same request succeeds."""
    refuses: Callable[[Body], str | None]
    """Returns the reason why a message of the model is rejected, or None."""
    call: Body | None = None
    """Additional fields of the call."""
    finish: str = "tool_calls"
    choice: Body | None = None
    """Additional fields of the choice."""
    body: Body | None = None
    """Additional fields of the answer."""
    before: str = ""
    """Characters before the answer."""

    def answer(self, name: str, arguments: str, *, finish: str | None = None) -> Answer:
        call = {"type": "function", **(self.call or {}), "function": {"name": name, "arguments": arguments}}
        if self.identity is not None:
            call["id"] = self.identity
        message = {"role": "assistant", "content": None, **self.message, "tool_calls": [call]}
        choice = {
            "index": 0,
            "message": message,
            **(self.choice or {}),
            "finish_reason": finish or self.finish,
        }
        body = {"id": "1", "object": "chat.completion", "choices": [choice], **(self.body or {})}
        return 200, {"raw": self.before + json.dumps(body)}


def raw(status: int, body: Any) -> Answer:
    return status, {"raw": json.dumps(body)}


def accepted(message: Body) -> None:
    """Accept every message."""


def without(*names: str) -> Callable[[Body], str | None]:
    """Return a rule that rejects all other fields."""

    def rule(message: Body) -> str | None:
        odd = message.keys() - {"role", "content", "tool_calls", *names}
        return f"Extra inputs are not permitted: {sorted(odd)}" if odd else None

    return rule


def with_thought(message: Body) -> str | None:
    if message.get("tool_calls") and not message.get("reasoning_content"):
        return "Missing `reasoning_content` field in the assistant message"
    return None


def with_signature(message: Body) -> str | None:
    for call in message.get("tool_calls") or ():
        if call.get("extra_content", {}).get("google", {}).get("thought_signature") != "c2lnbmVk":
            return "Function call is missing a thought_signature"
    return None


def with_details(message: Body) -> str | None:
    details = message.get("reasoning_details")
    return None if details == REASONING else f"the reasoning of another message: {details}"


REASONING = [
    {"type": "reasoning.encrypted", "data": "b3BhcXVl", "id": "rs_1", "format": "openai", "index": 0}
]
USAGE = {"usage": {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}}
DIALECTS = {
    "OpenAI": Dialect(
        identity="call_Qm3",
        message={"refusal": None, "annotations": []},
        errors=(
            (429, {"retry-after": "0", "text": "Rate limit reached"}),
            raw(500, {"error": {"message": "The server had an error", "type": "server_error", "code": None}}),
        ),
        refuses=without("refusal"),
        choice={"logprobs": None},
        body={**USAGE, "service_tier": "default", "system_fingerprint": None},
    ),
    "vLLM": Dialect(
        identity="chatcmpl-tool-2f0c",
        message={"reasoning": "I must look.", "refusal": None, "function_call": None},
        errors=(raw(500, {"object": "error", "message": "EngineDeadError", "code": 500}),),
        refuses=accepted,
        choice={"stop_reason": None, "token_ids": None},
        body={**USAGE, "prompt_logprobs": None, "kv_transfer_params": None},
    ),
    "DeepSeek": Dialect(
        identity="call_00_f1",
        message={"content": "", "reasoning_content": "I must look."},
        call={"index": 0},
        errors=(raw(503, {"error": {"message": "Service is too busy", "type": "service_unavailable"}}),),
        refuses=with_thought,
        body={"usage": {**USAGE["usage"], "prompt_cache_hit_tokens": 0}},
        before="\n\n\n",
    ),
    "Gemini": Dialect(
        identity="",
        message={},
        call={"extra_content": {"google": {"thought_signature": "c2lnbmVk"}}},
        errors=(raw(503, [{"error": {"code": 503, "status": "UNAVAILABLE", "message": "overloaded"}}]),),
        refuses=with_signature,
        finish="stop",
        body=USAGE,
    ),
    "Mistral": Dialect(
        identity="D681PevKs",
        message={"content": "", "prefix": False},
        call={"index": 0},
        errors=(
            raw(429, {"object": "error", "message": "Service tier capacity exceeded", "code": "3505"}),
            raw(
                500, {"object": "error", "message": "Internal server error", "type": "internal_server_error"}
            ),
        ),
        refuses=without("prefix"),
        body=USAGE,
    ),
    "OpenRouter": Dialect(
        identity="tool_0_look",
        message={"refusal": None, "reasoning": "I must look.", "reasoning_details": REASONING},
        errors=(
            {"error": {"code": 502, "message": "Provider returned error"}, "user_id": "u"},
            {
                "choices": [
                    {
                        "error": {"code": 502, "message": "Upstream idle timeout"},
                        "finish_reason": "error",
                        "native_finish_reason": None,
                        "message": {"role": "assistant", "content": ""},
                    }
                ]
            },
            {"choices": []},
        ),
        refuses=with_details,
        choice={"native_finish_reason": "completed", "logprobs": None},
        body={**USAGE, "provider": "Any"},
    ),
    "Ollama": Dialect(
        identity="call_8tu1",
        message={"content": "", "reasoning": "I must look."},
        call={"index": 0},
        errors=(
            raw(500, {"error": {"message": "model runner has unexpectedly stopped", "type": "api_error"}}),
        ),
        refuses=accepted,
        body={**USAGE, "system_fingerprint": "fp_ollama"},
    ),
    "llama.cpp": Dialect(
        identity=None,
        message={"reasoning_content": "I must look."},
        errors=(raw(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}),),
        refuses=accepted,
        body={**USAGE, "timings": {"prompt_n": 20, "predicted_per_second": 30.0}},
    ),
}


NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def problem(messages: list[Body], refuses: Callable[[Body], str | None]) -> str | None:
    """Return the reason to reject a conversation: a missing result, invalid arguments, or a rule."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return f"no call has the id {message['tool_call_id']!r}"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return f"the calls {waiting} have no result"
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or []
            waiting = [call["id"] for call in calls]
            if not all(NAME.fullmatch(call["function"]["name"]) for call in calls):
                return "a name does not match the pattern"
            if not all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls):
                return "arguments must be an object"
            if not calls and not message.get("content"):
                return "a message must have text or calls"
            if reason := refuses(message):
                return reason
    return None


class Endpoint:
    """Plays ``Sums`` in a dialect: each of its errors, a look, a truncated call, and the answer."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.refused: list[str] = []
        self.errors = len(dialect.errors)
        self._script = self._answers()
        next(self._script)

    def reply(self, body: Body) -> Answer:
        """Answer a request or reject its conversation."""
        if reason := problem(body["messages"], self.dialect.refuses):
            self.refused.append(reason)
            return 400, {"text": reason}
        return self._script.send(body)

    def _answers(self) -> Iterator[Any]:
        dialect = self.dialect
        body = yield
        for error in dialect.errors:
            body = yield error
        body = yield dialect.answer("look", "{}")
        body = yield dialect.answer("answer", '{"total": 10', finish="length")
        while True:
            known = numbers(body)
            body = yield dialect.answer("answer", json.dumps({"total": sum(known[:2])}))


@pytest.mark.parametrize("name", DIALECTS)
async def test_episode_in_the_dialect_of_a_provider_ends_with_its_answer(name: str, tmp_path: Path) -> None:
    endpoint = Endpoint(DIALECTS[name])
    settings = EvaluationSettings(task="sums", split="test", model="small", indices=(3,))
    with ChatServer(endpoint.reply) as server:
        async with EnvClient.local(Sums) as client, ChatModel(server.url, "small") as model:
            with RunFile(tmp_path, settings) as file:
                run = await evaluate(client, model_policy(model, file.run), file)
    assert endpoint.refused == []
    ((episode),) = run.counted
    assert (episode.reward, episode.failed, len(episode.turns)) == (1.0, None, 3)
    assert [turn.finish_reason for turn in episode.turns][1] == "length"
    assert sum(turn.repeats for turn in episode.turns) == endpoint.errors


class Pictures(Environment):
    """Look at two pictures, then finish."""

    def reset(self, sample, rng):
        return "Look at both."

    @tool
    def look(self, number: int):
        """Return a picture."""
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{number}"}}
        return [Message(role="tool", content="Here."), Message(role="user", content=[picture])]

    @tool
    def finish(self):
        """Finish."""
        return Done("Thanks.", reward=1.0)


@pytest.mark.parametrize("odd", ["multi_tool_use.parallel", "a" * 65])
async def test_pictures_of_parallel_calls_and_unknown_names_are_accepted_by_a_provider(tmp_path, odd):
    refused: list[str] = []

    def reply(body: Body) -> Answer:
        if reason := problem(body["messages"], accepted):
            refused.append(reason)
            return 400, {"text": reason}
        if len(body["messages"]) > 1:
            return completion(ToolCall.of("finish"))
        calls = [ToolCall.of("look", call_id=f"c{n}", number=n) for n in range(2)]
        return completion(*calls, ToolCall.of(odd, call_id="c2"))

    settings = EvaluationSettings(task="pictures", split="train", model="small", indices=(0,))
    with ChatServer(reply) as server:
        async with EnvClient.local(Pictures) as client, ChatModel(server.url, "small") as model:
            with RunFile(tmp_path, settings) as file:
                run = await evaluate(client, model_policy(model, file.run), file, retries=0)
    assert refused == []
    ((episode),) = run.counted
    assert episode.success
    assert [message.role for message in episode.turns[0].messages] == ["tool", "tool", "tool", "user", "user"]
    assert episode.turns[0].action.tool_calls[2].function.name == odd  # the record keeps the name
