"""Accounts for every admitted group and every trained episode of a run."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_train.storage.checkpoint import load_latest
from agentrl_train.telemetry.metrics import read_jsonl
from tests.chaos.account import read_ledgers


@dataclass(slots=True)
class TrainedAccount:
    """Counts of a training run. ``notes`` has one sentence for each finding."""

    samples: int = 0
    """Episodes that were trained on."""
    trained_twice: int = 0
    lost_silently: int = 0
    dropped: int = 0
    """Groups reported as failed."""
    unfinished: int = 0
    """Groups that the last checkpoint lists as not yet played or trained."""
    played: int = 0
    """Episodes started in environments."""
    notes: list[str] = field(default_factory=list)

    def lose(self, note: str) -> None:
        """Count a silent loss."""
        self.lost_silently += 1
        self.notes.append(note)

    def double(self, note: str) -> None:
        """Count an episode trained twice."""
        self.trained_twice += 1
        self.notes.append(note)


def settle_training(run: Path, ledgers: Path, *, group_size: int) -> TrainedAccount:
    """Compare the records of a run with its checkpoint and the ledgers of its environments.

    Args:
        run: Folder of a run that ended gracefully.
        ledgers: Folder of the ledgers.
        group_size: Expected number of episodes in a group.
    """
    account = TrainedAccount()
    steps = read_jsonl(run / "metrics.jsonl")
    if [line["step"] for line in steps] != list(range(1, len(steps) + 1)):
        account.lose(f"the steps are not told one after another: {[line['step'] for line in steps]}")
    trained = Counter(group for line in steps for group in line["groups"])
    failures = read_jsonl(run / "failures.jsonl")
    dropped = {line["group_id"] for line in failures if line["dropped"]} - trained.keys()
    account.dropped = len(dropped)
    _settle_groups(account, run, trained, dropped)
    left_out = Counter[int]()
    for line in failures:
        left_out[line["group_id"]] = max(left_out[line["group_id"]], line["episodes"])
    _settle_episodes(account, run, ledgers, len(steps), {i: group_size - left_out[i] for i in trained})
    return account


def _settle_groups(account: TrainedAccount, run: Path, trained: Counter[int], dropped: set[int]) -> None:
    checkpoint = load_latest(run / "checkpoints")
    if checkpoint is None:
        account.lose("the run has ended, and there is no checkpoint")
        return
    window = checkpoint.loop["window"]
    waiting = {one["group_id"] for one in window["unfinished"]} | set(window["finished"])
    account.unfinished = len(waiting)
    if missing := set(window["finished"]) - {group.group_id for group in checkpoint.groups}:
        account.lose(f"groups {sorted(missing)} are finished, and the checkpoint does not hold them")
    for group_id in range(window["next_id"]):
        places = (trained[group_id], group_id in dropped, group_id in waiting)
        if trained[group_id] > 1:
            account.double(f"group {group_id} was trained {trained[group_id]} times")
        elif sum(map(bool, places)) != 1:
            account.lose(f"group {group_id}: trained {places[0]}, dropped {places[1]}, waiting {places[2]}")
    for group_id in trained.keys() - set(range(window["next_id"])):
        account.lose(f"group {group_id} was trained and never admitted")


def _settle_episodes(
    account: TrainedAccount, run: Path, ledgers: Path, steps: int, sizes: dict[int, int]
) -> None:
    turns: dict[str, list[float]] = defaultdict(list)
    for line in read_ledgers(ledgers):
        if line.what == "open":
            account.played += 1
        elif line.what == "turn":
            turns[line.key].append(float(line.words[0]))
    seen: Counter[str] = Counter()
    siblings: Counter[int] = Counter()
    for step in range(1, steps + 1):
        for episode in episodes(run, step):
            key = _key(episode)
            seen[key] += 1
            siblings[episode["group_id"]] += 1
            account.samples += 1
            told = [one["turn"]["reward"] for one in episode["messages"] if "turn" in one]
            # A turn spent on an invalid call never reaches the task.
            if list(filter(None, told)) != list(filter(None, turns[key])):
                account.lose(f"episode {key}: trained with rewards {told}, and it earned {turns[key]}")
    for key, times in seen.items():
        if times > 1:
            account.double(f"episode {key} was trained {times} times")
    for group_id, size in sizes.items():
        if siblings[group_id] != size:
            account.lose(f"group {group_id} was trained with {siblings[group_id]} episodes instead of {size}")


def episodes(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the episodes trained in a step."""
    text = (run / "trajectories" / f"step_{step:06d}.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n") if line]


def rewards(run: Path, first: int, last: int) -> dict[int, list[float]]:
    """Return the rewards of each group's episodes in the given steps."""
    found: dict[int, list[float]] = defaultdict(list)
    for step in range(first, last + 1):
        for episode in episodes(run, step):
            found[episode["group_id"]].append(episode["reward"])
    return {group_id: sorted(values) for group_id, values in found.items()}


def _key(episode: dict[str, Any]) -> str:
    return str(next(one["content"] for one in episode["messages"] if one["role"] == "user")).split(" ")[0]
