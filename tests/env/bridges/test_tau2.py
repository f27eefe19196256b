"""The tasks of tau2-bench as sessions, with the same verdicts as its own evaluator."""

import json
import logging
import re

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.errors import TargetError
from agentrl_env.hosting.loader import load_target
from tests.env.evaluation.chat_server import ChatServer, completion

pytest.importorskip("loguru")
pytestmark = [
    pytest.mark.bridges,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
ASKED = re.compile(r"Please use (\w+) with (\{.*\})\.")


def obey(body):
    """Play a user that makes the requested calls and leaves at the end."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return completion(text="I have done it.")
    if found := ASKED.search(last["content"]):
        return completion(ToolCall.of(found[1], **json.loads(found[2])))
    if "That is done." in last["content"]:
        return completion(text="Thank you. ###STOP###")
    return completion(text="Hello, I need your help.")


@pytest.fixture
def user(monkeypatch):
    with ChatServer(obey) as server:
        monkeypatch.setenv("TAU2_USER_URL", server.url)
        yield server


def reference(task, name, without):
    """Return the reference solution's actions, optionally without all actions named like the first."""
    actions = task.tasks[name].evaluation_criteria.actions or []
    return [action for action in actions if not without or action.name != actions[0].name]


async def played(task, split, index, without):
    """Return the last result of an episode of the reference solution."""
    async with EnvClient.local(task) as client:
        session = await client.open(task.name, split=split, index=index)
        for action in reference(task, session.sample.data["task"], without) if without else ():
            asked = f"Please use {action.name} with {json.dumps(action.arguments)}."
            call = ToolCall.of(action.name, **action.arguments)
            await session.step(call if action.requestor == "assistant" else asked)
        while not session.status.final:
            await session.step("That is done." if without else await session.expert())
        return session.last


def own_verdict(task, name, without):
    """Return tau2-bench's reward for the reference solution, or None if its evaluator fails."""
    tau2, wanted = task.tau2, task.tasks[name]
    types, begun = tau2.messages, wanted.initial_state
    world = tau2.registry.registry.get_env_constructor(task.domain)()
    messages = list((begun.message_history if begun else None) or ())
    world.set_state(
        begun.initialization_data if begun else None,
        begun.initialization_actions if begun else None,
        messages,
    )
    for number, action in enumerate(reference(task, name, without)):
        call = types.ToolCall(
            id=str(number), name=action.name, arguments=action.arguments, requestor=action.requestor
        )
        kind = types.AssistantMessage if action.requestor == "assistant" else types.UserMessage
        messages += [kind(role=action.requestor, tool_calls=[call]), world.get_response(call)]
    told = "" if without else ", ".join(wanted.evaluation_criteria.communicate_info or ())
    messages.append(types.AssistantMessage(role="assistant", content=f"Done. {told}"))
    run = tau2.simulation.SimulationRun(
        id="0", task_id=name, start_time="", end_time="", duration=0, messages=messages,
        termination_reason=tau2.simulation.TerminationReason.USER_STOP,
    )  # fmt: skip
    kind = tau2.evaluator.EvaluationType.ALL
    try:
        return tau2.evaluator.evaluate_simulation(run, wanted, kind, False, task.domain).reward
    except ValueError:  # an assertion about a record that the solution did not create
        return None


@pytest.mark.parametrize(
    ("domain", "split", "indices"),
    [
        ("mock", "base", range(9)),
        ("airline", "test", (0, 3, 7)),
        ("retail", "train", (0, 11, 40)),
        ("telecom", "small", (0, 5, 12, 19)),
    ],
)
async def test_verdicts_equal_those_of_the_domains_own_evaluator(user, domain, split, indices):
    task = load_target(f"tau2:{domain}")
    ours, theirs = [], []
    for index in indices:
        name = task.ids[split][index]
        for without in (False, True):
            result = await played(task, split, index, without)
            ours.append(result.reward if result.terminated else None)
            theirs.append(own_verdict(task, name, without))
    assert ours == theirs
    assert {0.0, 1.0} <= set(ours)


async def test_user_calls_its_own_tools_and_the_policy_sees_neither_calls_nor_answers(user):
    task = load_target("tau2:telecom")
    async with EnvClient.local(task) as client:
        session = await client.open("tau2_telecom", split="small", index=0)
        assert [m.role for m in session.messages] == ["system", "assistant", "user"]
        own = {tool["function"]["name"] for tool in user.requests[0]["tools"]}
        assert "toggle_airplane_mode" in own
        assert not own & {tool.function.name for tool in session.tools}
        result = await session.step("Please use check_network_status with {}.")
    assert [m.content for m in result.messages] == ["I have done it."]
    assert (user.requests[-1]["messages"][-1]["role"], result.metrics["user_calls"]) == ("tool", 1.0)
    assert "scenario" in user.requests[0]["messages"][0]["content"]


async def test_wrong_call_is_an_error_that_the_policy_reads(user):
    task = load_target("tau2:mock")
    async with EnvClient.local(task) as client:
        session = await client.open("tau2_mock", split="base", index=0)
        result = await session.step(ToolCall.of("create_task", user_id="nobody", title="A"))
        assert "not found" in result.messages[0].content
        assert not result.final


async def test_history_of_a_task_opens_the_episode(user):
    task = load_target("tau2:mock")
    index = task.ids["base"].index("update_task_with_message_history")
    async with EnvClient.local(task) as client:
        session = await client.open("tau2_mock", split="base", index=index)
        roles = [message.role for message in session.messages]
        assert roles[0] == "system"
        assert {"assistant", "tool", "user"} <= set(roles)
        calls = [call for message in session.messages for call in message.tool_calls or ()]
        answers = [message.tool_call_id for message in session.messages if message.role == "tool"]
        assert [call.id for call in calls] == answers


async def test_forks_of_an_episode_do_not_share_records(user):
    task = load_target("tau2:mock")
    async with EnvClient.local(task) as client:
        session = await client.open("tau2_mock", split="base", index=0)
        [fork] = await session.fork()
        await session.step(await session.expert())
        left = await fork.step(Message.assistant("That is done."))
        right = await session.step(await session.expert())
    assert (left.reward, right.reward) == (0.0, 1.0)


@pytest.fixture
def judged(user, monkeypatch):
    """Return a function that makes a domain with two tasks, one of them graded by a model."""
    task = load_target("tau2:mock")
    judged = task.tasks["create_task_1"].model_copy(deep=True)
    kind = type(judged.evaluation_criteria.reward_basis[0])
    judged.evaluation_criteria.reward_basis = [kind.DB, kind.NL_ASSERTION]
    judged.evaluation_criteria.nl_assertions = ["The agent is polite.", "The agent is brief."]
    both = [judged, task.tasks["update_task_1"]]
    monkeypatch.setitem(task.tau2.registry.registry._tasks, "mock", lambda split=None: both)


def test_task_that_a_model_grades_is_omitted_without_a_judge(judged, caplog):
    with caplog.at_level(logging.WARNING):
        assert load_target("tau2:mock").ids == {"base": ["update_task_1"]}
    assert "omitted 1 of 2 tasks that need a judge model: set TAU2_JUDGE_URL to its endpoint" in caplog.text


@pytest.mark.parametrize(
    ("met", "reward"), [([True, True], 1.0), ([True, False], 0.0), ([True], None), (None, None)]
)
async def test_judge_grades_assertions_and_its_failure_is_not_a_reward(judged, monkeypatch, met, reward):
    def judge(body):
        if met is None:
            return 400, {"text": "no such model"}
        results = [{"expectedOutcome": "", "reasoning": "", "metExpectation": value} for value in met]
        return {**completion(text=json.dumps({"results": results})), "model": "judge"}

    with ChatServer(judge) as server:
        monkeypatch.setenv("TAU2_JUDGE_URL", server.url)
        task = load_target("tau2:mock")
        result = await played(task, "base", 0, without=False)
    assert (result.reward if result.terminated else None) == reward
    assert server.requests[0]["model"] == "default"
    assert "The agent is brief." in server.requests[0]["messages"][1]["content"]


def test_unknown_domain_and_missing_user_are_refused(user, monkeypatch):
    with pytest.raises(TargetError, match=r"there is no domain 'trains'; there are mock, airline, retail"):
        load_target("tau2:trains")
    monkeypatch.delenv("TAU2_USER_URL")
    with pytest.raises(TargetError, match="set TAU2_USER_URL to an OpenAI-compatible endpoint"):
        load_target("tau2:mock")
