"""Twin critics of turns: targets, fixed point, actor gradient, rows, updates and checkpoints."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl_train.advantage import shaped_rewards
from agentrl_train.batch import pack, sequences
from agentrl_train.config import AlgorithmSection, TrainSection
from agentrl_train.config.credit import Archer
from agentrl_train.critics.archer import marked, turn_row, twin_advantages, twin_targets
from agentrl_train.critics.networks import TwinCritic
from agentrl_train.critics.strategy import episode_rows
from agentrl_train.critics.trainer import CriticTrainer, critic_trainer
from agentrl_train.errors import ConfigError
from agentrl_train.loss import Tokens, policy_loss, twin_loss, unbounded
from agentrl_train.types import EpisodeEnd
from tests.train.learner.test_learner import qwen
from tests.train.test_credit import episode, group, turn

ARCHER = {"credit": {"name": "archer", "gamma": 0.9}, "normalization": "none"}


def twins(*, target_rate: float = 0.1) -> TwinCritic:
    return TwinCritic(qwen(), train=TrainSection(learning_rate=3e-3), target_rate=target_rate)


def trainer(one: TwinCritic, *, replay: int = 0, passes: int = 1, **algorithm) -> CriticTrainer:
    return critic_trainer(
        one,
        settings=Archer(gamma=0.9, replay=replay, passes=passes, warmup_steps=1),
        algorithm=AlgorithmSection(**ARCHER | algorithm),
        train=TrainSection(),
        max_context=512,
        encode=str.encode,
    )


def chain(*rewards: float, end: EpisodeEnd = EpisodeEnd.TERMINATED):
    """Return an episode with one token per turn and different observations."""
    one = episode(list(rewards), end=end)
    turns = [replace(turn(reward, 1, str(u)), prompt_ids=[10 + u]) for u, reward in enumerate(rewards)]
    return replace(one, turns=turns)


def test_targets_have_the_fixed_point_of_the_chain() -> None:
    values, actions, rewards = np.zeros((3, 2)), np.zeros((3, 2)), np.array([0.0, 0.0, 1.0])
    target_values, target_actions = np.zeros((3, 2)), np.zeros((3, 2))
    for _ in range(400):
        values, actions = twin_targets(rewards, target_values, target_actions, gamma=0.9)
        target_values += 0.1 * (values - target_values)
        target_actions += 0.1 * (actions - target_actions)
    assert values == pytest.approx(np.array([[0.81], [0.9], [1.0]]).repeat(2, 1), abs=1e-3)
    after = np.append(values[1:], np.zeros((1, 2)), axis=0)
    assert actions == pytest.approx(rewards[:, None] + 0.9 * after, abs=1e-3)


def test_targets_of_a_truncated_episode_use_its_last_value() -> None:
    values, actions = np.array([[1.0, 2.0], [3.0, 4.0]]), np.zeros((2, 2))
    _, found = twin_targets(np.array([0.5, 0.0]), values, actions, gamma=0.5, bootstrap=values[-1])
    assert found.tolist() == [[2.0, 2.5], [1.5, 2.0]]


def test_advantage_is_the_smaller_action_value_minus_the_state_value() -> None:
    found = twin_advantages(np.array([[1.0, 2.0], [0.0, -1.0]]), np.array([[3.0, 2.5], [1.0, 4.0]]))
    assert found.tolist() == [1.5, 2.0]


def test_gradient_of_the_actor_matches_enumeration() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(5, dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    chances = logprobs.exp().detach()
    tokens = Tokens(logprobs=logprobs, behaviour=logprobs.detach(), advantages=advantages, weights=chances)
    loss, _ = policy_loss(tokens, region=unbounded)
    (found,) = torch.autograd.grad(loss, logits)
    expected = -chances * (advantages - (chances * advantages).sum())
    assert torch.allclose(found, expected)


def test_gradient_of_twins_matches_finite_differences_and_ignores_unknown_targets() -> None:
    torch.manual_seed(0)
    values, weights = torch.randn(6, 2, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    first, second = torch.randn(2, 6, dtype=torch.float64)
    first[2] = second[2] = torch.nan

    def total(values: torch.Tensor) -> torch.Tensor:
        return twin_loss(Tokens(logprobs=values, behaviour=first, advantages=second, weights=weights))[0]

    assert torch.autograd.gradcheck(total, (values.requires_grad_(),))
    (gradient,) = torch.autograd.grad(total(values), values)
    assert gradient.isfinite().all()
    assert not gradient[2].any()


def test_rows_mark_the_starts_of_turns_and_the_tokens_after_their_ends() -> None:
    (row,) = sequences([group(episode([0.0, 1.0], tokens=3))], [[0.0]])
    assert row.loss_mask.tolist() == [0, 1, 1, 1, 0, 1, 1, 1]
    marked = turn_row(row)
    assert marked.loss_mask.tolist() == [0, 1, 0, 0, 1, 1, 0, 0, 1]
    assert marked.token_ids[:-1].tolist() == row.token_ids.tolist()


def test_values_do_not_depend_on_packing_and_follow_from_the_hidden_states() -> None:
    one = twins()
    rows = [turn_row(row) for row in sequences([group(chain(0, 0, 1), episode([0.0, 1.0]))], [[0.0, 0.0]])]
    head, body = one.model.get_output_embeddings(), one.model.base_model
    for row, found in zip(rows, one.values(rows), strict=True):
        with torch.no_grad():
            alone = one.model.eval() and body(
                torch.from_numpy(row.token_ids)[None], position_ids=torch.arange(len(row))[None]
            )
            outputs = head(alone[0][0]).numpy()
        marks = np.flatnonzero(row.loss_mask)
        expected = [outputs[t - 1, :2] if i % 2 == 0 else outputs[t - 1, 2:] for i, t in enumerate(marks)]
        assert found[marks] == pytest.approx(np.array(expected), abs=1e-4)


def test_target_networks_follow_slowly() -> None:
    one = twins(target_rate=0.25)
    before = [p.clone() for p in one._target.parameters()]
    (row,) = [turn_row(row) for row in sequences([group(chain(0, 1))], [[0.0]])]
    ones = row.loss_mask.copy()
    one.step(pack([replace(row, logprobs=ones, advantages=ones)], aggregation="token_mean"))
    parameters = zip(before, one._target.parameters(), one.model.parameters(), strict=True)
    for old, new, mine in parameters:
        assert torch.allclose(new, old + 0.25 * (mine - old), atol=1e-7)


def test_critics_learn_the_values_of_the_chain() -> None:
    one = trainer(twins(), passes=20)
    groups = [group(chain(0, 0, 1))]
    for step in range(1, 16):
        one.rows(groups)
        one.learn(step=step)
    one.rows(groups)
    ((values, actions),) = one.strategy._values
    assert values.mean(-1) == pytest.approx([0.81, 0.9, 1.0], abs=0.1)
    assert actions.mean(-1) == pytest.approx([0.81, 0.9, 1.0], abs=0.1)


def test_tokens_of_a_turn_share_its_advantage() -> None:
    one = trainer(twins(), leave_out=["truncated"])
    cut = episode([1.0], end=EpisodeEnd.TRUNCATED_TURNS)
    (row,) = one.rows([group(cut, episode([0.0], tokens=0), episode([0.0, 1.0], tokens=3))])
    expected = twin_advantages(*one.strategy._values[2])
    assert row.advantages[1:4] == pytest.approx(expected[0].repeat(3))
    assert row.advantages[5:8] == pytest.approx(expected[1].repeat(3))
    assert {"critic_loss", "explained_variance"} <= one.learn(step=1).keys()


def test_replayed_episodes_train_only_the_values_of_turns() -> None:
    played = marked(episode_rows([group(chain(0, 1))], shaped_rewards))
    strategy = trainer(twins(), replay=4).strategy
    (fresh,), (again,) = (strategy.targets(played, on_policy=on) for on in (True, False))
    marks = np.flatnonzero(fresh.loss_mask)
    assert np.isfinite(fresh.logprobs[marks]).all()
    assert np.isnan(again.logprobs[marks]).tolist() == [True, False, True, False]


def test_turns_without_tokens_between_them_are_refused() -> None:
    joined = episode([0.0, 1.0])
    joined = replace(joined, turns=[joined.turns[0], replace(joined.turns[1], prompt_ids=[])])
    with pytest.raises(ConfigError, match="tokens of the environment between turns"):
        trainer(twins()).rows([group(joined)])


def test_resumed_twins_continue_bit_for_bit(tmp_path: Path) -> None:
    groups = [[group(chain(0, n % 2), episode([0.5]), number=n)] for n in range(6)]
    straight, resumed = (trainer(twins(), replay=3, passes=2) for _ in range(2))
    for step in range(1, 5):
        straight.rows(groups[step])
        straight.learn(step=step)
    for part in straight.parts():
        part.write(tmp_path)
    resumed.load(tmp_path)
    rows = [one.rows(groups[5]) for one in (straight, resumed)]
    for left, right in zip(*rows, strict=True):
        assert left.advantages.tolist() == right.advantages.tolist()
    found = [one.learn(step=5) for one in (straight, resumed)]
    timeless = [{name: value for name, value in one.items() if "seconds" not in name} for one in found]
    assert timeless[0] == timeless[1]
