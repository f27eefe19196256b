"""The steps of a long run as a bounded number of points for its curves, extended as steps are appended.

Each point is the mean of the same number of consecutive steps and has the number of the last of these steps.
The number of steps per point is a power of two: 1 up to ``MAX_POINTS`` steps, 2 up to twice as many, and so
on. The last point can have fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_train.report.charts import MAX_POINTS
from agentrl_train.report.curves import AGE, number, task_values

Step = Mapping[str, Any]


class ThinnedSteps:
    """Lines like those of ``metrics.jsonl``, each the mean of consecutive steps.

    Args:
        most: maximum number of lines, even.
    """

    def __init__(self, most: int = MAX_POINTS) -> None:
        self.size = 1
        """Number of steps of a point."""
        self._most = most
        self._points: list[_Point] = []
        self._taken = 0
        self._last: Step | None = None

    def update(self, steps: Sequence[Step]) -> None:
        """Update the points from the steps of a run. Only steps appended since the last call are read.

        If the earlier steps differ from those of the last call, all points are computed again.
        """
        if self._taken > len(steps) or (self._taken and steps[self._taken - 1] is not self._last):
            self.size, self._points, self._taken = 1, [], 0
        for step in steps[self._taken :]:
            self._add(step)
        self._taken = len(steps)
        self._last = steps[-1] if steps else None

    def means(self) -> list[dict[str, Any]]:
        """Return the points, oldest first."""
        return [point.mean() for point in self._points]

    def _add(self, step: Step) -> None:
        if not self._points or self._points[-1].count == self.size:
            if len(self._points) == self._most:
                pairs = zip(self._points[::2], self._points[1::2], strict=True)
                self._points = [first.join(second) for first, second in pairs]
                self.size *= 2
            self._points.append(_Point())
        self._points[-1].add(step)


class _Point:
    """Sums over consecutive steps, by name and by task and name."""

    __slots__ = ("_sums", "count", "step")

    def __init__(self) -> None:
        self.count = 0
        self.step: Any = None
        self._sums: dict[tuple[str | None, str], tuple[float, int]] = {}

    def add(self, step: Step) -> None:
        """Add one step. Values that are not finite numbers are skipped."""
        self.count, self.step = self.count + 1, step["step"]
        self._add(None, step)
        for task, values in task_values(step).items():
            if isinstance(values, Mapping):
                self._add(task, values)

    def join(self, later: _Point) -> _Point:
        """Return the sums over the steps of both."""
        both = _Point()
        both.count, both.step = self.count + later.count, later.step
        both._sums = dict(self._sums)
        for key, (total, known) in later._sums.items():
            before, counted = both._sums.get(key, (0.0, 0))
            both._sums[key] = before + total, counted + known
        return both

    def mean(self) -> dict[str, Any]:
        """Return the means as a line of ``metrics.jsonl``."""
        line: dict[str, Any] = {"tasks": {}}
        for (task, name), (total, known) in self._sums.items():
            values = line if task is None else line["tasks"].setdefault(task, {})
            # Ages without tokens are not in a step.
            values[name] = total / (self.count if name.startswith(AGE) else known)
        return line | {"step": self.step}

    def _add(self, task: str | None, values: Mapping[str, Any]) -> None:
        for name, given in values.items():
            if (value := number(given)) is not None:
                total, known = self._sums.get((task, name), (0.0, 0))
                self._sums[task, name] = total + value, known + 1
