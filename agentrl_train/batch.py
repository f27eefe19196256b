"""Step 6 of 9: trajectories + advantages -> ``Batch``.

Pure functions: ``sequence`` flattens one trajectory into one row of tokens; ``pack`` combines
whole sequences into rows and micro-batches. Token weights are computed over the whole optimizer step
before it is split, so packing, micro-batches and ranks do not change the loss::

    three sequences, lengths 5, 3, 2    rows of 5       segment_ids   position_ids
                                        a a a a a       1 1 1 1 1     0 1 2 3 4
                                        b b b c c       1 1 1 2 2     0 1 2 0 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np
import torch

from agentrl_train.types import (
    Batch,
    FloatArray,
    MicroBatch,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
)

Aggregation = Literal["token_mean", "sequence_mean", "group_mean", "task_mean", "constant"]

Row = list[int]
"""Indices of the sequences that share a row."""


def sequence(trajectory: Trajectory, advantage: float, group: TrajectoryGroup) -> TokenSequence:
    """Return a trajectory as one row of tokens, ``advantage`` on every token that was sampled.

    Raises ``ValueError`` if a completion's lists differ in length, or if the first token
    is sampled (it would have no logits).
    """
    ids: list[int] = []
    mask: list[float] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in trajectory.turns:
        prompt, completion = turn.prompt_ids, turn.completion
        size = len(completion.token_ids)
        if not len(completion.logprobs) == len(completion.versions) == size:
            raise ValueError(
                f"a completion of group {group.group_id} has {size} tokens, "
                f"{len(completion.logprobs)} logprobs and {len(completion.versions)} versions; "
                "the engine must return one of each per token."
            )
        ids += [*prompt, *completion.token_ids]
        mask += [0.0] * len(prompt) + [1.0] * size
        logprobs += [0.0] * len(prompt) + list(completion.logprobs)
        versions += [-1] * len(prompt) + list(completion.versions)
    if mask and mask[0]:
        raise ValueError(
            f"a trajectory of group {group.group_id} starts with a sampled token; give it a prompt."
        )
    loss_mask = np.asarray(mask, np.float32)
    return TokenSequence(
        token_ids=np.asarray(ids, np.int64),
        loss_mask=loss_mask,
        logprobs=np.asarray(logprobs, np.float32),
        versions=np.asarray(versions, np.int64),
        advantages=loss_mask * np.float32(advantage),
        task=group.task,
        group_id=group.group_id,
    )


def sequences(
    groups: Sequence[TrajectoryGroup], advantages: Sequence[Sequence[float]]
) -> list[TokenSequence]:
    """Return one sequence per trajectory, in order; trajectories without sampled tokens are left out.

    ``advantages[g][i]`` belongs to ``groups[g].trajectories[i]`` (``advantage.advantages``).
    """
    return [
        sequence(trajectory, advantage, group)
        for group, values in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, values, strict=True)
        if trajectory.num_sampled_tokens
    ]


def pack(
    sequences: Sequence[TokenSequence],
    *,
    aggregation: Aggregation = "sequence_mean",
    max_tokens: int = 8192,
    num_minibatches: int = 1,
    seed: int = 0,
    row_tokens: int = 0,
    packed: bool = True,
    constant_tokens: int | None = None,
    skip_zero_advantages: bool = False,
) -> list[Batch]:
    """Return one ``Batch`` per optimizer step, at most ``num_minibatches`` of them.

    The sequences are divided at random (``seed``) into ``num_minibatches`` steps of equal size and
    weighted within their step (``token_weights``). Whole sequences are then packed, first fit
    decreasing, into rows as long as the longest sequence (or ``row_tokens``, if that is more), and rows of
    similar length into micro-batches of at most ``max_tokens`` slots; a longer row is a micro-batch of its
    own. ``packed=False`` puts one sequence in a row, for models that do not support packed rows.

    With ``skip_zero_advantages``, sequences without any advantage are not computed, but still count in the
    denominators: the policy gradient is the same at less cost, but entropy and KL terms leave them out. A
    step with nothing to compute is left out.
    """
    order = np.random.default_rng(seed).permutation(len(sequences))
    batches = []
    for part in np.array_split(order, num_minibatches):
        chosen = [sequences[i] for i in part]
        weights = token_weights(chosen, aggregation=aggregation, constant_tokens=constant_tokens)
        if skip_zero_advantages:
            live = [i for i, one in enumerate(chosen) if one.advantages.any()]
            chosen, weights = [chosen[i] for i in live], [weights[i] for i in live]
        if chosen:
            lengths = [len(one) for one in chosen]
            rows = pack_rows(lengths, max(row_tokens, *lengths) if packed else 0)
            batches.append(_batch(chosen, weights, rows, max_tokens))
    return batches


def token_weights(
    sequences: Sequence[TokenSequence],
    *,
    aggregation: Aggregation = "sequence_mean",
    constant_tokens: int | None = None,
) -> list[FloatArray]:
    """Return the weight of every token in the loss, one [T] array per sequence, 0 where masked.

    ``token_mean`` (DAPO, arXiv 2503.14476): all tokens have equal weight. ``sequence_mean`` (GRPO,
    2402.03300), ``group_mean``, ``task_mean``: all sequences, groups or tasks have equal weight, as have the
    tokens within each. In these four the weights sum to 1. ``constant`` (Dr. GRPO, 2503.20783): a token has
    weight ``1 / (constant_tokens * number of sequences)``.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation is {aggregation!r}; use one of {', '.join(get_args(Aggregation))}.")
    if aggregation == "constant":
        if not constant_tokens:
            raise ValueError("aggregation 'constant' needs constant_tokens, for example the token limit.")
        return [one.loss_mask / np.float32(constant_tokens * len(sequences)) for one in sequences]
    units = [_unit(one, i, aggregation) for i, one in enumerate(sequences)]
    tokens: Counter[Hashable] = Counter()
    for unit, one in zip(units, sequences, strict=True):
        tokens[unit] += int(one.loss_mask.sum())
    counted = sum(size > 0 for size in tokens.values())
    return [
        one.loss_mask / np.float32(max(1, counted * tokens[unit]))
        for unit, one in zip(units, sequences, strict=True)
    ]


def pack_rows(lengths: Sequence[int], capacity: int) -> list[Row]:
    """Assign sequences to rows of ``capacity`` tokens, first fit decreasing.

    A sequence longer than ``capacity`` gets its own row.
    """
    free = np.zeros(len(lengths), np.int64)
    rows: list[Row] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = free[: len(rows)] >= lengths[i]
        row = int(np.argmax(fits)) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            free[row] = capacity
        rows[row].append(i)
        free[row] -= lengths[i]
    return rows


def _unit(one: TokenSequence, index: int, aggregation: Aggregation) -> Hashable:
    """Return the key of the unit that shares one weight: sequence, group, task or the whole batch."""
    match aggregation:
        case "sequence_mean":
            return index
        case "group_mean":
            return one.group_id
        case "task_mean":
            return one.task
        case _:
            return None


def _batch(
    sequences: Sequence[TokenSequence],
    weights: Sequence[FloatArray],
    rows: Sequence[Row],
    max_tokens: int,
) -> Batch:
    lengths = [len(one) for one in sequences]
    micro_batches = [
        _micro_batch(sequences, weights, part) for part in _split_rows(rows, lengths, max_tokens)
    ]
    return Batch(
        micro_batches=micro_batches,
        num_sequences=len(sequences),
        num_loss_tokens=int(sum(one.loss_mask.sum() for one in sequences)),
        num_tokens=sum(lengths),
        num_slots=sum(micro.token_ids.numel() for micro in micro_batches),
    )


def _split_rows(rows: Sequence[Row], lengths: Sequence[int], max_tokens: int) -> list[list[Row]]:
    """Split rows into micro-batches of similar length and at most ``max_tokens`` slots.

    Rows of one sequence come first: without packed rows among them they need no attention mask.
    """
    sizes = {row[0]: sum(lengths[i] for i in row) for row in rows}
    parts: list[list[Row]] = []
    width = 0
    for row in sorted(rows, key=lambda row: (len(row) > 1, -sizes[row[0]])):
        width = max(width, sizes[row[0]])
        if not parts or width * (len(parts[-1]) + 1) > max_tokens:
            parts.append([])
            width = sizes[row[0]]
        parts[-1].append(row)
    return parts


def _micro_batch(
    sequences: Sequence[TokenSequence],
    weights: Sequence[FloatArray],
    rows: Sequence[Row],
) -> MicroBatch:
    shape = (len(rows), max(sum(len(sequences[i]) for i in row) for row in rows))
    tokens, positions, segments = (np.zeros(shape, np.int64) for _ in range(3))
    mask, logprobs, advantages, weight = (np.zeros(shape, np.float32) for _ in range(4))
    for r, row in enumerate(rows):
        start = 0
        for number, i in enumerate(row, start=1):
            one = sequences[i]
            at = np.s_[r, start : start + len(one)]
            tokens[at], positions[at], segments[at] = one.token_ids, np.arange(len(one)), number
            mask[at], logprobs[at] = one.loss_mask, one.logprobs
            advantages[at], weight[at] = one.advantages, weights[i]
            start += len(one)
    return MicroBatch(
        token_ids=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(positions),
        segment_ids=torch.from_numpy(segments),
        loss_mask=torch.from_numpy(mask),
        logprobs=torch.from_numpy(logprobs),
        advantages=torch.from_numpy(advantages),
        weights=torch.from_numpy(weight),
    )
