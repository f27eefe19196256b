"""Custom rewards: the decorator, scores in groups, and failures, which are never a reward of zero."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl_env import EnvClient
from agentrl_env.types import Message, ToolCall
from agentrl_train.advantage import advantages, shaped_rewards
from agentrl_train.algorithm import reward_functions
from agentrl_train.config import RewardSection
from agentrl_train.errors import ConfigError, RewardUnavailable
from agentrl_train.reward import Rewards, reward
from agentrl_train.storage.journal import decode_group, encode_group
from agentrl_train.training.step_trainer import by_task
from agentrl_train.types import EpisodeEnd, TrajectoryGroup
from tests.train.fakes import CHAT, DOWN, EPISODE, Countdown, ScriptedEngine, always, make_actor
from tests.train.reward.test_pieces import episode
from tests.train.test_algorithm import plain_config, refusal


def rewards(*functions, timeout_s: float = 60.0, **options) -> Rewards:
    plain = {"weights": {}, "fade_steps": {}}
    named = {function.__name__: function for function in functions}
    return Rewards(named, timeout_s=timeout_s, **plain | options)


@pytest.fixture
async def client() -> AsyncIterator[EnvClient]:
    Countdown.broken_resets = Countdown.broken_steps = 0
    async with Countdown.local() as client:
        yield client


@reward
def exact(trajectory, gold: str, partial: float = 0.25) -> float:
    return 1.0 if trajectory.turns[-1].message.content == gold else partial


@reward
async def both(trajectory) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"turns": len(trajectory.turns), "tokens": trajectory.num_sampled_tokens}


async def test_decorated_function_takes_fields_of_the_sample_by_name() -> None:
    right = episode(Message.assistant("42"), gold="42")
    wrong = episode(Message.assistant("41"), gold="42", partial=0.5, unused=1)
    assert (exact(right), exact(wrong)) == (1.0, 0.5)
    found = await rewards(exact).score(episode(Message.assistant("42")))
    assert found.end is EpisodeEnd.FAILED_REWARD
    assert "the sample has no field 'gold'" in str(found.error)


async def test_scores_are_kept_in_addition_to_the_environments_reward() -> None:
    made = rewards(exact, both, weights={"environment": 0.0, "both.tokens": 0.5, "both.turns": 0.0})
    scored = await made.score(episode(Message.assistant("42"), gold="42", reward=3.0))
    (found,) = made.combined([scored], version=0)
    assert found.scores == {"environment": 3.0, "exact": 1.0, "both.turns": 1.0, "both.tokens": 2.0}
    assert (scored.reward, found.reward) == (3.0, 2.0)
    group = TrajectoryGroup(group_id=0, task="t", trajectories=[found], admitted_version=0)
    assert decode_group(encode_group(group)).trajectories[0].scores == found.scores
    assert by_task([group])["t"]["score.both.tokens"] == 2.0


async def test_difference_to_the_environment_is_credited_to_the_last_turn() -> None:
    made = rewards(both)
    scored = await made.score(episode(*[Message.assistant("x")] * 2, reward=1.0))
    (found,) = made.combined([scored], version=0)
    assert found.reward == 1.0 + 2.0 + 4.0
    shaped = shaped_rewards(TrajectoryGroup(group_id=0, task="t", trajectories=[found], admitted_version=0))
    assert shaped.returns.tolist() == [7.0]
    assert shaped.rewards[0].tolist() == [0.5, 6.5]


@pytest.mark.parametrize("value", [math.nan, math.inf, "seven", None])
async def test_value_that_is_not_a_number_fails_the_episode(value: object) -> None:
    def broken(trajectory):
        return value

    found = await rewards(broken).score(episode(Message.assistant("x")))
    assert found.end is EpisodeEnd.FAILED_REWARD
    assert str(found.error).startswith("reward 'broken':")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError"),
        (TimeoutError("the socket timed out"), "TimeoutError: the socket timed out"),
    ],
)
async def test_error_of_any_kind_in_a_function_fails_the_episode(error: BaseException, reason: str) -> None:
    async def broken(trajectory):
        raise error

    found = await rewards(broken).score(episode(Message.assistant("x")))
    assert found.end is EpisodeEnd.FAILED_REWARD
    assert str(found.error).startswith(f"reward 'broken': {reason}")


async def test_cancellation_of_an_episode_is_not_a_failure_of_its_reward_function() -> None:
    async def slow(trajectory):
        await asyncio.sleep(3600)

    scoring = asyncio.create_task(rewards(slow).score(episode(Message.assistant("x"))))
    await asyncio.sleep(0)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


async def test_function_that_takes_too_long_fails_the_episode() -> None:
    async def slow(trajectory):
        await asyncio.sleep(3600)

    found = await rewards(slow, timeout_s=0.01).score(episode(Message.assistant("x")))
    assert found.end is EpisodeEnd.FAILED_REWARD
    assert found.error == "reward 'slow': no score within 0.01 s"


async def test_sibling_without_a_score_leaves_its_group_and_does_not_count_as_zero(client: EnvClient) -> None:
    asked = 0

    async def flaky(trajectory) -> float:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise RuntimeError("the judge is away")
        return 0.5 * asked

    actor = make_actor(ScriptedEngine(CHAT, always(DOWN)), client, rewards=rewards(flaky))
    group, failed = await actor.group(EPISODE, size=4, group_id=0, admitted_version=0)
    assert len(group.trajectories) == 3
    assert [one.end for one in failed] == [EpisodeEnd.FAILED_REWARD]
    assert sorted(one.reward for one in group.trajectories) == [1.5, 2.5, 3.0]
    line = flaky.__code__.co_firstlineno + 4
    assert str(failed[0].error).startswith("reward 'flaky': RuntimeError: the judge is away (")
    assert str(failed[0].error).endswith(f"test_scoring.py:{line}, in flaky)")
    assert actor.discarded_tokens == failed[0].num_sampled_tokens
    assert all(one is not None for one in advantages([group])[0])


async def test_judging_occupies_no_engine_slot(client: EnvClient) -> None:
    waiting, release = 0, asyncio.Event()

    async def judged(trajectory) -> float:
        nonlocal waiting
        waiting += 1
        if waiting == 6:  # more than the number of slots
            release.set()
        await release.wait()
        return 1.0

    actor = make_actor(ScriptedEngine(CHAT, always(DOWN)), client, rewards=rewards(judged))
    async with asyncio.timeout(60):
        group, _ = await actor.group(EPISODE, size=6, group_id=0, admitted_version=0)
    assert [one.reward for one in group.trajectories] == [2.0] * 6


async def test_greedy_episode_is_scored_like_its_siblings(client: EnvClient) -> None:
    made = rewards(both, weights={"environment": 0.0, "both.tokens": 0.0})
    engine = ScriptedEngine(CHAT, always(DOWN))
    actor = make_actor(
        engine, client, greedy=make_actor(engine, client, temperature=0.0, rewards=made), rewards=made
    )
    group, _ = await actor.group(EPISODE, size=2, group_id=0, admitted_version=0)
    assert group.greedy is not None
    assert [one.reward for one in (*group.trajectories, group.greedy)] == [3.0] * 3


def test_weight_of_a_score_fades_along_half_a_cosine() -> None:
    made = rewards(both, weights={"both.turns": 4.0}, fade_steps={"both.turns": 100})
    one = episode(Message.assistant(None, ToolCall.of("x")))
    scored = [asyncio.run(made.score(one))]
    found = [made.combined(scored, version=version)[0].reward - 2.0 for version in (0, 50, 100, 5000)]
    assert found == pytest.approx([4.0, 2.0, 0.0, 0.0])


async def test_siblings_with_different_scores_are_an_error() -> None:
    async def varying(trajectory) -> dict[str, float]:
        return {trajectory.turns[0].message.content: 1.0}

    made = rewards(varying)
    scored = [await made.score(episode(Message.assistant(text))) for text in "ab"]
    with pytest.raises(RewardUnavailable, match="return the same names for all"):
        made.combined(scored, version=0)
    assert made.combined([], version=0) == []


def test_functions_of_a_run_are_found_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def brief(trajectory):\n    return 1.0\n")
    (tmp_path / "mine.toml").write_text('[reward]\nfunctions = ["mine.py:brief"]\nweights = {brief = 2.0}\n')
    config = plain_config(f"algorithm.preset={tmp_path}/mine.toml")
    assert [function.spelled for function in config.reward.functions] == [f"{tmp_path}/mine.py:brief"]
    made = reward_functions(config.reward)
    assert made is not None
    scored = asyncio.run(made.score(episode(Message.assistant("x"), reward=1.0)))
    assert made.combined([scored], version=0)[0].reward == 3.0
    assert reward_functions(RewardSection()) is None
    gone = plain_config('reward.functions=["agentrl_train.reward:gone"]')
    with pytest.raises(ConfigError, match=r"agentrl_train\.reward has no function 'gone'"):
        reward_functions(gone.reward)


async def test_combination_that_is_too_large_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def own(scores, weights): return 1e300 * scores['exact']\n")
    functions = f'reward.functions=["{__file__}:exact"]'
    made = reward_functions(plain_config(functions, f"reward.combine={tmp_path}/mine.py:own").reward)
    assert made is not None
    scored = await made.score(episode(Message.assistant("42"), gold="42"))
    with pytest.raises(ConfigError, match=r"must return a finite number for each episode, at most 1e\+12"):
        made.combined([scored], version=0)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ('reward.functions=["brief"]', "is not a function such as"),
        ('reward.functions=["gone.py:brief"]', "reward.functions.0: there is no"),
        ('reward.functions=["a:brief", "b:brief"]', "two functions have the name 'brief'"),
        ('reward.functions=["a:environment"]', "has the name 'environment', the score of the environment"),
        ("reward.weights={polite = 2.0}", "weights names 'polite', which is not a score"),
        ("reward.combine=best", "is none of weighted"),
    ],
)
def test_invalid_section_is_rejected_with_the_reason(override: str, reason: str) -> None:
    assert reason in refusal(override)
