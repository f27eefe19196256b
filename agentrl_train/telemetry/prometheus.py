"""The metrics of a run as a Prometheus endpoint, ``/metrics``, exported by ``prometheus_client``.

Metrics are named as in ``metrics.jsonl``, with the prefix ``agentrl_train_``. A task is a label. Values that
add up over steps are counters, the ages of trained tokens are a histogram, and all other values are gauges.
``agentrl_train_last_step_timestamp_seconds`` shows that a run has stalled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from itertools import accumulate, groupby
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from agentrl_train.errors import ConfigError

PREFIX = "agentrl_train"
COUNTERS = {
    "loss_tokens": "trained_tokens",
    "sampled_tokens": "sampled_tokens",
    "prefilled_tokens": "prefilled_tokens",
    "reprefilled_tokens": "reprefilled_tokens",
    "discarded_tokens": "discarded_tokens",
    "tokens": "trained_tokens_by_task",
}
"""Name in ``metrics.jsonl`` -> name of the counter. "tokens" is counted only per task."""
AGE = "tokens_of_age_"


class PrometheusExporter(Collector):
    """Serves the metrics of the last step from a thread. Implements ``Sink``.

    Args:
        host: address to listen on.
        port: port to listen on; 0 picks a free port, see ``url``.

    Raises:
        ConfigError: the address is not available.
    """

    def __init__(self, *, host: str, port: int) -> None:
        self._lock = threading.Lock()
        self._gauges: dict[tuple[str, str], float] = {}
        """(name, task) -> value. The task is empty for values of the whole run."""
        self._counters: dict[tuple[str, str], float] = {}
        self._ages: dict[int, float] = {}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server = _Server((host, port), _Handler.factory(registry))
        except OSError as error:
            raise ConfigError(
                f"the metrics cannot be served on {host}:{port} ({error.strerror}): choose another "
                "metrics.prometheus.port, or leave it out"
            ) from error
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Update the exported values. Values with other names stay."""
        with self._lock:
            self._gauges["step", ""] = float(step)
            self._gauges["last_step_timestamp_seconds", ""] = time.time()
            for key, value in scalars.items():
                name, _, task = key.partition("/")
                if name.startswith(AGE):
                    age = int(name.removeprefix(AGE))
                    self._ages[age] = self._ages.get(age, 0.0) + value
                elif name in COUNTERS and (name != "tokens" or task):
                    counter = COUNTERS[name], task
                    self._counters[counter] = self._counters.get(counter, 0.0) + value
                else:
                    self._gauges[name, task] = value

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        with self._lock:
            gauges, counters, ages = dict(self._gauges), dict(self._counters), dict(self._ages)
        yield from _families(GaugeMetricFamily, gauges)
        yield from _families(CounterMetricFamily, counters, suffix="_total")
        help_text = "Ages of trained tokens, in policy versions."
        histogram = HistogramMetricFamily(f"{PREFIX}_token_staleness", help_text)
        bounds = range(max(ages, default=-1) + 1)
        counts = accumulate(ages.get(age, 0.0) for age in bounds)
        buckets = [(str(bound), count) for bound, count in zip(bounds, counts, strict=True)]
        total = sum(age * number for age, number in ages.items())
        histogram.add_metric([], [*buckets, ("+Inf", sum(ages.values()))], total)
        yield histogram

    def close(self) -> None:
        """Stop serving; idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


class _Handler(MetricsHandler):
    timeout = 10.0
    """Seconds that a client can take to send its request."""

    def do_GET(self) -> None:
        """Serve the metrics, only at ``/metrics``."""
        if urlsplit(self.path).path == "/metrics":
            super().do_GET()
        else:
            self.send_error(404, "the metrics are at /metrics")


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    values: Mapping[tuple[str, str], float],
    suffix: str = "",
) -> Iterator[Metric]:
    """Yield one family per name. Samples of tasks have a label."""
    for name, samples in groupby(sorted(values.items()), key=lambda item: item[0][0]):
        family = kind(f"{PREFIX}_{name}", name.replace("_", " ").capitalize() + ".")
        for (_, task), value in samples:
            family.add_sample(f"{PREFIX}_{name}{suffix}", {"task": task} if task else {}, value)
        yield family
