"""The dashboards of Grafana: rows of panels, each with its expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 7
"""Of a panel; a row of Grafana is 24 wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Args:
        title: what it shows.
        lines: pairs of an expression and its legend.
        unit: Grafana's name of the unit.
        kind: ``timeseries`` or ``stat``.
    """

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"


def _line(title: str, expr: str, legend: str, unit: str = "short") -> Panel:
    return Panel(title=title, lines=((expr, legend),), unit=unit)


def _quantiles(name: str, labels: str = "") -> tuple[tuple[str, str], ...]:
    by = f"le, {labels}" if labels else "le"
    suffix = f" {{{{{labels}}}}}" if labels else ""
    return tuple(
        (f"histogram_quantile({q}, sum by ({by}) (rate({name}_bucket[5m])))", f"p{100 * q:g}{suffix}")
        for q in (0.5, 0.99)
    )


_T = 'task=~"$task"'
FLEET = {
    "Load": (
        Panel(
            title="Sessions",
            lines=(
                ("max(agentrl_sessions_open)", "open"),
                ("max(agentrl_sessions_capacity)", "capacity"),
                ("max(agentrl_sessions_waiting)", "waiting for room"),
            ),
        ),
        _line("Steps", f"max by (task) (rate(agentrl_steps_total{{{_T}}}[5m]))", "{{task}}", "ops"),
        Panel(
            title="Servers",
            lines=(
                ("max(agentrl_fleet_servers)", "connected"),
                ("max(agentrl_fleet_servers_lost)", "lost in the last ten minutes"),
            ),
        ),
    ),
    "Results": (
        _line(
            "Success",
            f"max by (task) (rate(agentrl_episodes_succeeded_total{{{_T}}}[15m])) "
            f"/ max by (task) (rate(agentrl_episode_reward_count{{{_T}}}[15m]))",
            "{{task}}",
            "percentunit",
        ),
        _line(
            "Mean reward",
            f"max by (task) (rate(agentrl_episode_reward_sum{{{_T}}}[15m])) "
            f"/ max by (task) (rate(agentrl_episode_reward_count{{{_T}}}[15m]))",
            "{{task}}",
        ),
        _line(
            "Ends of sessions",
            f"max by (status) (rate(agentrl_sessions_ended_total{{{_T}}}[5m]))",
            "{{status}}",
            "ops",
        ),
    ),
    "Latency": (
        Panel(title="Duration of a step", lines=_quantiles("agentrl_step_seconds"), unit="s"),
        Panel(
            title="Duration of a tool call",
            lines=(
                (
                    "histogram_quantile(0.99, sum by (le, task, tool) "
                    f"(rate(agentrl_tool_seconds_bucket{{{_T}}}[5m])))",
                    "p99 {{task}}.{{tool}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Delay of the event loop",
            lines=_quantiles("agentrl_event_loop_lag_seconds", "instance"),
            unit="s",
        ),
    ),
    "Each server": (
        _line(
            "Use of each server",
            "max by (place) (agentrl_server_sessions_open) "
            "/ max by (place) (agentrl_server_sessions_capacity)",
            "{{place}}",
            "percentunit",
        ),
        _line(
            "Steps of each server",
            "max by (place) (rate(agentrl_server_steps_total[5m]))",
            "{{place}}",
            "ops",
        ),
        _line("Memory", "process_resident_memory_bytes", "{{instance}}", "bytes"),
    ),
    "Errors": (
        _line("Answered errors", "sum by (type) (rate(agentrl_errors_total[5m]))", "{{type}}", "ops"),
        _line(
            "Invalid tool calls",
            f"max by (task) (rate(agentrl_invalid_tool_calls_total{{{_T}}}[5m]))",
            "{{task}}",
            "ops",
        ),
        _line(
            "Refusals by budget",
            "sum by (limit) (rate(agentrl_budget_refusals_total[5m]))",
            "{{limit}}",
            "ops",
        ),
    ),
}
_R = 'instance=~"$instance"'


def _run(title: str, *names: str, unit: str = "short", label: str = "") -> Panel:
    legend = f"{{{{instance}}}} {label}" if label else "{{instance}}"
    lines = tuple(
        (f"agentrl_train_{name}{{{_R}}}", f"{legend} {name}" if len(names) > 1 else legend) for name in names
    )
    return Panel(title=title, lines=lines, unit=unit)


RUN = {
    "Progress": (
        _run("Success", "success", unit="percentunit", label="{{task}}"),
        _run("Reward", "reward", label="{{task}}"),
        _run("Step", "step"),
    ),
    "Throughput": (
        _run("Trained tokens per second", "trained_tokens_per_s", "trained_tokens_per_s_ceiling"),
        _run("Sampled tokens per second", "sampled_tokens_per_s", "sampled_tokens_per_s_ceiling"),
        _run("Idle share of a step", "trainer_idle", "engine_idle", unit="percentunit"),
    ),
    "Learning": (
        _run("Loss", "loss"),
        _run("KL", "kl"),
        _run("Entropy", "entropy"),
        _run("Norm of the gradient", "grad_norm"),
        _run("Clipped share", "clip_fraction", unit="percentunit"),
        _run("Age of trained tokens", "staleness_mean", "staleness_max"),
    ),
}


def dashboard(
    uid: str, title: str, rows: dict[str, tuple[Panel, ...]], variable: str, values: str
) -> dict[str, Any]:
    """Return a dashboard in Grafana's JSON model.

    Args:
        uid: its id, which stays the same so that links do not break.
        title: its name.
        rows: panels by the title of their row.
        variable: name of the filter.
        values: expression of the filter's values.
    """
    panels: list[dict[str, Any]] = []
    y = 0
    for name, row in rows.items():
        panels.append(
            {
                "type": "row",
                "title": name,
                "id": len(panels) + 1,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
            }
        )
        y += 1
        for number, panel in enumerate(row):
            place = {"x": number % 3 * WIDTH, "y": y + number // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += -(-len(row) // 3) * HEIGHT
    query = {"query": values, "refId": "values"}
    return {
        "uid": uid,
        "title": title,
        "tags": ["agentrl"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": variable,
                    "label": variable.capitalize(),
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": query,
                    "definition": values,
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": ["All"], "value": ["$__all"]},
                },
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0} if panel.unit != "short" else {},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend, "datasource": _SOURCE}
            for index, (expr, legend) in enumerate(panel.lines)
        ],
    }


DASHBOARDS = {
    "fleet.json": dashboard(
        "agentrl-fleet", "agentrl: fleet", FLEET, "task", "label_values(agentrl_sessions_opened_total, task)"
    ),
    "run.json": dashboard(
        "agentrl-run", "agentrl: training run", RUN, "instance", "label_values(agentrl_train_step, instance)"
    ),
}
"""Dashboards by file name."""
