"""The alerts of a fleet; the runbook has a section for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert of Prometheus.

    Args:
        name: its name, and the title of its section in the runbook.
        expr: condition in PromQL.
        wait: time for which the condition must hold.
        severity: ``page`` if a person must act now, ``ticket`` if they can act later.
        summary: one sentence for the person who gets it.
    """

    name: str
    expr: str
    wait: str
    severity: str
    summary: str


ALERTS = (
    Alert(
        name="AgentrlTargetDown",
        expr='up{job="agentrl"} == 0',
        wait="2m",
        severity="page",
        summary="Prometheus cannot scrape {{ $labels.instance }}.",
    ),
    Alert(
        name="AgentrlNoServers",
        expr="max(agentrl_fleet_servers) == 0",
        wait="2m",
        severity="page",
        summary="No server is connected to a controller, so that no session can open.",
    ),
    Alert(
        name="AgentrlServersLost",
        expr="max(agentrl_fleet_servers_lost) > 0",
        wait="0m",
        severity="ticket",
        summary="{{ $value }} servers were lost in the last ten minutes.",
    ),
    Alert(
        name="AgentrlQueueGrows",
        expr="max(avg_over_time(agentrl_sessions_waiting[10m])) > 5",
        wait="10m",
        severity="ticket",
        summary="{{ $value }} openings have waited for room on average over ten minutes.",
    ),
    Alert(
        name="AgentrlFleetFull",
        expr="max(agentrl_sessions_open) / max(agentrl_sessions_capacity) > 0.95",
        wait="15m",
        severity="ticket",
        summary="The fleet has used over 95 % of its places for 15 minutes.",
    ),
    Alert(
        name="AgentrlEnvironmentFails",
        expr=(
            'sum by (task) (rate(agentrl_sessions_ended_total{status="failed_environment"}[15m])) '
            "/ sum by (task) (rate(agentrl_sessions_ended_total[15m])) > 0.05"
        ),
        wait="10m",
        severity="page",
        summary="Over 5 % of the sessions of {{ $labels.task }} end because its environment fails.",
    ),
    Alert(
        name="AgentrlSessionsLost",
        expr='sum by (task) (increase(agentrl_sessions_ended_total{status="session_lost"}[15m])) > 0',
        wait="0m",
        severity="ticket",
        summary="{{ $value }} sessions of {{ $labels.task }} were lost with their server in 15 minutes.",
    ),
    Alert(
        name="AgentrlNoSuccess",
        expr=(
            "sum by (task) (rate(agentrl_episode_reward_count[1h])) > 0.01 "
            "and sum by (task) (rate(agentrl_episodes_succeeded_total[1h])) == 0"
        ),
        wait="1h",
        severity="ticket",
        summary="No episode of {{ $labels.task }} has succeeded for an hour.",
    ),
    Alert(
        name="AgentrlInvalidToolCalls",
        expr=(
            "sum by (task) (rate(agentrl_invalid_tool_calls_total[15m])) "
            "/ sum by (task) (rate(agentrl_steps_total[15m])) > 0.5"
        ),
        wait="30m",
        severity="ticket",
        summary="Every second step of {{ $labels.task }} has an invalid tool call.",
    ),
    Alert(
        name="AgentrlStepsSlow",
        expr="histogram_quantile(0.99, sum by (le) (rate(agentrl_step_seconds_bucket[10m]))) > 5",
        wait="10m",
        severity="ticket",
        summary="The slowest 1 % of the steps take {{ $value | humanizeDuration }} or longer.",
    ),
    Alert(
        name="AgentrlEventLoopBlocked",
        expr=(
            "histogram_quantile(0.99, sum by (le, instance) "
            "(rate(agentrl_event_loop_lag_seconds_bucket[5m]))) > 0.5"
        ),
        wait="5m",
        severity="page",
        summary="The event loop of {{ $labels.instance }} is blocked for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        name="AgentrlBudgetRefusals",
        expr="sum by (limit) (rate(agentrl_budget_refusals_total[10m])) > 1",
        wait="10m",
        severity="ticket",
        summary="Callers are refused over once a second because of {{ $labels.limit }}.",
    ),
    Alert(
        name="AgentrlInternalErrors",
        expr='sum by (instance) (increase(agentrl_errors_total{type="internal_error"}[15m])) > 0',
        wait="0m",
        severity="ticket",
        summary="{{ $labels.instance }} answered {{ $value }} internal errors in 15 minutes: a bug.",
    ),
    Alert(
        name="AgentrlMemoryGrows",
        expr='predict_linear(process_resident_memory_bytes{job="agentrl"}[1h], 14400) > 16e9',
        wait="30m",
        severity="ticket",
        summary="{{ $labels.instance }} will use over 16 GB of memory in four hours.",
    ),
    Alert(
        name="AgentrlRunStalls",
        expr="time() - agentrl_train_last_step_timestamp_seconds > 3600",
        wait="5m",
        severity="page",
        summary="The run at {{ $labels.instance }} has trained no step for over an hour.",
    ),
)
