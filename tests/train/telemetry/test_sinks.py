"""Metric sinks: the Prometheus endpoint, and the real W&B package in offline mode."""

from __future__ import annotations

import json
import math
import socket
import struct
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentrl_train.errors import ConfigError
from agentrl_train.telemetry.prometheus import PrometheusExporter
from agentrl_train.telemetry.sinks import grouped

FIRST = {
    "loss": 0.5,
    "loss_tokens": 100.0,
    "tokens": 300.0,
    "trainer_idle": math.nan,
    "tokens_of_age_0": 60.0,
    "tokens_of_age_2": 40.0,
    'tokens/a "task"\n': 70.0,
    'success/a "task"\n': 0.25,
}


def scrape(exporter: PrometheusExporter) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urlopen(exporter.url, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(one.name, frozenset(one.labels.items())): one.value for f in families for one in f.samples}


@pytest.fixture
def exporter():
    exporter = PrometheusExporter(host="127.0.0.1", port=0)
    yield exporter
    exporter.close()
    exporter.close()


def test_prometheus_parses_gauges_counters_and_histogram(exporter: PrometheusExporter) -> None:
    exporter.write(FIRST, step=1)
    exporter.write(FIRST | {"loss": 0.25}, step=2)
    samples = scrape(exporter)

    def value(name: str, **labels: str) -> float:
        return samples[f"agentrl_train_{name}", frozenset(labels.items())]

    assert (value("loss"), value("step"), value("tokens")) == (0.25, 2.0, 300.0)
    assert math.isnan(value("trainer_idle"))
    assert value("trained_tokens_total") == 200.0
    assert value("trained_tokens_by_task_total", task='a "task"\n') == 140.0
    assert value("success", task='a "task"\n') == 0.25
    assert value("last_step_timestamp_seconds") > 1.7e9
    buckets = [value("token_staleness_bucket", le=bound) for bound in ("0", "1", "2", "+Inf")]
    assert buckets == [120.0, 120.0, 200.0, 200.0]
    assert (value("token_staleness_count"), value("token_staleness_sum")) == (200.0, 160.0)


def test_evaluation_keeps_values_of_last_step(exporter: PrometheusExporter) -> None:
    exporter.write({"loss": 0.5}, step=1)
    exporter.write({"held_out_success/shop": 0.75}, step=1)
    samples = scrape(exporter)
    assert samples["agentrl_train_loss", frozenset()] == 0.5
    assert samples["agentrl_train_held_out_success", frozenset({("task", "shop")})] == 0.75


def test_only_metrics_path_is_served(exporter: PrometheusExporter) -> None:
    with pytest.raises(HTTPError, match="404") as refused:
        urlopen(exporter.url.replace("/metrics", "/etc/passwd"), timeout=30)
    refused.value.close()


def test_idle_connection_does_not_block_others(exporter: PrometheusExporter) -> None:
    exporter.write({"loss": 0.5}, step=1)
    port = int(exporter.url.rsplit(":", 1)[1].split("/")[0])
    with socket.create_connection(("127.0.0.1", port)):
        assert scrape(exporter)
        exporter.close()


def test_port_in_use_is_reported(exporter: PrometheusExporter) -> None:
    port = int(exporter.url.rsplit(":", 1)[1].split("/")[0])
    with pytest.raises(ConfigError, match=r"choose another metrics\.prometheus\.port"):
        PrometheusExporter(host="127.0.0.1", port=port)


OFFLINE = """
import json, sys
from pathlib import Path
from agentrl_train.telemetry.sinks import WandbWriter, grouped
folder = Path(sys.argv[1])
for first in (1, 3):  # a run, and the same one resumed
    writer = WandbWriter(folder, project="tests", name="one", config={"run": {"seed": 3}})
    for step in (first, first + 1):
        writer.write({"loss": 1.0 / step, "kl": float("nan"), "success/shop": 0.5}, step=step)
    writer.write({"held_out_success/shop": 0.25}, step=first)
    writer.close()
    writer.close()
"""


def test_wandb_writes_all_values_to_run_folder(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    runs = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    name = (tmp_path / "wandb-id").read_text()
    assert [path.stem for path in runs] == [f"run-{name}"] * 2
    records = [record for path in runs for record in history(path)]
    assert [
        (one["step"], one["train/loss"], one["success/shop"]) for one in records if "train/loss" in one
    ] == [(step, 1.0 / step, 0.5) for step in (1, 2, 3, 4)]
    earlier = [(one["step"], one["held_out_success/shop"]) for one in records if "train/loss" not in one]
    assert earlier == [(1, 0.25), (3, 0.25)]
    assert not any("train/kl" in one for one in records)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("loss", "train/loss"),
        ("staleness_max", "staleness/staleness_max"),
        ("tokens_of_age_3", "staleness/tokens_of_age_3"),
        ("loss_tokens", "tokens/loss_tokens"),
        ("trained_tokens_per_s", "speed/trained_tokens_per_s"),
        ("step_seconds", "speed/step_seconds"),
        ("engine_idle", "speed/engine_idle"),
        ("critic_loss", "critic/critic_loss"),
        ("logprob_drift", "drift/logprob_drift"),
        ("reward/shop", "reward/shop"),
    ],
)
def test_metric_names_start_with_a_group(name: str, shown: str) -> None:
    assert grouped(name) == shown


def history(path: Path) -> list[dict[str, float]]:
    """Return the steps in an offline W&B file: seven bytes, then a LevelDB log of one block."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, rows, at = path.read_bytes(), [], 7
    assert data.startswith(b":W&B")
    assert len(data) < 32_768
    while at < len(data):
        _, length, whole = struct.unpack_from("<IHB", data, at)
        assert whole == 1
        record = Record.FromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return rows


def test_wandb_without_login_is_reported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode != 0
    assert "ConfigError: W&B rejected the run" in done.stderr
    assert "WANDB_MODE=offline" in done.stderr
