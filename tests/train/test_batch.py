from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env.types import Message, TaskSample
from agentrl_train.batch import pack, pack_rows, sequence, sequences, token_weights
from agentrl_train.types import (
    Batch,
    Completion,
    EpisodeEnd,
    MicroBatch,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

SUMMING_TO_ONE = ("token_mean", "sequence_mean", "rollout_mean", "group_mean", "task_mean")
AGGREGATIONS = (*SUMMING_TO_ONE, "segment_mean", "constant")


def turn(prompt: Sequence[int], sampled: Sequence[int], version: int = 0) -> Turn:
    return Turn(
        prompt_ids=prompt,
        completion=Completion(
            token_ids=sampled,
            logprobs=[-float(token) for token in sampled],
            versions=[version] * len(sampled),
            finish_reason="stop",
        ),
        message=Message.assistant("x"),
        reply=[],
        reward=0.0,
    )


def trajectory(turns: Sequence[Turn]) -> Trajectory:
    return Trajectory(
        sample=TaskSample(task="a"),
        opening=[],
        turns=turns,
        end=EpisodeEnd.TERMINATED,
        reward=0.0,
        success=False,
    )


def group(trajectories: Sequence[Trajectory]) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=3, task="a", trajectories=trajectories, admitted_version=0)


def row(
    length: int,
    sampled: int | None = None,
    *,
    first: int = 0,
    advantage: float = 1.0,
    group_id: int = 0,
    task: str = "a",
    rollout: int | None = None,
) -> TokenSequence:
    """Return a sequence with ``sampled`` sampled tokens at its end and token ids from ``first``."""
    sampled = length - 1 if sampled is None else sampled
    mask = np.zeros(length, np.float32)
    mask[length - sampled :] = 1
    return TokenSequence(
        token_ids=np.arange(first, first + length),
        loss_mask=mask,
        logprobs=-mask,
        versions=np.where(mask > 0, 0, -1),
        advantages=mask * np.float32(advantage),
        task=task,
        group_id=group_id,
        rollout=rollout,
    )


@st.composite
def rows(draw: st.DrawFn) -> list[TokenSequence]:
    """Return sequences with unique token ids, so that each token can be identified."""
    made, first = [], 0
    for length in draw(st.lists(st.integers(2, 30), min_size=1, max_size=15)):
        made.append(
            row(
                length,
                draw(st.integers(1, length - 1)),
                first=first,
                advantage=draw(st.sampled_from([-1.0, 0.0, 2.0])),
                group_id=draw(st.integers(0, 3)),
                task=draw(st.sampled_from("ab")),
                rollout=draw(st.none() | st.integers(0, 4)),
            )
        )
        first += length
    return made


def unpacked(micro: MicroBatch) -> list[MicroBatch]:
    """Return the sequences of a micro-batch, separated by segment id."""
    found = []
    for r, segments in enumerate(micro.segment_ids):
        for number in range(1, int(segments.max()) + 1):
            at = segments == number
            found.append(micro.each(lambda values, r=r, at=at: values[r][at]))
    return found


def all_unpacked(batches: Sequence[Batch]) -> list[MicroBatch]:
    return [one for batch in batches for micro in batch.micro_batches for one in unpacked(micro)]


def by_first_token(batches: Sequence[Batch]) -> dict[int, MicroBatch]:
    return {int(one.token_ids[0]): one for one in all_unpacked(batches)}


ids = st.lists(st.integers(1, 99), min_size=1, max_size=6)


@given(st.lists(st.tuples(ids, st.one_of(ids, st.just([])), st.integers(0, 9)), min_size=1, max_size=5))
def test_mask_covers_exactly_the_sampled_tokens(turns):
    one = sequence(trajectory([turn(*parts) for parts in turns]), -0.5, group([]))
    sampled = np.concatenate([completion for _, completion, _ in turns]).astype(int)
    at = one.loss_mask == 1
    assert one.token_ids.tolist() == [t for p, c, _ in turns for t in (*p, *c)]
    assert one.token_ids[at].tolist() == sampled.tolist()
    assert one.token_ids[~at].tolist() == [token for prompt, _, _ in turns for token in prompt]
    assert one.logprobs[at].tolist() == (-sampled.astype(float)).tolist()
    assert one.versions[at].tolist() == [v for _, c, v in turns for _ in c]
    assert (one.advantages[at] == -0.5).all()
    assert not one.logprobs[~at].any()
    assert not one.advantages[~at].any()
    assert (one.versions[~at] == -1).all()


def test_trajectory_without_prompt_is_rejected():
    with pytest.raises(ValueError, match="give it a prompt"):
        sequence(trajectory([turn([], [5])]), 1.0, group([]))


def test_completion_with_unequal_lists_is_rejected():
    broken = Completion(token_ids=[1, 2], logprobs=[-1.0], versions=[0, 0], finish_reason="stop")
    bad = Turn(prompt_ids=[1], completion=broken, message=Message.assistant("x"), reply=[], reward=0.0)
    with pytest.raises(ValueError, match="2 tokens, 1 logprobs and 2 versions"):
        sequence(trajectory([bad]), 1.0, group([]))


def test_trajectories_without_sampled_tokens_are_omitted():
    full, empty = trajectory([turn([1, 2], [3])]), trajectory([])
    (only,) = sequences([group([empty, full])], [[0.5, 2.0]])
    assert only.advantages.tolist() == [0.0, 0.0, 2.0]
    assert (only.task, only.group_id) == ("a", 3)


@given(rows(), st.integers(1, 100), st.integers(1, 4), st.integers(0, 80), st.booleans())
def test_every_token_is_packed_exactly_once(made, max_tokens, minibatches, row_tokens, packed):
    batches = pack(
        made,
        max_tokens=max_tokens,
        num_minibatches=minibatches,
        row_tokens=row_tokens,
        packed=packed,
    )
    found = by_first_token(batches)
    assert len(all_unpacked(batches)) == len(made)
    for one in made:
        copy = found[int(one.token_ids[0])]
        assert copy.token_ids.tolist() == one.token_ids.tolist()
        assert copy.position_ids.tolist() == list(range(len(one)))
        assert copy.loss_mask.tolist() == one.loss_mask.tolist()
        assert copy.logprobs.tolist() == one.logprobs.tolist()
        assert copy.advantages.tolist() == one.advantages.tolist()


@given(rows(), st.integers(1, 100), st.integers(0, 80))
def test_batch_counts_tokens_and_slots(made, max_tokens, row_tokens):
    (batch,) = pack(made, max_tokens=max_tokens, row_tokens=row_tokens)
    assert batch.num_sequences == len(made)
    assert batch.num_tokens == sum(len(one) for one in made)
    assert batch.num_loss_tokens == sum(one.loss_mask.sum() for one in made)
    assert batch.num_slots == sum(micro.token_ids.numel() for micro in batch.micro_batches)
    for micro in batch.micro_batches:
        padding = micro.segment_ids == 0
        assert not micro.weights[padding].any()
        assert not micro.loss_mask[padding].any()
        assert micro.token_ids.shape[0] == 1 or micro.token_ids.numel() <= max_tokens
        assert micro.token_ids.shape[1] <= max(row_tokens, *(len(one) for one in made))


@given(rows(), st.sampled_from(AGGREGATIONS), st.integers(1, 100), st.integers(0, 80))
def test_weights_do_not_depend_on_split(made, aggregation, max_tokens, row_tokens):
    expected = token_weights(made, aggregation=aggregation, constant_tokens=50)
    found = by_first_token(
        pack(
            made,
            aggregation=aggregation,
            max_tokens=max_tokens,
            row_tokens=row_tokens,
            constant_tokens=50,
        )
    )
    for one, weights in zip(made, expected, strict=True):
        assert found[int(one.token_ids[0])].weights.tolist() == weights.tolist()


@given(rows(), st.sampled_from(SUMMING_TO_ONE), st.integers(1, 3))
def test_weights_of_each_step_sum_to_one(made, aggregation, minibatches):
    for batch in pack(made, aggregation=aggregation, num_minibatches=minibatches):
        total = sum(float(micro.weights.sum()) for micro in batch.micro_batches)
        assert total == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [
        ("token_mean", 0.1, 0.1),
        ("sequence_mean", 0.25, 0.0625),
        ("rollout_mean", 0.25, 0.0625),
        ("segment_mean", 0.25, 0.0625),
        ("group_mean", 0.25, 0.0625),
        ("task_mean", 0.1, 0.1),
        ("constant", 0.05, 0.05),
    ],
)
def test_token_weights_match_published_values(aggregation, short, long):
    made = [row(5, 2, group_id=0), row(9, 8, group_id=1)]
    first, second = token_weights(made, aggregation=aggregation, constant_tokens=10)
    assert first[-2:] == pytest.approx([short] * 2)
    assert second[-8:] == pytest.approx([long] * 8)
    assert not first[:-2].any()


def test_tasks_have_equal_weight():
    made = [row(3, 2, task="a"), row(9, 8, task="b"), row(9, 8, task="b")]
    few, *many = token_weights(made, aggregation="task_mean")
    assert few.sum() == pytest.approx(0.5)
    assert sum(weights.sum() for weights in many) == pytest.approx(0.5)


def test_constant_aggregation_requires_constant():
    with pytest.raises(ValueError, match="needs constant_tokens"):
        pack([row(3)], aggregation="constant")


def test_unknown_aggregation_is_rejected():
    with pytest.raises(ValueError, match="aggregation is 'median'; use one of token_mean"):
        pack([row(3)], aggregation="median")


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(0, 60))
def test_first_fit_decreasing_fills_rows_more_than_half(lengths, spare):
    capacity = max([*lengths, 1]) + spare
    packed = pack_rows(lengths, capacity)
    sizes = sorted(sum(lengths[i] for i in row) for row in packed)
    assert sorted(i for row in packed for i in row) == list(range(len(lengths)))
    assert all(size <= capacity for size in sizes)
    assert all(2 * size > capacity for size in sizes[1:])


def test_minibatches_are_equal_and_seeded():
    made = [row(4, first=10 * i) for i in range(10)]
    first, again, other = (pack(made, num_minibatches=3, seed=seed) for seed in (1, 1, 2))
    assert [batch.num_sequences for batch in first] == [4, 3, 3]
    assert firsts(first) == firsts(again)
    assert firsts(first) != firsts(other)


def firsts(batches: Sequence[Batch]) -> list[list[int]]:
    return [sorted(by_first_token([batch])) for batch in batches]


def test_empty_minibatches_are_omitted():
    assert len(pack([row(4), row(4)], num_minibatches=5)) == 2
    assert pack([]) == []


@given(rows(), st.sampled_from(AGGREGATIONS))
def test_skipped_sequences_count_in_denominators(made, aggregation):
    options = {"aggregation": aggregation, "constant_tokens": 50, "num_minibatches": 2}
    whole = by_first_token(pack(made, **options))
    batches = pack(made, **options, skip_zero_advantages=True)
    live = by_first_token(batches)
    assert set(live) == {int(one.token_ids[0]) for one in made if one.advantages.any()}
    assert all(torch.equal(one.weights, whole[first].weights) for first, one in live.items())
    assert all(batch.micro_batches for batch in batches)


def test_single_sequence_rows_are_separate_from_packed_rows():
    lengths = [20, 20, 20, 11, 9, 8, 8]
    made = [row(length, first=100 * i) for i, length in enumerate(lengths)]
    (batch,) = pack(made, max_tokens=60)
    single, packed = batch.micro_batches
    assert single.segment_ids.max() == 1
    assert packed.segment_ids.tolist() == [[1] * 11 + [2] * 9, [1] * 8 + [2] * 8 + [0] * 4]
