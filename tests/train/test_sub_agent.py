"""A sub-agent as a tool. Workers play in their own segments within the planner's session."""

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env import Done, EnvClient, Environment, tool
from agentrl_env.types import FunctionCall, Message, ToolCall
from agentrl_train.actor import Episode
from agentrl_train.advantage import advantages
from agentrl_train.batch import sequences
from agentrl_train.config import SubAgentSection
from agentrl_train.errors import ConfigError, EngineError
from agentrl_train.report.episodes import episode_html
from agentrl_train.storage.journal import decode_group, encode_group
from agentrl_train.sub_agent import LAST_TURN, NO_REPORT, divide_calls, merge_answers, planner_tools
from agentrl_train.telemetry.metrics import readable
from agentrl_train.template_check import check_sessions
from agentrl_train.types import EpisodeEnd, Sampling, TaskSource, Trajectory, TrajectoryGroup
from tests.train.fakes import CHAT, ScriptedEngine, make_actor
from tests.train.test_algorithm import plain_config, refusal

VAULT = Episode(task="vault", split="train", index=0, seed=1, draw_seed=(0, 1))


class Vault(Environment):
    """Find the code and open the vault."""

    max_turns = 9
    blocking = False
    broken = False

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.looks = 0
        return "Open the vault."

    @tool
    def look(self, place: str) -> str:
        """Look at a place."""
        if type(self).broken:
            raise RuntimeError("the light is off")
        self.looks += 1
        return f"The code is 40{self.looks}." if place == "desk" else "Nothing."

    @tool
    def enter(self, code: int) -> Done | str:
        """Enter a code."""
        return Done("open", reward=1.0) if self.looks and code == 400 + self.looks else "wrong"


@pytest.fixture
async def client() -> AsyncIterator[EnvClient]:
    Vault.broken = False
    async with Vault.local() as client:
        yield client


def call(name: str, *, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall.of(name, call_id=f"call_{number}", **arguments)


def says(*calls: ToolCall, text: str | None = None) -> Message:
    return Message.assistant(text, *calls)


DELEGATE = says(call("delegate", task="Find the code."))
LOOK, ENTER = says(call("look", place="desk")), says(call("enter", code=401))
REPORT = says(text="It is 401.")


class Played:
    """Plays an episode with a scripted planner and workers, which send their messages in turn."""

    def __init__(self, planner: list[Message], *workers: list[Message]) -> None:
        self._left = [iter(messages) for messages in (planner, *workers)]
        self.engine = ScriptedEngine(CHAT, self._say)

    def _say(self, context: object, key: str) -> Message:
        _, _, number = key.partition("/")
        return next(self._left[int(number or 0)])

    async def run(
        self, client: EnvClient, *, options: dict[str, Any] | None = None, **play: Any
    ) -> Trajectory:
        section = SubAgentSection(**(options or {}))
        play = {"max_new_tokens": 300, "environment_retries": 0} | play
        return await make_actor(self.engine, client, sub_agent=section, **play).sibling(VAULT)


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=0, task="vault", trajectories=trajectories, admitted_version=0)


# --- episodes ---


async def test_worker_acts_in_the_same_session_and_its_report_is_the_result(client: EnvClient) -> None:
    trajectory = await Played([DELEGATE, ENTER], [LOOK, REPORT]).run(client)
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TERMINATED, 1.0)
    assert [turn.segment for turn in trajectory.turns] == [0, 1, 1, 0]
    root, worker = trajectory.segments
    assert (root.parent, root.reason, root.agent) == (None, "root", "main")
    assert (worker.parent, worker.after_turn, worker.reason) == (0, 0, "sub_agent")
    assert worker.agent == "delegate"
    assert [message.role for message in worker.opening] == ["system", "user"]
    assert worker.opening[1].content == "Find the code."
    (result,) = trajectory.turns[0].reply
    assert (result.role, result.content, result.tool_call_id) == ("tool", "It is 401.", "call_1_0")
    assert trajectory.turns[1].reply[0].content == "The code is 401."
    called, looked, reported, entered = [turn.times for turn in trajectory.turns]
    assert called[1] <= looked[0] <= reported[1] <= called[2] <= entered[0]


async def test_every_segment_equals_the_row_that_the_engine_saw(client: EnvClient) -> None:
    both = says(call("delegate", number=0, task="a"), call("delegate", number=1, task="b"))
    played = Played([both, ENTER], [LOOK, REPORT], [says(text="No idea.")])
    trajectory = await played.run(client)
    rows = sequences([group(trajectory)], advantages([group(trajectory)]))
    assert {row.rollout for row in rows} == {0}
    seen = {
        turn.segment: [*ids, *turn.completion.token_ids]
        for turn, (_, ids, *_) in zip(trajectory.turns, played.engine.calls, strict=True)
    }
    assert [row.token_ids.tolist() for row in rows] == [seen[number] for number in range(3)]
    assert "Open the vault" in CHAT.text(rows[0].token_ids.tolist())
    assert "Open the vault" not in CHAT.text(rows[1].token_ids.tolist())


async def test_agents_see_their_own_tools(client: EnvClient) -> None:
    played = Played([LOOK, DELEGATE, ENTER], [says(call("enter", code=1)), LOOK, REPORT])
    options = {"planner_tools": ["enter"], "worker_tools": ["look"]}
    trajectory = await played.run(client, options=options)
    planner, worker = (CHAT.text(played.engine.calls[number][1]) for number in (0, 2))
    assert "Enter a code" in planner
    assert "delegate" in planner
    assert "Look at a place" not in planner
    assert ("delegate" in worker, "Enter a code" in worker, "Look at a place" in worker) == (
        False,
        False,
        True,
    )
    refused = trajectory.turns[0]
    assert refused.reply[0].content == "Error: there is no tool 'look'. Tools: enter, delegate."
    assert (refused.invalid_calls, refused.reward) == (1, 0.0)
    assert trajectory.turns[2].reply[0].content == "Error: there is no tool 'enter'. Tools: look."
    assert (trajectory.invalid_calls, trajectory.success) == (2, True)


async def test_calls_of_both_kinds_in_one_message_are_answered_in_order(client: EnvClient) -> None:
    mixed = says(
        call("delegate", number=0, task="a"),
        call("look", number=1, place="sofa"),
        call("delegate", number=2, wrong=1),
        call("look", number=3, place="desk"),
    )
    trajectory = await Played([mixed, says(call("enter", code=402))], [REPORT]).run(client)
    contents = [message.content for message in trajectory.turns[0].reply]
    assert contents == [
        "It is 401.",
        "Nothing.",
        "Error: delegate takes one argument, task, which is a text.",
        "The code is 402.",
    ]
    assert trajectory.turns[0].invalid_calls == 1
    assert trajectory.success


async def test_episode_can_end_in_a_worker(client: EnvClient) -> None:
    trajectory = await Played([DELEGATE], [LOOK, ENTER]).run(client)
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TERMINATED, 1.0)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    failed = await Played([says(text="no")] * 9).run(client)
    made = group(trajectory, failed)
    ((won, lost),) = advantages([made], normalization="none")
    assert won.tolist() == [won[0]] * 3
    assert won[0] > 0 > lost[0]


async def test_last_turn_of_a_worker_is_for_its_report(client: EnvClient) -> None:
    last = says(call("look", place="sofa"), text="Try 402.")
    played = Played([DELEGATE, says(call("enter", code=402))], [LOOK, LOOK, last])
    trajectory = await played.run(client, options={"max_turns": 3})
    contexts = [CHAT.text(ids) for key, ids, *_ in played.engine.calls if "/" in key]
    assert [LAST_TURN in text for text in contexts] == [False, False, True]
    assert [message.content for message in trajectory.turns[2].reply] == ["The code is 402.", LAST_TURN]
    assert trajectory.turns[3].reply == ()
    assert trajectory.turns[0].reply[0].content == "Try 402."
    assert trajectory.success


async def test_worker_without_a_text_has_no_report(client: EnvClient) -> None:
    silent = await Played([DELEGATE, ENTER], [LOOK, LOOK]).run(client, options={"max_turns": 2})
    assert silent.turns[1].reply[0].content == "The code is 401."
    assert silent.turns[0].reply[0].content == NO_REPORT


async def test_full_context_ends_the_worker_and_not_the_episode(client: EnvClient) -> None:
    chatty = says(call("look", place="far " * 20))
    played = Played([DELEGATE, *[ENTER] * 9], [chatty] * 9)
    options = {"planner_tools": ["enter"], "max_turns": 9}
    planner, _ = lengths(await Played([DELEGATE, ENTER], [LOOK, REPORT]).run(client, options=options))
    trajectory = await played.run(client, options=options, max_context=planner + 200)
    assert {turn.segment for turn in trajectory.turns} == {0, 1}
    assert trajectory.turns[0].reply[0].content == NO_REPORT
    assert trajectory.turns[-1].segment == 0
    assert max(lengths(trajectory)) <= planner + 200


def lengths(trajectory: Trajectory) -> list[int]:
    """Return the number of tokens of each segment."""
    found = [0] * len(trajectory.segments)
    for turn in trajectory.turns:
        found[turn.segment] += len(turn.prompt_ids) + len(turn.completion.token_ids)
    return found


async def test_engine_failure_in_a_worker_fails_the_episode(client: EnvClient) -> None:
    played = Played([DELEGATE], [LOOK])

    def fail_after_a_look(context: object, key: str) -> Message:
        played.engine.failures = int("/" in key)
        return LOOK if "/" in key else DELEGATE

    played.engine.script = fail_after_a_look
    trajectory = await played.run(client)
    assert trajectory.end is EpisodeEnd.FAILED_ENGINE
    assert [turn.segment for turn in trajectory.turns] == [0, 1]


async def test_environment_failure_in_a_worker_has_no_reward(client: EnvClient) -> None:
    Vault.broken = True
    trajectory = await Played([DELEGATE], [LOOK]).run(client)
    assert trajectory.end is EpisodeEnd.FAILED_ENVIRONMENT
    assert trajectory.error is not None
    assert trajectory.reward == 0.0


async def test_turn_limit_counts_the_turns_of_workers(client: EnvClient) -> None:
    limits = {"max_turns": {"vault": 3}}
    inside = await Played([DELEGATE], [LOOK, LOOK]).run(client, **limits)
    assert (inside.end, len(inside.turns)) == (EpisodeEnd.TRUNCATED_TURNS, 3)
    after = await Played([DELEGATE], [LOOK, REPORT]).run(client, **limits)
    assert (after.end, len(after.turns)) == (EpisodeEnd.TRUNCATED_TURNS, 3)
    assert after.turns[0].reply[0].content == "It is 401."
    two = says(call("delegate", number=0, task="a"), call("delegate", number=1, task="b"))
    between = await Played([two], [LOOK, REPORT], [REPORT]).run(client, **limits)
    assert (between.end, len(between.segments)) == (EpisodeEnd.TRUNCATED_TURNS, 2)


async def test_contexts_of_all_segments_are_released(client: EnvClient) -> None:
    played = Played([DELEGATE, ENTER], [LOOK, REPORT])
    await played.run(client)
    assert played.engine.released == {key for key, *_ in played.engine.calls}
    assert len(played.engine.released) == 2


async def test_sub_agent_is_offered_only_in_its_tasks(client: EnvClient) -> None:
    played = Played([LOOK, ENTER])
    trajectory = await played.run(client, options={"tasks": ["another"]})
    assert trajectory.success
    assert "delegate" not in CHAT.text(played.engine.calls[0][1])


async def test_same_seed_plays_the_same_draws(client: EnvClient) -> None:
    runs = [Played([DELEGATE, ENTER], [LOOK, REPORT]) for _ in range(2)]
    for played in runs:
        await played.run(client)
    first, again = ([sampling.seed for _, _, sampling, _ in one.engine.calls] for one in runs)
    assert first == again
    assert len(set(first)) == 4


# --- recording ---


async def test_episode_with_workers_round_trips_and_is_shown_as_a_tree(client: EnvClient) -> None:
    made = group(await Played([DELEGATE, ENTER], [LOOK, REPORT]).run(client))
    assert decode_group(encode_group(made)).trajectories[0].segments[1] == made.trajectories[0].segments[1]
    shown = json.loads(json.dumps(readable(made.trajectories[0], made)))
    assert [one["segment"] for one in shown["messages"]] == [0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    roles = [one["role"] for one in shown["messages"]]
    worker = ["system", "user", "assistant", "tool", "assistant"]
    assert roles == ["user", "assistant", *worker, "tool", "assistant", "tool"]
    assert shown["segments"][1] == {
        "parent": 0,
        "after_turn": 0,
        "reason": "sub_agent",
        "agent": "delegate",
    }
    page = episode_html(shown)
    assert page.count('<div class="segment">') == 1
    assert "delegate · sub-agent" in page
    assert "4 turns · 2 segments · policy version 0 · group 0" in page
    assert page.count("<div") == page.count("</div>")
    inside = page.split('<div class="segment">')[1]
    assert inside.index("The code is 401.") < inside.index("</div></div></div>")


# --- calls ---

names = st.sampled_from(["look", "enter", "delegate", "fly", ""])
texts = st.sampled_from(['{"task": "a"}', '{"task": 1}', "{", "[]", '{"task": " "}', '{"place": "desk"}'])


@given(st.lists(st.tuples(names, texts), max_size=5))
def test_every_call_has_one_answer_in_order(made: list[tuple[str, str]]) -> None:
    calls = [
        ToolCall(id=f"c{number}", function=FunctionCall(name=name, arguments=arguments))
        for number, (name, arguments) in enumerate(made)
    ]
    message = says(*calls)
    section = SubAgentSection()
    parts = divide_calls(message, sub_agent=section, tools=planner_tools(section, ()))
    sent = [one.id for one in (parts.sent.tool_calls or ())] if parts.sent else []
    assert sorted([*sent, *parts.tasks, *parts.errors]) == [one.id for one in calls]
    assert all(task == "a" for task in parts.tasks.values())
    reply = [Message(role="tool", content="env", tool_call_id=name) for name in sent]
    reply += [Message(role="user", content="a picture"), Message(role="user", content="another")]
    answers = {name: Message(role="tool", content="own", tool_call_id=name) for name in parts.tasks}
    answers |= parts.errors
    found = merge_answers(message, reply, answers)
    assert [one.tool_call_id for one in found[: len(calls)]] == [one.id for one in calls]
    assert [one.content for one in found[len(calls) :]] == ["a picture", "another"]


def test_message_without_calls_goes_to_the_environment() -> None:
    message = says(text="hello")
    assert divide_calls(message, sub_agent=SubAgentSection(), tools=()).sent is message


# --- settings ---


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "look"}, "rollout.sub_agent.name = 'look' is a tool of the environment"),
        ({"planner_tools": ["fly"]}, "planner_tools names 'fly'.*its tools: look, enter"),
        ({"worker_tools": ["walk"]}, "worker_tools names 'walk'"),
    ],
)
async def test_sub_agent_that_does_not_fit_the_tools_is_rejected_at_the_start(
    client: EnvClient, options: dict[str, Any], reason: str
) -> None:
    sources = [TaskSource(task="vault", split="train", num_samples=None)]
    check = partial(check_sessions, CHAT, {"vault": client}, sources=sources)
    with pytest.raises(ConfigError, match=reason):
        await check(sub_agent=SubAgentSection(**options))
    elsewhere = SubAgentSection(**options, tasks=["another"])
    await check(sub_agent=elsewhere)


async def test_format_is_checked_for_planner_and_workers(client: EnvClient) -> None:
    sources = [TaskSource(task="vault", split="train", num_samples=None)]
    section = SubAgentSection(system_prompt="Look around. " * 300)
    sampling = Sampling(max_context=3000, max_new_tokens=100)
    with pytest.raises(EngineError, match=r"raise engine.max_context from 3000"):
        await check_sessions(CHAT, {"vault": client}, sources=sources, sampling=sampling, sub_agent=section)


def test_invalid_settings_are_rejected_with_the_reason() -> None:
    nobody = "rollout.sub_agent={planner_tools=[], worker_tools=[]}"
    assert "so no agent can act" in refusal(nobody)
    assert "which is for its report" in refusal("rollout.sub_agent={max_turns=1, worker_tools=['look']}")
    assert "one can belong to a planner" in refusal("algorithm.credit=turn", "rollout.sub_agent={}")
    assert "rollout.sub_agent.name = 'two words' should match pattern" in refusal(
        "rollout.sub_agent={name='two words'}"
    )


def test_preset_matpo_offers_the_sub_agent_and_its_keys_can_be_overridden() -> None:
    config = plain_config("algorithm.preset=matpo", "rollout.sub_agent.max_turns=3")
    assert config.rollout.sub_agent == SubAgentSection(max_turns=3)
    assert plain_config("algorithm.preset=lightning").rollout.sub_agent is None
