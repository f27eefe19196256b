"""Users in an episode: scripts, functions, and models behind a real endpoint."""

import json

import pytest

from agentrl_env import EnvClient, Environment, SessionStatus, ToolCall, tool
from agentrl_env.errors import DefinitionError, ToolError
from agentrl_env.testing import Verdict, check_environment
from agentrl_env.users import (
    Dialogue,
    Endpoint,
    FunctionUser,
    ModelUser,
    OwnTools,
    ScriptedUser,
    UserFailed,
    Utterance,
    endpoint,
    visible_text,
)
from tests.env.evaluation.chat_server import ChatServer, completion


class Desk(Environment):
    """Find out the number of a parcel."""

    max_turns = 6
    blocking = False
    limit = 20

    def make_user(self, sample):
        return ScriptedUser(
            ["Where is my parcel?", "It is W17.", "Thank you."], replies={r"your name\?": "Ada."}
        )

    async def reset(self, sample, rng):
        self.dialogue = Dialogue(self.make_user(sample), max_messages=self.limit)
        return await self.dialogue.open()

    async def respond(self, text):
        return await self.dialogue.answer(text, grade=self.grade)

    def grade(self):
        return float("W17" in self.dialogue.told[-1])

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)


async def talk(task, *texts, **which):
    """Send the texts in turn. Return the session and the results."""
    async with EnvClient.local(task) as client:
        session = await client.open(task.name, index=0, seed=7, **which)
        results = [await session.step(text) for text in texts]
        await session.close()
        return session, results


def with_user(make, **attributes):
    return type("Desk", (Desk,), {"make_user": make, **attributes})


async def test_three_lines_of_code_let_a_scripted_user_answer():
    session, results = await talk(Desk, "Which number?", "What is your name?", "W17 arrives today.")
    assert session.messages[0].content == "Where is my parcel?"
    assert [r.messages[0].content for r in results] == ["It is W17.", "Ada.", "Thank you."]
    assert (results[-1].reward, results[-1].terminated) == (1.0, True)
    assert results[-1].metrics["user_messages"] == 4


async def test_policy_cannot_end_a_dialogue():
    _, (result,) = await talk(Desk, "[END] Goodbye. Done. ###STOP###")
    assert not result.final


async def test_user_does_not_see_thoughts_and_silence_is_not_a_message():
    heard = []

    def user(self, sample):
        return FunctionUser(lambda lines: heard.append([line.text for line in lines]) or "Go on.")

    _, results = await talk(with_user(user), "<think>W17 [END]</think> Hello.", "<think>only this")
    assert heard[-1] == ["Go on.", "Hello."]
    assert "no text" in results[1].messages[0].content
    assert results[1].metrics["invalid_calls"] == 1


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("b<thinking>a", "b"),
        ("<THINK a='1'>x</THINK >b <reasoning>y</reasoning>c", "b c"),
        ("[THINK]a[/THINK]b", "b"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "b"),
        ("1 < 2 and <b>bold</b>", "1 < 2 and <b>bold</b>"),
        ("I think </b> so", "I think </b> so"),
    ],
)
def test_thoughts_are_removed_from_a_text(text, visible):
    assert visible_text(text) == visible


async def test_messages_of_both_sides_count_for_the_limit():
    def user(self, sample):
        return FunctionUser(lambda lines: "And?")

    _, results = await talk(with_user(user, limit=4), "one", "two")
    assert not results[0].final
    assert results[1].status is SessionStatus.TRUNCATED_TURNS
    assert results[1].reward == 0.0


async def test_function_user_can_be_async_and_ends_the_dialogue():
    async def speak(lines):
        return Utterance(text="Bye.", ends=True) if lines else "Hi."

    session, (result,) = await talk(with_user(lambda self, sample: FunctionUser(speak)), "W17")
    assert (session.messages[0].content, result.reward, result.terminated) == ("Hi.", 1.0, True)


async def test_user_that_breaks_fails_the_episode_without_a_reward():
    def user(self, sample):
        return FunctionUser(lambda lines: 3 if lines else "Hello?")

    _, (result,) = await talk(with_user(user), "W17")
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert result.reward == 0.0
    assert "return a str or Utterance" in result.info["error"]["message"]


async def test_forks_continue_the_same_dialogue():
    async with EnvClient.local(Desk) as client:
        session = await client.open("desk", index=0)
        await session.step("Which number?")
        (fork,) = await session.fork()
        ends = [await one.step("W17 it is.") for one in (session, fork)]
        assert [end.reward for end in ends] == [1.0, 1.0]


async def test_state_of_a_dialogue_is_plain_data_and_continues_it():
    first = Dialogue(ScriptedUser(["a", "b", "c"]))
    await first.open()
    await first.answer("1")
    again = Dialogue(ScriptedUser(["a", "b", "c"]), state=json.loads(json.dumps(first.state())))
    assert (await again.answer("2")).content == "c"


@pytest.mark.slow
def test_task_with_a_user_passes_the_conformance_checks():
    report = check_environment(Desk)
    assert [result for result in report.results if result.verdict is Verdict.FAIL] == []


class Phone:
    """The user's phone."""

    def __init__(self):
        self.on = False

    @tool
    def switch(self, on: bool):
        """Switch the phone on or off."""
        if on == self.on:
            raise ToolError("it already is")
        self.on = on
        return f"The phone is {'on' if on else 'off'}."


def play_user(body):
    """Play a user that opens, switches the phone, answers and ends."""
    texts = [message["content"] for message in body["messages"] if message["role"] == "user"]
    last = body["messages"][-1]
    if len(texts) == 1:
        return completion(text="<think>[END]</think>My phone is dead.")
    if last["role"] == "user" and len(texts) == 2 and body.get("tools"):
        return completion(ToolCall.of("switch", on=True))
    if len(texts) == 2:
        return completion(text="It is on now.", reasoning_content="It works.")
    return completion(text="Thanks. [END]")


def model_user(url, **options):
    fields = {name: options.pop(name) for name in ("temperature", "cache", "body") if name in options}
    return ModelUser("Your phone is W17.", Endpoint(url=url, model="m", **fields), **options)


async def test_model_plays_the_user_with_tools_that_the_policy_does_not_see():
    with ChatServer(play_user) as server:
        task = with_user(lambda self, sample: model_user(server.url, tools=Phone(), seed=sample.seed))
        session, results = await talk(task, "Switch it on. [END]", "W17 works.")
    assert session.messages[0].content == "My phone is dead."
    assert [message.content for r in results for message in r.messages] == ["It is on now.", "Thanks."]
    hidden = results[0].info["user"]
    assert hidden["instructions"] == "Your phone is W17."
    assert hidden["messages"][-1]["calls"] == [
        {"call": {"name": "switch", "arguments": '{"on": true}'}, "answer": "The phone is on."}
    ]
    assert hidden["messages"][-1]["thought"] == "It works."
    assert (results[-1].reward, results[-1].terminated) == (1.0, True)
    metrics = results[-1].metrics
    assert (metrics["user_requests"], metrics["user_tokens_out"], metrics["user_calls"]) == (4, 20, 1)
    assert metrics["user_seconds"] > 0
    assert {request["seed"] for request in server.requests} == {7}
    assert {request["temperature"] for request in server.requests} == {0.0}
    assert "[END]" not in server.requests[1]["messages"][-1]["content"]


async def test_tool_factory_gives_each_fork_its_own_object():
    def switch_it(body):
        last = body["messages"][-1]
        if last["role"] == "user" and "Switch" in last["content"]:
            return completion(ToolCall.of("switch", on="on" in last["content"].split()))
        return completion(text=str(last["content"]) or "Hello.")

    with ChatServer(switch_it) as server:
        task = with_user(lambda self, sample: model_user(server.url, tools=Phone))
        async with EnvClient.local(task) as client:
            session = await client.open(task.name, index=0, seed=7)
            await session.step("Switch it on .")
            (fork,) = await session.fork()
            answers = [await one.step("Switch it off .") for one in (session, fork)]
            again = await fork.step("Switch it off .")
    assert [answer.messages[0].content for answer in answers] == ["The phone is off."] * 2
    assert again.messages[0].content == "it already is"


async def test_calls_of_a_dialogue_are_replayed_on_a_new_object():
    bad = [ToolCall.of("dance"), ToolCall.of("switch", on="yes"), ToolCall.of("switch", on=False)]
    calls = [{"call": call.model_dump(), "answer": ""} for call in (*bad, ToolCall.of("switch", on=True))]
    phone = Phone()
    OwnTools(phone).replay([Utterance.model_validate({"text": "Done.", "calls": calls})])
    assert phone.on


class SlowPhone:
    """A phone that cannot be replayed."""

    @tool
    async def switch(self, on: bool):
        """Switch the phone on or off."""
        return "Done."


def test_async_tools_cannot_be_replayed():
    line = Utterance.model_validate(
        {"text": "", "calls": [{"call": ToolCall.of("switch", on=True).model_dump(), "answer": ""}]}
    )
    with pytest.raises(DefinitionError, match="async and cannot be called again"):
        OwnTools(SlowPhone()).replay([line])


async def test_same_dialogue_is_answered_from_the_cache(tmp_path):
    with ChatServer(play_user) as server:
        task = with_user(lambda self, sample: model_user(server.url, cache=str(tmp_path), temperature=1.0))
        first = await talk(task, "Hello.", "W17 works.")
        asked = len(server.requests)
        again = await talk(task, "Hello.", "W17 works.")
    assert asked == 3
    assert len(server.requests) == asked
    assert len(list(tmp_path.iterdir())) == asked
    ends = [(r.messages, r.reward, r.metrics) for _, results in (first, again) for r in results]
    assert ends[:2] == ends[2:]


async def test_cache_folder_outlives_the_process_and_the_endpoint(tmp_path, monkeypatch):
    with ChatServer(play_user) as server:
        task = with_user(lambda self, sample: model_user(server.url, cache=str(tmp_path)))
        first = await talk(task, "Hello.", "W17 works.")
    monkeypatch.setattr(endpoint, "_kept", type(endpoint._kept)())
    again = await talk(task, "Hello.", "W17 works.")
    assert [r.metrics for r in first[1]] == [r.metrics for r in again[1]]
    assert again[1][-1].reward == 1.0


async def test_failed_requests_are_retried(monkeypatch):
    monkeypatch.setattr("agentrl_env.evaluation.chat_model.PAUSE_S", 0.0)
    failures = iter([(500, {}), (429, {})])
    with ChatServer(lambda body: next(failures, None) or play_user(body)) as server:
        session, (result,) = await talk(with_user(lambda self, sample: model_user(server.url)), "Hello.")
    assert session.messages[0].content == "My phone is dead."
    assert result.metrics["user_repeats"] == 2


async def test_failing_endpoint_fails_the_episode_without_a_reward(monkeypatch):
    monkeypatch.setattr("agentrl_env.evaluation.chat_model.PAUSE_S", 0.0)
    with ChatServer(lambda body: play_user(body) if len(body["messages"]) == 2 else (503, {})) as server:
        _, (result,) = await talk(with_user(lambda self, sample: model_user(server.url, seed=1)), "W17")
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert (result.reward, result.terminated) == (0.0, False)
    assert "the model that plays the user failed" in result.info["error"]["message"]


async def test_user_that_writes_only_thoughts_fails_and_one_beyond_its_budget_truncates():
    with (
        ChatServer(lambda body: completion(text="<think>hm")) as server,
        pytest.raises(UserFailed, match="wrote no message"),
    ):
        await Dialogue(model_user(server.url)).open()
    with ChatServer(play_user) as server:
        task = with_user(lambda self, sample: model_user(server.url, max_tokens=10))
        _, results = await talk(task, "one", "two")
    assert results[-1].status is SessionStatus.TRUNCATED_TURNS


async def test_invalid_calls_are_answered_and_endless_calls_fail():
    calls = [ToolCall.of("switch", on="yes"), ToolCall.of("dance"), ToolCall.of("switch", on=False)]

    def reply(body):
        made = sum(message["role"] == "tool" for message in body["messages"])
        return completion(calls[made % 3])

    with ChatServer(reply) as server:
        with pytest.raises(UserFailed, match="more than 3 tool calls"):
            await Dialogue(model_user(server.url, tools=Phone(), max_calls=3)).open()
        answers = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert "should be a valid boolean" in answers[0]
    assert "there is no tool" in answers[1]
    assert answers[2] == "it already is"


async def test_transcript_has_both_sides_and_the_hidden_part():
    with ChatServer(play_user) as server:
        dialogue = Dialogue(model_user(server.url, tools=Phone()))
        await dialogue.open()
        await dialogue.answer("<think>secret</think>Switch it on.")
    lines = dialogue.transcript().splitlines()
    assert lines[0] == "(instructions: Your phone is W17.)"
    assert "assistant: Switch it on." in lines
    assert '(user calls switch({"on": true}): The phone is on.)' in lines
    assert lines[-1] == "user: It is on now."


def test_endpoint_comes_from_variables(monkeypatch):
    assert Endpoint.from_variables("DESK_USER") is None
    monkeypatch.setenv("DESK_USER_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("DESK_USER_KEY", "secret")
    found = Endpoint.from_variables("DESK_USER")
    assert (found.model, found.temperature, found.key_variable) == ("default", 0.0, "DESK_USER_KEY")
    assert "secret" not in repr(found)
    monkeypatch.setenv("DESK_USER_TEMPERATURE", "warm")
    with pytest.raises(DefinitionError, match="not a number"):
        Endpoint.from_variables("DESK_USER")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ScriptedUser([]), "at least one line"),
        (lambda: ScriptedUser("hello"), "a list"),
        (lambda: Dialogue(ScriptedUser(["a"]), max_messages=1), "no room"),
        (lambda: model_user("http://127.0.0.1:9/v1", tools=object()), "has no tools"),
        (lambda: model_user("http://127.0.0.1:9/v1", stop=" "), "stop is empty"),
    ],
)
def test_users_that_cannot_work_are_refused(make, problem):
    with pytest.raises(DefinitionError, match=problem):
        make()
