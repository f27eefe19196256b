"""Curricula: raise the difficulty of tasks with their success, and weigh tasks by learning progress.

::

    trained groups --observe--> success by task --decide--> Change --to disk--> Mixer, from the next draw on

A change is on disk before the first draw that depends on it. A resumed run repeats the draws since its
checkpoint with the recorded changes, and makes new decisions only after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl_train.config.rollout import CurriculumSection, FixedMix
from agentrl_train.storage.atomic_io import append_lines, run_folder_errors
from agentrl_train.telemetry.metrics import read_jsonl
from agentrl_train.training.admission import Change, Mixer
from agentrl_train.types import TrajectoryGroup

FILE = "curriculum.jsonl"
"""File of a run folder with one line for each change."""


class Curriculum:
    """Changes the levels and weights of a mixer, depending on the success of trained groups.

    Args:
        section: the rules.
        mixer: draws the samples. It already has the changes in the file.
        folder: run folder, which keeps the changes in ``curriculum.jsonl``.
    """

    def __init__(self, section: CurriculumSection, *, mixer: Mixer, folder: Path) -> None:
        self._section = section
        self._mixer = mixer
        self._folder = folder
        self._success: dict[str, list[float]] = {task: [] for task in mixer.weights}
        """Success rates of the last groups of a task at its level, the newest last."""

    def trained(self, step: int, groups: Sequence[TrajectoryGroup]) -> list[str]:
        """Count the groups of a step, and change levels and weights if that is due.

        Returns:
            A message for each raised level.

        Raises:
            RunFolderError: the change cannot be written.
        """
        self._observe(groups)
        if self._mixer.has_planned:
            return []
        levels, weights = self._levels(), dict(self._mixer.weights)
        mix = self._section.mix
        if isinstance(mix, FixedMix):
            weights = dict(self._mixer.fixed_weights)
        elif step % mix.every == 0:
            weights = self._weights(mix.fixed_share)
        raised = [task for task, level in self._mixer.levels.items() if levels[task] > level]
        if not raised and weights == self._mixer.weights:
            return []
        change = Change(draw=self._mixer.num_drawn, levels=levels, weights=weights)
        self._write(change, step=step)
        self._mixer.plan(change)
        for task in raised:
            self._success[task] = []
        return [
            f"{task} moves to level {levels[task] + 1} ({self._mixer.split(task)}) after step {step}"
            for task in raised
        ]

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return level, from 1, and share of the draws of each task; empty without a curriculum."""
        if not self._section.levels and self._section.mix.name == "fixed":
            return {}
        weights, levels = self._mixer.weights, self._mixer.levels
        total = sum(weights.values())
        return {
            task: {"level": levels[task] + 1.0, "share": weight / total} for task, weight in weights.items()
        }

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"success": {task: list(values) for task, values in self._success.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``state()``; tasks added since then start without a history."""
        self._success |= {task: list(v) for task, v in state["success"].items() if task in self._success}

    def _observe(self, groups: Sequence[TrajectoryGroup]) -> None:
        for group in groups:
            if group.task not in self._success:
                continue  # the resumed run does not have this task
            if group.trajectories[0].sample.split != self._mixer.split(group.task):
                continue  # admitted before its task was raised
            values = self._success[group.task]
            values.append(fmean(one.success for one in group.trajectories))
            del values[: -self._section.window]

    def _levels(self) -> dict[str, int]:
        """Return the levels, raised for each task that succeeds at its level."""
        levels = dict(self._mixer.levels)
        for task, splits in self._section.levels.items():
            values = self._success[task]
            full = len(values) == self._section.window
            if full and fmean(values) >= self._section.raise_at and levels[task] + 1 < len(splits):
                levels[task] += 1
        return levels

    def _weights(self, stays: float) -> dict[str, float]:
        """Return weights by learning progress, mixed with a share of the configured weights.

        Progress is the absolute difference of the mean success between the older and the newer half of the
        window (arXiv 1707.00183). Without progress, or before all windows are full, the configured weights
        apply.
        """
        fixed = self._mixer.fixed_weights
        half, whole = self._section.window // 2, sum(fixed.values())
        if any(len(values) < self._section.window for values in self._success.values()):
            return dict(fixed)
        progress = {task: abs(fmean(v[-half:]) - fmean(v[:-half])) for task, v in self._success.items()}
        if not (total := sum(progress.values())):
            return dict(fixed)
        return {task: stays * fixed[task] + (1 - stays) * whole * progress[task] / total for task in fixed}

    def _write(self, change: Change, *, step: int) -> None:
        line = {"step": step, "draw": change.draw, "levels": change.levels, "weights": change.weights}
        with run_folder_errors(self._folder):
            append_lines(self._folder / FILE, [json.dumps(line)], sync=True)


def read_changes(folder: Path) -> list[Change]:
    """Return the changes that a run made so far, in order; truncated lines are ignored."""
    return [
        Change(draw=entry["draw"], levels=entry["levels"], weights=entry["weights"])
        for entry in read_jsonl(folder / FILE)
    ]
