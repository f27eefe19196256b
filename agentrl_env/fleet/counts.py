"""Counts of a fleet: what its servers report with their heartbeats, added up."""

from __future__ import annotations

from collections import OrderedDict

from agentrl_env.fleet.remote_server import RemoteServer
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.types import Counts, Durations, SessionStatus, TaskCounts, TaskInfo

MAX_SOURCES = 4096
"""Number of serving processes whose last report is kept, to know what the next one adds."""
_NO_TASK, _NO_DURATIONS = TaskCounts(), Durations()
_STATUSES = frozenset(status.value for status in SessionStatus)


class FleetCounts:
    """Adds what servers count to the metrics of a controller.

    Reports are sums since the start of a process, so that a lost or repeated one does no harm, and only
    what a report adds to the one before it is counted, so that no sum falls where a server is replaced.

    Args:
        metrics: of the controller.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: OrderedDict[str, Counts] = OrderedDict()

    def add(self, server: RemoteServer, counts: Counts) -> None:
        """Add a report; what it says of other tasks and tools than the server's is left out."""
        before = self._last.pop(counts.source, None) or Counts(source=counts.source)
        self._last[counts.source] = counts
        if len(self._last) > MAX_SOURCES:
            self._last.popitem(last=False)
        server.steps = sum(task.steps for task in counts.tasks.values())
        self._metrics.step_seconds.add(counts.step_seconds, before.step_seconds)
        for name, task in server.tasks.items():
            now = counts.tasks.get(name)
            if now is not None:
                known = {status: count for status, count in now.ended.items() if status in _STATUSES}
                now = now.model_copy(update={"ended": known})
                self._metrics.add_task(name, now, before.tasks.get(name, _NO_TASK))
            earlier = before.tools.get(name, {})
            for tool, durations in counts.tools.get(name, {}).items():
                if tool in _tools(task):
                    self._metrics.add_tool(name, tool, durations, earlier.get(tool, _NO_DURATIONS))


def _tools(task: TaskInfo) -> set[str]:
    return {"respond", *(spec.function.name for spec in task.tools)}
