"""The numbers of the last step as Prometheus text at ``/metrics``, served from a thread.

Names are those of ``metrics.jsonl`` after ``agentrl_train_``; a task is a label. What adds up over steps is
a counter, the ages of trained tokens are a histogram, everything else is a gauge. A run that hangs shows in
``agentrl_train_last_step_timestamp_seconds``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from agentrl_train.errors import ConfigError

PREFIX = "agentrl_train"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTERS = {
    "loss_tokens": "trained_tokens",
    "sampled_tokens": "sampled_tokens",
    "prefilled_tokens": "prefilled_tokens",
    "reprefilled_tokens": "reprefilled_tokens",
    "discarded_tokens": "discarded_tokens",
    "tokens": "trained_tokens_by_task",
}
"""Name in ``metrics.jsonl`` -> name of the counter; "tokens" counts for tasks alone."""
AGE = "tokens_of_age_"
Labels = tuple[tuple[str, str], ...]


class Exposition:
    """Serves what it was last told; satisfies ``Sink``.

    Args:
        host: address to listen on.
        port: 0 takes a free one; see ``url``.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, *, host: str, port: int) -> None:
        self._lock = threading.Lock()
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._counters: dict[tuple[str, Labels], float] = {}
        self._ages: dict[int, float] = {}
        try:
            self._server = _Server((host, port), self.render)
        except OSError as error:
            raise ConfigError(
                f"no metrics can be served on {host}:{port} ({error.strerror}): choose another "
                "metrics.prometheus_port, or leave it out"
            ) from error
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Show these values from now on, beside those told before under other names."""
        with self._lock:
            self._gauges["step", ()] = float(step)
            self._gauges["last_step_timestamp_seconds", ()] = time.time()
            for flat, value in scalars.items():
                name, _, task = flat.partition("/")
                labels: Labels = (("task", task),) if task else ()
                if name.startswith(AGE):
                    age = int(name.removeprefix(AGE))
                    self._ages[age] = self._ages.get(age, 0.0) + value
                elif name in COUNTERS and (name != "tokens" or task):
                    key = (COUNTERS[name], labels)
                    self._counters[key] = self._counters.get(key, 0.0) + value
                else:
                    self._gauges[name, labels] = value

    def render(self) -> str:
        """Return everything as Prometheus text."""
        with self._lock:
            lines = [*_samples(self._gauges, "gauge"), *_samples(self._counters, "counter", suffix="_total")]
            lines += _histogram(self._ages)
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stop serving; idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], render: Callable[[], str]) -> None:
        super().__init__(address, _Handler)
        self.render = render


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0
    """Seconds that a peer may take to send its request."""
    server: _Server

    def do_GET(self) -> None:
        """Answer with the metrics, at their one path."""
        if urlsplit(self.path).path != "/metrics":
            self.send_error(404, "the metrics are at /metrics")
            return
        body = self.server.render().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: scrapes come all the time."""


def _samples(values: Mapping[tuple[str, Labels], float], kind: str, suffix: str = "") -> Iterator[str]:
    named = ""
    for (name, labels), value in sorted(values.items()):
        if name != named:
            named = name
            yield f"# TYPE {PREFIX}_{name}{suffix} {kind}"
        yield _line(f"{PREFIX}_{name}{suffix}", value, labels)


def _histogram(ages: Mapping[int, float]) -> Iterator[str]:
    """Yield the ages of trained tokens, in policy versions."""
    name = f"{PREFIX}_token_staleness"
    yield f"# TYPE {name} histogram"
    total = 0.0
    for age in range(max(ages, default=-1) + 1):
        total += ages.get(age, 0.0)
        yield _line(f"{name}_bucket", total, (("le", str(age)),))
    yield _line(f"{name}_bucket", total, (("le", "+Inf"),))
    yield _line(f"{name}_sum", sum(age * number for age, number in ages.items()))
    yield _line(f"{name}_count", total)


def _line(name: str, value: float, labels: Labels = ()) -> str:
    inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
    return f"{name}{{{inner}}} {value:.10g}" if inner else f"{name} {value:.10g}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
