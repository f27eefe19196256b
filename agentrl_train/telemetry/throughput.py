"""Throughput of each step, with the ceiling of each rate.

The ceiling is the rate while the responsible part was busy: trained tokens per second of a trainer that never
waits, sampled tokens per second of an engine that is never idle, and weights pushed at memory copy bandwidth.
The difference is waiting time, which is reported as idle shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

Statistics = Callable[[], Mapping[str, float]]
COPIED_BYTES = 1 << 26
"""Size of the bandwidth measurement, which is larger than processor caches."""


class Throughput:
    """Computes the throughput of a step from the running totals of an engine.

    Args:
        statistics: returns the running totals: ``sampled_tokens``, ``prefilled_tokens``, ``busy_s`` and any
            others.
        copy_bytes_per_s: copy bandwidth of the memory through which weights are pushed.
    """

    def __init__(self, statistics: Statistics, *, copy_bytes_per_s: float = 0.0) -> None:
        self._statistics = statistics
        self._copy_bytes_per_s = copy_bytes_per_s
        self._discarded = 0.0
        self.begin()

    def begin(self) -> None:
        """Restart the measurement, so that earlier time does not count for a step."""
        self._mark, self._totals = time.monotonic(), dict(self._statistics())
        self._cpu_s = time.process_time()

    def step(
        self, metrics: Mapping[str, float], *, waited_s: float, discarded_tokens: float = 0.0
    ) -> dict[str, float]:
        """Return the throughput since the end of the last step.

        Args:
            metrics: metrics of the step: ``loss_tokens``, ``publish_bytes``, ``publish_seconds``.
            waited_s: time that the trainer waited for episodes.
            discarded_tokens: running total of sampled tokens that are not trained on.
        """
        now, totals = time.monotonic(), dict(self._statistics())
        seconds = max(now - self._mark, 1e-9)
        spent = {name: total - self._totals.get(name, 0.0) for name, total in totals.items()}
        spent["discarded_tokens"] = discarded_tokens - self._discarded + spent.pop("abandoned_tokens", 0.0)
        self._mark, self._totals, self._discarded = now, totals, discarded_tokens
        cpu_s, self._cpu_s = time.process_time() - self._cpu_s, time.process_time()
        idle, busy_s = min(1.0, waited_s / seconds), min(spent.pop("busy_s"), seconds)
        trained, sampled = metrics.get("loss_tokens", 0.0), spent["sampled_tokens"]
        return {
            **spent,
            "step_seconds": seconds,
            "cpu_seconds": cpu_s,
            "trained_tokens_per_s": trained / seconds,
            "trained_tokens_per_s_ceiling": trained / max(seconds * (1.0 - idle), 1e-9),
            "sampled_tokens_per_s": sampled / seconds,
            "sampled_tokens_per_s_ceiling": sampled / max(busy_s, 1e-9) if sampled else 0.0,
            "trainer_idle": idle,
            "engine_idle": 1.0 - busy_s / seconds,
            **self._publish_rate(metrics),
        }

    def _publish_rate(self, metrics: Mapping[str, float]) -> dict[str, float]:
        size, seconds = metrics.get("publish_bytes", 0.0), metrics.get("publish_seconds", 0.0)
        if not (size and seconds):
            return {}
        rate = {"publish_bytes_per_s": size / seconds}
        if self._copy_bytes_per_s:
            rate["publish_bytes_per_s_ceiling"] = self._copy_bytes_per_s
        return rate


def copy_bytes_per_s(device: str) -> float:
    """Return the copy bandwidth of a device's memory, the best of four measurements."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(4):
        _synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        best = max(best, COPIED_BYTES / max(time.perf_counter() - started, 1e-9))
    return best


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
