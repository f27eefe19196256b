"""Step 6 of 9: trajectories + advantages -> ``Batch``.

Pure functions: ``sequence`` flattens one segment of a trajectory into one row of tokens; ``pack`` combines
whole sequences into rows and micro-batches. Token weights are computed over the whole optimizer step
before it is split, so packing, micro-batches and ranks do not change the loss. They weigh rollouts: a
trajectory counts once, however many segments it has::

    three sequences, lengths 5, 3, 2    rows of 5       segment_ids   position_ids
                                        a a a a a       1 1 1 1 1     0 1 2 3 4
                                        b b b c c       1 1 1 2 2     0 1 2 0 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from agentrl_train.types import (
    Batch,
    FloatArray,
    IntArray,
    MicroBatch,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

SHORTEST_BEGINNING = 16
"""Sequences must have this many tokens in common for their beginning to be computed once."""
MOST_COPIES = 4
"""Maximum tokens of sequences for each token of their tree: attention copies shared keys and values."""
Row = list[int]
"""Indices of the sequences that share a row."""

Aggregation = Literal[
    "token_mean",
    "sequence_mean",
    "rollout_mean",
    "segment_mean",
    "group_mean",
    "task_mean",
    "constant",
]


def sequence(
    trajectory: Trajectory,
    advantage: ArrayLike,
    group: TrajectoryGroup,
    *,
    segment: int = 0,
    rollout: int | None = None,
) -> TokenSequence:
    """Return a segment as one row of tokens, with each turn's ``advantage`` on its sampled tokens.

    ``advantage`` is one number per turn of the trajectory, or one for all turns. ``rollout`` is the number of
    the trajectory in the step.

    Raises ``ValueError`` if a completion's lists differ in length, or if the first token
    is sampled (it would have no logits).
    """
    ids: list[int] = []
    mask: list[float] = []
    logprobs: list[float] = []
    versions: list[int] = []
    sizes: list[int] = []
    chosen = [number for number, turn in enumerate(trajectory.turns) if turn.segment == segment]
    for turn in (trajectory.turns[number] for number in chosen):
        prompt, completion = turn.prompt_ids, turn.completion
        size = len(completion.token_ids)
        if not len(completion.logprobs) == len(completion.versions) == size:
            raise ValueError(
                f"a completion of group {group.group_id} has {size} tokens, "
                f"{len(completion.logprobs)} logprobs and {len(completion.versions)} versions; "
                "the engine must return one of each per token."
            )
        ids += [*prompt, *completion.token_ids]
        sizes.append(len(prompt) + size)
        mask += [0.0] * len(prompt) + [1.0] * size
        logprobs += [0.0] * len(prompt) + list(completion.logprobs)
        versions += [-1] * len(prompt) + list(completion.versions)
    if mask and mask[0]:
        raise ValueError(
            f"a trajectory of group {group.group_id} starts with a sampled token; give it a prompt."
        )
    loss_mask = np.asarray(mask, np.float32)
    allowed, allowed_sets = _allowed_sets([trajectory.turns[number] for number in chosen])
    by_turn = np.broadcast_to(np.asarray(advantage, np.float32), len(trajectory.turns))[chosen]
    return TokenSequence(
        token_ids=np.asarray(ids, np.int64),
        loss_mask=loss_mask,
        logprobs=np.asarray(logprobs, np.float32),
        versions=np.asarray(versions, np.int64),
        advantages=loss_mask * np.repeat(by_turn, sizes),
        task=group.task,
        group_id=group.group_id,
        rollout=rollout,
        allowed=allowed,
        allowed_sets=allowed_sets,
    )


def _allowed_sets(turns: Sequence[Turn]) -> tuple[IntArray | None, NDArray[np.uint8] | None]:
    """Return the number of each token's allowed set and the sets, or None if no token is constrained."""
    held = [turn.completion.allowed for turn in turns]
    sets = list(dict.fromkeys(one for allowed in held if allowed for one in allowed.sets))
    if not sets:
        return None, None
    numbers = {one: number for number, one in enumerate(sets, start=1)}
    places: list[int] = []
    for turn, allowed in zip(turns, held, strict=True):
        own = [0, *(numbers[one] for one in allowed.sets)] if allowed else [0]
        inside = allowed.places if allowed else [0] * len(turn.completion.token_ids)
        places += [0] * len(turn.prompt_ids)
        places += [own[place] for place in inside]
    packed = np.frombuffer(b"".join(sets), np.uint8).reshape(len(sets), -1)
    return np.asarray(places, np.int64), np.concatenate([_all_tokens(packed.shape[1]), packed])


def _all_tokens(size: int) -> NDArray[np.uint8]:
    """Return the set of all tokens, in ``size`` bytes."""
    return np.full((1, size), 255, np.uint8)


def joined_sets(sequences: Sequence[TokenSequence]) -> tuple[list[IntArray], NDArray[np.uint8]]:
    """Return the distinct sets of several rows, and the number of the set of each token of each row."""
    held = [one.allowed_sets for one in sequences if one.allowed_sets is not None]
    if not held:
        return [np.zeros(len(one), np.int64) for one in sequences], _all_tokens(0)
    rows = np.concatenate([_all_tokens(held[0].shape[1]), *(one[1:] for one in held)])
    sets, numbers = np.unique(rows, axis=0, return_inverse=True)
    # The set of all tokens sorts last.
    sets, numbers = sets[::-1], len(sets) - 1 - numbers.reshape(-1)
    found: list[IntArray] = []
    place = 1
    for one in sequences:
        if one.allowed is None or one.allowed_sets is None:
            found.append(np.zeros(len(one), np.int64))
            continue
        count = len(one.allowed_sets) - 1
        found.append(np.append(0, numbers[place : place + count])[one.allowed])
        place += count
    return found, np.ascontiguousarray(sets)


def completions(trajectory: Trajectory, group: TrajectoryGroup) -> list[list[TokenSequence]]:
    """Return each turn's completions as rows after its context. The completion that was played comes first.

    Only the tokens of the completion are in the loss. Turns without alternatives have an empty list.
    """
    contexts: dict[int, list[int]] = {}
    found: list[list[TokenSequence]] = []
    for turn in trajectory.turns:
        context = contexts.setdefault(turn.segment, [])
        context += turn.prompt_ids
        choices = [turn.completion, *turn.alternatives] if turn.alternatives else []
        lone = [replace(turn, prompt_ids=list(context), completion=one, segment=0) for one in choices]
        found.append([sequence(replace(trajectory, turns=[one]), 0.0, group) for one in lone])
        context += turn.completion.token_ids
    return found


def sequences(
    groups: Sequence[TrajectoryGroup], advantages: Sequence[Sequence[ArrayLike | None]]
) -> list[TokenSequence]:
    """Return one sequence per segment of each trajectory, in order; trajectories are numbered from 0.

    ``advantages[g][i]`` belongs to ``groups[g].trajectories[i]`` (``advantage.advantages``). Segments
    without sampled tokens and trajectories whose advantages are None are omitted.
    """
    played = [
        (group, trajectory, advantage)
        for group, values in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, values, strict=True)
    ]
    return [
        sequence(trajectory, advantage, group, segment=segment, rollout=rollout)
        for rollout, (group, trajectory, advantage) in enumerate(played)
        if advantage is not None
        for segment in sorted({turn.segment for turn in trajectory.turns if turn.completion.token_ids})
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
    shared: bool = False,
    constant_tokens: int | None = None,
    skip_zero_advantages: bool = False,
    version: int | None = None,
) -> list[Batch]:
    """Return one ``Batch`` per optimizer step, at most ``num_minibatches`` of them.

    The rollouts are divided at random (``seed``) into ``num_minibatches`` steps of equal size, and their
    sequences weighted within their step (``token_weights``). Whole sequences are then packed, first fit
    decreasing, into rows as long as the longest sequence (or ``row_tokens``, if that is more), and rows of
    similar length into micro-batches of at most ``max_tokens`` slots. A longer row gets its own micro-batch.
    The ages of tokens are counted from ``version``, the version of the weights before the step.
    ``packed=False`` puts one sequence in a row, for models that do not support packed rows. ``shared`` is for
    models that compute common beginnings once: sequences that begin alike are in the same micro-batches, of
    at most ``max_tokens`` tokens if common beginnings count once.

    With ``skip_zero_advantages``, sequences without any advantage are not computed, but still count in the
    denominators. The policy gradient is the same at less cost, but entropy and KL terms omit these sequences.
    A step with nothing to compute is omitted.
    """
    members: dict[Hashable, list[TokenSequence]] = {}
    for key, one in zip(_rollouts(sequences), sequences, strict=True):
        members.setdefault(key, []).append(one)
    rollouts = list(members.values())
    order = np.random.default_rng(seed).permutation(len(rollouts))
    batches = []
    for part in np.array_split(order, num_minibatches):
        chosen = [one for i in part for one in rollouts[i]]
        weights = token_weights(chosen, aggregation=aggregation, constant_tokens=constant_tokens)
        if skip_zero_advantages:
            live = [i for i, one in enumerate(chosen) if one.advantages.any()]
            chosen, weights = [chosen[i] for i in live], [weights[i] for i in live]
        if chosen:
            parts = _share(chosen, max_tokens) if shared else _pack(chosen, max_tokens, row_tokens, packed)
            batches.append(_batch(chosen, weights, parts, version))
    return batches


def token_weights(
    sequences: Sequence[TokenSequence],
    *,
    aggregation: Aggregation = "sequence_mean",
    constant_tokens: int | None = None,
) -> list[FloatArray]:
    """Return the weight of every token in the loss, one [T] array per sequence, 0 where masked.

    For sequences of one rollout each, ``sequence_mean``, ``rollout_mean`` and ``segment_mean`` are the same.

    - ``token_mean`` (DAPO, arXiv 2503.14476): all tokens have equal weight.
    - ``sequence_mean`` (GRPO, 2402.03300): all rollouts have equal weight. So have the segments of a rollout
      and the tokens of a segment.
    - ``rollout_mean`` (Agent Lightning, 2508.03680): all rollouts have equal weight. So have the tokens of a
      rollout, whatever their segments.
    - ``segment_mean`` (MATPO, 2510.04678): the sum of the token means of all segments, divided by the number
      of rollouts. More segments do not change the weights of the tokens in the first segment.
    - ``group_mean``, ``task_mean``: all groups or tasks have equal weight. So have the tokens within each.
    - ``constant`` (Dr. GRPO, 2503.20783): a token has weight ``1 / (constant_tokens * number of rollouts)``.

    The weights sum to 1, except with ``constant`` and ``segment_mean``.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation is {aggregation!r}; use one of {', '.join(get_args(Aggregation))}.")
    rollouts = _rollouts(sequences)
    if aggregation == "constant":
        if not constant_tokens:
            raise ValueError("aggregation 'constant' needs constant_tokens, for example the token limit.")
        return [one.loss_mask / np.float32(constant_tokens * len(set(rollouts))) for one in sequences]
    units = [_unit(one, i, rollouts[i], aggregation) for i, one in enumerate(sequences)]
    tokens: Counter[Hashable] = Counter()
    for unit, one in zip(units, sequences, strict=True):
        tokens[unit] += int(one.loss_mask.sum())
    # Units that share a weight: all units, or the units of a rollout if units are segments.
    segments = Counter(rollouts[i] for i, one in enumerate(sequences) if one.loss_mask.any())
    by_segment = aggregation in ("sequence_mean", "segment_mean")
    counted = len(segments) if by_segment else sum(size > 0 for size in tokens.values())
    shared = segments if aggregation == "sequence_mean" else Counter(set(rollouts))
    return [
        one.loss_mask / np.float32(max(1, counted * shared[rollout] * tokens[unit]))
        for unit, rollout, one in zip(units, rollouts, sequences, strict=True)
    ]


def towards_teacher(
    one: TokenSequence, teacher: FloatArray, *, weight: float = 1.0, keep_rewards: bool = False
) -> TokenSequence:
    """Return a sequence with the advantage ``weight (log q - log p)`` on every sampled token.

    On-policy distillation: with p the sampler and q the teacher, the policy gradient is the gradient of
    ``-KL(p || q)``, one token at a time and without discount.

    Args:
        one: the sequence.
        teacher: log-probabilities under the teacher, [T].
        weight: factor.
        keep_rewards: add to the advantages of the sequence, instead of replacing them.
    """
    towards = one.loss_mask * np.float32(weight) * (teacher - one.logprobs)
    return replace(one, advantages=one.advantages + towards if keep_rewards else towards)


def without_high_covariance(
    sequences: Sequence[TokenSequence], *, share: float, low: float, high: float, seed: Sequence[int]
) -> list[TokenSequence]:
    """Return sequences with advantage 0 for some of the tokens that would lower the entropy most (Clip-Cov).

    The covariance of a token is ``(A - mean A) (log p - mean log p)`` over all sampled tokens, with the
    log-probability p under the sampler. Tokens between ``low`` and ``high`` are drawn at random, as many as
    ``share`` of all tokens and at least one. Drawn tokens have no policy loss, and the weights of the others
    are unchanged. Used by SPEAR (arXiv 2509.22601), after "The Entropy Mechanism of Reinforcement Learning
    for Reasoning Language Models" (arXiv 2505.22617).
    """
    sampled = [one.loss_mask > 0 for one in sequences]
    parts = [(one.advantages[on], one.logprobs[on]) for one, on in zip(sequences, sampled, strict=True)]
    if not (total := sum(len(values) for values, _ in parts)):
        return list(sequences)
    values, logprobs = (np.concatenate(column).astype(np.float64) for column in zip(*parts, strict=True))
    covariance = (values - values.mean()) * (logprobs - logprobs.mean())
    inside = np.flatnonzero((covariance > low) & (covariance < high))
    count = max(1, int(share * total))
    values[np.random.default_rng(seed).permutation(inside)[:count]] = 0.0
    found = []
    for one, on in zip(sequences, sampled, strict=True):
        own, values = np.split(values, [int(on.sum())])
        advantages = one.advantages.copy()
        advantages[on] = own
        found.append(replace(one, advantages=advantages))
    return found


def _rollouts(sequences: Sequence[TokenSequence]) -> list[Hashable]:
    """Return the key of each sequence's rollout. A sequence without a number has its own rollout."""
    return [("alone", i) if one.rollout is None else one.rollout for i, one in enumerate(sequences)]


def _unit(one: TokenSequence, index: int, rollout: Hashable, aggregation: Aggregation) -> Hashable:
    """Return the key of the unit whose tokens have equal weight."""
    match aggregation:
        case "sequence_mean" | "segment_mean":
            return index
        case "rollout_mean":
            return rollout
        case "group_mean":
            return one.group_id
        case "task_mean":
            return one.task
        case _:
            return None


def _batch(
    sequences: Sequence[TokenSequence],
    weights: Sequence[FloatArray],
    parts: Sequence[Sequence[Row]],
    version: int | None,
) -> Batch:
    micro_batches = [_micro_batch(sequences, weights, part, version) for part in parts]
    return Batch(
        micro_batches=micro_batches,
        num_sequences=len(sequences),
        num_loss_tokens=int(sum(one.loss_mask.sum() for one in sequences)),
        num_tokens=sum(len(one) for one in sequences),
        num_slots=sum(micro.token_ids.numel() for micro in micro_batches),
    )


def _share(sequences: Sequence[TokenSequence], max_tokens: int) -> list[list[Row]]:
    """Return the rows of micro-batches in which sequences that begin alike are together."""
    found: list[list[Row]] = []
    for part in families([one.token_ids for one in sequences], max_tokens):
        lengths = [len(sequences[i]) for i in part]
        found.append([[part[i] for i in row] for row in pack_rows(lengths, max(lengths))])
    return found


def _pack(
    sequences: Sequence[TokenSequence], max_tokens: int, row_tokens: int, packed: bool
) -> list[list[Row]]:
    """Return the rows of micro-batches of similar length and at most ``max_tokens`` slots.

    Rows of one sequence come first, because they need no attention mask if no packed rows are among them.
    """
    lengths = [len(one) for one in sequences]
    rows = pack_rows(lengths, max(row_tokens, *lengths) if packed else 0)
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
    version: int | None,
) -> MicroBatch:
    shape = (len(rows), max(sum(len(sequences[i]) for i in row) for row in rows))
    tokens, positions, segments, ages, allowed = (np.zeros(shape, np.int64) for _ in range(5))
    mask, logprobs, advantages, weight = (np.zeros(shape, np.float32) for _ in range(4))
    order = [i for row in rows for i in row]
    joined, allowed_sets = joined_sets([sequences[i] for i in order])
    places = dict(zip(order, joined, strict=True))
    for r, row in enumerate(rows):
        start = 0
        for number, i in enumerate(row, start=1):
            one = sequences[i]
            at = np.s_[r, start : start + len(one)]
            tokens[at], positions[at], segments[at] = one.token_ids, np.arange(len(one)), number
            mask[at], logprobs[at] = one.loss_mask, one.logprobs
            advantages[at], weight[at], allowed[at] = one.advantages, weights[i], places[i]
            if version is not None:
                ages[at] = np.where(one.loss_mask > 0, version - one.versions, 0)
            start += len(one)
    return MicroBatch(
        token_ids=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(positions),
        segment_ids=torch.from_numpy(segments),
        loss_mask=torch.from_numpy(mask),
        logprobs=torch.from_numpy(logprobs),
        advantages=torch.from_numpy(advantages),
        ages=torch.from_numpy(ages),
        weights=torch.from_numpy(weight),
        allowed=torch.from_numpy(allowed),
        allowed_sets=torch.from_numpy(allowed_sets),
    )


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


def families(sequences: Sequence[IntArray], max_tokens: int) -> list[list[int]]:
    """Divide sequences into parts whose trees have at most ``max_tokens`` tokens. Similar ones stay together.

    The sequences of a part have at most ``MOST_COPIES`` times as many tokens. A longer sequence is its own
    part.
    """
    parts: list[list[int]] = []
    before, size, whole = np.empty(0, np.int64), 0, 0
    for i in alphabetical(sequences):
        one = sequences[i]
        added = len(one) - shared_beginning(before, one)
        if not parts or size + added > max_tokens or whole + len(one) > MOST_COPIES * max_tokens:
            parts.append([])
            size, added, whole = 0, len(one), 0
        parts[-1].append(i)
        before, size, whole = one, size + added, whole + len(one)
    return parts


def alphabetical(sequences: Sequence[IntArray]) -> list[int]:
    """Return the order in which each sequence shares its longest beginning with the previous sequence."""
    keys = [one.astype(">i8").tobytes() for one in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def shared_beginning(a: IntArray, b: IntArray) -> int:
    """Return the length of the common beginning, or 0 if it is shorter than ``SHORTEST_BEGINNING``."""
    size = min(len(a), len(b))
    unlike = np.flatnonzero(a[:size] != b[:size])
    same = int(unlike[0]) if len(unlike) else size
    return same if same >= SHORTEST_BEGINNING else 0
