"""A run folder of a running trainer. Its records are read as they are appended."""

from __future__ import annotations

import gzip
import json
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_train.errors import RunFolderError
from agentrl_train.report.curves import number, task_values
from agentrl_train.report.page import RunRecord, check_run_folder
from agentrl_train.telemetry.metrics import parse_jsonl
from agentrl_train.watch.episodes import EpisodeIndex
from agentrl_train.watch.thinning import ThinnedSteps

Record = Mapping[str, Any]

REFRESH_S = 1.0
"""Shortest time between two reads of the folder."""
QUIET_S = 90.0
"""Seconds without a write after which a run is no longer shown as running."""
TAIL = 64
"""Number of bytes before the position in a file that are compared to detect a replaced file."""
ACTIVE = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "trace.json",
    "config.toml",
    ".lock",
    "journal",
    "evaluations",
)
"""Files and folders of a run that change while it runs."""


class GrowingFile:
    """The records of a JSON Lines file that is appended to.

    Reads only new records, and leaves an incomplete line for the next call. It starts again if the file was
    replaced or truncated, for example by a resumed run. If only a gzip copy of the file exists, that is read.
    """

    def __init__(self, path: Path) -> None:
        self.records: list[dict[str, Any]] = []
        self._path = path
        self._position = 0
        self._tail = b""
        self._compressed: tuple[int, int] | None = None

    def read(self) -> bool:
        """Read the new records. Return True if there was a change."""
        try:
            with open(self._path, "rb") as file:
                return self._continue(file)
        except FileNotFoundError:
            return self._read_compressed()
        except OSError:
            return False

    def _continue(self, file: Any) -> bool:
        file.seek(max(0, self._position - len(self._tail)))
        replaced = self._position > 0 and file.read(len(self._tail)) != self._tail
        if replaced:
            self.records, self._position, self._tail = [], 0, b""
            file.seek(0)
        new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self.records += parse_jsonl(complete.decode("utf-8", errors="replace"))
        self._position += len(complete)
        self._tail = (self._tail + complete)[-TAIL:]
        return replaced or bool(complete)

    def _read_compressed(self) -> bool:
        path = self._path.with_name(f"{self._path.name}.gz")
        try:
            facts = path.stat()
            stamp = facts.st_mtime_ns, facts.st_size
            if stamp == self._compressed:
                return False
            content = gzip.decompress(path.read_bytes())
            self.records = parse_jsonl(content.decode("utf-8", errors="replace"))
        except (OSError, EOFError):
            changed, self.records = bool(self.records), []
            self._position, self._tail, self._compressed = 0, b"", None
            return changed
        self._compressed = stamp
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of a run as text."""

    badge: str
    kind: str
    """Class of the badge: "good", "warn" or empty."""
    note: str


class WatchedRun:
    """A run folder, which does not have to exist yet.

    Raises ``RunFolderError`` if the path is a file, or a folder with content that is not a run's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        self.version = 0
        """Counter that increases when the records change."""
        self.record = RunRecord(
            name=self.name, steps=(), evaluations=(), summary=None, config="", episodes={}
        )
        self.thinned = ThinnedSteps()
        """The steps of ``record`` as points of curves."""
        self.episodes = EpisodeIndex(folder)
        self._trained: Mapping[int, int] = {}
        self._metrics = GrowingFile(folder / "metrics.jsonl")
        self._evaluations = GrowingFile(folder / "evaluations.jsonl")
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            check_run_folder(folder)

    def refresh(self) -> None:
        """Read new records, at most once in ``REFRESH_S``. Thread-safe."""
        with self._lock:
            if time.monotonic() - self._read_at < REFRESH_S:
                return
            changed = [self._metrics.read(), self._evaluations.read()]
            summary, config = self._summary(), self._config()
            if any(changed) or (summary, config) != (self.record.summary, self.record.config):
                steps = [one for one in self._metrics.records if number(one.get("step")) is not None]
                self.record = RunRecord(
                    name=self.name,
                    steps=list({one["step"]: one for one in steps}.values()),
                    evaluations=list(self._evaluations.records),
                    summary=summary,
                    config=config,
                    episodes={},
                )
                self.thinned.update(self.record.steps)
                self._trained = {
                    group: int(one["step"]) for one in self.record.steps for group in _groups(one)
                }
                self.version += 1
            self.episodes.refresh(trained=self._trained, steps=self.step)
            self._read_at = time.monotonic()

    @property
    def step(self) -> int:
        """Return the number of the last trained step."""
        return int(self.record.steps[-1]["step"]) if self.record.steps else 0

    @property
    def planned_steps(self) -> int | None:
        """Return the number of steps in the configuration."""
        try:
            steps = tomllib.loads(self.record.config)["run"]["steps"]
        except (tomllib.TOMLDecodeError, KeyError, TypeError):
            return None
        return steps if isinstance(steps, int) else None

    @property
    def tasks(self) -> list[str]:
        """Return all tasks, in order of appearance."""
        trained = dict.fromkeys(task for step in self.record.steps[-1:] for task in task_values(step))
        return list(dict.fromkeys([*self.record.tasks, *trained, *self.episodes.tasks]))

    def state(self) -> State:
        """Return the state of the run: not started, running, silent, or finished."""
        if not self.folder.is_dir():
            note = f"{self.folder} does not exist yet. The page fills when the run starts."
            return State(badge="not started", kind="", note=note)
        with suppress(RunFolderError):
            check_run_folder(self.folder)
            summary = self.record.summary
            if summary is not None and summary.get("policy_version") == self.step:
                return State(badge="finished", kind="good", note="")
            quiet = time.time() - self._last_write()
            if quiet < QUIET_S:
                return State(badge="running", kind="good", note="")
            note = f"Nothing was written for {_ago(quiet)}."
            return State(badge="no news", kind="warn", note=note)
        return State(badge="not started", kind="", note=f"{self.folder} has no file of a run yet.")

    def _last_write(self) -> float:
        paths = [self.folder / name for name in ACTIVE]
        paths += (self.folder / "journal").glob("*.bin") if (self.folder / "journal").is_dir() else ()
        found = []
        for path in paths:
            with suppress(OSError):
                found.append(path.stat().st_mtime)
        return max(found, default=0.0)

    def _summary(self) -> dict[str, Any] | None:
        try:
            summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) else None

    def _config(self) -> str:
        try:
            return (self.folder / "config.toml").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _groups(step: Record) -> Sequence[int]:
    groups = step.get("groups")
    return groups if isinstance(groups, list) else ()


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
