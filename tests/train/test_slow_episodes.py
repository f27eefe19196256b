"""Long episodes are truncated and trained on. Only unanswered calls are failures."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from agentrl_env import Done, EnvClient, Environment, Reply, tool
from agentrl_env.client import ClientSession
from agentrl_env.types import Message, StepResult, ToolCall
from agentrl_train.actor import Actor, Episode
from agentrl_train.config import EngineSection, RolloutSection
from agentrl_train.errors import EngineError
from agentrl_train.storage.journal import Journal
from agentrl_train.training.admission import Mixer, WorkWindow
from agentrl_train.training.evaluation import evaluate
from agentrl_train.training.loop import Loop
from agentrl_train.types import Completion, EpisodeEnd, Sampling, SamplingParams, TaskSource
from tests.train.fakes import CHAT, DOWN, EPISODE, Countdown, ScriptedEngine, always, make_actor

LIMIT_S = 9.0
LAST = Message.assistant("done", ToolCall.of("walk", last=True))
FURTHER = Message.assistant("on", ToolCall.of("walk", last=False))


class Walk(Environment):
    """Walk as far as the episode goes; every step is worth a tenth."""

    max_turns = 10_000
    blocking = False

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        return "Walk."

    @tool
    def walk(self, last: bool):  # type: ignore[no-untyped-def]
        """Take a step."""
        return Done("end", reward=1.0) if last else Reply("on", reward=0.1)


class VirtualTime(ScriptedEngine):
    """An engine whose completions take a second of virtual time, for episodes with heavy-tailed lengths."""

    def __init__(self) -> None:
        super().__init__(CHAT, self._say)
        self.now = 0.0
        self.turns: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._lengths: dict[str, int] = {}

    def _say(self, context: Sequence[int], key: str) -> Message:
        if key not in self._lengths:
            draws = np.random.default_rng(len(self._lengths))
            self._lengths[key] = 1 + int(
                2 * draws.pareto(1.0)
            )  # the mean is infinite, and about a fifth exceed 9
        self.turns[key] += 1
        return LAST if self.turns[key] == self._lengths[key] else FURTHER

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        session_key: str,
        policy: str = "current",
    ) -> Completion:
        self.now += 1.0
        completion = await super().generate(
            token_ids, sampling=sampling, session_key=session_key, policy=policy
        )
        self.tokens[session_key] += len(completion.token_ids)
        return completion

    @property
    def cut(self) -> int:
        """Number of episodes longer than the limit."""
        return sum(length > LIMIT_S for length in self._lengths.values())


def virtual_actor(engine: VirtualTime, client: EnvClient) -> Actor:
    return Actor(
        engine=engine,
        chat=CHAT,
        clients={"walk": client},
        sampling=Sampling(max_new_tokens=100, max_context=100_000),
        rollout=RolloutSection(episode_timeout_s=LIMIT_S),
        slots=asyncio.Semaphore(1),  # one at a time, so that episodes do not share time
        clock=lambda: engine.now,
    )


async def test_trained_episodes_have_the_lengths_of_played_ones(tmp_path: Path) -> None:
    engine, group_size, trained = VirtualTime(), 4, []
    with closing(Journal(tmp_path)) as journal:
        async with Walk.local() as client:
            loop = Loop(
                actor=virtual_actor(engine, client),
                window=WorkWindow(
                    Mixer([TaskSource(task="walk")], seed=0),
                    groups_per_step=5,
                    max_staleness=1,
                    total_steps=10,
                ),
                journal=journal,
                group_size=group_size,
                seed=0,
                stall_timeout_s=60.0,
            )
            async for step in loop.steps():
                trained += [one for group in step.groups for one in group.trajectories]
    share = sum(one.end is EpisodeEnd.TRUNCATED_TIME for one in trained) / len(trained)
    assert share == engine.cut / len(engine.turns)
    assert 0.1 < share < 0.3
    # Every episode was played once and trained: none is replayed or omitted.
    assert len(trained) == len(engine.turns) == 10 * 5 * group_size
    assert np.mean([len(one.turns) for one in trained]) == np.mean(list(engine.turns.values()))
    assert sum(one.num_sampled_tokens for one in trained) == sum(engine.tokens.values())
    assert (loop.discarded_tokens, loop.window.dropped) == (0, 0)


async def test_truncated_episode_keeps_the_reward_of_its_turns() -> None:
    engine = VirtualTime()
    engine.script = always(FURTHER)
    async with Walk.local() as client:
        actor = virtual_actor(engine, client)
        episode = Episode(task="walk", split="train", index=0, seed=None, draw_seed=(0,))
        trajectory = await actor.sibling(episode)
    assert trajectory.end is EpisodeEnd.TRUNCATED_TIME
    assert (len(trajectory.turns), trajectory.error) == (9, None)
    assert trajectory.reward == pytest.approx(0.9)


async def test_evaluation_counts_slow_episodes_as_played() -> None:
    engine = VirtualTime()
    engine.script = always(FURTHER)
    async with Walk.local() as client:
        results = await evaluate(
            virtual_actor(engine, client), samples={"walk": [0, 1, 2]}, split={"walk": "train"}, seed=0
        )
    assert len(results["walk"].counted) == 3
    assert results["walk"].success == 0.0


class Stuck(ScriptedEngine):
    """An engine that makes no progress."""

    async def generate(self, token_ids: Sequence[int], **options: object) -> Completion:
        self.calls.append(("", tuple(token_ids), SamplingParams(max_new_tokens=1), ""))
        raise EngineError("the engine made no progress for 60 s")


@pytest.fixture
async def client() -> AsyncIterator[EnvClient]:
    async with Countdown.local() as client:
        yield client


async def test_engine_without_progress_is_a_failure(client: EnvClient) -> None:
    engine = Stuck(CHAT, always(DOWN))
    actor = make_actor(engine, client, environment_retries=1)
    trajectory = await actor.sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.FAILED_ENGINE
    assert trajectory.error == "the engine made no progress for 60 s"
    assert len(engine.calls) == 2


async def test_unanswered_environment_call_is_a_failure(
    client: EnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(session: ClientSession, message: Message) -> StepResult:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(ClientSession, "step", silent)
    actor = make_actor(
        ScriptedEngine(CHAT, always(DOWN)), client, environment_timeout_s=0.05, environment_retries=0
    )
    trajectory = await actor.sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.FAILED_ENVIRONMENT
    assert trajectory.error == "CallTimeout: the environment did not answer within 0.05 s"


async def test_last_turn_is_shorter_at_the_end_of_the_context(client: EnvClient) -> None:
    words = Message.assistant("blah " * 10)
    engine = ScriptedEngine(CHAT, always(words))
    trajectory = await make_actor(engine, client, max_context=600, max_new_tokens=60).sibling(EPISODE)
    assert trajectory.end is EpisodeEnd.TRUNCATED_LENGTH
    *before, (_, context, sampling, _) = engine.calls
    assert len(context) + sampling.max_new_tokens == 600
    assert 0 < sampling.max_new_tokens < 60
    assert {call[2].max_new_tokens for call in before} == {60}
    # The last turn is a prefix of the untruncated turn.
    assert (
        list(trajectory.turns[-1].completion.token_ids) == CHAT.completion(words)[: sampling.max_new_tokens]
    )


def test_default_limits_follow_from_lengths() -> None:
    engine = EngineSection(max_context=8_000, max_new_tokens=1_000)
    assert engine.completion_deadline_s == 260.0
    assert RolloutSection().episode_limit_s(max_context=engine.max_context) == 1_660.0
    assert RolloutSection(episode_timeout_s=5).episode_limit_s(max_context=engine.max_context) == 5.0
