"""The efficiency section of the report: throughput and its ceiling, and tokens by use, age and task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from agentrl_train.report.charts import number_label, percent_label, share_bar
from agentrl_train.report.curves import number, task_values

Step = Mapping[str, Any]
SPEEDS = (
    ("trained_tokens_per_s", "trained tokens/s", "ceiling: a trainer that never waits"),
    ("sampled_tokens_per_s", "sampled tokens/s", "ceiling: an engine that is never idle"),
    ("publish_bytes_per_s", "weights pushed, bytes/s", "ceiling: a copy in memory"),
)
AGE = "tokens_of_age_"
WORK = (
    ("loss_tokens", "trained on"),
    ("discarded_tokens", "discarded: failed episodes, dropped groups, aborted completions"),
)
PREFILL = ("reprefilled_tokens", "prefilled again: new weights or an evicted cache row")


def efficiency(steps: Sequence[Step]) -> str:
    """Return throughput and token tables as HTML, or "" without data."""
    cards = [
        _card("Throughput and its ceiling", _speeds(steps)),
        _card("Tokens by use", _uses(steps)),
        _card("Sampled tokens of the trained groups by age", _shares(_ages(steps))),
        _card("Sampled tokens of the trained groups by task", _shares(_tasks(steps))),
    ]
    return "".join(cards)


def _card(title: str, rows: Sequence[str]) -> str:
    if not rows:
        return ""
    return (
        f'<figure class="card"><figcaption><b>{escape(title)}</b></figcaption>'
        f'<div class="scroll"><table class="uses"><tbody>{"".join(rows)}</tbody></table></div></figure>'
    )


def _speeds(steps: Sequence[Step]) -> list[str]:
    """Return the rows of the throughput table, averaged over time."""
    rows = []
    for name, title, ceiling in SPEEDS:
        pairs = [(number(step.get(name)), number(step.get(f"{name}_ceiling"))) for step in steps]
        known = [(value, top) for value, top in pairs if value and top]
        if known:
            # The harmonic mean weighs a slow step by its duration.
            value, top = (len(known) / sum(1 / pair[i] for pair in known) for i in (0, 1))
            text = f"{number_label(value)} of {number_label(top)}"
            rows.append(_row(title, text, value / top, note=ceiling))
    return rows


def _uses(steps: Sequence[Step]) -> list[str]:
    sampled, prefilled = _total(steps, "sampled_tokens"), _total(steps, "prefilled_tokens")
    rows = [_row("sampled", number_label(sampled), None)] if sampled else []
    rows += [
        _row(title, number_label(_total(steps, name)), _total(steps, name) / sampled)
        for name, title in WORK
        if sampled and _has(steps, name)
    ]
    name, title = PREFILL
    if prefilled:
        rows.append(_row("prefilled", number_label(prefilled), None))
        if _has(steps, name):
            rows.append(_row(title, number_label(_total(steps, name)), _total(steps, name) / prefilled))
    return rows


def _ages(steps: Sequence[Step]) -> dict[str, float]:
    names = {name for step in steps for name in step if name.startswith(AGE)}
    ages = sorted(int(name.removeprefix(AGE)) for name in names)
    counts = {age: _total(steps, f"{AGE}{age}") for age in ages}
    return {"1 step" if age == 1 else f"{age} steps": count for age, count in counts.items() if count}


def _tasks(steps: Sequence[Step]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for step in steps:
        for task, values in task_values(step).items():
            if isinstance(values, Mapping) and (tokens := number(values.get("tokens"))):
                totals[task] = totals.get(task, 0.0) + tokens
    return totals


def _shares(counts: Mapping[str, float]) -> list[str]:
    total = sum(counts.values())
    return [_row(name, number_label(count), count / total) for name, count in counts.items()]


def _row(title: str, value: str, share: float | None, note: str = "") -> str:
    below = f'<div class="dim small">{escape(note)}</div>' if note else ""
    bar = "" if share is None else share_bar(share)
    percent = "" if share is None else percent_label(round(share, 3))
    return f"<tr><td>{escape(title)}{below}</td><td>{value}</td><td>{percent}</td><td>{bar}</td></tr>"


def _total(steps: Iterable[Step], name: str) -> float:
    return sum(value for step in steps if (value := number(step.get(name))) is not None)


def _has(steps: Iterable[Step], name: str) -> bool:
    return any(number(step.get(name)) is not None for step in steps)
