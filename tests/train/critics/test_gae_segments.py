"""Critic advantages of rollouts with several segments."""

from dataclasses import replace

import numpy as np
import pytest

from agentrl_train.critics.gae import turn_numbers
from agentrl_train.types import ROOT, Segment, Trajectory
from tests.train.critics.test_archer import trainer as archer_trainer
from tests.train.critics.test_archer import twins
from tests.train.critics.test_gae import advantages_and_returns
from tests.train.critics.test_values import critic, trainer
from tests.train.test_credit import episode, group


def rollout_with_a_worker() -> Trajectory:
    """Return a rollout in which a worker plays turns 1 and 2."""
    one = episode([0.0, 1.0, 2.0, 4.0], tokens=2)
    turns = [replace(turn, segment=segment) for turn, segment in zip(one.turns, [0, 1, 1, 0], strict=True)]
    worker = Segment(parent=0, after_turn=0, reason="sub_agent", agent="worker")
    return replace(one, turns=turns, segments=(ROOT, worker))


def test_rewards_reach_earlier_turns_in_any_segment() -> None:
    one = rollout_with_a_worker()
    assert turn_numbers(one).tolist() == [0, 0, 3, 3, 1, 1, 2, 2]
    found, _ = advantages_and_returns([group(one)], [[np.zeros(8)]], normalization="none")
    assert found[0][0] is not None
    assert found[0][0].tolist() == [7, 7, 4, 4, 7, 7, 6, 6]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "rollout_mean", "segment_mean"])
def test_normalized_advantages_of_segments_have_mean_0_under_the_weights_of_the_loss(
    aggregation: str,
) -> None:
    groups = [group(rollout_with_a_worker(), episode([1.0]))]
    values = [[np.zeros(8), np.zeros(groups[0].trajectories[1].num_sampled_tokens)]]
    (found,), _ = advantages_and_returns(groups, values, aggregation=aggregation)
    first, second = found
    assert first is not None
    assert second is not None
    by_segment = {"token_mean": 4.0, "sequence_mean": 0.5, "rollout_mean": 0.5, "segment_mean": 1.0}
    weight = by_segment[aggregation]
    last = float(len(second)) if aggregation == "token_mean" else 1.0
    total = weight * (first[:4].mean() + first[4:].mean()) + last * second.mean()
    assert total == pytest.approx(0.0, abs=1e-9)


def test_rows_of_segments_get_the_advantages_of_their_turns() -> None:
    groups = [group(rollout_with_a_worker(), episode([1.0]))]
    rows = trainer(critic(head=False)).rows(groups)
    assert [row.advantages[row.loss_mask > 0].tolist() for row in rows[:2]] == [[7, 7, 4, 4], [7, 7, 6, 6]]


def test_twin_critics_value_the_turns_of_all_segments() -> None:
    groups = [group(rollout_with_a_worker(), episode([1.0]))]
    one = archer_trainer(twins())
    rows = one.rows(groups)
    values, actions = one.strategy._values[0]
    expected = (actions.min(-1) - values.min(-1)).astype(np.float32)
    assert rows[0].advantages[rows[0].loss_mask > 0] == pytest.approx(expected[[0, 0, 3, 3]])
    assert rows[1].advantages[rows[1].loss_mask > 0] == pytest.approx(expected[[1, 1, 2, 2]])
