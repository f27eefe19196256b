"""Throughput and ceilings, with a manual clock and engine statistics."""

from __future__ import annotations

import pytest

from agentrl_train.telemetry import throughput
from agentrl_train.telemetry.throughput import Throughput, copy_bytes_per_s


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def test_throughput_includes_ceilings(clock: Clock) -> None:
    totals = {"sampled_tokens": 1000.0, "prefilled_tokens": 50.0, "busy_s": 7.0, "abandoned_tokens": 3.0}
    speeds = Throughput(lambda: totals, copy_bytes_per_s=8e9)
    clock.now += 10.0
    totals.update(sampled_tokens=3000.0, prefilled_tokens=250.0, busy_s=12.0, abandoned_tokens=13.0)
    metrics = {"loss_tokens": 1600.0, "publish_bytes": 4e9, "publish_seconds": 2.0}
    assert speeds.step(metrics, waited_s=2.0, discarded_tokens=40.0) == {
        "sampled_tokens": 2000.0,
        "prefilled_tokens": 200.0,
        "discarded_tokens": 50.0,
        "step_seconds": 10.0,
        "cpu_seconds": 2.5,
        "trained_tokens_per_s": 160.0,
        "trained_tokens_per_s_ceiling": 200.0,
        "sampled_tokens_per_s": 200.0,
        "sampled_tokens_per_s_ceiling": 400.0,
        "trainer_idle": 0.2,
        "engine_idle": 0.5,
        "publish_bytes_per_s": 2e9,
        "publish_bytes_per_s_ceiling": 8e9,
    }
    clock.now += 5.0
    later = speeds.step({}, waited_s=5.0, discarded_tokens=40.0)
    assert (later["discarded_tokens"], later["trainer_idle"], later["engine_idle"]) == (0.0, 1.0, 1.0)
    assert (later["trained_tokens_per_s"], later["sampled_tokens_per_s_ceiling"]) == (0.0, 0.0)


def test_begin_restarts_measurement(clock: Clock) -> None:
    totals = {"sampled_tokens": 0.0, "prefilled_tokens": 0.0, "busy_s": 0.0}
    speeds = Throughput(lambda: totals)
    clock.now, totals["sampled_tokens"] = 500.0, 900.0  # an evaluation
    speeds.begin()
    clock.now, totals["sampled_tokens"] = 501.0, 910.0
    metrics = speeds.step({}, waited_s=0.0)
    assert (metrics["sampled_tokens"], metrics["step_seconds"]) == (10.0, 1.0)


def test_copy_bandwidth_is_plausible() -> None:
    assert 1e7 < copy_bytes_per_s("cpu") < 1e13
