"""Tokens of recorded episodes: ids, log-probabilities, policy versions and advantages.

``trajectories/step_000012.tokens.jsonl.gz`` has one line per line of ``step_000012.jsonl``::

    {"turns": [{"token_ids": [...], "logprobs": [...], "versions": [...], "advantages": [...]}, ...]}

The turns are in the order in which they were sampled, the ``number`` of a turn in the readable line.
``advantages`` is null for an episode that was not trained on, for example in an evaluation. The text of the
tokens is not stored, because each checkpoint has the tokenizer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_train.types import TokenSequence, Trajectory, TrajectoryGroup, Turn

SUFFIX = ".tokens.jsonl.gz"
DIGITS = 5
"""Decimals of log-probabilities and advantages."""
TurnAdvantages = Sequence[Sequence[float]]
"""Advantages of the sampled tokens of each turn of a trajectory."""


def trained_advantages(
    groups: Sequence[TrajectoryGroup], rows: Sequence[TokenSequence]
) -> dict[int, TurnAdvantages]:
    """Return the advantages of each trained trajectory by its number in the step.

    Args:
        groups: the groups of a step. Their trajectories are numbered from 0.
        rows: the rows of the step, with the advantages of its loss. Rows that do not cover exactly the
            sampled tokens of their trajectory are ignored.
    """
    by_rollout: dict[int, list[TokenSequence]] = {}
    for row in rows:
        if row.rollout is not None:
            by_rollout.setdefault(row.rollout, []).append(row)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    found = {}
    for number, trajectory in enumerate(trajectories):
        values = _by_turn(trajectory, by_rollout.get(number, ()))
        if values is not None:
            found[number] = values
    return found


def _by_turn(trajectory: Trajectory, rows: Sequence[TokenSequence]) -> TurnAdvantages | None:
    """Return the advantages of rows, one for each segment with sampled tokens, by turn."""
    segments = sorted({turn.segment for turn in trajectory.turns if turn.completion.token_ids})
    if not rows or len(rows) != len(segments):
        return None
    by_turn: list[Sequence[float]] = [()] * len(trajectory.turns)
    for segment, row in zip(segments, rows, strict=True):
        numbers = [i for i, turn in enumerate(trajectory.turns) if turn.segment == segment]
        sizes = [len(trajectory.turns[i].completion.token_ids) for i in numbers]
        values = row.advantages[row.loss_mask > 0]
        if len(values) != sum(sizes):
            return None
        for i, part in zip(numbers, np.split(values, np.cumsum(sizes)[:-1]), strict=True):
            by_turn[i] = part.tolist()
    return by_turn


def token_record(trajectory: Trajectory, advantages: TurnAdvantages | None = None) -> dict[str, Any]:
    """Return the tokens of an episode as one line of the file."""
    return {
        "turns": [
            _turn(turn, None if advantages is None else advantages[i])
            for i, turn in enumerate(trajectory.turns)
        ]
    }


def _turn(turn: Turn, advantages: Sequence[float] | None) -> dict[str, Any]:
    completion = turn.completion
    return {
        "token_ids": list(completion.token_ids),
        "logprobs": [round(value, DIGITS) for value in completion.logprobs],
        "versions": list(completion.versions),
        "advantages": None if advantages is None else [round(value, DIGITS) for value in advantages],
    }


def write_tokens(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the lines of a file."""
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=1, mtime=0))


def read_tokens(path: Path, line: int) -> dict[str, Any] | None:
    """Return one line of a file, counted from 0, or None if it does not exist or is not complete yet."""
    try:
        lines = gzip.decompress(path.read_bytes()).split(b"\n")
        record = json.loads(lines[line])
    except (OSError, EOFError, ValueError, IndexError):
        return None
    return record if isinstance(record, dict) else None
