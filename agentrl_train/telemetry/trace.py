"""Trace of a run in the Chrome trace event format, for https://ui.perfetto.dev.

``trace.json`` is a complete JSON array after every event, because each event overwrites the closing bracket
and adds a new one. A killed run leaves at worst a truncated last line, which Perfetto ignores and a resumed
run removes. Times are microseconds since the epoch.

Tracks are named ``group/track``::

    trainer/steps        step: wait, advantages, check, forward, backward, optimizer, publish; evaluation
    trainer/checkpoints  checkpoint writes in the background
    engine/...           idle gaps and weight pushes, one track per engine
    slots/slot 7         episode > turn > engine | environment; a slot is reused after its episode
    numbers              counters: throughput, idle shares, staleness
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from agentrl_train.storage.atomic_io import run_folder_errors

logger = logging.getLogger(__name__)

GROUPS = ("trainer", "engine", "slots", "numbers")
"""Groups of tracks in display order. Each appears as a process."""
COUNTERS = {
    "tokens a second": {"trained": "trained_tokens_per_s", "sampled": "sampled_tokens_per_s"},
    "idle share": {"trainer": "trainer_idle", "engine": "engine_idle"},
    "staleness": {"mean": "staleness_mean", "maximum": "staleness_max"},
}
"""Counter -> series -> name in ``metrics.jsonl``."""
END = b"\n]"
TAIL_BYTES = 1 << 16


class TraceFile:
    """Writes trace events to a file. Implements ``Trace`` and ``Sink``.

    At half of ``max_bytes`` the file is renamed to ``trace.earlier.json``, replacing an earlier file, and a
    new file is started. A write error ends the trace with a warning, but the run continues.

    Args:
        path: the file. Events are appended to an existing file.
        max_bytes: size limit of both files together.

    Raises:
        RunFolderError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20) -> None:
        self._path = path
        self._max_bytes = max_bytes // 2
        self._lock = threading.Lock()
        self._free: dict[str, list[int]] = {}
        self._numbers: dict[str, Iterator[int]] = {}
        self._epoch_s = time.time() - time.monotonic()
        with run_folder_errors(path.parent):
            self._open()

    @contextmanager
    def span(self, track: str, name: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Record the duration of the block. Late attributes can be added to the yielded dict."""
        started = time.monotonic()
        try:
            yield facts
        except BaseException as error:
            facts["error"] = type(error).__name__
            raise
        finally:
            self.mark(track, name, since=started, **facts)

    def mark(self, track: str, name: str, *, since: float, **facts: Any) -> None:
        """Record a span that began at ``since`` (``time.monotonic``) and ends now."""
        group, _, _ = track.partition("/")
        event = {
            "name": name,
            "ph": "X",
            "ts": self._microseconds(since),
            "dur": max(1, round((time.monotonic() - since) * 1e6)),
            "pid": GROUPS.index(group) + 1,
            "tid": _track_id(track),
        }
        if facts:
            event["args"] = {key: _plain(value) for key, value in facts.items()}
        self._write(track, event)

    @contextmanager
    def lane(self, group: str) -> Iterator[str]:
        """Yield the first free track of a group: ``slots`` -> ``slots/slot 7``."""
        with self._lock:
            free = self._free.setdefault(group, [])
            numbers = self._numbers.setdefault(group, count(1))
            number = heapq.heappop(free) if free else next(numbers)
        try:
            yield f"{group}/{group.removesuffix('s')} {number}"
        finally:
            with self._lock:
                heapq.heappush(free, number)

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step as counters."""
        now = self._microseconds(time.monotonic())
        for name, lines in COUNTERS.items():
            values = {line: scalars[key] for line, key in lines.items() if _is_number(scalars.get(key))}
            if values:
                pid = GROUPS.index("numbers") + 1
                self._write("numbers", {"name": name, "ph": "C", "ts": now, "pid": pid, "args": values})

    def close(self) -> None:
        """Close the file. Later events are dropped. Idempotent."""
        with self._lock:
            self._close()

    def _microseconds(self, monotonic_s: float) -> int:
        return round((self._epoch_s + monotonic_s) * 1e6)

    def _write(self, track: str, event: Mapping[str, Any]) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                if self._size >= self._max_bytes:
                    self._rotate()
                if track not in self._named:
                    self._named.add(track)
                    for one in _metadata(track):
                        self._append(one)
                self._append(event)
            except OSError as error:
                logger.warning("tracing stopped: %s cannot be written (%s)", self._path, error.strerror)
                with suppress(OSError):
                    os.ftruncate(self._file, self._size)
                    os.pwrite(self._file, END, self._size)
                self._close()

    def _append(self, event: Mapping[str, Any]) -> None:
        assert self._file is not None
        line = json.dumps(event, separators=(",", ":"), default=str).encode()
        content = (b",\n" if self._size > 1 else b"\n") + line + END
        written = os.pwrite(self._file, content, self._size)
        if written < len(content):
            raise OSError(0, "the event was written partially")
        self._size += written - len(END)

    def _open(self) -> None:
        self._file: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._named: set[str] = set()
        self._size = _complete_size(self._file)
        os.ftruncate(self._file, self._size)
        if not self._size:
            os.pwrite(self._file, b"[" + END, 0)
            self._size = 1

    def _rotate(self) -> None:
        self._close()
        os.replace(self._path, self._path.with_suffix(".earlier.json"))
        self._open()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _complete_size(file: int) -> int:
    """Return the position after the last complete event of a trace, or 0 if there is none."""
    size = os.fstat(file).st_size
    start = max(0, size - TAIL_BYTES)
    tail = os.pread(file, size - start, start)
    end = len(tail)
    while (begin := tail.rfind(b"\n", 0, end)) >= 0:
        line = tail[begin + 1 : end].removesuffix(b",")
        if _is_event(line):
            return start + begin + 1 + len(line)
        end = begin
    return 0


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _plain(value: Any) -> Any:
    """Return a value for JSON. Non-finite numbers become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _metadata(track: str) -> Iterator[dict[str, Any]]:
    """Yield the metadata events with name and display order of a track and its group."""
    group, _, name = track.partition("/")
    place = GROUPS.index(group) + 1
    yield {"name": "process_name", "ph": "M", "pid": place, "args": {"name": group}}
    yield {"name": "process_sort_index", "ph": "M", "pid": place, "args": {"sort_index": place}}
    if name:
        number = name.rpartition(" ")[2]
        order = int(number) if number.isdigit() else 0
        ids = {"pid": place, "tid": _track_id(track)}
        yield {"name": "thread_name", "ph": "M", **ids, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", **ids, "args": {"sort_index": order}}


def _track_id(track: str) -> int:
    """Return an id of the track that stays the same after a resume."""
    return zlib.crc32(track.encode()) & 0x7FFFFFFF
