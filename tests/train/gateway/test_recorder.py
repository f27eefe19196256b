"""The recorder. A context is recorded tokens plus new tokens, and every sampled token is recorded once."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env.types import FunctionCall, FunctionSpec, Message, ToolCall, ToolSpec
from agentrl_train.chat import ChatFormat
from agentrl_train.gateway.recorder import Call, Recorder
from agentrl_train.types import Completion, Segment, Turn
from tests.tiny_models import make_tokenizer

CHAT = ChatFormat(make_tokenizer())
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOL = ToolSpec(function=FunctionSpec(name="down", parameters=PARAMETERS))
SYSTEM = Message(role="system", content="You count.")
numbers = itertools.count()


def user(text: str) -> Message:
    return Message(role="user", content=text)


def result(call: Call, text: str) -> Message:
    assert call.message.tool_calls
    return Message(role="tool", content=text, tool_call_id=call.message.tool_calls[0].id)


def completion_of(chat: ChatFormat, text: str, *, stopped: bool = True) -> Completion:
    """Return the tokens of a text with log-probabilities that identify them."""
    ids = chat._encode(text) + ([chat.stop_token_ids[0]] if stopped else [])
    return Completion(
        token_ids=ids,
        logprobs=[-float(next(numbers)) for _ in ids],
        versions=[7] * len(ids),
        finish_reason="stop" if stopped else "length",
    )


def say(
    recorder: Recorder, messages: Sequence[Message], text: str, tools: Sequence[ToolSpec] = (TOOL,), **request
) -> Call:
    """Make a call and answer it with a text."""
    call, repeated = recorder.begin(messages, tools, **request)
    assert not repeated
    recorder.finish(call, completion_of(CHAT, text))
    return call


def rows(turns: Sequence[Turn]) -> dict[int, tuple[list[int], list[float]]]:
    """Return the tokens and log-probabilities of each segment."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    for turn in turns:
        ids, logprobs = found.setdefault(turn.segment, ([], []))
        ids += [*turn.prompt_ids, *turn.completion.token_ids]
        logprobs += [*[0.0] * len(turn.prompt_ids), *turn.completion.logprobs]
    return found


CALLING = 'I go <tool_call>\n{"name": "down", "arguments": {"n":  2}}\n</tool_call>'


def test_call_that_repeats_an_answer_appends_to_its_tokens() -> None:
    recorder = Recorder(CHAT)
    first = say(recorder, [SYSTEM, user("go")], CALLING)
    second = say(recorder, [SYSTEM, user("go"), first.message, result(first, "1")], "done")
    assert second.context[: len(first.tokens)] == first.tokens
    turns, segments = recorder.rollout()
    assert [turn.segment for turn in turns] == [0, 0]
    assert segments == [Segment(parent=None, after_turn=None, reason="root")]
    assert rows(turns)[0][0] == second.tokens
    assert turns[0].reply == [result(first, "1")]
    assert [m.role for m in recorder.opening] == ["system", "user"]


def test_reply_has_the_time_of_the_call_that_brings_it() -> None:
    recorder = Recorder(CHAT)
    first, _ = recorder.begin([user("go")], (TOOL,), elapsed=0.5)
    recorder.finish(first, completion_of(CHAT, CALLING), elapsed=0.75)
    second, _ = recorder.begin([user("go"), first.message, result(first, "1")], (TOOL,), elapsed=2.0)
    recorder.finish(second, completion_of(CHAT, "done"), elapsed=2.5)
    assert [turn.times for turn in recorder.rollout()[0]] == [(0.5, 0.75, 2.0), (2.0, 2.5)]


@pytest.mark.parametrize(
    "changed",
    [
        {"content": "I  go\n"},
        {"content": "<think>\nhm\n</think>\n\nI go"},
        {"tool_calls": (ToolCall.of("down", call_id="other", n=2),)},
        {"content": CALLING, "tool_calls": None},
    ],
    ids=["blanks", "thought in the text", "arguments and ids written anew", "call as text"],
)
def test_answer_that_the_client_writes_differently_is_still_the_same(changed: dict) -> None:
    recorder = Recorder(CHAT)
    first = say(recorder, [user("go")], CALLING)
    given_back = first.message.model_copy(update=changed)
    second = say(recorder, [user("go"), given_back, result(first, "1")], "done")
    assert second.context[: len(first.tokens)] == first.tokens
    assert len(recorder.rollout()[1]) == 1


def test_numbers_that_a_client_in_javascript_rewrites_are_still_the_same() -> None:
    recorder = Recorder(CHAT)
    written = '{"n": 1.0, "many": [12345678901234567890, 1e3]}'
    first = say(
        recorder, [user("go")], f'<tool_call>\n{{"name": "down", "arguments": {written}}}\n</tool_call>'
    )
    (call,) = first.message.tool_calls or ()
    returned = '{"n":1,"many":[12345678901234567000,1000]}'
    parsed = call.model_copy(update={"function": FunctionCall(name="down", arguments=returned)})
    say(recorder, [user("go"), Message.assistant(None, parsed), result(first, "1")], "done")
    assert len(recorder.rollout()[1]) == 1


def test_results_get_the_recorded_ids_if_the_client_changes_them() -> None:
    recorder = Recorder(CHAT)
    first = say(recorder, [user("go")], CALLING)
    renamed = first.message.model_copy(update={"tool_calls": (ToolCall.of("down", call_id="mine", n=2),)})
    call, _ = recorder.begin(
        [user("go"), renamed, Message(role="tool", content="1", tool_call_id="mine")], (TOOL,)
    )
    assert first.message.tool_calls
    assert call.new[0].tool_call_id == first.message.tool_calls[0].id


def test_call_with_other_arguments_is_another_message() -> None:
    recorder = Recorder(CHAT)
    first = say(recorder, [user("go")], CALLING)
    other = first.message.model_copy(update={"tool_calls": (ToolCall.of("down", n=3),)})
    say(recorder, [user("go"), other, result(first, "1")], "done")
    assert [one.reason for one in recorder.rollout()[1]] == ["root", "rewritten"]


def test_summarized_history_is_a_new_segment_of_the_same_agent() -> None:
    recorder = Recorder(CHAT)
    first = say(recorder, [SYSTEM, user("go")], CALLING)
    say(recorder, [SYSTEM, user("go"), first.message, result(first, "1")], CALLING)
    summary = [SYSTEM, user("So far: 2 left, then 1.")]
    third = say(recorder, summary, "done")
    assert third.context == CHAT.opening(summary, (TOOL,))
    turns, segments = recorder.rollout()
    assert segments[1] == Segment(parent=0, after_turn=1, reason="rewritten", opening=tuple(summary))
    assert [turn.segment for turn in turns] == [0, 0, 1]


def test_history_truncated_at_its_start_counts_as_rewritten() -> None:
    recorder = Recorder(CHAT)
    first = say(recorder, [user("go")], CALLING)
    say(recorder, [first.message, result(first, "1")], "done")
    assert [one.reason for one in recorder.rollout()[1]] == ["root", "rewritten"]


def test_conversation_of_another_agent_is_a_branch_and_the_first_continues() -> None:
    recorder = Recorder(CHAT)
    first = say(recorder, [SYSTEM, user("go")], CALLING)
    helper = [Message(role="system", content="You search."), user("find it")]
    inner = say(recorder, helper, "found", tools=())
    say(recorder, [*helper, inner.message, user("more")], "that is all", tools=())
    say(recorder, [SYSTEM, user("go"), first.message, result(first, "found")], "done")
    turns, segments = recorder.rollout()
    assert [turn.segment for turn in turns] == [0, 1, 1, 0]
    assert (segments[1].reason, segments[1].parent, segments[1].after_turn) == ("sub_agent", 0, 0)
    assert segments[1].agent == "agent_1"


def test_named_agents_with_equal_messages_have_separate_segments() -> None:
    recorder = Recorder(CHAT)
    say(recorder, [user("go")], "one", agent="planner")
    second = say(recorder, [user("go")], "two", agent="worker")
    assert second.conversation.agent == "worker"
    assert [(one.agent, one.reason) for one in recorder.rollout()[1]] == [
        ("planner", "root"),
        ("worker", "sub_agent"),
    ]


def test_second_sample_of_one_request_is_a_branch_with_the_same_tokens() -> None:
    recorder = Recorder(CHAT)
    first = say(recorder, [user("go")], CALLING)
    conversation = [user("go"), first.message, result(first, "1")]
    one, two = say(recorder, conversation, "a"), say(recorder, conversation, "b")
    assert one.context == two.context
    turns, segments = recorder.rollout()
    assert [turn.segment for turn in turns] == [0, 0, 1]
    assert (segments[1].parent, segments[1].after_turn) == (0, 0)
    assert sum(len(turn.completion.token_ids) for turn in turns) == sum(
        logprob != 0 for _, logprobs in rows(turns).values() for logprob in logprobs
    )


def test_repeated_request_gets_the_answer_that_was_lost() -> None:
    recorder = Recorder(CHAT)
    call, _ = recorder.begin([user("go")])
    call.lost = True
    again, repeated = recorder.begin([user("go")])
    assert (again is call) is repeated is True
    recorder.finish(call, completion_of(CHAT, "hello"))
    assert len(recorder.rollout()[0]) == 1


def test_request_marked_as_a_retry_gets_the_same_answer() -> None:
    recorder = Recorder(CHAT)
    call = say(recorder, [user("go")], "hello")
    assert recorder.begin([user("go")], (TOOL,), retried=True) == (call, True)


@pytest.mark.parametrize("answered", [True, False])
def test_answer_that_nobody_received_is_not_recorded(answered: bool) -> None:
    recorder = Recorder(CHAT)
    first = say(recorder, [user("go")], "hello")
    conversation = [user("go"), first.message]
    lost, _ = recorder.begin([*conversation, user("on")], (TOOL,))
    lost.lost = True
    if answered:
        recorder.finish(lost, completion_of(CHAT, "unseen"))
    after = say(recorder, [*conversation, user("something else")], "seen")
    if not answered:
        recorder.finish(lost, completion_of(CHAT, "unseen"))
    turns, segments = recorder.rollout()
    assert [turn.message.content for turn in turns] == ["hello", "seen"]
    assert len(segments) == 1
    assert rows(turns)[0][0] == after.tokens


def test_reward_belongs_to_the_newest_turn() -> None:
    recorder = Recorder(CHAT)
    with pytest.raises(ValueError, match="before the first answer"):
        recorder.reward(1.0)
    first = say(recorder, [user("go")], "hello")
    recorder.reward(0.5)
    say(recorder, [user("go"), first.message, user("on")], "more")
    recorder.reward(1.0)
    recorder.reward(0.25)
    assert [turn.reward for turn in recorder.rollout()[0]] == [0.5, 1.25]


def test_stop_token_in_the_stop_texts_of_a_request_is_the_usual_end_of_an_answer() -> None:
    """Many clients list the stop token of their model among the stop texts."""
    recorder, ask = Recorder(CHAT), [user("go")]
    stop_token = CHAT.text(CHAT.stop_token_ids[:1])
    call, _ = recorder.begin(ask)
    recorder.finish(call, completion_of(CHAT, "one"), stop=[stop_token])
    assert (call.message.content, call.cut) == ("one", False)
    say(recorder, [*ask, call.message, user("go on")], "two", tools=())
    (first, second), _ = recorder.rollout()
    assert first.completion.finish_reason == "stop"
    reply = CHAT.reply_text([user("go on")], after=call.message)
    assert stop_token + CHAT.text(second.prompt_ids) == reply


def test_stop_text_cuts_the_answer_after_the_token_that_completes_it() -> None:
    recorder = Recorder(CHAT)
    call, _ = recorder.begin([user("go")])
    whole = completion_of(CHAT, "one two END three")
    recorder.finish(call, whole, stop=["END"])
    assert call.message.content == "one two"
    assert call.completion is not None
    assert CHAT.text(call.completion.token_ids) == "one two END"
    assert list(call.completion.logprobs) == whole.logprobs[: len(call.completion.token_ids)]
    following, _ = recorder.begin([user("go"), call.message, user("on")])
    assert CHAT.text(following.context).count("one two END<|im_end|>") == 1


def test_call_that_cannot_be_read_is_text_and_counts_as_invalid() -> None:
    recorder = Recorder(CHAT)
    call = say(recorder, [user("go")], "so <tool_call>\n{down\n</tool_call>")
    assert call.message.tool_calls is None
    assert call.message.content == "so\n{down"
    assert call.invalid_calls == 1
    again = say(recorder, [user("go"), call.message, user("write JSON")], "ok")
    assert again.context[: len(call.tokens)] == call.tokens


class Client:
    """A client that continues, rewrites, resamples, loses answers and has several conversations."""

    def __init__(self, rng: random.Random, recorder: Recorder) -> None:
        self.rng, self.recorder = rng, recorder
        self.histories: list[list[Message]] = [[SYSTEM, user("start")]]
        self.contexts: list[Call] = []

    def step(self) -> None:
        rng = self.rng
        history = rng.choice(self.histories)
        action = rng.choice(["continue", "continue", "rewrite", "agent", "same", "lose", "fail", "overlap"])
        if action == "rewrite":
            history = [history[0], user(f"summary {rng.randrange(100)}"), *history[-rng.randrange(1, 3) :]]
        if action == "agent":
            history = [Message(role="system", content=f"agent {rng.randrange(3)}"), user("start")]
        call, _ = self.recorder.begin(history, (TOOL,))
        if action == "lose":
            call.lost = True
        if action == "fail":
            self.recorder.fail(call)
            return
        if action == "overlap":
            other, _ = self.recorder.begin(history, (TOOL,))
            self.answer(other, history)
        if call.completion is None:
            self.answer(call, history)

    def answer(self, call: Call, history: list[Message]) -> None:
        text = self.rng.choice(["hello", CALLING, "  blanks  ", "<think>\nhm\n</think>\n\nyes", ""])
        stopped = not text or self.rng.random() < 0.8
        self.recorder.finish(call, completion_of(CHAT, text, stopped=stopped))
        self.contexts.append(call)
        if call.lost:
            return
        reply = result(call, "ok") if call.message.tool_calls else user(f"and {self.rng.randrange(100)}")
        said = call.message
        if self.rng.random() < 0.5 and said.content:
            said = said.model_copy(update={"content": f" {said.content}\n"})
        self.histories.append([*history, said, reply])


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 14))
def test_every_received_answer_is_recorded_once_after_the_context_it_was_sampled_from(
    seed: int, steps: int
) -> None:
    recorder = Recorder(CHAT)
    client = Client(random.Random(seed), recorder)
    for _ in range(steps):
        client.step()
    turns, segments = recorder.rollout()
    received = [call for call in client.contexts if call.settled and call in call.conversation.calls]
    assert sorted(turn.completion.logprobs for turn in turns) == sorted(
        call.completion.logprobs for call in received if call.completion
    )
    seen = [logprob for turn in turns for logprob in turn.completion.logprobs]
    assert len(seen) == len(set(seen))
    prefix: dict[int, list[int]] = {}
    by_logprob = {tuple(call.completion.logprobs): call for call in received if call.completion}
    for turn in turns:
        before = [*prefix.get(turn.segment, []), *turn.prompt_ids]
        assert before == list(by_logprob[tuple(turn.completion.logprobs)].context)
        prefix[turn.segment] = [*before, *turn.completion.token_ids]
    assert {turn.segment for turn in turns} == set(range(len(segments))) or not turns
    for number, segment in enumerate(segments[1:], start=1):
        assert segment.parent is not None
        assert segment.parent < number
        assert segment.after_turn is not None
        assert turns[segment.after_turn].segment == segment.parent
