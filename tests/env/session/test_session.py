import asyncio
import logging
import re
from typing import Annotated

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator

from agentrl_env import (
    Done,
    Environment,
    Message,
    Reply,
    Session,
    SessionStatus,
    TaskSample,
    ToolCall,
    ToolError,
    tool,
)
from agentrl_env.errors import (
    EnvironmentFailed,
    InvalidRequest,
    NotSupported,
    SeqConflict,
    SessionEnded,
    SessionExpired,
)
from agentrl_env.session.session import MAX_TURNS
from agentrl_env.session.threads import ThreadPool
from agentrl_env.tools import clean
from agentrl_env.types import FunctionCall
from tests.env.tasks import Clock, Guess, Quick, Slow

THREADS = ThreadPool()


def make(environment, seed=1, data=None, **options):
    sample = TaskSample(task=environment.name, seed=seed, data=data or {})
    return Session(environment, sample, session_id="s", threads=THREADS, **options)


async def started(environment, **options):
    session = make(environment, **options)
    await session.start()
    return session


def says(name, **arguments):
    return Message.assistant(None, ToolCall.of(name, **arguments))


async def test_start_returns_the_messages_of_reset_and_the_tools():
    session = make(Quick, data={"n": 1})
    info = await session.start()
    assert [(m.role, m.content) for m in info.messages] == [("system", "Be quick."), ("user", "{'n': 1}")]
    assert info.tools == Quick.tool_specs()
    assert (info.status, info.turn, info.last) == (SessionStatus.RUNNING, 0, None)


@pytest.mark.parametrize("environment", [Guess, Quick], ids=["on a thread", "inline"])
async def test_sessions_with_the_same_seed_give_equal_results(environment):
    async def play():
        session = await started(environment, seed=5)
        return [
            await session.step(says("guess", n=n) if environment is Guess else says("note", text="x"))
            for n in (1, 2, 3)
        ]

    assert await play() == await play()


async def test_steps_are_numbered_from_one():
    session = await started(Quick)
    assert [(await session.step(says("refuse"))).seq for _ in range(3)] == [1, 2, 3]


async def test_done_terminates_the_episode():
    session = await started(Quick)
    result = await session.step(says("finish", reward=0.25))
    assert (result.reward, result.terminated, result.truncated) == (0.25, True, False)
    assert result.status is SessionStatus.COMPLETED
    assert result.final
    assert result.metrics["success"] == 0.0


async def test_turn_limit_truncates_the_episode():
    session = await started(Quick)
    results = [await session.step(says("gain", amount=0.2)) for _ in range(Quick.max_turns)]
    assert [r.status for r in results[:-1]] == [SessionStatus.RUNNING] * 5
    assert results[-1].status is SessionStatus.TRUNCATED_TURNS
    assert (results[-1].terminated, results[-1].truncated) == (False, True)
    assert results[-1].metrics["success"] == 1.0  # six times 0.2
    assert "success" not in results[0].metrics


async def test_done_in_the_last_turn_terminates_instead_of_truncating():
    session = await started(Quick)
    for _ in range(Quick.max_turns - 1):
        await session.step(Message.assistant("..."))
    assert (await session.step(says("finish"))).status is SessionStatus.COMPLETED


class Timed(Quick):
    max_seconds = 10.0


async def test_time_limit_truncates_at_the_first_step_after_it():
    clock = Clock()
    session = await started(Timed, clock=clock)
    clock.now += 9
    assert not (await session.step(says("note", text="a"))).final
    clock.now += 2
    result = await session.step(says("note", text="b"))
    assert (result.status, result.truncated) == (SessionStatus.TRUNCATED_TIME, True)
    assert result.messages[0].content == "Not executed: the time limit was reached."


class ShortOfTime(Slow):
    max_seconds = 0.02


async def test_time_limit_interrupts_a_running_tool():
    session = await started(ShortOfTime)
    result = await session.step(says("wait"))
    assert result.status is SessionStatus.TRUNCATED_TIME
    assert "success" in result.metrics


@pytest.mark.parametrize("name", ["crash", "leave", "confuse", "poison"])
async def test_exception_in_a_tool_fails_the_session(name, caplog):
    session = await started(Quick)
    with caplog.at_level(logging.CRITICAL):
        result = await session.step(says(name))
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, False)
    assert set(result.info["error"]) == {"type", "message"}
    assert "success" not in result.metrics  # success is unknown


class OddArgument(Quick):
    blocking = True

    @tool
    def halve(self, n: Annotated[int, AfterValidator(lambda n: 1 // n)]):
        """Take a number."""
        return str(n)


class OddArgumentInline(OddArgument):
    blocking = False


@pytest.mark.parametrize("task", [OddArgument, OddArgumentInline])
async def test_exception_in_a_custom_validator_fails_the_session(task):
    result = await (await started(task)).step(says("halve", n=0))
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert result.info["error"]["type"] == "ZeroDivisionError"


class Cancels(Quick):
    blocking = True

    @tool
    def cancel(self):
        """Raise CancelledError."""
        raise asyncio.CancelledError


async def test_cancelled_error_raised_on_a_thread_fails_the_session():
    result = await asyncio.wait_for((await started(Cancels)).step(says("cancel")), 60)
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert "CancelledError" in result.info["error"]["message"]


async def test_failed_result_names_the_exception_and_its_line():
    result = await (await started(Quick)).step(says("crash"))
    error = result.info["error"]
    assert error["type"] == "ZeroDivisionError"
    assert re.fullmatch(
        r"ZeroDivisionError: author bug \(tests/env/tasks\.py:\d+, in crash\)", error["message"]
    )


@pytest.mark.parametrize("name", ["block_too_long", "wait_too_long"])
async def test_tool_timeout_fails_the_session(name):
    session = await started(Slow)
    result = await session.step(says(name))
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    message = result.info["error"]["message"]
    assert message.startswith(f"AuthorTimeout: {name}(): still running after 0.02 s (tests/env/tasks.py:")


async def test_close_waits_for_a_tool_past_its_timeout():
    session = await started(Slow)
    await session.step(says("block_too_long"))
    await asyncio.sleep(0.01)
    assert Slow.closed == []
    Slow.blocker.set()
    await session.close()
    assert len(Slow.closed) == 1


async def test_repeated_seq_returns_the_stored_result():
    session = await started(Quick)
    first = await session.step(says("note", text="a"), 1)
    assert await session.step(says("note", text="a"), 1) == first
    second = await session.step(says("note", text="b"), 2)
    assert second.messages[0].content.startswith("2 ")
    assert await session.step(says("note", text="a"), 1) == first


async def test_repeated_last_step_returns_its_result_after_close():
    session = await started(Quick)
    last = await session.step(says("finish"), 1)
    await session.close()
    assert await session.step(says("finish"), 1) == last


async def test_number_of_stored_results_is_bounded():
    class Long(Quick):
        max_turns = 1000

    session = await started(Long)
    for _ in range(MAX_TURNS + 1):
        await session.step(says("refuse"))
    assert (await session.step(says("refuse"), 2)).seq == 2
    with pytest.raises(SeqConflict, match="no longer kept"):
        await session.step(says("refuse"), 1)


async def test_seq_with_a_gap_is_a_conflict_and_zero_is_invalid():
    session = await started(Quick)
    with pytest.raises(SeqConflict, match="the next is 1") as caught:
        await session.step(says("refuse"), 2)
    assert caught.value.details == {"expected": 1}
    with pytest.raises(InvalidRequest, match="counts from 1"):
        await session.step(says("refuse"), 0)


async def test_step_accepts_only_assistant_messages():
    session = await started(Quick)
    with pytest.raises(InvalidRequest, match="not one of 'user'"):
        await session.step(Message(role="user", content="hi"))
    assert session.turn == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=25))
def test_each_turn_runs_once_for_any_sequence_of_seqs(seqs):
    async def run():
        session, seen = await started(Quick), {}
        for seq in seqs:
            try:
                result = await session.step(says("note", text="x"), seq)
            except SeqConflict:
                assert seq > session.turn + 1
                continue
            except SessionEnded:
                raise AssertionError("a stored answer was refused") from None
            assert seen.setdefault(seq, result) == result
            assert result.messages[0].content.split()[0] == str(seq)
        assert session.turn == len(seen)

    asyncio.run(run())


@settings(max_examples=40, deadline=None)
@given(st.permutations([1, 1, 1, 2, 2, 3, 3]))
def test_concurrent_repeats_wait_for_the_first(seqs):
    async def run():
        Slow.prepare()
        session = await started(Slow)
        steps = [asyncio.create_task(session.step(says("wait"), seq)) for seq in seqs]
        await asyncio.sleep(0)
        Slow.gate.set()
        answers = await asyncio.gather(*steps, return_exceptions=True)
        by_seq = {}
        for seq, answer in zip(seqs, answers, strict=True):
            if not isinstance(answer, SeqConflict):
                assert by_seq.setdefault(seq, answer) == answer
                assert answer.messages[0].content == f"waited {seq}"
        await session.close()

    asyncio.run(run())


async def test_next_seq_waits_for_the_running_step():
    session = await started(Slow)
    first = asyncio.create_task(session.step(says("wait"), 1))
    second = asyncio.create_task(session.step(says("wait"), 2))
    await asyncio.sleep(0.01)
    with pytest.raises(SeqConflict):
        await session.step(says("wait"), 4)
    Slow.gate.set()
    assert [(await first).seq, (await second).seq] == [1, 2]
    await session.close()


async def test_step_completes_after_its_caller_is_cancelled():
    session = await started(Slow)
    caller = asyncio.create_task(session.step(says("wait"), 1))
    await asyncio.sleep(0.01)
    caller.cancel()
    Slow.gate.set()
    assert (await session.step(says("wait"), 1)).messages[0].content == "waited 1"
    await session.close()


TEXT = st.text(st.characters(codec=None), max_size=20)
NAMES = TEXT | st.sampled_from(["note", "gain", "finish", "refuse", "crash", "confuse"])
ARGUMENTS = TEXT | st.sampled_from(['{"text": "x"}', "{}", '{"amount": NaN}', '{"amount": 1e999}'])
CALLS = st.builds(ToolCall, id=TEXT, function=st.builds(FunctionCall, name=NAMES, arguments=ARGUMENTS))


@settings(max_examples=200, deadline=None)
@given(content=st.none() | TEXT, calls=st.lists(CALLS, max_size=3))
def test_step_returns_a_result_for_any_assistant_message(content, calls):
    async def run():
        session = await started(Quick)
        result = await session.step(Message.assistant(content, *calls))
        assert result.seq == 1
        answered = [m.tool_call_id for m in result.messages if m.role == "tool"]
        if result.status is not SessionStatus.FAILED_ENVIRONMENT:
            assert answered == [clean(call.id) for call in calls]

    logging.disable(logging.CRITICAL)
    try:
        asyncio.run(run())
    finally:  # otherwise a failure would disable logging in all later tests
        logging.disable(logging.NOTSET)


async def test_step_after_the_end_raises_session_ended():
    session = await started(Quick)
    await session.step(says("finish"))
    with pytest.raises(SessionEnded, match="completed") as caught:
        await session.step(says("finish"))
    assert caught.value.details == {"status": "completed"}


async def test_close_is_idempotent_and_closes_the_environment_once():
    session = await started(Slow)
    await asyncio.gather(session.close(), session.close())
    await session.close(SessionStatus.EXPIRED)
    assert len(Slow.closed) == 1
    assert session.status is SessionStatus.CANCELLED
    with pytest.raises(SessionEnded, match="cancelled"):
        await session.step(says("wait"))


async def test_expired_session_raises_session_expired():
    session = await started(Slow)
    await session.close(SessionStatus.EXPIRED)
    with pytest.raises(SessionExpired):
        await session.step(says("wait"))
    with pytest.raises(SessionExpired):
        await session.expert()


async def test_environment_is_closed_when_its_episode_ends():
    session = await started(Slow)
    await session.step(says("end"))
    await session.close()
    assert len(Slow.closed) == 1
    assert session.status is SessionStatus.COMPLETED


async def test_close_cancels_a_running_coroutine_before_closing_the_environment():
    session = await started(Slow)
    step = asyncio.create_task(session.step(says("wait")))
    await asyncio.sleep(0.01)
    await session.close()
    with pytest.raises(SessionEnded, match="cancelled"):
        await step
    assert len(Slow.closed) == 1
    assert session.turn == 0


async def test_close_waits_for_a_running_thread_before_closing_the_environment():
    session = await started(Slow)
    step = asyncio.create_task(session.step(says("block")))
    await asyncio.to_thread(Slow.started.wait, 5)
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0.01)
    assert Slow.closed == []
    Slow.blocker.set()
    await closing
    assert len(Slow.closed) == 1
    with pytest.raises(SessionEnded):
        await step


class BadClose(Quick):
    def close(self):
        raise RuntimeError("cannot close")


async def test_exception_in_close_is_logged(caplog):
    session = await started(BadClose)
    await session.close()
    assert "close of task bad_close failed" in caplog.text


class BadReset(Slow):
    def reset(self, sample, rng):
        raise LookupError("no such level")


class BadOpening(Slow):
    def reset(self, sample, rng):
        return None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (BadReset, "reset of task 'bad_reset' failed: LookupError: no such level"),
        (BadOpening, "reset.. returned NoneType; return a str"),
    ],
)
async def test_failed_reset_raises_and_closes_the_environment(environment, message):
    session = make(environment)
    with pytest.raises(EnvironmentFailed, match=message):
        await session.start()
    await session.close()
    assert session.status is SessionStatus.FAILED_ENVIRONMENT
    assert len(Slow.closed) == 1


async def test_author_code_cannot_change_the_dataset():
    class Vandal(Quick):
        def reset(self, sample, rng):
            sample.data["deep"]["list"].append("mine")
            return ""

    data = {"deep": {"list": []}}
    session = await started(Vandal, data=data)
    assert data == {"deep": {"list": []}}
    assert session.sample.data == {"deep": {"list": []}}


class Scored(Quick):
    def score(self):
        return {"notes": len(self.notes), "success": float("x" in self.notes)}


async def test_score_is_merged_into_the_last_metrics_and_decides_success():
    session = await started(Scored)
    await session.step(says("note", text="x"))
    result = await session.step(says("finish", reward=0.0))
    assert result.metrics == {"invalid_calls": 0.0, "notes": 1.0, "success": 1.0}


class BadScore(Quick):
    def score(self):
        raise KeyError("lost")


async def test_exception_in_score_fails_the_session():
    result = await (await started(BadScore)).step(says("finish"))
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert result.reward == 0.0


class AllAsync(Environment):
    """Every method is a coroutine."""

    def __init__(self):
        self.log = Slow.closed

    async def reset(self, sample, rng):
        return "go"

    @tool
    async def go(self):
        return Done("gone", reward=1.0)

    async def respond(self, text):
        return f"you said {text}"

    async def score(self):
        return {"steps": 2.0}

    async def expert(self, rng):
        return "just talk"

    async def close(self):
        self.log.append(self)


async def test_every_method_can_be_a_coroutine():
    session = await started(AllAsync)
    assert await session.expert() == Message.assistant("just talk")
    result = await session.step(Message.assistant("hi"))
    assert result.messages[0].content == "you said hi"
    assert result.metrics["invalid_calls"] == 0.0
    result = await session.step(says("go"))
    assert result.metrics == {"invalid_calls": 0.0, "steps": 2.0, "success": 1.0}
    await session.close()
    assert len(Slow.closed) == 1


async def test_text_parts_reach_respond_as_text():
    session = await started(AllAsync)
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    result = await session.step(Message(role="assistant", content=parts))
    assert result.messages[0].content == "you said ab"
    await session.close()


class Strict(Quick):
    def respond(self, text):
        raise ToolError("say less")


async def test_respond_can_raise_tool_error():
    result = await (await started(Strict)).step(Message.assistant("blah"))
    assert result.messages == (Message(role="user", content="say less"),)
    assert result.status is SessionStatus.RUNNING


class CancelsItself(AllAsync):
    @tool
    async def go(self):
        raise asyncio.CancelledError


async def test_cancelled_error_raised_in_a_coroutine_fails_the_session():
    session = await started(CancelsItself)
    result = await session.step(says("go"))
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    await session.close()


async def test_expert_does_not_take_a_step():
    session = await started(Guess)
    message = await session.expert()
    assert message.tool_calls[0].function.name == "guess"
    assert message == await session.expert()
    assert session.turn == 0
    assert (await session.step(message)).metrics["success"] == 1.0
    with pytest.raises(SessionEnded):
        await session.expert()


async def test_expert_of_a_task_without_one_raises_not_supported():
    with pytest.raises(NotSupported, match="no expert"):
        await (await started(Slow)).expert()


@pytest.mark.parametrize("move", [None, 3, Message(role="user", content="x")])
async def test_invalid_return_value_of_expert_raises_environment_failed(move):
    class Odd(Quick):
        def expert(self, rng):
            return move

    with pytest.raises(EnvironmentFailed, match="return a ToolCall, a str or an assistant Message"):
        await (await started(Odd)).expert()


async def test_exception_in_expert_raises_without_ending_the_session():
    class Broken(Quick):
        def expert(self, rng):
            return 1 / 0

    session = await started(Broken)
    with pytest.raises(EnvironmentFailed, match="ZeroDivisionError"):
        await session.expert()
    assert not (await session.step(says("note", text="x"))).final


class Unsendable(Quick):
    @tool
    def surrogate(self):
        return "caf\udce9 ☃"

    @tool
    def write(self):
        part = {"type": "text", "text": "caf\udce9"}
        return [Message(role="tool", content="\udce9"), Message(role="user", content=[part])]

    @tool
    def complain(self):
        raise ToolError("\udce9")

    @tool
    def alien(self):
        return Message(role="tool", content=[{"type": "text", "text": object()}])

    @tool
    def named(self):
        return Reply("x", metrics={1: 2.0, "\ud800": True})

    @tool
    def lost(self):
        raise OSError("\ud800")


async def test_lone_surrogates_are_replaced():
    session = await started(Unsendable)
    assert (await session.step(says("surrogate"))).messages[0].content == "caf? ☃"
    written = (await session.step(says("write"))).messages
    assert [message.content for message in written] == ["?", [{"type": "text", "text": "caf?"}]]
    assert (await session.step(says("complain"))).messages[0].content == "?"
    assert (await session.step(says("named"))).metrics == {"invalid_calls": 0.0, "1": 2.0, "?": 1.0}
    assert (await session.step(says("lost"))).info["error"]["message"].startswith("OSError: ? (tests/env")


async def test_message_that_is_not_json_fails_the_session():
    result = await (await started(Unsendable)).step(says("alien"))
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert "cannot be sent as JSON" in result.info["error"]["message"]


class Panic(BaseException):
    """An exception that is not an Exception, as Rust extensions raise."""


class Grid(Quick):
    """Counts its calls, whose answers cannot be sent."""

    tool_timeout = 5.0

    def reset(self, sample, rng):
        self.count = 0
        return super().reset(sample, rng)

    @tool
    def look(self):
        """Return info that is not JSON."""
        self.count += 1
        return Done("seen", reward=1.0, info={"cells": {(0, 1): 3}})

    @tool
    async def panic(self):
        """Raise an exception that is not an Exception."""
        self.count += 1
        raise Panic("boo")

    def expert(self, rng):
        return Message(role="assistant", content=[{"type": "text", "text": "x", "grid": self}])


class BlockingGrid(Grid):
    """``Grid`` with its plain methods on threads."""

    blocking = True


@pytest.mark.parametrize("environment", [Grid, BlockingGrid])
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("look", r"info of look\(\) cannot be sent as JSON: TypeError: keys must"),
        ("panic", "Panic was raised"),
    ],
)
async def test_tool_that_cannot_be_answered_fails_the_session_and_runs_once(environment, call, reason):
    session = await started(environment)
    grid = session._environment
    result = await session.step(says(call), seq=1)
    assert (result.status, result.reward) == (SessionStatus.FAILED_ENVIRONMENT, 0.0)
    assert re.search(reason, result.info["error"]["message"])
    assert await session.step(says(call), seq=1) == result
    assert (session.turn, session.history.last, grid.count) == (1, result, 1)


async def test_expert_whose_message_cannot_be_sent_has_failed():
    session = await started(Grid)
    with pytest.raises(EnvironmentFailed, match=r"expert\(\) returned a message that cannot be sent as JSON"):
        await session.expert()


@pytest.mark.parametrize("tools", [None, ["not a tool"]])
async def test_invalid_session_tools_fail_the_opening_and_close_the_environment(tools):
    closed = []

    class Odd(Quick):
        def session_tools(self):
            return tools

        def close(self):
            closed.append(True)

    session = make(Odd)
    with pytest.raises(EnvironmentFailed, match="session_tools of task 'odd' failed"):
        await session.start()
    await session.close()
    assert (session.status, closed) == (SessionStatus.FAILED_ENVIRONMENT, [True])
