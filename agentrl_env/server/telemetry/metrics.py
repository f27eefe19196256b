"""Counters of a serving process, exported by ``prometheus_client``, and the observer of its sessions."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from agentrl_env.server.telemetry.tracing import annotate, spanned
from agentrl_env.session.observer import Observer
from agentrl_env.types import Counts, Durations, SessionStatus, TaskCounts

if TYPE_CHECKING:
    from agentrl_env.session import Session
    from agentrl_env.tools import StepBuilder
    from agentrl_env.types import ServerSummary

__all__ = ["CONTENT_TYPE", "SLOW_STEP_S", "Histogram", "Metrics", "SessionMetrics", "measure_loop_lag"]

N = TypeVar("N", int, float)
T = TypeVar("T")
logger = logging.getLogger("agentrl_env")
messages = logging.getLogger("agentrl_env.messages")
"""Logs the messages of models and environments at level DEBUG, only with ``--log-messages``."""
SLOW_STEP_S = 30.0
BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
LAG_EVERY_S = 0.25
_RUNNING = SessionStatus.RUNNING
_STATM = Path("/proc/self/statm")
_FDS = Path("/proc/self/fd")


class Histogram:
    """Durations in seconds, counted in buckets."""

    __slots__ = ("_buckets", "_seconds")
    _NONE = (0,) * (len(BUCKETS_S) + 1)

    def __init__(self) -> None:
        self._buckets = list(self._NONE)
        self._seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self._seconds += seconds

    def counted(self) -> Durations:
        """Return the counts."""
        return Durations(buckets=tuple(self._buckets), seconds=self._seconds)

    def add(self, now: Durations, before: Durations) -> None:
        """Add the increase of another histogram between two of its states."""
        if len(now.buckets) != len(self._buckets):
            return  # the server has another version, with other buckets
        for index, (count, was) in enumerate(zip(now.buckets, before.buckets or self._NONE, strict=True)):
            self._buckets[index] = _more(self._buckets[index], count, was)
        self._seconds = _more(self._seconds, now.seconds, before.seconds)

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...] = ()) -> None:
        """Add the samples to a metric family."""
        total, buckets = 0, []
        for bound, count in zip((*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"), self._buckets, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric(labels, buckets, round(self._seconds, 6))


class Metrics(Collector):
    """Counts since the start of a serving process.

    These are plain counters, because a labelled counter of ``prometheus_client`` takes 2 us an increment, and
    three increments would take a fifth of a step. The exporter collects them for ``/metrics``.
    """

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        """Steps by task."""
        self.opened: Counter[str] = Counter()
        """Opened sessions by task."""
        self.ended: Counter[tuple[str, str]] = Counter()
        """Ended sessions by task and status."""
        self.errors: Counter[str] = Counter()
        """Errors returned to callers, by type."""
        self.invalid_calls: Counter[str] = Counter()
        """Tool calls with an unknown tool or invalid arguments, by task."""
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """HTTP answers by method, route and status. Calls over the WebSocket are not included."""
        self.calls: Counter[str] = Counter()
        """Calls of protocol 1 by name, over HTTP and the WebSocket."""
        self.scored: Counter[str] = Counter()
        """Sessions that ended with a reward, by task."""
        self.succeeded: Counter[str] = Counter()
        """Sessions that ended with a reward and succeeded, by task."""
        self.reward: defaultdict[str, float] = defaultdict(float)
        """Sum of the rewards of ended sessions, by task."""
        self.step_seconds = Histogram()
        self.tool_seconds: dict[tuple[str, str], Histogram] = {}
        """Durations by task and tool. Only declared tools count, so that a model cannot invent labels."""
        self.loop_lag_seconds = Histogram()
        """Delay of the event loop."""
        self._source = secrets.token_hex(8)
        self.refusals: Counter[str] = Counter()
        """Requests refused because the caller had used up a budget, by the name of the limit."""
        self.connections = 0
        """HTTP connections and WebSockets."""
        self.held_bytes = 0
        """Bytes of large requests and answers in progress."""
        self.unfinished = 0
        """Large requests that are being received."""
        self.held_seconds = 0.0
        """Event loop time that callers used in long periods."""
        self._gauges: Mapping[str, float] = {}
        self.servers: Callable[[], Iterable[ServerSummary]] = tuple
        """Returns the servers of a fleet. Empty at a single server."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def step_taken(self, task: str, seconds: float) -> None:
        """Count one step and its duration."""
        self.steps[task] += 1
        self.step_seconds.observe(seconds)

    def tool_ran(self, task: str, tool: str, seconds: float) -> None:
        """Count one call of a tool and its duration."""
        histogram = self.tool_seconds.get((task, tool)) or self._tool(task, tool)
        histogram.observe(seconds)

    def scored_session(self, task: str, reward: float, *, success: bool) -> None:
        """Count a session that ended with a reward."""
        self.scored[task] += 1
        self.succeeded[task] += success
        self.reward[task] = _bound(self.reward[task] + reward)

    def counts(self) -> Counts:
        """Return all counts by task, for a controller."""
        tools: dict[str, dict[str, Durations]] = {}
        for (task, tool), histogram in self.tool_seconds.items():
            tools.setdefault(task, {})[tool] = histogram.counted()
        return Counts(
            source=self._source, tasks=self.by_task(), tools=tools, step_seconds=self.step_seconds.counted()
        )

    def by_task(self) -> dict[str, TaskCounts]:
        """Return the counts of each task."""
        ended: dict[str, dict[str, int]] = {}
        for (task, status), count in self.ended.items():
            ended.setdefault(task, {})[str(status)] = count
        return {
            task: TaskCounts(
                opened=self.opened[task],
                ended=ended.get(task, {}),
                steps=self.steps[task],
                invalid_calls=self.invalid_calls[task],
                scored=self.scored[task],
                succeeded=self.succeeded[task],
                reward=self.reward.get(task, 0.0),
            )
            for task in {**self.opened, **self.steps, **ended}
        }

    def add_task(self, task: str, now: TaskCounts, before: TaskCounts) -> None:
        """Add the increase of a server's counts between two reports. Counts never decrease."""
        for own, name in (
            (self.opened, "opened"),
            (self.steps, "steps"),
            (self.invalid_calls, "invalid_calls"),
            (self.scored, "scored"),
            (self.succeeded, "succeeded"),
        ):
            own[task] = _more(own[task], getattr(now, name), getattr(before, name))
        for status, count in now.ended.items():
            self.ended[task, status] = _more(self.ended[task, status], count, before.ended.get(status, 0))
        self.reward[task] = _bound(self.reward[task] + now.reward - before.reward)

    def add_tool(self, task: str, tool: str, now: Durations, before: Durations) -> None:
        """Add the increase of a server's counts of a tool between two reports."""
        self._tool(task, tool).add(now, before)

    def _tool(self, task: str, tool: str) -> Histogram:
        return self.tool_seconds.setdefault((task, tool), Histogram())

    def render(self, gauges: Mapping[str, float]) -> bytes:
        """Return all metrics as Prometheus text, with the given gauges and the gauges of the process."""
        self._gauges = {**gauges, **_process_gauges()}
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        gauges = {
            "agentrl_connections": float(self.connections),
            "agentrl_held_bytes": float(self.held_bytes),
            "agentrl_unfinished_requests": float(self.unfinished),
        }
        for name, value in {**self._gauges, **gauges}.items():
            yield GaugeMetricFamily(name, name.replace("_", " "), value)
        yield from self._by_server()
        yield _counter("agentrl_steps", "Steps taken.", ["task"], self.steps)
        yield _counter("agentrl_sessions_opened", "Sessions opened.", ["task"], self.opened)
        yield _counter("agentrl_sessions_ended", "Sessions ended.", ["task", "status"], self.ended)
        yield _counter("agentrl_errors", "Errors answered.", ["type"], self.errors)
        refused = "Requests refused because a budget of the caller was used up."
        yield _counter("agentrl_budget_refusals", refused, ["limit"], self.refusals)
        held = "Time that callers held the event loop in stretches over 20 ms, and with large requests."
        yield CounterMetricFamily("agentrl_event_loop_held_seconds", held, self.held_seconds)
        invalid = "Tool calls that named no tool or did not fit its schema."
        yield _counter("agentrl_invalid_tool_calls", invalid, ["task"], self.invalid_calls)
        succeeded = "Sessions that ended with a reward, in success."
        yield _counter("agentrl_episodes_succeeded", succeeded, ["task"], self.succeeded)
        rewards = SummaryMetricFamily(
            "agentrl_episode_reward",
            "Rewards of sessions that the task or a limit has ended.",
            labels=["task"],
        )
        for task, count in self.scored.items():
            rewards.add_metric([task], count, self.reward[task])
        yield rewards
        requests = "HTTP requests answered."
        yield _counter("agentrl_requests", requests, ["method", "route", "status"], self.requests)
        yield _counter("agentrl_calls", "Calls over HTTP and the WebSocket.", ["call"], self.calls)
        yield _histograms("agentrl_step_seconds", "Duration of a step.", [], {(): self.step_seconds})
        tools = "Duration of a call of a tool."
        yield _histograms("agentrl_tool_seconds", tools, ["task", "tool"], self.tool_seconds)
        lag = "Delay of the event loop."
        yield _histograms("agentrl_event_loop_lag_seconds", lag, [], {(): self.loop_lag_seconds})

    def _by_server(self) -> Iterator[Metric]:
        """Yield the metrics of each server of a fleet."""
        labels = ["server", "place"]
        opened = GaugeMetricFamily(
            "agentrl_server_sessions_open", "Open sessions of a server.", labels=labels
        )
        room = GaugeMetricFamily("agentrl_server_sessions_capacity", "Sessions it can hold.", labels=labels)
        steps = CounterMetricFamily("agentrl_server_steps", "Steps that a server has taken.", labels=labels)
        for server in self.servers():
            names = [server.server_id, server.place]
            opened.add_metric(names, server.open)
            room.add_metric(names, server.capacity)
            steps.add_metric(names, server.steps)
        yield from (opened, room, steps)


class SessionMetrics(Observer):
    """Counts, logs and traces the sessions of a pool.

    Args:
        metrics: counters of the process.
        slow_step_s: steps that take longer are logged as warnings.
        tracing: True if calls can be traced.
    """

    def __init__(self, metrics: Metrics, slow_step_s: float = SLOW_STEP_S, *, tracing: bool = False) -> None:
        self._metrics = metrics
        self._slow_step_s = slow_step_s
        self._tracing = tracing

    def opened(self, session: Session, client: str) -> None:
        """Observe a session that has opened."""
        task = session.sample.task
        self._metrics.opened[task] += 1
        annotate(session_id=session.session_id, task=task)
        if logger.isEnabledFor(logging.INFO):
            logger.info("session opened", extra=_where(session, client=client))

    def ended(self, session: Session, client: str, seconds: float) -> None:
        """Observe a session that has ended, ``seconds`` after it began."""
        task, status = session.sample.task, session.status
        self._metrics.ended[task, status] += 1
        annotate(session_id=session.session_id, task=task)
        if logger.isEnabledFor(logging.INFO):
            facts = {"status": status.value, "turns": session.turn, "duration_s": round(seconds, 6)}
            logger.info("session ended", extra=_where(session, client=client, **facts))

    def traced(
        self, name: str, work: Coroutine[Any, Any, T], session: Session | None, tool: str = ""
    ) -> Coroutine[Any, Any, T]:
        """Return ``work``, wrapped in a trace span if tracing is on."""
        if not self._tracing:
            return work
        attributes = {"tool": tool} if tool else {}
        if session is not None:
            attributes |= {"session_id": session.session_id, "task": session.sample.task}
        return spanned(name, work, **attributes)

    def tool_ran(self, task: str, name: str, seconds: float) -> None:
        """Observe a call of a tool."""
        self._metrics.tool_ran(task, name, seconds)

    def counts(self) -> Mapping[str, TaskCounts]:
        """Return the counts so far, by task."""
        return self._metrics.by_task()

    def stepped(self, session: Session, result: StepBuilder, seconds: float) -> None:
        """Observe a step that has been taken."""
        task = session.sample.task
        self._metrics.step_taken(task, seconds)
        if session.status is not _RUNNING and session.status is not SessionStatus.FAILED_ENVIRONMENT:
            self._metrics.scored_session(
                task, session.episode_return, success=result.metrics.get("success", 0.0) > 0
            )
        invalid = result.metrics.get("invalid_calls")
        if invalid:
            self._metrics.invalid_calls[task] += int(invalid)
        if seconds >= self._slow_step_s:
            facts = {"seq": session.turn, "duration_s": round(seconds, 6)}
            logger.warning("slow step", extra=_where(session, **facts))
        if messages.isEnabledFor(logging.DEBUG):
            *_, (message, answer) = session.history
            texts = {"message": message.wire(), "answer": [item.wire() for item in answer.messages]}
            messages.debug("step", extra=_where(session, seq=answer.seq, **texts))


def _where(session: Session, **facts: object) -> dict[str, dict[str, object]]:
    return {"facts": {"session_id": session.session_id, "task": session.sample.task, **facts}}


def _more(total: N, now: N, before: N) -> N:
    """Add the increase of a server's count to a total, up to the largest integer exact as a float."""
    return min(total + max(0, now - before), 2**53)


def _bound(reward: float) -> float:
    return max(-1e300, min(1e300, reward))


async def measure_loop_lag(metrics: Metrics) -> None:
    """Measure the delay of the event loop, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        expected = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        metrics.loop_lag_seconds.observe(max(0.0, loop.time() - expected))


def _counter(name: str, text: str, labels: list[str], counts: Mapping[Any, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(
            [str(value) for value in (values if isinstance(values, tuple) else (values,))], count
        )
    return family


def _histograms(
    name: str, text: str, labels: list[str], histograms: Mapping[Any, Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in histograms.items():
        histogram.add_to(family, values)
    return family


def _process_gauges() -> dict[str, float]:
    """Return the memory, descriptors and tasks of the process, as far as the system reports them."""
    try:
        pages, files = int(_STATM.read_text().split()[1]), len(os.listdir(_FDS))
    except OSError:
        return {}
    resident = float(pages * os.sysconf("SC_PAGE_SIZE"))
    gauges = {"process_resident_memory_bytes": resident, "process_open_fds": float(files)}
    with suppress(RuntimeError):  # there are no tasks outside an event loop
        gauges["agentrl_event_loop_tasks"] = float(len(asyncio.all_tasks()))
    return gauges
