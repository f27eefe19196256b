"""Tasks that answer whole messages, offer tools per session, and end by their own limit."""

import asyncio
from typing import ClassVar

import pytest

from agentrl_env import Done, Environment, Message, Reply, SessionStatus, ToolCall, ToolSpec, tool
from agentrl_env.errors import EnvironmentFailed
from agentrl_env.types import FunctionSpec


class Relay(Environment):
    """Answer the calls of a message oneself."""

    blocking = False

    def reset(self, sample, rng):
        self.names = [f"tool_{sample.index}"]
        return "Go."

    def session_tools(self):
        return [ToolSpec(function=FunctionSpec(name=name)) for name in self.names]

    def answer_message(self, message):
        calls = message.tool_calls or ()
        answers = [Message(role="tool", tool_call_id=call.id, content=call.function.name) for call in calls]
        if message.content == "enough":
            return Done(answers, reward=0.5, truncated=True, info={"why": "enough"})
        return Reply(answers, info={"calls": len(calls)})


async def test_whole_message_is_answered_with_the_tools_of_its_session():
    async with Relay.local() as client:
        session = await client.open("relay", index=3)
        assert [one.function.name for one in session.tools] == ["tool_3"]
        calls = ToolCall.of("tool_3", call_id="a"), ToolCall.of("any", call_id="b")
        result = await session.step(Message.assistant(None, *calls))
        assert [(one.tool_call_id, one.content) for one in result.messages] == [("a", "tool_3"), ("b", "any")]
        assert result.info == {"calls": 2}


async def test_limit_of_the_task_truncates_its_session():
    async with Relay.local() as client:
        session = await client.open("relay", index=0)
        result = await session.step(Message.assistant("enough"))
        assert (result.status, result.truncated) == (SessionStatus.TRUNCATED_TURNS, True)
        assert (result.terminated, result.reward, result.info) == (False, 0.5, {"why": "enough"})


class Shop(Environment):
    """Offers only some of its tools."""

    open_to = ("look", "finish")
    closed: ClassVar[list[str]] = []

    def reset(self, sample, rng):
        return "Welcome."

    def session_tools(self):
        return [spec for spec in self.tool_specs() if spec.function.name in self.open_to]

    @tool
    def look(self):
        """Look around."""
        return "Shelves."

    @tool
    def admin(self):
        """Open the safe."""
        return Done("The hidden tool was run.", reward=1.0)

    @tool
    def finish(self):
        """Leave."""
        return Done("Bye.")

    def snapshot(self):
        return {}

    def restore(self, state):
        pass

    def close(self):
        self.closed.append("shop")


class AsyncShop(Shop):
    """Asks for its tools."""

    async def session_tools(self):
        await asyncio.sleep(0)
        return super().session_tools()


class BlockingShop(Shop):
    """Waits for its tools on a thread."""

    def session_tools(self):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return super().session_tools()


class BrokenShop(Shop):
    """Has no tools."""

    def session_tools(self):
        raise ValueError("closed today")


@pytest.mark.parametrize("shop", [Shop, AsyncShop, BlockingShop])
async def test_tool_that_the_session_does_not_offer_is_unknown(shop):
    async with shop.local() as client:
        session = await client.open()
        assert [spec.function.name for spec in session.tools] == ["look", "finish"]
        result = await session.step(ToolCall.of("admin"))
        assert (result.status, result.reward) == (SessionStatus.RUNNING, 0.0)
        assert result.metrics == {"invalid_calls": 1.0}
        assert result.messages[0].content == 'Error: there is no tool "admin". Tools: look, finish.'
        assert (await session.step(ToolCall.of("look"))).messages[0].content == "Shelves."


async def test_answer_to_a_turn_without_a_call_names_only_the_offered_tools():
    async with Shop.local() as client:
        session = await client.open()
        result = await session.step(Message.assistant("Hello."))
        assert result.messages[0].content == "Call one of the tools: look, finish."
        assert result.metrics["invalid_calls"] == 1.0


async def test_fork_offers_the_same_tools():
    async with Shop.local() as client:
        (forked,) = await (await client.open()).fork(1)
        assert [spec.function.name for spec in forked.tools] == ["look", "finish"]
        assert (await forked.step(ToolCall.of("admin"))).metrics["invalid_calls"] == 1.0


async def test_error_in_session_tools_fails_and_closes_the_session():
    Shop.closed.clear()
    async with BrokenShop.local() as client:
        with pytest.raises(EnvironmentFailed, match="session_tools of task 'broken_shop' failed: ValueError"):
            await client.open()
    assert Shop.closed == ["shop"]


class Named(Environment):
    """Samples with names."""

    splits = ("test",)

    @classmethod
    def samples(cls, split):
        return {"a": {"n": 1}, "b": {"n": 2}}

    def reset(self, sample, rng):
        return str(sample.data["n"])

    def respond(self, text):
        return Done("bye")


class Numbered(Named):
    """Samples with numbers as names."""

    @classmethod
    def samples(cls, split):
        return {"2": {"n": "two"}, "0": {"n": "zero"}, "1": {"n": "one"}}


@pytest.mark.parametrize(
    ("text", "index"),
    [("2", "2"), ("0", "0"), ("3", 3), ("007", "007"), ("-1", "-1"), ("a", "a")],
)
async def test_text_is_a_name_of_a_sample_before_it_is_a_number(text, index):
    async with Numbered.local() as client:
        info = (await client.tasks())["numbered"]
    assert info.parse_index("test", text) == index
    assert info.parse_index("dev", text) == (int(text) if text in "0123" else text)


async def test_number_selects_a_named_sample_by_its_position():
    async with Named.local() as client:
        assert (await client.tasks())["named"].splits["test"].ids == ("a", "b")
        by_name = await client.open("named", split="test", index="b")
        by_number = await client.open("named", split="test", index=1)
        assert by_name.sample == by_number.sample
        assert by_number.messages[0].content == "2"
