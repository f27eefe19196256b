"""A trajectory with several segments is one rollout, with one return, one weight and one place in a group."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env.types import Message, TaskSample
from agentrl_train.advantage import advantages, by_state, observation, shaped_rewards
from agentrl_train.algorithm import advantage_function
from agentrl_train.batch import Aggregation, pack, sequences, token_weights
from agentrl_train.types import (
    ROOT,
    Completion,
    EpisodeEnd,
    Segment,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from tests.train.learner.test_learner import VOCABULARY, gradients, learner, on_policy, qwen, with_
from tests.train.test_algorithm import plain_config

BY_TOKENS = ("token_mean", "rollout_mean", "group_mean", "task_mean", "constant")
"""Aggregations that do not depend on the division of a rollout into segments."""


def turn(prompt: Sequence[int], sampled: Sequence[int], *, segment: int = 0, reward: float = 0.0) -> Turn:
    return Turn(
        prompt_ids=prompt,
        completion=Completion(
            token_ids=sampled,
            logprobs=[-3.9] * len(sampled),
            versions=[0] * len(sampled),
            finish_reason="stop",
        ),
        message=Message.assistant("x"),
        reply=[Message(role="tool", content=f"after {len(prompt)}", tool_call_id="1")],
        reward=reward,
        segment=segment,
    )


def rollout(turns: Sequence[Turn], segments: Sequence[Segment] = (ROOT,)) -> Trajectory:
    return Trajectory(
        sample=TaskSample(task="a"),
        opening=[Message(role="user", content="go")],
        turns=turns,
        end=EpisodeEnd.TERMINATED,
        reward=sum(one.reward for one in turns),
        success=False,
        segments=segments,
    )


def group(*trajectories: Trajectory, number: int = 0, task: str = "a") -> TrajectoryGroup:
    return TrajectoryGroup(group_id=number, task=task, trajectories=trajectories, admitted_version=0)


def divided(whole: Trajectory, boundaries: Sequence[int]) -> Trajectory:
    """Return the same rollout with a new segment at each of these turns. A segment repeats the history."""
    turns: list[Turn] = []
    segments, context = [ROOT], []
    for number, one in enumerate(whole.turns):
        prompt = list(one.prompt_ids)
        if number in boundaries:
            segments.append(Segment(parent=len(segments) - 1, after_turn=number - 1, reason="rewritten"))
            prompt = context + prompt
        turns.append(replace(one, prompt_ids=prompt, segment=len(segments) - 1))
        context = context + list(one.prompt_ids) + list(one.completion.token_ids)
    return replace(whole, turns=turns, segments=segments)


def with_workers(planner: Trajectory, count: int) -> Trajectory:
    """Return a rollout that calls ``count`` workers in its first turn, with two turns each."""
    first, *rest = planner.turns
    worker = Segment(parent=0, after_turn=0, reason="sub_agent", agent="worker")
    played = [turn([7, 8], [9] * size, segment=number) for number in range(1, count + 1) for size in (1, 2)]
    return replace(planner, turns=[first, *played, *rest], segments=[ROOT, *[worker] * count])


def sampled(rows: Sequence[TokenSequence], values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the values of the sampled tokens of all rows, in order."""
    return np.concatenate([value[row.loss_mask > 0] for row, value in zip(rows, values, strict=True)])


ids = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@st.composite
def divided_groups(draw: st.DrawFn) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """Generate groups, and the same groups with rollouts divided into segments."""
    whole, parts = [], []
    for number in range(draw(st.integers(1, 3))):
        task = draw(st.sampled_from("ab"))
        members = [
            rollout([turn(*pair) for pair in draw(st.lists(st.tuples(ids, ids), min_size=1, max_size=5))])
            for _ in range(draw(st.integers(1, 3)))
        ]
        cut = [divided(one, draw(st.sets(st.integers(1, 4)).map(sorted))) for one in members]
        whole.append(group(*members, number=number, task=task))
        parts.append(group(*cut, number=number, task=task))
    return whole, parts


def ones(groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
    return [[1.0] * len(one.trajectories) for one in groups]


@given(divided_groups(), st.sampled_from(BY_TOKENS))
def test_weights_of_tokens_do_not_depend_on_the_division_into_segments(made, aggregation):
    whole, parts = (sequences(groups, ones(groups)) for groups in made)
    before, after = (
        sampled(rows, token_weights(rows, aggregation=aggregation, constant_tokens=50))
        for rows in (whole, parts)
    )
    assert after.tolist() == before.tolist()


@given(divided_groups())
def test_rollouts_have_equal_weight_and_so_have_their_segments(made):
    rows = sequences(made[1], ones(made[1]))
    numbers = [one.rollout for one in rows]
    weights = token_weights(rows, aggregation="sequence_mean")
    for one, weight in zip(rows, weights, strict=True):
        share = 1 / len(set(numbers)) / numbers.count(one.rollout)
        assert weight.sum() == pytest.approx(share, rel=1e-5)
        assert len(set(weight[one.loss_mask > 0].tolist())) == 1


@given(divided_groups(), st.integers(1, 3), st.integers(0, 5))
def test_minibatches_never_divide_a_rollout(made, minibatches, seed):
    rows = sequences(made[1], ones(made[1]))
    numbered = [with_(one, versions=np.where(one.loss_mask > 0, one.rollout, -1)) for one in rows]
    batches = pack(numbered, num_minibatches=minibatches, seed=seed, max_tokens=40, version=100)
    found = [
        {100 - int(age) for micro in batch.micro_batches for age in micro.ages[micro.loss_mask > 0]}
        for batch in batches
    ]
    assert sorted(number for one in found for number in one) == sorted({one.rollout for one in rows})


@given(divided_groups())
def test_every_sampled_token_is_in_exactly_one_row(made):
    whole, parts = (sequences(groups, ones(groups)) for groups in made)
    for rows, groups in ((whole, made[0]), (parts, made[1])):
        expected = [
            token
            for one in groups
            for trajectory in one.trajectories
            for number in range(len(trajectory.segments))
            for played in trajectory.turns
            if played.segment == number
            for token in played.completion.token_ids
        ]
        assert sampled(rows, [one.token_ids for one in rows]).tolist() == expected
    assert sampled(parts, [one.token_ids for one in parts]).tolist() == expected


def test_rewritten_history_opens_exactly_one_row():
    whole = rollout([turn([1, 2], [3, 4]), turn([5], [6]), turn([7], [8, 9])])
    rows = sequences([group(divided(whole, [2]))], [[np.array([0.5, 1.0, 2.0])]])
    assert [one.token_ids.tolist() for one in rows] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert [one.loss_mask.tolist() for one in rows] == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1, 1]]
    assert [one.advantages.tolist() for one in rows] == [[0, 0, 0.5, 0.5, 0, 1], [0] * 7 + [2, 2]]
    assert [one.rollout for one in rows] == [0, 0]


def test_rollouts_keep_their_numbers_if_others_are_omitted():
    one = rollout([turn([1], [2])])
    rows = sequences([group(one, one), group(with_workers(one, 2), number=1)], [[None, 1.0], [1.0]])
    assert [row.rollout for row in rows] == [1, 2, 2, 2]


# --- the gradient of a model ---


def five_turns(seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    pairs = [(rng.integers(0, VOCABULARY, 3), rng.integers(0, VOCABULARY, 1 + u)) for u in range(5)]
    return rollout([turn(prompt.tolist(), said.tolist()) for prompt, said in pairs])


def of_the_policy(rows: Sequence[TokenSequence], seed: int = 3) -> list[TokenSequence]:
    """Return rows as if sampled by a slightly different policy, so that ratios differ from 1."""
    shift = np.random.default_rng(seed).normal(0, 0.1, VOCABULARY).astype(np.float32)
    found = on_policy(learner(qwen()), rows)
    return [with_(one, logprobs=(one.logprobs + shift[one.token_ids]) * one.loss_mask) for one in found]


@pytest.mark.parametrize("packing", [{"max_tokens": 40}, {"max_tokens": 200, "row_tokens": 90}])
@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean", "constant"])
def test_gradient_of_a_rollout_of_one_two_or_five_segments_is_the_same(
    aggregation: Aggregation, packing: dict[str, int]
) -> None:
    others = [five_turns(1), divided(five_turns(2), [3])]
    values = [[0.8, -1.3, 0.4]]
    found = []
    for boundaries in ([], [3], [1, 2, 3, 4]):
        rows = sequences([group(divided(five_turns(0), boundaries), *others)], values)
        assert len(rows) == 4 + len(boundaries)
        options = {"aggregation": aggregation, "constant_tokens": 20, **packing}
        found.append(gradients(qwen(), of_the_policy(rows), **options))
    assert all(part.abs().max() > 1e-4 for part in found[0])
    for other in found[1:]:
        for left, right in zip(found[0], other, strict=True):
            assert torch.allclose(left, right, atol=1e-6)


# --- MATPO: planner and workers (arXiv 2510.04678) ---


def four_planners() -> list[Trajectory]:
    return [rollout([turn([1], [2, 3]), turn([4], [5], reward=reward)]) for reward in (1.0, 0.0, 1.0, 0.0)]


def test_matpo_advantages_equal_those_of_the_planners():
    function = advantage_function(plain_config("algorithm.preset=matpo").algorithm, max_context=512)
    planners = four_planners()
    crowded = [with_workers(planners[0], 100), *planners[1:]]
    (alone,), (found,) = function([group(*planners)]), function([group(*crowded)])
    assert [turns[0] for turns in alone] == pytest.approx([0.866024, -0.866024] * 2, abs=2e-6)
    assert [turns[0] for turns in found] == [turns[0] for turns in alone]
    assert found[0].tolist() == [alone[0][0]] * 202


def test_workers_do_not_change_the_gradient_of_the_planners():
    config = plain_config("algorithm.preset=matpo").algorithm
    assert config.aggregation.name == "segment_mean"
    planners = four_planners()
    crowded = [with_workers(planners[0], 100), *planners[1:]]
    both = []
    for members in (planners, crowded):
        values = advantage_function(config, max_context=512)([group(*members)])
        rows = sequences([group(*members)], values)
        weights = token_weights(rows, aggregation=config.aggregation.name)
        roots = [number for number, one in enumerate(rows) if one.token_ids[0] == 1]
        both.append([(weights[n] * rows[n].advantages).tolist() for n in roots])
    assert both[0] == both[1]


def test_without_workers_matpo_is_grpo():
    rows = sequences([group(*four_planners())], ones([group(*four_planners())]))
    matpo, grpo = (token_weights(rows, aggregation=name) for name in ("segment_mean", "sequence_mean"))
    assert [one.tolist() for one in matpo] == [one.tolist() for one in grpo]
    stated = plain_config("algorithm.preset=matpo").algorithm.model_dump()
    expected = plain_config("algorithm.preset=grpo").algorithm.model_dump()
    different = {"preset", "aggregation"}
    assert {k: v for k, v in stated.items() if k not in different} == {
        k: v for k, v in expected.items() if k not in different
    }


def test_worker_tokens_are_divided_by_the_number_of_rollouts():
    members = [with_workers(four_planners()[0], 2), four_planners()[1]]
    rows = sequences([group(*members)], ones([group(*members)]))
    weights = token_weights(rows, aggregation="segment_mean")
    assert [weight.sum() for weight in weights] == pytest.approx([0.5] * 4)


# --- Agent Lightning (arXiv 2508.03680) ---


def test_rollout_of_fifty_calls_has_the_same_weight_as_one_of_a_single_call():
    many = rollout([turn([1], [2, 3]) for _ in range(50)])
    made = [group(divided(many, range(1, 50)), rollout([turn([1], [2])]))]
    rows = sequences(made, ones(made))
    assert len(rows) == 51
    for aggregation in ("rollout_mean", "sequence_mean"):
        weights = token_weights(rows, aggregation=aggregation)
        assert sum(weight.sum() for weight in weights[:50]) == pytest.approx(0.5)
        assert weights[50].sum() == pytest.approx(0.5)


def test_every_call_of_a_rollout_has_the_same_advantage_under_the_preset_lightning():
    function = advantage_function(plain_config("algorithm.preset=lightning").algorithm, max_context=512)
    first, *rest = four_planners()
    (found,) = function([group(divided(first, [1]), *rest)])
    assert found[0].tolist() == found[2].tolist() == [pytest.approx(0.866025, abs=2e-6)] * 2


# --- advantages ---


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "rollout_mean", "segment_mean"])
def test_normalized_advantages_of_segments_have_mean_zero_under_the_weights_of_the_loss(aggregation):
    planners = four_planners()
    members = [with_workers(planners[0], 3), *planners[1:3], divided(planners[3], [1])]
    made = [group(*members)]
    rows = sequences(made, advantages(made, aggregation=aggregation))
    weights = token_weights(rows, aggregation=aggregation)
    mean = sum(float((w * one.advantages).sum()) for w, one in zip(weights, rows, strict=True))
    assert mean == pytest.approx(0.0, abs=1e-6)


def test_observation_of_a_turn_comes_from_its_segment():
    task = Message(role="user", content="find it")
    worker = Segment(parent=0, after_turn=0, reason="sub_agent", agent="worker", opening=[task])
    one = rollout([turn([1], [2]), turn([1] * 5, [2], segment=1), turn([1], [3])], [ROOT, worker])
    assert observation(one, 0) == (("agent", "main"), ("user", "go"))
    assert observation(one, 1) == (("agent", "worker"), ("user", "find it"))
    assert observation(one, 2) == (("agent", "main"), ("tool", "after 1"))


def test_states_of_planner_and_worker_are_not_compared():
    same = [Message(role="user", content="go")]
    worker = Segment(parent=0, after_turn=0, reason="sub_agent", agent="worker", opening=same)
    one = rollout([turn([1], [2], reward=1.0), turn([1, 1], [2], segment=1)], [ROOT, worker])
    made = group(one, rollout([turn([1], [2])]))
    recurring = by_state(made, shaped_rewards(made))[1:]
    assert [comparison.turns for comparison in recurring] == [[0, 0]]


def test_overlong_penalty_depends_on_the_longest_segment():
    one = with_workers(rollout([turn([1] * 6, [2] * 2)]), 3)  # 8 tokens, plus 7 in each worker
    shaped = shaped_rewards(group(one), overlong=(10, 4, 1.0))
    assert shaped.returns.tolist() == [-0.5]


# --- invalid trees ---


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([ROOT, Segment(parent=None, after_turn=None, reason="rewritten")], "opened from segment None"),
        ([ROOT, Segment(parent=1, after_turn=0, reason="rewritten")], "opened from segment 1"),
        ([ROOT, Segment(parent=0, after_turn=2, reason="sub_agent")], "after turn 2"),
        ([ROOT, Segment(parent=0, after_turn=1, reason="sub_agent")], "which is of segment 1"),
        ([Segment(parent=0, after_turn=0, reason="root")], "opened from segment 0"),
        ([ROOT], "a turn is of segment 1"),
        ([], "a turn is of segment 0"),
    ],
)
def test_segments_that_do_not_form_a_tree_are_rejected(segments, reason):
    with pytest.raises(ValueError, match=reason):
        rollout([turn([1], [2]), turn([1], [2], segment=1)], segments)


def test_privileged_information_comes_from_the_sample():
    sample = TaskSample(task="a", data={"privileged": {"reference": "42"}, "question": "?"})
    one = rollout([turn([1], [2])])
    assert replace(one, sample=sample).privileged == {"reference": "42"}
    assert one.privileged == {}
