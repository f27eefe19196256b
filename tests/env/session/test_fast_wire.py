"""The fast path parses and encodes steps like the wire models."""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl_env import Message, StepResult, ToolCall
from agentrl_env.errors import InvalidRequest
from agentrl_env.fast_wire import FastMessage, FastStep, ToolAnswer, encode, encode_result, encoded_info
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


def strict(answer: bytes) -> Any:
    """Parse an answer with the decoder of a controller, which rejects NaN and Infinity."""
    return msgspec.json.decode(answer)


@pytest.mark.parametrize("other", [np.int64(3), "\ud800", {None: 1}])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, np.float64("nan"), np.float32("inf")])
def test_numbers_that_are_not_finite_become_null_beside_any_other_value(number, other):
    info = {"mean": number, "list": [number], "other": other, "text": "NaN, Infinity"}
    answer = encode_result("id", 1, [], 0.0, SessionStatus.RUNNING, {}, {"info": info})
    for found in (strict(answer)["info"]["info"], encoded_info(info)):
        assert (found["mean"], found["list"], found["text"]) == (None, [None], "NaN, Infinity")


def test_content_parts_with_nan_and_surrogates_are_valid_json():
    message = Message(role="user", content=[{"type": "text", "text": "\ud800", "score": math.nan}])
    answer = encode_result("id", 1, [message], 0.0, SessionStatus.RUNNING, {}, {})
    assert strict(answer)["messages"][0]["content"] == [{"type": "text", "text": "?", "score": None}]


class Count(int):
    """An integer of a subclass."""


class Celsius(float):
    """A float of a subclass."""


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.longdouble(1.5), 1.5),
        (np.True_, True),
        (np.arange(3), [0, 1, 2]),
        (np.array([[1.5, np.nan]]), [[1.5, None]]),
        (np.array(3), 3),
        (np.array([{"a": np.int8(1)}], dtype=object), [{"a": 1}]),
        ({np.int64(2): np.float64(0.5)}, {"2": 0.5}),
        (Count(3), 3),
        (Celsius(1.5), 1.5),
        (MappingProxyType({"a": np.int8(1)}), {"a": 1}),
    ],
)
def test_numbers_and_arrays_of_info_stay_numbers_and_lists(value, wanted):
    found = encoded_info({"value": value})["value"]
    assert found == wanted
    assert type(found) is type(wanted)


class Array:
    """An object with a text and the given ``tolist``."""

    def __init__(self, tolist: Any) -> None:
        self.tolist = tolist

    def __str__(self) -> str:
        return "its text"


@pytest.mark.parametrize("tolist", [3, lambda: 1 / 0, lambda: Array(3), lambda: {1j}, lambda: 1j])
def test_object_with_an_unusable_tolist_becomes_its_text(tolist):
    info = encoded_info({"value": Array(tolist), "usable": Array(lambda: (1, 2))})
    assert info == {"value": "its text", "usable": [1, 2]}


def test_endless_tolist_raises_an_error():
    array = Array(lambda: [array])
    with pytest.raises(RecursionError):
        encoded_info({"value": array})
