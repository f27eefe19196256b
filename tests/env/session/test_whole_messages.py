"""Tasks that answer whole messages, offer tools per session, and end by their own limit."""

import pytest

from agentrl_env import Done, Environment, Message, Reply, SessionStatus, ToolCall, ToolSpec
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
