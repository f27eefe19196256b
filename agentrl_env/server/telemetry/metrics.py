"""Counters of a serving process, in Prometheus text format."""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LAG_EVERY_S = 0.25
_STATM = Path("/proc/self/statm")
_FDS = Path("/proc/self/fd")


class Histogram:
    """How long something took, in seconds, counted in buckets."""

    __slots__ = ("_buckets", "_seconds")

    def __init__(self) -> None:
        self._buckets = [0] * (len(BUCKETS_S) + 1)
        self._seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self._seconds += seconds

    def lines(self, name: str, **labels: str) -> Iterator[str]:
        """Yield the samples in Prometheus text."""
        total = 0
        for bound, count in zip((*BUCKETS_S, float("inf")), self._buckets, strict=True):
            total += count
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield _line(f"{name}_bucket", total, **labels, le=label)
        yield _line(f"{name}_sum", round(self._seconds, 6), **labels)
        yield _line(f"{name}_count", total, **labels)


class Metrics:
    """What a serving process has done since it started."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        """Steps taken, by task."""
        self.opened: Counter[str] = Counter()
        """Sessions that opened, by task."""
        self.ended: Counter[tuple[str, str]] = Counter()
        """Sessions that ended, by (task, status)."""
        self.errors: Counter[str] = Counter()
        """Errors answered, by type."""
        self.invalid_calls: Counter[str] = Counter()
        """Tool calls that named no tool or did not fit its schema, by task."""
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """Answers over HTTP, by (method, route, status); calls over the WebSocket are not among them."""
        self.calls: Counter[str] = Counter()
        """Calls of protocol 1, by name, over HTTP and the WebSocket."""
        self.hung_up: Counter[str] = Counter()
        """Connections that the server closed because they kept it waiting, by reason."""
        self.step_seconds = Histogram()
        self.tool_seconds: dict[tuple[str, str], Histogram] = {}
        """By (task, tool): declared tools alone, so that what a model makes up is no label."""
        self.loop_lag_seconds = Histogram()
        """How much later than asked for the event loop came back."""

    def step_taken(self, task: str, seconds: float) -> None:
        """Count one step and how long it took."""
        self.steps[task] += 1
        self.step_seconds.observe(seconds)

    def tool_ran(self, task: str, tool: str, seconds: float) -> None:
        """Count one call of a tool and how long it took."""
        histogram = self.tool_seconds.get((task, tool))
        if histogram is None:
            histogram = self.tool_seconds[task, tool] = Histogram()
        histogram.observe(seconds)

    def render(self, gauges: Mapping[str, float]) -> str:
        """Return everything as Prometheus text, after the given gauges and those of the process."""
        lines: list[str] = []
        for name, value in {**gauges, **_process()}.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value:.10g}"]
        for name, help_text, samples in self._counters():
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} counter", *samples]
        for name, help_text, samples in self._histograms():
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} histogram", *samples]
        return "\n".join(lines) + "\n"

    def _counters(self) -> Iterator[tuple[str, str, Iterable[str]]]:
        name = "agentrl_steps_total"
        yield name, "Steps taken.", [_line(name, n, task=task) for task, n in self.steps.items()]
        name = "agentrl_sessions_opened_total"
        yield name, "Sessions opened.", [_line(name, n, task=task) for task, n in self.opened.items()]
        name = "agentrl_sessions_ended_total"
        ended = [_line(name, n, task=task, status=status) for (task, status), n in self.ended.items()]
        yield name, "Sessions ended.", ended
        name = "agentrl_errors_total"
        yield name, "Errors answered.", [_line(name, n, type=kind) for kind, n in self.errors.items()]
        name = "agentrl_invalid_tool_calls_total"
        wrong = [_line(name, n, task=task) for task, n in self.invalid_calls.items()]
        yield name, "Tool calls that named no tool or did not fit its schema.", wrong
        name = "agentrl_requests_total"
        requests = [
            _line(name, n, method=method, route=route, status=str(status))
            for (method, route, status), n in self.requests.items()
        ]
        yield name, "HTTP requests answered.", requests
        name = "agentrl_calls_total"
        calls = [_line(name, n, call=call) for call, n in self.calls.items()]
        yield name, "Calls over HTTP and the WebSocket.", calls
        name = "agentrl_connections_hung_up_total"
        hung_up = [_line(name, n, reason=reason) for reason, n in self.hung_up.items()]
        yield name, "Connections closed because they kept the server waiting.", hung_up

    def _histograms(self) -> Iterator[tuple[str, str, Iterable[str]]]:
        name = "agentrl_step_seconds"
        yield name, "Time of a step.", self.step_seconds.lines(name)
        name = "agentrl_tool_seconds"
        tools = [
            line
            for (task, tool), histogram in self.tool_seconds.items()
            for line in histogram.lines(name, task=task, tool=tool)
        ]
        yield name, "Time of a call of a tool.", tools
        name = "agentrl_event_loop_lag_seconds"
        yield name, "How late the event loop came back.", self.loop_lag_seconds.lines(name)


async def watch_loop(metrics: Metrics) -> None:
    """Measure again and again how late the event loop comes back."""
    loop = asyncio.get_running_loop()
    while True:
        asked = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        metrics.loop_lag_seconds.observe(max(0.0, loop.time() - asked))


def _process() -> dict[str, float]:
    """Return what the process holds, where the system tells."""
    try:
        pages, files = int(_STATM.read_text().split()[1]), len(os.listdir(_FDS))
    except OSError:
        return {}
    resident = float(pages * os.sysconf("SC_PAGE_SIZE"))
    held = {"process_resident_memory_bytes": resident, "process_open_fds": float(files)}
    with suppress(RuntimeError):  # outside of an event loop there are none
        held["agentrl_event_loop_tasks"] = float(len(asyncio.all_tasks()))
    return held


def _line(name: str, value: float, **labels: str) -> str:
    inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value}" if inner else f"{name} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
