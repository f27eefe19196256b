"""The fast path parses and encodes steps like the wire models."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl_env import Message, StepResult, ToolCall
from agentrl_env.errors import InvalidRequest
from agentrl_env.fast_wire import FastMessage, FastStep, ToolAnswer, encode, encode_result
from agentrl_env.server.api import read_step
from agentrl_env.types import SessionStatus
from agentrl_env.wire import StepBody, StepRequest


def objects(values: Any) -> Any:
    return st.dictionaries(st.text(max_size=4), values, max_size=3)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | objects(inner), max_leaves=8)
WORDS = st.text(st.characters(exclude_categories=()), max_size=8)
"""Text with lone surrogates, which JSON cannot represent."""


CALLS = st.fixed_dictionaries(
    {
        "id": st.text(max_size=4),
        "function": st.fixed_dictionaries({"name": st.text(max_size=4), "arguments": st.text(max_size=8)}),
    },
    optional={"type": st.just("function")},
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={
        "content": st.none() | st.text(max_size=8) | st.lists(objects(JSON), max_size=2),
        "tool_calls": st.none() | st.lists(CALLS, max_size=2),
        "name": st.none() | st.text(max_size=4),
    },
)


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    """Generate bodies of a step, most of them malformed."""
    body = {"seq": draw(st.integers(1, 4)), "message": draw(MESSAGES)}
    for _ in range(draw(st.integers(0, 2))):
        place: Any = body
        while inner := [value for value in values(place) if isinstance(value, dict | list) and value]:
            if not draw(st.booleans()):
                break
            place = draw(st.sampled_from(inner))
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        change = draw(st.sampled_from(["drop", "replace", "add"]))
        if change == "drop":
            del place[key]
        elif change == "replace":
            place[key] = draw(JSON | st.sampled_from(["2", 2.0, "user", True]))
        elif isinstance(place, dict):
            place["more"] = draw(JSON)
        if not place:
            break
    return body


def values(place: Any) -> Any:
    return place.values() if isinstance(place, dict) else place


BODIES = bodies()


def read_by_model(text: str) -> StepBody | None:
    try:
        return StepBody.model_validate_json(text)
    except ValidationError:
        return None


@given(BODIES, st.booleans())
def test_step_is_parsed_like_its_model(body, ascii_only):
    text = json.dumps(body, ensure_ascii=ascii_only)
    wanted = read_by_model(text)
    if wanted is None:
        with pytest.raises(InvalidRequest):
            read_step(text, "id")
        return
    step = read_step(text, "id")
    assert step.seq == wanted.seq
    assert Message.model_validate_json(encode(step.message)) == wanted.message


@given(st.binary(max_size=40) | st.builds(lambda body: json.dumps(body).encode()[:-1], BODIES))
def test_malformed_json_is_an_invalid_request(text):
    with pytest.raises(InvalidRequest):
        read_step(text, "id")


@given(
    st.builds(
        Message,
        role=st.just("assistant"),
        content=st.none() | WORDS,
        tool_calls=st.none()
        | st.lists(st.builds(ToolCall.of, WORDS, call_id=WORDS), min_size=1, max_size=2).map(tuple),
        name=st.none() | WORDS,
    )
)
def test_message_is_encoded_like_its_model_with_surrogates_replaced(message):
    written = encode(message)
    replaced = json.dumps(message.model_dump(), ensure_ascii=False).encode("utf-8", "replace")
    assert json.loads(written) == json.loads(replaced)


@given(
    st.lists(
        st.builds(ToolAnswer, WORDS, WORDS) | st.builds(Message, role=st.just("user"), content=WORDS),
        max_size=3,
    ),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(SessionStatus),
    st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False, allow_infinity=False), max_size=2),
)
def test_encoded_result_parses_as_a_step_result(messages, reward, status, metrics):
    answer = encode_result("id", 3, messages, reward=reward, status=status, metrics=metrics, info={"a": [1]})
    result = StepResult.model_validate_json(answer)
    assert (result.session_id, result.seq, result.status, result.info) == ("id", 3, status, {"a": [1]})
    assert (result.reward, result.metrics) == (reward, metrics)
    assert result.terminated is (status is SessionStatus.COMPLETED)
    assert result.truncated is (status in (SessionStatus.TRUNCATED_TURNS, SessionStatus.TRUNCATED_TIME))
    texts = [message.content.encode("utf-8", "replace").decode() for message in messages]
    assert [message.content for message in result.messages] == texts
    assert b"\n" not in answer  # a controller splits batches at line breaks


def test_step_of_a_batch_survives_forwarding():
    step = StepRequest(session_id="a", seq=2, message=Message.assistant("x", ToolCall.of("f", n=1)))
    fast = msgspec.json.decode(step.model_dump_json(), type=FastStep)
    assert StepRequest.model_validate_json(encode(fast)) == step
    assert StepRequest.model_validate_json(encode(step)) == step


def test_only_surrogates_of_a_result_are_replaced():
    messages = [Message(role="user", content="é"), ToolAnswer("ok", "\ud800")]
    answer = encode_result("id", 1, messages, reward=0, status=SessionStatus.RUNNING, metrics={}, info={})
    first, second = StepResult.model_validate_json(answer).messages
    assert (first.content, second.content, second.tool_call_id) == ("é", "ok", "?")


def test_large_integers_in_content_parts_are_preserved():
    message = Message(role="assistant", content=[{"type": "text", "n": 2**80}])
    fast = msgspec.convert(message.wire(), FastMessage)
    assert Message.model_validate_json(encode(fast)) == message
