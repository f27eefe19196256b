"""Finished groups on disk: a lossless encoding, and an append-only journal that survives a kill.

The journal is a folder of segments such as ``step_000012-0.bin``, which has the groups that finished between
the snapshot of checkpoint 12 and the next one. A record is ``magic, length, crc32, payload``. It is on disk
when ``append`` returns. A truncated last record is ignored when reading.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from agentrl_env.types import Message, TaskSample
from agentrl_train.errors import CheckpointError
from agentrl_train.storage.atomic_io import run_folder_errors, sync_folder
from agentrl_train.types import (
    ROOT,
    AllowedSets,
    Completion,
    EpisodeEnd,
    Segment,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

logger = logging.getLogger(__name__)

MAGIC = b"AGJ1"
HEADER = struct.Struct("<4sII")


def encode_group(group: TrajectoryGroup) -> bytes:
    """Encode a group: its structure as JSON, its tokens and log-probabilities as raw arrays."""
    ints: list[int] = []
    floats: list[float] = []
    structure = {
        "group_id": group.group_id,
        "task": group.task,
        "admitted_version": group.admitted_version,
        "trajectories": [_pack(one, ints, floats) for one in group.trajectories],
        "greedy": None if group.greedy is None else _pack(group.greedy, ints, floats),
    }
    text = json.dumps(structure).encode()
    whole = np.asarray(ints, dtype="<i8").tobytes()
    real = np.asarray(floats, dtype="<f8").tobytes()
    sizes = struct.pack("<III", len(text), len(ints), len(floats))
    return zlib.compress(sizes + text + whole + real, level=1)


def decode_group(payload: bytes) -> TrajectoryGroup:
    """Decode the result of ``encode_group`` without loss. Sequences become tuples."""
    raw = zlib.decompress(payload)
    text, num_ints, num_floats = struct.unpack_from("<III", raw)
    start = 12 + text
    structure = json.loads(raw[12:start])
    ints = np.frombuffer(raw, dtype="<i8", count=num_ints, offset=start).tolist()
    floats = np.frombuffer(raw, dtype="<f8", count=num_floats, offset=start + 8 * num_ints).tolist()
    reader = _Reader(ints=ints, floats=floats)
    return TrajectoryGroup(
        group_id=structure["group_id"],
        task=structure["task"],
        admitted_version=structure["admitted_version"],
        trajectories=tuple(_unpack(one, reader) for one in structure["trajectories"]),
        greedy=None if structure.get("greedy") is None else _unpack(structure["greedy"], reader),
    )


@dataclass(slots=True)
class _Reader:
    """Reads the arrays in the order in which they were written."""

    ints: list[int]
    floats: list[float]
    next_int: int = field(default=0)
    next_float: int = field(default=0)

    def take_ints(self, count: int) -> tuple[int, ...]:
        self.next_int += count
        return tuple(self.ints[self.next_int - count : self.next_int])

    def take_floats(self, count: int) -> tuple[float, ...]:
        self.next_float += count
        return tuple(self.floats[self.next_float - count : self.next_float])


def _pack(trajectory: Trajectory, ints: list[int], floats: list[float]) -> dict[str, Any]:
    return {
        "sample": trajectory.sample.model_dump(mode="json"),
        "opening": [_pack_message(message) for message in trajectory.opening],
        "turns": [_pack_turn(turn, ints, floats) for turn in trajectory.turns],
        "end": trajectory.end.value,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "metrics": dict(trajectory.metrics),
        "scores": dict(trajectory.scores),
        "error": trajectory.error,
        "seconds": trajectory.seconds,
        "started": trajectory.started,
        "segments": [_pack_segment(one) for one in trajectory.segments],
    }


def _unpack(structure: dict[str, Any], reader: _Reader) -> Trajectory:
    return Trajectory(
        sample=TaskSample.model_validate(structure["sample"]),
        opening=tuple(Message.model_validate(one) for one in structure["opening"]),
        turns=tuple(_unpack_turn(one, reader) for one in structure["turns"]),
        end=EpisodeEnd(structure["end"]),
        reward=structure["reward"],
        success=structure["success"],
        metrics=structure["metrics"],
        scores=structure.get("scores", {}),
        error=structure["error"],
        seconds=structure["seconds"],
        started=structure.get("started"),
        segments=tuple(map(_unpack_segment, structure["segments"])) if "segments" in structure else (ROOT,),
    )


def _pack_segment(segment: Segment) -> dict[str, Any]:
    return {
        "parent": segment.parent,
        "after_turn": segment.after_turn,
        "reason": segment.reason,
        "agent": segment.agent,
        "opening": [_pack_message(message) for message in segment.opening],
    }


def _unpack_segment(structure: dict[str, Any]) -> Segment:
    opening = tuple(Message.model_validate(one) for one in structure["opening"])
    return Segment(**structure | {"opening": opening})


def _pack_turn(turn: Turn, ints: list[int], floats: list[float]) -> dict[str, Any]:
    ints.extend(turn.prompt_ids)
    completion = _pack_completion(turn.completion, ints, floats)
    return {
        **completion,
        "sizes": [len(turn.prompt_ids), *completion["sizes"]],
        "message": _pack_message(turn.message),
        "reply": [_pack_message(message) for message in turn.reply],
        "reward": turn.reward,
        "invalid_calls": turn.invalid_calls,
        "tolerant": turn.tolerant,
        "thought": turn.thought,
        "segment": turn.segment,
        "alternatives": [_pack_completion(one, ints, floats) for one in turn.alternatives],
        "times": list(turn.times),
    }


def _pack_completion(completion: Completion, ints: list[int], floats: list[float]) -> dict[str, Any]:
    ints.extend(completion.token_ids)
    ints.extend(completion.versions)
    floats.extend(completion.logprobs)
    return {
        "sizes": [len(completion.token_ids), len(completion.versions), len(completion.logprobs)],
        "finish_reason": completion.finish_reason,
        "policy": completion.policy,
        "allowed": completion.allowed.plain() if completion.allowed else None,
    }


def _unpack_turn(structure: dict[str, Any], reader: _Reader) -> Turn:
    return Turn(
        prompt_ids=reader.take_ints(structure["sizes"][0]),
        completion=_unpack_completion(structure, reader),
        message=Message.model_validate(structure["message"]),
        reply=tuple(Message.model_validate(one) for one in structure["reply"]),
        reward=structure["reward"],
        invalid_calls=structure["invalid_calls"],
        tolerant=structure.get("tolerant", False),
        thought=structure.get("thought"),
        segment=structure.get("segment", 0),
        alternatives=tuple(_unpack_completion(one, reader) for one in structure.get("alternatives", ())),
        times=tuple(structure.get("times", ())),
    )


def _unpack_completion(structure: dict[str, Any], reader: _Reader) -> Completion:
    tokens, versions, logprobs = structure["sizes"][-3:]
    allowed = structure.get("allowed")
    return Completion(
        token_ids=reader.take_ints(tokens),
        versions=reader.take_ints(versions),
        logprobs=reader.take_floats(logprobs),
        finish_reason=structure["finish_reason"],
        policy=structure["policy"],
        allowed=AllowedSets.of_plain(allowed) if allowed else None,
    )


def _pack_message(message: Message) -> dict[str, Any]:
    return message.model_dump(mode="json", exclude_none=True)


def frame(payload: bytes) -> bytes:
    """Return a payload as one record."""
    return HEADER.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


def read_records(content: bytes) -> Iterator[bytes]:
    """Yield the payload of every complete record. Skip damaged records and stop at a truncated one."""
    return (payload for _, payload in located_records(content))


def located_records(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the position of each record and its payload, like ``read_records``."""
    position = 0
    while position + HEADER.size <= len(content):
        magic, length, checksum = HEADER.unpack_from(content, position)
        payload = content[position + HEADER.size : position + HEADER.size + length]
        if magic != MAGIC or len(payload) < length:
            return
        if zlib.crc32(payload) == checksum:
            yield position, payload
        else:
            logger.warning("a record of the journal is damaged; its group will be played again")
        position += HEADER.size + length


def read_groups(path: Path) -> tuple[TrajectoryGroup, ...]:
    """Return the groups of the complete records in a file."""
    return tuple(decode_group(payload) for payload in read_records(path.read_bytes()))


class Journal:
    """Append-only log of the groups that finished since the oldest kept checkpoint.

    ``append`` is thread-safe. A run folder belongs to one process.
    """

    def __init__(self, folder: Path, *, step: int = 0) -> None:
        """Start a new segment. ``step`` is the checkpoint that the run continues from.

        Raises ``RunFolderError`` if the folder is not writable.
        """
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()
        with run_folder_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.rotate(step)

    def append(self, group: TrajectoryGroup) -> None:
        """Write a finished group to disk. On ``RunFolderError`` the journal is unchanged."""
        record = frame(encode_group(group))
        with self._lock, run_folder_errors(self._folder):
            if self._file is None:
                raise CheckpointError("The journal is closed; open a new one to append to it.")
            before = self._file.tell()
            try:
                _write_all(self._file, record)
            except OSError:
                self._file.truncate(before)
                self._file.seek(before)
                raise

    def rotate(self, step: int) -> None:
        """Start a new segment, atomically with the snapshot of checkpoint ``step``.

        Groups appended from now on are not in that checkpoint. Earlier groups are trained or in the
        checkpoint. Appending a group and marking it as finished must therefore also be atomic.
        """
        with self._lock, run_folder_errors(self._folder):
            number = sum(1 for _ in self._folder.glob(f"step_{step:06d}-*.bin"))
            fresh = open(self._folder / f"step_{step:06d}-{number}.bin", "xb", buffering=0)  # noqa: SIM115
            self._file, old = fresh, self._file
            if old is not None:
                old.close()
            sync_folder(self._folder)

    def read(self, since_step: int = 0) -> tuple[TrajectoryGroup, ...]:
        """Return the groups that finished since checkpoint ``since_step``, without duplicates.

        Some of them can have been trained on before, but with weights that were lost.
        """
        groups: dict[int, TrajectoryGroup] = {}
        for step, path in _segments(self._folder):
            for payload in read_records(path.read_bytes()) if step >= since_step else ():
                group = decode_group(payload)
                groups.setdefault(group.group_id, group)
        return tuple(groups.values())

    def prune(self, oldest_step: int) -> None:
        """Delete the segments that no checkpoint from ``oldest_step`` on needs."""
        for step, path in _segments(self._folder):
            if step < oldest_step:
                path.unlink()

    def close(self) -> None:
        """Close the segment; idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _write_all(file: IO[bytes], record: bytes) -> None:
    """Write and sync a record. An unbuffered file can need several writes."""
    rest = memoryview(record)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def _segments(folder: Path) -> Sequence[tuple[int, Path]]:
    found: Iterable[Path] = folder.glob("step_*-*.bin")
    numbers = [(path.stem.removeprefix("step_").split("-"), path) for path in found]
    ordered = sorted((int(step), int(number), path) for (step, number), path in numbers)
    return [(step, path) for step, _, path in ordered]
