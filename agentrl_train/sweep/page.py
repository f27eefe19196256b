"""The report of a sweep: ranking, curves with bands over seeds, differences to the baseline, the runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from agentrl_train.config.toml import literal
from agentrl_train.report.charts import (
    NUM_COLOURS,
    Interval,
    Panel,
    Series,
    interval_axis,
    interval_chart,
    line_chart,
    number_label,
    percent_label,
    standalone,
)
from agentrl_train.report.html import document, duration, percent, section_head, tile
from agentrl_train.sweep.results import CURVES

Record = Mapping[str, Any]
AXES = {"samples": "episodes", "steps": "step"}
"""Axis of a curve -> its unit."""
UNITS = {"samples": "over episodes played", "steps": "over training steps"}
STATES = {"finished": "good", "failed": "bad", "stopped": "warn", "not started": "warn"}


def render(results: Record) -> str:
    """Return the page of a ``results.json``."""
    sections = (_header, _ranking, _tasks, _curves, _runs, _settings)
    body = "\n".join(part for part in (section(results) for section in sections) if part)
    return document(results["name"], body)


def figure(results: Record, curve: str, *, axis: str = "samples", title: str = "") -> str:
    """Return a chart of all variants as an SVG file. Many variants are drawn one by one against the baseline.

    Args:
        results: content of a ``results.json``.
        curve: name of a curve, a key of ``CURVES``.
        axis: "samples" or "steps".
        title: title of the figure, by default the title of the curve.
    """
    variants = _finished_variants(results)
    if len(variants) <= NUM_COLOURS:
        shown = [_series(variants, curve, axis)]
    else:
        base = _record_of(results, results["baseline"])
        shown = [_pair(one, base, curve, axis) for one in variants if one is not base]
    panels = [
        Panel(chart=_chart(series, curve, axis), names=[(one.name, one.colour) for one in series])
        for series in shown
    ]
    return standalone(panels, title=title or CURVES[curve])


def _header(results: Record) -> str:
    complete = results["finished"] == results["planned"]
    badge = '<span class="badge good">finished</span>'
    if not complete:
        failed = sum(run["status"] == "failed" for run in _all_runs(results))
        badge = f'<span class="badge bad">{failed} failed</span>' if failed else ""
        badge += '<span class="badge warn">not finished</span>'
    variants, seeds = len(results["variants"]), len(results["seeds"])
    facts = f"{variants} variants of {results['config']} · {seeds} seeds · baseline {results['baseline']}"
    return (
        f'<header><div class="line"><h1>{escape(results["name"])}</h1>{badge}</div>'
        f'<div class="dim">{escape(facts)}</div></header>'
        f'<div class="tiles">{"".join(_tiles(results))}</div>'
    )


def _tiles(results: Record) -> Iterable[str]:
    if results["ranking"]:
        best = _record_of(results, results["ranking"][0])
        yield tile("Best held-out success", percent(best["final"]["success"]["mean"]), best["name"])
    yield tile("Runs", f"{results['finished']} of {results['planned']}", "finished")
    done = [run for run in _all_runs(results) if run["status"] == "finished"]
    if done:
        wall, processor = (sum(run[key] for run in done) for key in ("wall_s", "processor_s"))
        yield tile("Processor time", duration(processor), f"{duration(processor / len(done))} a run")
        yield tile("Wall time of the runs", duration(wall), f"at most {results['processes']} at a time")


def _ranking(results: Record) -> str:
    rows = "".join(
        _rank(number, _record_of(results, name), results)
        for number, name in enumerate(results["ranking"], start=1)
    )
    if not rows:
        return ""
    note = (
        f"Means over seeds with the {results['interval']}. Area: mean held-out success over the first "
        f"{results['area_samples']:.0f} episodes. Differences: to {results['baseline']} at equal seeds. "
        "The p-value is adjusted for all variants (Holm); up to 0.05 a difference of areas is a finding."
    )
    return (
        f"{section_head('ranking', 'Ranking by final held-out success', note)}"
        '<div class="card scroll"><table class="ranking"><thead><tr><th>variant</th><th>success</th>'
        f'<th class="picture">{interval_axis()}</th><th>area</th><th>difference</th>'
        "<th>episodes</th><th>time of a run</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _rank(number: int, variant: Record, results: Record) -> str:
    final, difference = variant["final"], variant["difference"]["success"]
    shown = final["success"]
    low, high = (shown["mean"] if shown[key] is None else shown[key] for key in ("low", "high"))
    picture = interval_chart(None, Interval(value=shown["mean"], low=low, high=high))
    change = "baseline"
    if variant["name"] != results["baseline"]:
        change = _difference(difference)
        if difference is not None:
            change += _below(f"above in {difference['above']} of {difference['n']}")
    greedy = _below(f"greedy {_share(final['greedy'])}") if final["greedy"] else ""
    tested = variant["difference"]["area"]
    adjusted = tested and tested.get("p_holm")
    under = _below(f"{_difference(tested)}, p {adjusted:.2g}") if adjusted is not None else ""
    return (
        f"<tr><td>{number}. {escape(variant['name'])}</td><td>{_share(shown)}{greedy}</td>"
        f'<td class="picture">{picture}</td><td>{_share(final["area"])}{under}</td><td>{change}</td>'
        f"<td>{_count(variant['samples'])}</td><td>{_seconds(variant['wall_s'])}"
        f"{_below('processor ' + _seconds(variant['processor_s']))}</td></tr>"
    )


def _tasks(results: Record) -> str:
    tasks = list(dict.fromkeys(task for variant in results["variants"] for task in variant["tasks"]))
    if len(tasks) < 2:
        return ""
    head = "".join(f"<th>{escape(task)}</th>" for task in tasks)
    rows = "".join(
        f"<tr><td>{escape(variant['name'])}</td>"
        + "".join(
            f"<td>{_share(found['success']) if (found := variant['tasks'].get(task)) else '–'}</td>"
            for task in tasks
        )
        + "</tr>"
        for variant in results["variants"]
    )
    return (
        f"{section_head('tasks', 'Final held-out success by task', 'Sampled.')}"
        f'<div class="card scroll"><table><thead><tr><th>variant</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _curves(results: Record) -> str:
    variants = _finished_variants(results)
    if not variants:
        return ""
    if len(variants) <= NUM_COLOURS:
        cards = [_card(variants, curve, axis) for axis in AXES for curve in CURVES]
        note = "Lines are means over seeds, areas their 95 % intervals. Training curves are moving averages."
    else:
        base = _record_of(results, results["baseline"])
        rest = [_record_of(results, name) for name in results["ranking"] if name != results["baseline"]]
        cards = [_against(one, base) for one in rest]
        note = f"Each variant, in blue, and {results['baseline']}, in grey, with 95 % intervals over seeds."
    return f'{section_head("curves", "Curves", note)}<div class="charts">{"".join(cards)}</div>'


def _card(variants: Sequence[Record], curve: str, axis: str) -> str:
    series = _series(variants, curve, axis)
    chart = _chart(series, curve, axis)
    if not chart:
        return ""
    keys = "".join(f'<span class="key c{one.colour}"><i></i>{escape(one.name)}</span>' for one in series)
    return _figure(CURVES[curve].capitalize(), UNITS[axis], chart, legend=keys)


def _against(variant: Record, base: Record) -> str:
    curve = "held_out_success"
    chart = _chart(_pair(variant, base, curve, "samples"), curve, "samples")
    return _figure(variant["name"], f"{CURVES[curve]}, {UNITS['samples']}", chart)


def _pair(variant: Record, base: Record, curve: str, axis: str) -> list[Series]:
    return [*_series([base], curve, axis, colour=7), *_series([variant], curve, axis)]


def _chart(series: Sequence[Series], curve: str, axis: str) -> str:
    return line_chart(series, label=_label(curve), top=_top(curve), x_name=AXES[axis])


def _figure(title: str, unit: str, chart: str, *, legend: str = "") -> str:
    keys = f'<div class="legend">{legend}</div>' if legend else ""
    return (
        f'<figure class="card"><figcaption><b>{escape(title)}</b><span class="unit">{escape(unit)}</span>'
        f"</figcaption>{keys}{chart}</figure>"
    )


def _series(variants: Sequence[Record], curve: str, axis: str, *, colour: int = 0) -> list[Series]:
    found = []
    for number, variant in enumerate(variants, start=colour):
        rows = variant["curves"][curve][axis]
        found.append(
            Series(
                name=variant["name"],
                points=[(x, mean) for x, mean, _, _ in rows],
                colour=number,
                band=[(x, low, high) for x, _, low, high in rows if low is not None],
            )
        )
    return [one for one in found if one.points]


def _runs(results: Record) -> str:
    rows = "".join(
        f"<tr><td>{escape(run['variant'])}</td><td>{run['seed']}</td>"
        f'<td><span class="badge {STATES[run["status"]]}">{escape(run["status"])}</span></td>'
        + (
            f"<td>{percent(run['final']['success'])}</td><td>{percent(run['final']['greedy'])}</td>"
            f"<td>{_seconds(run['wall_s'])}</td><td>{_seconds(run['processor_s'])}</td>"
            if run["status"] == "finished"
            else f'<td colspan="4" class="reason">{escape(run["error"])}</td>'
        )
        + "</tr>"
        for run in _all_runs(results)
    )
    is_open = " open" if any(run["status"] == "failed" for run in _all_runs(results)) else ""
    return (
        f'<h2 id="runs">Runs</h2><details class="card fold"{is_open}><summary>{results["planned"]} runs'
        '</summary><div class="scroll"><table><thead><tr><th>variant</th><th>seed</th><th>state</th>'
        "<th>sampled</th><th>greedy</th><th>wall</th><th>processor</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _settings(results: Record) -> str:
    lines = [f"{key} = {literal(value)}" for key, value in results["set"].items()]
    for variant in results["variants"]:
        lines += ["", f"# {variant['name']}"]
        lines += [f"{key} = {literal(value)}" for key, value in variant["changes"].items()]
    return (
        '<h2 id="repeat">To repeat it</h2>'
        f'<div class="card"><pre>{escape(results["command"])}</pre></div>'
        f'<details class="card fold"><summary>Settings that differ from {escape(results["config"])}</summary>'
        f"<pre>{escape(chr(10).join(lines).strip())}</pre></details>"
    )


def _all_runs(results: Record) -> list[Record]:
    return [run for variant in results["variants"] for run in variant["runs"]]


def _finished_variants(results: Record) -> list[Record]:
    """Return the variants with a finished run."""
    return [one for one in results["variants"] if one["final"]["success"] is not None]


def _record_of(results: Record, name: str) -> Record:
    found: Record = next(one for one in results["variants"] if one["name"] == name)
    return found


def _label(curve: str) -> Any:
    return number_label if curve.endswith("reward") else percent_label


def _top(curve: str) -> float | None:
    return None if curve.endswith("reward") else 1.0


def _share(found: Record | None) -> str:
    if found is None:
        return "–"
    if found["low"] is None:
        return percent(found["mean"])
    ends = f"[{100 * found['low']:.0f}, {100 * found['high']:.0f}]"
    return f'{percent(found["mean"])} <span class="dim small">{ends}</span>'


def _difference(found: Record | None) -> str:
    if found is None:
        return "–"
    mean = 100 * found["mean"]
    ends, kind = "", "dim"
    if found["low"] is not None:
        ends = f' <span class="dim small">[{100 * found["low"]:+.0f}, {100 * found["high"]:+.0f}]</span>'
        kind = "up" if found["low"] > 0 else "down" if found["high"] < 0 else "dim"
    return f'<span class="{kind}">{mean:+.1f}</span>{ends}'


def _below(text: str) -> str:
    return f'<div class="dim small">{text}</div>'


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} s"
