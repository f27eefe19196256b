"""Names of the metrics of servers, controllers and runs, taken from the code that exports them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client.core import Metric

from agentrl_env.fleet.controller import FleetService
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.types import ServerSummary

SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "summary": ["_count", "_sum"]}
"""Suffixes of the samples of each type of metric; others have none."""
_NAME = re.compile(r"\b(?:agentrl|process)_[a-z0-9_]+\b")


def sample_names(families: Iterable[Metric]) -> set[str]:
    """Return the names under which the samples of metric families are stored."""
    return {f"{family.name}{suffix}" for family in families for suffix in SUFFIXES.get(family.type, [""])}


def controller_metrics() -> set[str]:
    """Return the names of the samples in ``/metrics`` of a controller."""
    fleet = FleetService()
    fleet.metrics.servers = lambda: [ServerSummary(server_id="x", capacity=1, open=0)]
    fleet.metrics.render(fleet.gauges())
    return sample_names(fleet.metrics.collect())


def server_metrics() -> set[str]:
    """Return the names of the samples that ``/metrics`` of any server has, without those of its pool."""
    return sample_names(Metrics().collect())


def names_in(expression: str) -> set[str]:
    """Return the names of metrics in an expression of PromQL."""
    return set(_NAME.findall(expression))
