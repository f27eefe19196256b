import asyncio
import logging

import pytest

from agentrl_env import EnvClient, Message, SessionStatus, ToolCall
from agentrl_env.errors import (
    DefinitionError,
    EnvironmentFailed,
    InternalError,
    InvalidRequest,
    NotSupported,
    ServerFull,
    SessionEnded,
    TargetError,
    UnknownSession,
)
from tests.env.tasks import Guess, Quick, Slow


async def test_local_client_plays_a_task():
    async with Guess.local() as client:
        session = await client.open("guess", split="test", index=3)
        assert session.messages[0].content.startswith("I picked a number")
        assert session.tools == Guess.tool_specs()
        assert session.sample.split == "test"
        while not session.status.final:
            result = await session.step(await session.expert())
        assert (result.reward, session.turn, session.last) == (1.0, 1, result)


async def test_step_accepts_message_call_or_text():
    async with Quick.local() as client:
        session = await client.open("quick")
        assert (await session.step("hello")).metrics["invalid_calls"] == 1.0
        assert (await session.step(ToolCall.of("refuse"))).messages[0].content == "not like this"
        assert (await session.step(Message.assistant("x", ToolCall.of("finish")))).terminated


@pytest.mark.filterwarnings("error")
async def test_step_accepts_a_dict_in_chat_format():
    function = {"name": "note", "arguments": '{"text": "a"}'}
    calls = [{"id": "a", "type": "function", "function": function}]
    async with Quick.local() as client:
        session = await client.open("quick")
        result = await session.step({"role": "assistant", "content": None, "tool_calls": calls})
        assert result.messages[0].content.startswith("1 ")
        assert (await session.step({"role": "assistant", "content": "hello"})).seq == 2


@pytest.mark.parametrize(
    "value", [None, 5, ("note", {"text": "a"}), [ToolCall.of("refuse")], {"name": "note"}, {"role": "robot"}]
)
async def test_step_raises_type_error_for_anything_else(value):
    async with Quick.local() as client:
        session = await client.open("quick")
        with pytest.raises(TypeError, match=r"step\(\) takes a ToolCall, text, a Message, or a dict"):
            await session.step(value)
        assert session.turn == 0


def test_target_is_a_folder_or_a_class_by_name(tmp_path):
    (tmp_path / "environment.py").write_text("from tests.env.tasks import Guess\nclass Wordle(Guess):\n  ...")
    with EnvClient.local_sync(str(tmp_path), "tests.env.tasks:Quick") as client:
        assert set(client.tasks()) == {"wordle", "quick"}
    with pytest.raises(TargetError, match="no such folder"):
        EnvClient.local("no/such/task")
    with pytest.raises(DefinitionError, match="pass the class, not an instance"):
        EnvClient.local(Guess())


async def test_sessions_have_a_repr_and_results_are_done():
    async with Quick.local() as client:
        session = await client.open("quick")
        assert repr(session) == f"<ClientSession {session.session_id} of 'quick': running, turn 0>"
        assert not (await session.step("hello")).done
        result = await session.step(ToolCall.of("finish"))
        assert result.done
        assert "done" not in result.model_dump()
        assert repr(session).endswith("'quick': completed, turn 2>")
    with Quick.session() as sync:
        assert repr(sync) == f"<SyncClientSession {sync.session_id} of 'quick': running, turn 0>"


async def test_one_client_serves_several_tasks():
    async with EnvClient.local(Guess, Quick, max_sessions=2) as client:
        assert set(await client.tasks()) == {"guess", "quick"}
        await client.open("guess")
        await client.open("quick")
        with pytest.raises(ServerFull):
            await client.open("quick")


async def test_open_waits_for_a_free_session():
    async with Quick.local(max_sessions=1) as client:
        session = await client.open("quick")
        waiting = asyncio.create_task(client.open("quick", wait=5))
        await asyncio.sleep(0)
        await session.close()
        await (await waiting).close()


async def test_session_closes_once_with_its_context():
    async with Slow.local() as client:
        async with await client.open("slow") as session:
            pass
        await session.close()
        assert session.status is SessionStatus.CANCELLED
        assert len(Slow.closed) == 1
        with pytest.raises(SessionEnded):
            await session.step("hello")


async def test_closing_the_client_closes_its_sessions():
    async with Slow.local() as client:
        await client.open("slow")
    assert len(Slow.closed) == 1


async def test_resume_continues_an_open_session():
    async with Quick.local() as client:
        session = await client.open("quick")
        await session.step(ToolCall.of("note", text="a"))
        again = await client.resume(session.session_id)
        assert (again.turn, again.last) == (1, session.last)
        result = await again.step(ToolCall.of("note", text="b"))
        assert result.messages[0].content.startswith("2 ")
        with pytest.raises(UnknownSession):
            await client.resume("nope")


async def test_expert_is_unavailable_without_oracle():
    async with Guess.local(oracle=False) as client:
        with pytest.raises(NotSupported):
            await (await client.open("guess")).expert()


def test_local_client_works_on_successive_event_loops():
    client = Guess.local()

    async def play():
        session = await client.open("guess", index=1)
        return await session.step(await session.expert())

    first, second = asyncio.run(play()), asyncio.run(play())
    assert first.messages == second.messages
    asyncio.run(client.aclose())


def test_logged_traceback_of_a_failure_starts_in_the_authors_code(caplog):
    class Broken(Guess):
        def reset(self, sample, rng):
            raise KeyError("missing")

    with pytest.raises(EnvironmentFailed, match="KeyError"):
        Broken.session(index=0)
    (record,) = caplog.records
    text = logging.Formatter().format(record)
    assert "in reset\n" in text
    assert "executor.py" not in text


async def test_message_whose_parts_cannot_be_sent_is_an_invalid_request_and_plays_no_step():
    circular: dict[str, object] = {"type": "text"}
    circular["self"] = circular
    message = Message(role="assistant", content=[circular], tool_calls=(ToolCall.of("note", text="x"),))
    async with Quick.local() as client:
        session = await client.open("quick")
        with pytest.raises(InvalidRequest, match="the message cannot be sent as JSON"):
            await session.step(message)
        assert (await session.step(ToolCall.of("note", text="x"))).messages[0].content.startswith("1 ")


async def test_bug_in_a_step_is_an_internal_error_as_over_http(monkeypatch):
    async with Quick.local() as client:
        session = await client.open("quick")

        async def fail(request):
            raise ZeroDivisionError

        monkeypatch.setattr(client.backend.pool, "step", fail)
        with pytest.raises(InternalError, match="a bug in the server: ZeroDivisionError") as raised:
            await session.step("x")
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
