"""A critic with privileged information: advantages, preferences, gradients, and isolation of the actor."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env import Done, EnvClient, Environment
from agentrl_env.types import Message, TaskSample
from agentrl_train.actor import Episode
from agentrl_train.advantage import shaped_rewards
from agentrl_train.batch import completions, sequences, token_weights
from agentrl_train.config import AlgorithmSection, TrainSection
from agentrl_train.config.credit import Sweet
from agentrl_train.critics.networks import PrivilegedCritic
from agentrl_train.critics.strategy import episode_rows
from agentrl_train.critics.sweet import dpo, drawn_pairs, preference_loss, turn_means
from agentrl_train.critics.trainer import CriticTrainer, critic_trainer
from agentrl_train.errors import ConfigError
from agentrl_train.storage.journal import decode_group, encode_group
from agentrl_train.types import Trajectory, Turn
from tests.train.fakes import CHAT, ScriptedEngine, always, make_actor
from tests.train.learner.test_learner import qwen
from tests.train.test_credit import episode, group, turn

SWEET = {"credit": "sweet", "baseline": "value", "scale": "none", "normalization": "none"}
scores = st.lists(st.floats(-20, 20), min_size=2, max_size=5).map(np.array)


def trainer(*, encode=lambda text: [3, 4], learning_rate: float = 1e-2, **settings) -> CriticTrainer:
    return critic_trainer(
        PrivilegedCritic(qwen(), train=TrainSection(learning_rate=learning_rate, max_grad_norm=1e9)),
        encode=encode,
        settings=Sweet(**{"beta": 0.5} | settings),
        algorithm=AlgorithmSection(**SWEET),
        train=TrainSection(micro_batch_tokens=64),
        max_context=512,
    )


def knowing(one: Trajectory, known: str = "1") -> Trajectory:
    return replace(one, sample=TaskSample(task="a", data={"privileged": {"answer": known}}))


def said(*tokens: list[int], reward: float = 0.0) -> Trajectory:
    """Return an episode with these sampled tokens and a reward at the end."""
    turns: list[Turn] = []
    for number, ids in enumerate(tokens):
        plain = turn(reward * (number == len(tokens) - 1), len(ids), str(number))
        turns.append(replace(plain, completion=replace(plain.completion, token_ids=ids)))
    return knowing(replace(episode([0.0]), turns=turns, reward=reward))


@given(scores, st.integers(1, 4))
def test_turn_repeated_in_full_has_the_same_advantage(ratios: np.ndarray, times: int) -> None:
    once = turn_means(ratios, np.zeros(len(ratios), np.int64), count=1)
    again = turn_means(np.tile(ratios, times), np.zeros(times * len(ratios), np.int64), count=1)
    assert again == pytest.approx(once)


def test_mean_is_taken_per_turn_and_is_zero_without_tokens() -> None:
    found = turn_means(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 2]), count=3)
    assert found.tolist() == [2.0, 0.0, 5.0]


@given(scores, st.integers(0, 100), st.floats(0.05, 2.0))
def test_gradient_of_preferences_matches_finite_differences(values, seed: int, beta: float) -> None:
    returns = np.random.default_rng(seed).integers(0, 3, len(values)).astype(float)
    _, gradient, pairs = preference_loss(values, returns, beta=beta)
    assert gradient.sum() == pytest.approx(0.0, abs=1e-9)
    assert pairs == sum(left > right for left in returns for right in returns)
    step = 1e-5
    for i in range(len(values)):
        moved = [
            preference_loss(values + s * step * (np.arange(len(values)) == i), returns, beta=beta)[0]
            for s in (1, -1)
        ]
        assert gradient[i] == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-5)


def test_preferences_of_equal_returns_have_no_loss() -> None:
    loss, gradient, pairs = preference_loss(np.array([1.0, 2.0]), np.array([0.1 + 0.2, 0.3]), beta=1.0)
    assert (loss, gradient.tolist(), pairs) == (0.0, [0.0, 0.0], 0)


def test_advantage_is_zero_if_critic_equals_reference_without_privileged_information() -> None:
    one = trainer(encode=lambda text: [])
    rows = one.rows([group(said([5, 6], [7], reward=1.0), said([8], [9]))])
    assert not any(row.advantages.any() for row in rows)


def test_advantage_is_the_mean_log_ratio_of_the_turn() -> None:
    one, played = trainer(), said([5, 6, 7], [8, 9], reward=1.0)
    (row,) = one.rows([group(played)])
    (plain,) = sequences([group(played)], [[0.0]])
    shown = replace(
        plain,
        **{
            name: np.append(np.zeros(2, getattr(plain, name).dtype), getattr(plain, name))
            for name in ("loss_mask", "logprobs", "versions", "advantages")
        },
        token_ids=np.append([3, 4], plain.token_ids),
    )
    critic = one.strategy.critic
    ours, theirs = critic.logprobs([shown])[0], critic.reference_logprobs([plain])[0]
    ratios = ours[shown.loss_mask > 0] - theirs[plain.loss_mask > 0]
    expected = [ratios[:3].mean()] * 3 + [ratios[3:].mean()] * 2
    assert row.advantages[row.loss_mask > 0] == pytest.approx(expected, abs=1e-5)
    assert row.token_ids.tolist() == plain.token_ids.tolist()  # the actor's row has nothing privileged


def test_gradient_of_the_critic_matches_its_preference_loss() -> None:
    groups = [
        group(said([5, 6], [7], reward=1.0), said([8], [9, 10, 11]), said([6], [5], reward=0.5)),
        group(said([9], reward=2.0), said([7, 7]), number=1),
    ]
    one, step = trainer(learning_rate=1e-9), 1e-2
    one.rows(groups)
    caught: list[torch.Tensor] = []
    name = "model.norm.weight"
    critic = one.strategy.critic
    parameter = critic.model.get_parameter(name)
    hook = critic._optimizer.register_step_pre_hook(lambda *_: caught.append(parameter.grad.clone()))
    one.learn(step=1)
    hook.remove()
    start = parameter.detach().clone()
    direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(0))
    losses = []
    for sign in (1, -1):
        parameter.data.copy_(start + sign * step * direction)
        losses.append(one.strategy.preferences()[1]["preference_loss"])
    expected = (losses[0] - losses[1]) / (2 * step)
    assert float((caught[0] * direction).sum()) == pytest.approx(expected, rel=2e-2, abs=1e-5)


def test_learned_advantages_rank_actions_by_the_hidden_information() -> None:
    one = trainer(encode=lambda text: [20 + int(text.strip()[-1])], learning_rate=3e-3, passes=2)
    groups = []
    for known in (0, 1):  # the right first action is 5 if 0 is known and 6 if 1 is known, and the second is 7
        played = [
            replace(
                said([first], [second], reward=float(first == 5 + known) + float(second == 7)),
                sample=TaskSample(task="a", data={"privileged": {"answer": str(known)}}),
            )
            for first in (5, 6)
            for second in (7, 8)
        ]
        groups.append(group(*played, number=known))
    for step in range(1, 31):
        rows = one.rows(groups)
        metrics = one.learn(step=step)
    assert metrics["preference_accuracy"] == 1.0
    for row, (known, first, second) in zip(
        one.rows(groups), [(k, f, s) for k in (0, 1) for f in (5, 6) for s in (7, 8)], strict=True
    ):
        by_turn = row.advantages[row.loss_mask > 0]
        other = next(
            r.advantages[r.loss_mask > 0]
            for r, (k, f, s) in zip(
                rows, [(k, f, s) for k in (0, 1) for f in (5, 6) for s in (7, 8)], strict=True
            )
            if (k, f, s) == (known, 11 - first, second)
        )
        assert (by_turn[0] > other[0]) == (first == 5 + known)


def test_sample_without_privileged_information_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples of task 'a' have no such data"):
        trainer().rows([group(episode([1.0]), episode([0.0]))])


def test_resumed_critic_with_privileged_information_continues_bit_for_bit(tmp_path: Path) -> None:
    groups = [group(said([5, 6], [7], reward=1.0), said([8], [9]))]
    straight, resumed = trainer(), trainer()
    straight.rows(groups)
    straight.learn(step=1)
    for part in straight.parts():
        part.write(tmp_path)
    resumed.load(tmp_path)
    for left, right in zip(straight.rows(groups), resumed.rows(groups), strict=True):
        assert left.advantages.tolist() == right.advantages.tolist()
    found = [one.learn(step=2) for one in (straight, resumed)]
    timeless = [{name: value for name, value in one.items() if "seconds" not in name} for one in found]
    assert timeless[0] == timeless[1]


@given(scores, st.integers(0, 100), st.floats(0.05, 2.0))
def test_gradient_of_pairs_matches_finite_differences(values, seed: int, beta: float) -> None:
    generator, sizes = np.random.default_rng(seed), np.full(len(values), 3)
    pairs = drawn_pairs(values, count=4, generator=generator)
    _, gradient = dpo(values, pairs, sizes=sizes, beta=beta, likelihood=0.0)
    step = 1e-5
    for i in range(len(values)):
        moved = [
            dpo(
                values + sign * step * (np.arange(len(values)) == i),
                pairs,
                sizes=sizes,
                beta=beta,
                likelihood=0,
            )
            for sign in (1, -1)
        ]
        assert gradient[i] == pytest.approx((moved[0][0] - moved[1][0]) / (2 * step), abs=1e-5)


def test_pair_of_equal_scores_has_the_loss_of_a_coin_and_draws_both_equally() -> None:
    loss, gradient = dpo(np.zeros(2), [(1, 0)], sizes=np.array([4, 2]), beta=0.5, likelihood=0.01)
    assert loss == pytest.approx(np.log(2))
    assert gradient == pytest.approx([0.25, -0.25 - 0.01 / 2])  # the likelihood of a single token


@given(scores, st.integers(0, 100))
def test_pairs_are_of_the_better_and_the_worse_half(values, seed: int) -> None:
    pairs = drawn_pairs(values, count=8, generator=np.random.default_rng(seed))
    ranks = {int(number): rank for rank, number in enumerate(np.argsort(-values, kind="stable"))}
    half = len(values) // 2
    assert len(pairs) == 8
    for better, worse in pairs:
        assert ranks[better] < half
        assert ranks[worse] >= len(values) - half
    assert drawn_pairs(values[:1], count=8, generator=np.random.default_rng(seed)) == []


def choosing(*played: list[int], others: list[int], **options) -> Trajectory:
    """Return an episode with alternatives ``others`` for each turn."""
    one = said(*played, **options)
    turns = [
        replace(turn, alternatives=[replace(turn.completion, token_ids=[token]) for token in others])
        for turn in one.turns
    ]
    lone = [replace(turn, logprobs=[-1.0], versions=[0]) for each in turns for turn in each.alternatives]
    return replace(
        one,
        turns=[
            replace(turn, alternatives=lone[number * len(others) : (number + 1) * len(others)])
            for number, turn in enumerate(turns)
        ],
    )


def test_completions_of_a_turn_are_rows_behind_its_context() -> None:
    one = choosing([5, 6], [7], others=[8, 9])
    first, second = completions(one, group(one))
    assert [row.token_ids.tolist() for row in first] == [[0, 5, 6], [0, 8], [0, 9]]
    assert [row.token_ids.tolist() for row in second] == [[0, 5, 6, 0, token] for token in (7, 8, 9)]
    assert [row.loss_mask.tolist() for row in second] == [[0, 0, 0, 0, 1]] * 3
    plain = said([5, 6], [7])
    assert completions(plain, group(plain)) == [[], []]


def test_rows_of_pairs_have_the_gradient_of_their_mean_loss() -> None:
    groups = [group(choosing([5], [7], others=[6, 8, 9], reward=1.0), choosing([6], [9], others=[5, 8, 7]))]
    one = trainer(pairs=3, likelihood=0.0)
    rows = one.rows(groups)
    weights = token_weights(rows, aggregation="token_mean")
    slopes = np.array([-(row.advantages * weight).sum() for row, weight in zip(rows, weights, strict=True)])
    # For each pair it is the same for the better and the worse completion, and never steeper than beta.
    assert slopes.sum() == pytest.approx(0.0, abs=1e-6)
    assert 0.0 < slopes[slopes > 0].sum() < 0.5
    assert {row.token_ids.tolist()[0] for row in rows} == {0}  # nothing privileged
    assert one.learn(step=1)["dpo_pairs"] == 12.0


def test_pairs_move_the_policy_towards_the_critics_preferred_action() -> None:
    one = trainer(
        encode=lambda text: [20 + int(text.strip()[-1])],
        learning_rate=3e-3,
        passes=2,
        pairs=4,
        likelihood=0.0,
    )
    groups = [
        group(
            *(
                knowing(choosing([first], others=[5, 6], reward=float(first == 5 + known)), str(known))
                for first in (5, 6)
            ),
            number=known,
        )
        for known in (0, 1)
    ]
    for step in range(1, 31):
        rows = one.rows(groups)
        metrics = one.learn(step=step)
    assert metrics["preference_accuracy"] == 1.0
    assert metrics["dpo_pairs"] > 0
    for row in rows:
        assert (row.advantages.sum() > 0) == (row.token_ids[-1] == 5 + row.group_id)


class Riddle(Environment):
    """Guess a word that the sample holds."""

    name = "countdown"

    max_turns = 2
    blocking = False

    @classmethod
    def samples(cls, split):
        return [{"privileged": {"answer": "zanzibar"}}]

    def reset(self, sample, rng):
        self.answer = sample.data["privileged"]["answer"]
        return "Guess a word."

    def respond(self, text):
        return Done("That was it.", reward=1.0) if text == self.answer else "No."


async def test_privileged_information_reaches_the_critic_and_never_the_actor() -> None:
    engine = ScriptedEngine(CHAT, always(Message.assistant("a word")))
    async with EnvClient.local(Riddle) as client:
        actor = make_actor(engine, client)
        played, _ = await actor.group(
            Episode(task="countdown", split="train", index=0, seed=0, draw_seed=(0,)),
            size=2,
            group_id=0,
            admitted_version=0,
        )
    assert played.trajectories[0].sample.data["privileged"] == {"answer": "zanzibar"}
    assert not any("zanzibar" in CHAT.text(context) for _, context, _, _ in engine.calls)
    encode = partial(CHAT.tokenizer.encode, add_special_tokens=False)
    shown_texts: list[str] = []

    def recorded(text: str) -> list[int]:
        shown_texts.append(text)
        return encode(text)

    critic = trainer(encode=recorded)
    shown = critic.strategy.with_information(episode_rows([played], shaped_rewards)).rows
    assert shown_texts
    assert all("zanzibar" in text for text in shown_texts)
    assert all(not row.loss_mask[: len(encode(shown_texts[0]))].any() for row in shown)


async def test_alternatives_of_a_turn_are_sampled_in_its_context_and_never_played() -> None:
    words = iter(f"word {number}" for number in range(100))
    engine = ScriptedEngine(CHAT, lambda context, key: Message.assistant(next(words)))
    async with EnvClient.local(Riddle) as client:
        actor = make_actor(engine, client, alternatives=2)
        played, _ = await actor.group(
            Episode(task="countdown", split="train", index=0, seed=0, draw_seed=(0,)),
            size=1,
            group_id=0,
            admitted_version=0,
        )
    (trajectory,) = played.trajectories
    assert [len(turn.alternatives) for turn in trajectory.turns] == [2, 2]
    said_words = [[CHAT.text(one.token_ids) for one in turn.alternatives] for turn in trajectory.turns]
    assert [turn.message.content for turn in trajectory.turns] == ["word 2", "word 5"]
    assert [[text.split("<")[0] for text in texts] for texts in said_words] == [
        ["word 0", "word 1"],
        ["word 3", "word 4"],
    ]
    contexts = [context for _, context, _, _ in engine.calls]
    assert [contexts.count(context) for context in contexts] == [3] * 6
    assert len({sampling.seed for _, _, sampling, _ in engine.calls}) == 6
    assert "word 0" not in CHAT.text(contexts[-1])
    assert decode_group(encode_group(played)).trajectories[0].turns[0].alternatives == tuple(
        replace(
            one, token_ids=tuple(one.token_ids), logprobs=tuple(one.logprobs), versions=tuple(one.versions)
        )
        for one in trajectory.turns[0].alternatives
    )
