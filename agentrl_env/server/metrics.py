"""Counters of a serving process, in Prometheus text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


class Metrics:
    """What a pool has done since it started."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        """Steps taken, by task."""
        self.ended: Counter[tuple[str, str]] = Counter()
        """Sessions that ended, by (task, status)."""
        self.errors: Counter[str] = Counter()
        """Errors answered, by type."""
        self._buckets = [0] * (len(BUCKETS_S) + 1)
        self._seconds = 0.0

    def step_taken(self, task: str, seconds: float) -> None:
        """Count one step and how long it took."""
        self.steps[task] += 1
        self._buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self._seconds += seconds

    def render(self, gauges: Mapping[str, float]) -> str:
        """Return everything as Prometheus text, after the given gauges."""
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value:g}"]
        lines.append("# TYPE agentrl_steps_total counter")
        lines += [_line("agentrl_steps_total", n, task=task) for task, n in self.steps.items()]
        lines.append("# TYPE agentrl_sessions_ended_total counter")
        lines += [
            _line("agentrl_sessions_ended_total", n, task=task, status=status)
            for (task, status), n in self.ended.items()
        ]
        lines.append("# TYPE agentrl_errors_total counter")
        lines += [_line("agentrl_errors_total", n, type=kind) for kind, n in self.errors.items()]
        return "\n".join(lines + self._histogram()) + "\n"

    def _histogram(self) -> list[str]:
        name = "agentrl_step_seconds"
        lines, total = [f"# TYPE {name} histogram"], 0
        for bound, count in zip((*BUCKETS_S, float("inf")), self._buckets, strict=True):
            total += count
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            lines.append(_line(f"{name}_bucket", total, le=label))
        return [*lines, f"{name}_sum {self._seconds:.6f}", f"{name}_count {total}"]


def _line(name: str, value: int, **labels: str) -> str:
    inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
