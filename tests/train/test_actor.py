import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_env import EnvClient
from agentrl_env.client import ClientSession
from agentrl_env.errors import ServerUnreachable
from agentrl_env.types import Message, ToolCall
from agentrl_train.actor import TIME_DIGITS, turn_limit
from agentrl_train.batch import sequence
from agentrl_train.config import RolloutSection
from agentrl_train.types import Completion, EpisodeEnd, TrajectoryGroup
from tests.train.fakes import CHAT, DOWN, EPISODE, Countdown, ScriptedEngine, always, make_actor


@pytest.fixture
async def client() -> AsyncIterator[EnvClient]:
    Countdown.broken_resets = Countdown.broken_steps = 0
    async with Countdown.local() as client:
        yield client


async def test_episode_is_played_to_its_end(client: EnvClient) -> None:
    engine = ScriptedEngine(CHAT, always(DOWN), version=7)
    trajectory = await make_actor(engine, client).sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.TERMINATED
    assert (trajectory.reward, trajectory.success, len(trajectory.turns)) == (1.0, True, 3)
    assert trajectory.sample.index == 3
    assert trajectory.turns[-1].reply[0].content == "zero"
    assert {v for turn in trajectory.turns for v in turn.completion.versions} == {7}
    assert engine.released == {engine.calls[0][0]}


@pytest.mark.parametrize(
    ("pixels", "size", "error"),
    [(200_000, 10, ""), (10, 200_000, "the environment sent 200012 characters, more than any context")],
)
async def test_only_the_text_of_messages_counts_for_what_a_context_can_hold(
    pixels: int, size: int, error: str
) -> None:
    class Screen(Countdown):
        name = "countdown"

        def reset(self, sample, rng):  # type: ignore[no-untyped-def]
            super().reset(sample, rng)
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * pixels}}
            return [Message(role="user", content=[{"type": "text", "text": "x" * size}, image])]

    async with Screen.local() as client:
        actor = make_actor(ScriptedEngine(CHAT, always(DOWN)), client, max_context=700)
        trajectory = await actor.sibling(EPISODE)
    assert error in (found := trajectory.error or "")
    assert bool(found) == bool(error)


async def test_turns_have_the_times_of_their_request_completion_and_reply(client: EnvClient) -> None:
    before = time.time()
    trajectory = await make_actor(ScriptedEngine(CHAT, always(DOWN)), client).sibling(EPISODE)
    assert trajectory.started is not None
    assert before <= trajectory.started <= time.time()
    times = [second for turn in trajectory.turns for second in turn.times]
    assert len(times) == 9
    assert times == sorted(times)
    assert 0 < times[-1] <= round(trajectory.seconds, TIME_DIGITS)


@settings(max_examples=30, deadline=None)
@given(
    says=st.lists(
        st.one_of(
            st.just(DOWN),
            st.builds(Message.assistant, st.text("abc <>", min_size=1, max_size=20)),
            st.lists(st.integers(0, 260), min_size=1, max_size=30),
        ),
        min_size=8,
        max_size=8,
    )
)
async def test_turns_append_tokens_and_mask_covers_sampled_tokens(
    says: list,
) -> None:
    async with Countdown.local() as client:
        turns = iter(says)
        engine = ScriptedEngine(CHAT, lambda context, key: next(turns))
        trajectory = await make_actor(engine, client).sibling(EPISODE)
    group = TrajectoryGroup(group_id=0, task="t", trajectories=[trajectory], admitted_version=0)
    row = sequence(trajectory, 1.0, group)
    sampled = []
    context: list[int] = []
    for turn, call in zip(trajectory.turns, engine.calls, strict=True):
        context += turn.prompt_ids
        assert list(call[1]) == context
        sampled += [False] * len(turn.prompt_ids) + [True] * len(turn.completion.token_ids)
        context += turn.completion.token_ids
    assert row.token_ids.tolist() == context
    assert (row.loss_mask > 0).tolist() == sampled


def test_horizon_increases_in_stages() -> None:
    rollout = RolloutSection(horizon={"turns": (10, 20, 30), "steps": 100}, max_turns={"short": 15})
    versions = (0, 99, 100, 199, 200, 1_000_000)
    assert [turn_limit(rollout, "a", version=v) for v in versions] == [10, 10, 20, 20, 30, 30]
    assert [turn_limit(rollout, "short", version=v) for v in versions] == [10, 10, 15, 15, 15, 15]
    assert turn_limit(rollout, "a", version=None) is None


async def test_horizon_limits_only_the_turns_of_training_episodes(client: EnvClient) -> None:
    engine = ScriptedEngine(CHAT, always(DOWN))
    actor = make_actor(engine, client, horizon={"turns": (2, 3), "steps": 5})
    first, _ = await actor.group(EPISODE, size=1, group_id=0, admitted_version=4)
    second, _ = await actor.group(EPISODE, size=1, group_id=1, admitted_version=5)
    ends = [one.trajectories[0].end for one in (first, second)]
    assert ends == [EpisodeEnd.TRUNCATED_TURNS, EpisodeEnd.TERMINATED]
    assert (await actor.sibling(EPISODE)).end is EpisodeEnd.TERMINATED


async def test_greedy_episode_is_played_alongside_the_siblings(client: EnvClient) -> None:
    engine, likeliest = (ScriptedEngine(CHAT, always(DOWN)) for _ in range(2))
    greedy = make_actor(likeliest, client, temperature=0.0)
    group, failed = await make_actor(engine, client, greedy=greedy).group(
        EPISODE, size=2, group_id=0, admitted_version=0
    )
    assert (len(group.trajectories), failed) == (2, [])
    assert group.greedy is not None
    assert group.greedy.reward == 1.0
    assert {sampling.temperature for _, _, sampling, _ in likeliest.calls} == {0.0}


async def test_group_without_its_greedy_episode_is_not_trained_on(client: EnvClient) -> None:
    engine, broken = (ScriptedEngine(CHAT, always(DOWN)) for _ in range(2))
    broken.failures = 99
    actor = make_actor(engine, client, greedy=make_actor(broken, client, environment_retries=0))
    group, failed = await actor.group(EPISODE, size=2, group_id=0, admitted_version=0)
    assert (len(group.trajectories), group.greedy) == (0, None)
    assert [one.end for one in failed] == [EpisodeEnd.FAILED_ENGINE]
    assert actor.discarded_tokens > 0


async def test_turn_limit_of_a_task_ends_its_episodes(client: EnvClient) -> None:
    engine = ScriptedEngine(CHAT, always(DOWN))
    trajectory = await make_actor(engine, client, max_turns={EPISODE.task: 2, "other": 1}).sibling(EPISODE)
    assert (trajectory.end, len(trajectory.turns)) == (EpisodeEnd.TRUNCATED_TURNS, 2)
    assert (trajectory.reward, trajectory.error) == (0.0, None)
    ended = await make_actor(engine, client, max_turns={EPISODE.task: 3}).sibling(EPISODE)
    assert (ended.end, ended.reward) == (EpisodeEnd.TERMINATED, 1.0)


async def test_environment_failure_is_retried_in_fresh_session(client: EnvClient) -> None:
    Countdown.broken_steps = 1
    engine = ScriptedEngine(CHAT, always(DOWN))
    trajectory = await make_actor(engine, client).sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.TERMINATED
    assert len(trajectory.turns) == 3
    assert len({call[0] for call in engine.calls}) == 2


async def test_repeatedly_failing_episode_is_omitted_without_reward(client: EnvClient) -> None:
    Countdown.broken_resets = 3
    engine = ScriptedEngine(CHAT, always(DOWN))
    actor = make_actor(engine, client, environment_retries=2)
    group, failures = await actor.group(EPISODE, size=3, group_id=1, admitted_version=0)
    assert [t.reward for t in group.trajectories] == [1.0] * len(group.trajectories)
    assert len(group.trajectories) + len(failures) == 3
    assert all(f.end is EpisodeEnd.FAILED_ENVIRONMENT and f.error for f in failures)


async def test_engine_error_is_engine_failure(client: EnvClient) -> None:
    engine = ScriptedEngine(CHAT, always(DOWN))
    engine.failures = 100
    trajectory = await make_actor(engine, client, environment_retries=1).sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.FAILED_ENGINE
    assert trajectory.error == "the scripted engine fails"
    assert len(engine.calls) == 2


@pytest.mark.parametrize(
    "said",
    [
        Message.assistant("no call at all"),
        Message.assistant(None, ToolCall.of("unknown")),
        Message.assistant(None, ToolCall.of("down", by="two")),
        CHAT.tokenizer("<tool_call>{broken</tool_call><|im_end|>", add_special_tokens=False).input_ids,
    ],
)
async def test_invalid_model_output_is_a_turn_and_not_a_failure(client: EnvClient, said: Message) -> None:
    trajectory = await make_actor(ScriptedEngine(CHAT, always(said)), client).sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.TRUNCATED_TURNS
    assert trajectory.invalid_calls == len(trajectory.turns) == 8
    assert not trajectory.success


async def test_full_context_truncates_episode(client: EnvClient) -> None:
    engine = ScriptedEngine(CHAT, always(Message.assistant("blah " * 10)))
    trajectory = await make_actor(engine, client, max_context=600).sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.TRUNCATED_LENGTH
    assert 0 < len(trajectory.turns) < 8


@pytest.mark.parametrize(
    "said",
    [
        Message.assistant("x" * 300),
        Message.assistant("so", ToolCall.of("down", note="x" * 300)),
        Message.assistant(None, ToolCall.of("nothing", note="x" * 300)),
    ],
    ids=["text", "call", "invalid call"],
)
async def test_turn_truncated_by_the_full_context_is_recorded_and_not_played(
    client: EnvClient, monkeypatch: pytest.MonkeyPatch, said: Message
) -> None:
    steps: list[Message] = []
    step = ClientSession.step

    async def counted(session: ClientSession, message: Message) -> Any:
        steps.append(message)
        return await step(session, message)

    monkeypatch.setattr(ClientSession, "step", counted)
    engine = ScriptedEngine(CHAT, always(DOWN))
    await make_actor(engine, client).sibling(EPISODE)
    second = len(engine.calls[1][1])
    steps.clear()
    script = iter([DOWN, said])
    engine = ScriptedEngine(CHAT, lambda context, key: next(script))
    trajectory = await make_actor(engine, client, max_context=second + 80).sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.TRUNCATED_LENGTH
    assert [len(turn.times) for turn in trajectory.turns] == [3, 2]
    assert len(steps) == 1
    last = trajectory.turns[-1]
    assert last.completion.finish_reason == "length"
    assert (last.reply, last.reward, trajectory.invalid_calls) == ((), 0.0, 0)


async def test_turn_truncated_by_its_token_limit_is_answered(client: EnvClient) -> None:
    script = iter([Message.assistant("x" * 300), DOWN, DOWN, DOWN])
    engine = ScriptedEngine(CHAT, lambda context, key: next(script))
    trajectory = await make_actor(engine, client).sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.TERMINATED
    assert trajectory.turns[0].completion.finish_reason == "length"
    assert trajectory.turns[0].reply


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
async def test_completion_without_tokens_is_a_failure_of_the_engine(client: EnvClient, reason: str) -> None:
    class Empty(ScriptedEngine):
        async def generate(self, *args: Any, **options: Any) -> Completion:
            if self.calls:
                return Completion(token_ids=[], logprobs=[], versions=[], finish_reason=reason)
            return await super().generate(*args, **options)

    actor = make_actor(Empty(CHAT, always(DOWN)), client, environment_retries=0)
    trajectory = await actor.sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.FAILED_ENGINE
    assert "without a token" in str(trajectory.error)


async def test_context_too_small_for_opening_names_setting_to_raise(client: EnvClient) -> None:
    engine = ScriptedEngine(CHAT, always(DOWN))
    trajectory = await make_actor(engine, client, max_context=130).sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.FAILED_ENGINE
    assert "raise" in (trajectory.error or "")


async def test_stale_policy_samples_configured_fraction_of_turns(client: EnvClient) -> None:
    engine = ScriptedEngine(CHAT, always(DOWN))
    actor = make_actor(engine, client, stale={"fraction": 0.25})
    group, _ = await actor.group(EPISODE, size=200, group_id=0, admitted_version=0)
    counts = Counter(turn.completion.policy for t in group.trajectories for turn in t.turns)
    share = counts["stale"] / 600
    # Five standard deviations of a binomial share with 600 draws.
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 600) ** 0.5
    assert any(len({turn.completion.policy for turn in t.turns}) == 2 for t in group.trajectories)


async def test_seed_determines_draws_and_siblings_differ(client: EnvClient) -> None:
    seeds = []
    for _ in range(2):
        engine = ScriptedEngine(CHAT, always(DOWN))
        await make_actor(engine, client).group(EPISODE, size=4, group_id=0, admitted_version=0)
        seeds.append(sorted(params.seed for _, _, params, _ in engine.calls))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 12


async def test_concurrent_sessions_are_limited_by_slots(client: EnvClient) -> None:
    playing: set[str] = set()
    counts = []
    four = asyncio.Event()

    class Meeting(ScriptedEngine):
        async def generate(self, *args: Any, session_key: str, **options: Any) -> Completion:
            playing.add(session_key)
            counts.append(len(playing - self.released))
            if counts[-1] == 4:
                four.set()
            await asyncio.wait_for(four.wait(), 60)
            return await super().generate(*args, session_key=session_key, **options)

    engine = Meeting(CHAT, always(DOWN))
    await make_actor(engine, client).group(EPISODE, size=20, group_id=0, admitted_version=0)
    assert max(counts) == 4


class Away:
    """A client whose server is unreachable for the first calls."""

    def __init__(self, client: EnvClient, *, calls: int) -> None:
        self.client, self.calls = client, calls

    async def open(self, *args: object, **options: object) -> ClientSession:
        self.calls -= 1
        if self.calls >= 0:
            raise ServerUnreachable("nobody answers at http://shop:8000")
        return await self.client.open(*args, **options)  # type: ignore[arg-type]


async def test_unreachable_environment_is_logged_once_for_all_episodes(
    client: EnvClient, caplog: pytest.LogCaptureFixture
) -> None:
    away = Away(client, calls=5)
    engine = ScriptedEngine(CHAT, always(DOWN))
    actor = make_actor(engine, away, environment_wait_timeout_s=60.0)  # type: ignore[arg-type]
    group, failures = await actor.group(EPISODE, size=4, group_id=0, admitted_version=0)
    assert (len(group.trajectories), failures) == (4, [])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0] == (
        "the environment of countdown is unreachable (ServerUnreachable: nobody answers at "
        "http://shop:8000); its episodes wait up to 60 s for it"
    )
    assert said[1].startswith("the environment of countdown is reachable again after ")


async def test_session_opened_before_an_outage_does_not_end_it(
    client: EnvClient, caplog: pytest.LogCaptureFixture
) -> None:
    opened, lost = asyncio.Event(), asyncio.Event()

    class Dying:
        async def open(self, *args: object, **options: object) -> ClientSession:
            if opened.is_set():
                lost.set()
                raise ServerUnreachable("nobody answers at http://shop:8000")
            opened.set()
            return await client.open(*args, **options)  # type: ignore[arg-type]

    class Slow(ScriptedEngine):
        async def generate(self, *args: Any, **options: Any) -> Completion:
            await asyncio.wait_for(lost.wait(), 60)
            return await super().generate(*args, **options)

    actor = make_actor(
        Slow(CHAT, always(DOWN)),
        Dying(),  # type: ignore[arg-type]
        environment_retries=0,
    )
    group, failures = await actor.group(EPISODE, size=2, group_id=0, admitted_version=0)
    assert (len(group.trajectories), len(failures)) == (1, 1)
    said = [record.getMessage() for record in caplog.records]
    assert [message for message in said if "reachable again" in message] == []
    assert "is unreachable" in said[0]


async def test_opening_without_room_for_turn_names_needed_context(client: EnvClient) -> None:
    actor = make_actor(ScriptedEngine(CHAT, always(DOWN)), client, max_context=130, environment_retries=0)
    trajectory = await actor.sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.FAILED_ENGINE
    found = re.fullmatch(
        r"the opening of countdown takes (\d+) tokens and a turn up to engine.max_new_tokens = 120: raise "
        r"engine.max_context from 130 to at least (\d+)",
        str(trajectory.error),
    )
    assert found is not None
    assert int(found[2]) == int(found[1]) + 120
