"""The last hour of a server or fleet, which the dashboard draws as curves."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping

from agentrl_env.errors import SessionLost
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.types import FleetPoint, SessionStatus

EVERY_S, KEPT_S = 10.0, 3600.0
"""Seconds between points, and seconds for which points are kept."""
FAILED = (SessionStatus.FAILED_ENVIRONMENT.value, SessionLost.type)
"""Statuses of sessions without a result."""


class History:
    """A time series of a serving process's counters, oldest point first.

    Args:
        metrics: counters of the process.
        gauges: returns the gauges of ``/metrics``.
        clock: returns the Unix time in seconds.
    """

    def __init__(
        self,
        metrics: Metrics,
        gauges: Callable[[], Mapping[str, float]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics, self._gauges, self._clock = metrics, gauges, clock
        self._points: deque[FleetPoint] = deque(maxlen=int(KEPT_S / EVERY_S))

    def take(self) -> None:
        """Add a point with the current state."""
        gauges, tasks = self._gauges(), self._metrics.by_task().values()
        self._points.append(
            FleetPoint(
                time=self._clock(),
                servers=int(gauges.get("agentrl_fleet_servers", 1)),
                open=int(gauges["agentrl_sessions_open"]),
                waiting=int(gauges["agentrl_sessions_waiting"]),
                capacity=int(gauges["agentrl_sessions_capacity"]),
                steps=sum(task.steps for task in tasks),
                scored=sum(task.scored for task in tasks),
                succeeded=sum(task.succeeded for task in tasks),
                failed=sum(task.ended.get(status, 0) for task in tasks for status in FAILED),
            )
        )

    def since(self, when: float) -> tuple[FleetPoint, ...]:
        """Return the points after a Unix time."""
        return tuple(point for point in self._points if point.time > when)

    async def record(self) -> None:
        """Add a point every ``EVERY_S`` seconds, until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(EVERY_S)
