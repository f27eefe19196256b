"""``report.html``: a self-contained page about a run, built from the files in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl_env.evaluation.statistics import mean_change
from agentrl_train.errors import RunFolderError
from agentrl_train.report.charts import Interval, interval_axis, interval_chart, number_label
from agentrl_train.report.curves import Source, curves, number, task_values
from agentrl_train.report.efficiency import efficiency
from agentrl_train.report.episodes import episode_html
from agentrl_train.report.html import document, duration, fold, percent, section_head, tile
from agentrl_train.storage.atomic_io import run_folder_errors, write_file
from agentrl_train.telemetry.diagnosis import LARGE_GAP, RECENT
from agentrl_train.telemetry.metrics import read_jsonl

Record = Mapping[str, Any]

EXAMPLES_PER_TASK = 2
STEPS_SHOWN = 4
"""Number of training steps with shown episodes, spread over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Contents of a run folder. Every part can be missing."""

    name: str
    steps: Sequence[Record]
    evaluations: Sequence[Record]
    summary: Record | None
    config: str
    episodes: Mapping[str, Sequence[Record]]
    """Name of a file in ``trajectories/`` -> its episodes."""

    @property
    def tasks(self) -> list[str]:
        """Return all tasks, in order of appearance."""
        evaluated = [str(line["task"]) for line in self.evaluations if "task" in line]
        trained = [task for step in self.steps for task in task_values(step)]
        return list(dict.fromkeys([*evaluated, *trained]))

    def evaluation(self, name: str, task: str) -> Record | None:
        """Return the last evaluation with this name, or None."""
        found = [one for one in self.evaluations if (one.get("name"), one.get("task")) == (name, task)]
        return found[-1] if found else None

    def recent_success(self, task: str) -> float | None:
        """Return the success of a task's training episodes in the last steps."""
        values = [number(task_values(step).get(task, {}).get("success")) for step in self.steps[-RECENT:]]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None


RUN_FILES = ("config.toml", "metrics.jsonl", "trajectories", "summary.json")
"""Files and folders of a run. A folder with one of them is a run folder."""


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    Raises ``RunFolderError`` if the folder does not exist, has no file of a run, or cannot be written.
    """
    check_run_folder(folder)
    path = folder / "report.html"
    with run_folder_errors(folder):
        write_file(path, render(read_run(folder)).encode("utf-8", errors="replace"))
    return path


def check_run_folder(folder: Path) -> None:
    """Raise ``RunFolderError`` if a path is not a folder, or has no file of a run."""
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder; give the path of a run folder, such as runs/NAME.")
    if not any((folder / name).exists() for name in RUN_FILES):
        names = ", ".join(RUN_FILES)
        raise RunFolderError(
            f"{folder} has none of {names}; give the path of a run folder, such as runs/NAME."
        )


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. Unreadable files are skipped."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = None
    config = folder / "config.toml"
    files = sorted((folder / "trajectories").glob("*.jsonl"))
    held_out = [path for path in files if path.stem.startswith("held_out")]
    trained = [path for path in files if path.stem.startswith("step_")]
    steps = [line for line in read_jsonl(folder / "metrics.jsonl") if number(line.get("step")) is not None]
    return RunRecord(
        name=folder.resolve().name,
        steps=list({line["step"]: line for line in steps}.values()),
        evaluations=read_jsonl(folder / "evaluations.jsonl"),
        summary=summary if isinstance(summary, dict) else None,
        config=config.read_text(encoding="utf-8", errors="replace") if config.exists() else "",
        episodes={path.stem: read_jsonl(path) for path in [*held_out, *_spread(trained, STEPS_SHOWN)]},
    )


def render(run: RunRecord) -> str:
    """Return the page."""
    numbers = (_header, results, task_metrics, _curves, _efficiency)
    texts = (_comparisons, _training_episodes, _config)
    body = "\n".join(part for part in (section(run) for section in (*numbers, *texts)) if part)
    return document(run.name, body)


def _header(run: RunRecord) -> str:
    last = run.steps[-1] if run.steps else {}
    summary = run.summary or {}
    badge = '<span class="badge good">finished</span>'
    if run.summary is None:
        badge = '<span class="badge warn">not finished</span>'
    version = summary.get("policy_version", last.get("policy_version"))
    facts = [f"{int(last['step'])} steps"] if last else ["no step was trained"]
    facts += [f"policy version {version}"] if version is not None else []
    facts += [f"seed {summary['seed']}"] if "seed" in summary else []
    return (
        f'<header><div class="line"><h1>{escape(run.name)}</h1>{badge}</div>'
        f'<div class="dim">{escape(" · ".join(facts))}</div></header>'
        f'<div class="tiles">{"".join(tiles(run))}</div>'
    )


def tiles(run: RunRecord) -> Iterable[str]:
    """Yield a card for each of the main numbers of a run."""
    last = run.steps[-1] if run.steps else {}
    summary = run.summary or {}
    before, after = _mean_success(run, "before"), _mean_success(run, "after")
    if after is not None:
        gain = "" if before is None else f"from {percent(before)} before"
        yield tile("Held-out success", percent(after), gain)
    elif before is not None:
        yield tile("Held-out success", percent(before), "before training")
    seconds = number(summary.get("seconds", last.get("elapsed_s")))
    if seconds is not None:
        yield tile("Time", duration(seconds), f"{len(run.steps)} steps recorded")
    tokens = number(summary.get("trained_tokens")) or sum(_values(run, "loss_tokens"))
    if tokens:
        speed = _values(run, "trained_tokens_per_s")
        yield tile("Trained tokens", number_label(tokens), f"{fmean(speed):,.0f} per second" if speed else "")
    if staleness := _values(run, "staleness_mean"):
        most = max(_values(run, "staleness_max"), default=max(staleness))
        yield tile("Staleness", f"{fmean(staleness):.2f}", f"steps, at most {most:g}")
    if idle := _values(run, "trainer_idle"):
        engine = _values(run, "engine_idle")
        note = f"engine {percent(fmean(engine))}" if engine else ""
        yield tile("Trainer idle", percent(fmean(idle)), note)


def results(run: RunRecord) -> str:
    """Return the table of held-out success, or "" without an evaluation."""
    tasks = [task for task in run.tasks if run.evaluation("before", task) or run.evaluation("after", task)]
    if not tasks:
        return ""
    rows = "".join(
        _result_row(
            task, run.evaluation("before", task), run.evaluation("after", task), run.recent_success(task)
        )
        for task in tasks
    )
    if len(tasks) > 1:
        before, after = _mean_success(run, "before"), _mean_success(run, "after")
        rows += (
            f'<tr class="mean"><td>mean</td><td>{percent(before)}</td><td>{percent(after)}</td>'
            f"<td>{_change(*_shares(run, tasks))}</td><td></td><td></td>"
            '<td class="picture"></td></tr>'
        )
    return (
        '<h2 id="results">Held-out success</h2>'
        '<div class="legend"><span>Share of held-out episodes that succeed, with its 95% interval. A change '
        "is grey if its interval includes 0. In training: share of the episodes of the last "
        f"{RECENT} steps</span>"
        '<span class="key c7"><i></i>before</span><span class="key c0"><i></i>after</span></div>'
        '<div class="card scroll"><table><thead><tr><th>task</th><th>before</th><th>after</th>'
        f"<th>change</th><th>in training</th><th>episodes</th>"
        f'<th class="picture">{interval_axis()}</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _result_row(task: str, before: Record | None, after: Record | None, trained: float | None) -> str:
    old, new = _interval(before), _interval(after)
    kind = "down" if new and trained is not None and trained - new.high > LARGE_GAP else ""
    episodes = (after or before or {}).get("episodes", "")
    change = _change([old], [new])
    return (
        f"<tr><td>{escape(task)}</td><td>{_share(old)}{_greedy(before)}</td>"
        f"<td>{_share(new)}{_greedy(after)}</td><td>{change}</td>"
        f'<td class="{kind}">{percent(trained)}</td>'
        f'<td>{escape(str(episodes))}</td><td class="picture">{interval_chart(old, new)}</td></tr>'
    )


def task_metrics(run: RunRecord) -> str:
    """Return the table of the tasks' metrics before and after training, or "" without metrics."""
    rows = ""
    for task in run.tasks:
        before, after = (_metric_means(run.evaluation(name, task)) for name in ("before", "after"))
        for name in dict.fromkeys([*before, *after]):
            cells = "".join(
                f"<td>{'–' if value is None else number_label(value)}</td>"
                for value in (before.get(name), after.get(name))
            )
            rows += f"<tr><td>{escape(task)}</td><td>{escape(name)}</td>{cells}</tr>"
    if not rows:
        return ""
    note = "Means of the values that score() returns, over the held-out episodes that have them."
    return (
        f"{section_head('metrics', 'Metrics of the tasks', note)}"
        '<div class="card scroll"><table><thead><tr><th>task</th><th>metric</th><th>before</th>'
        f"<th>after</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _metric_means(line: Record | None) -> dict[str, float]:
    metrics = (line or {}).get("metrics")
    values = metrics if isinstance(metrics, Mapping) else {}
    return {str(name): value for name, given in values.items() if (value := number(given)) is not None}


def _share(one: Interval | None) -> str:
    if one is None:
        return "–"
    low, high = 100 * one.low, 100 * one.high
    return f'{percent(one.value)} <span class="dim small">[{low:.0f}, {high:.0f}]</span>'


def _greedy(evaluation: Record | None) -> str:
    success = number((evaluation or {}).get("greedy"))
    return "" if success is None else f'<div class="dim small">greedy {percent(success)}</div>'


def _shares(run: RunRecord, tasks: Sequence[str]) -> list[list[Interval | None]]:
    """Return the success of tasks before and after training."""
    return [[_interval(run.evaluation(name, task)) for task in tasks] for name in ("before", "after")]


def _change(before: Sequence[Interval | None], after: Sequence[Interval | None]) -> str:
    """Return the mean change in points with its 95 % interval. It is grey if the interval includes 0."""
    old, new = ([(one.value, one.low, one.high) for one in found if one] for found in (before, after))
    if not len(old) == len(new) == len(before):
        return "–"
    points, low, high = (100 * one for one in mean_change(old, new))
    kind = "up" if low > 0 else "down" if high < 0 else "dim"
    ends = f'<div class="dim small">[{low:+.1f}, {high:+.1f}]</div>'
    return f'<span class="{kind}">{points:+.1f} points</span> {ends}'


def _curves(run: RunRecord) -> str:
    charts = curves([source(run)], tasks=run.tasks)
    if not charts:
        return ""
    head = section_head("curves", "Curves", "Moving averages over training steps; single steps are faint.")
    return f'{head}<div class="charts">{charts}</div>'


def _efficiency(run: RunRecord) -> str:
    cards = efficiency(run.steps)
    if not cards:
        return ""
    note = "Over the whole run. Open trace.json at ui.perfetto.dev for a timeline."
    return f'{section_head("efficiency", "Time and tokens", note)}<div class="charts">{cards}</div>'


def source(run: RunRecord) -> Source:
    """Return the data for the curves of a run."""
    return Source(name=run.name, steps=run.steps, held_out=_held_out_marks(run))


def _held_out_marks(run: RunRecord) -> dict[str, list[tuple[float, float]]]:
    """Return (policy version, success) of the held-out evaluations by task."""
    marks: dict[str, dict[float, float]] = {}
    for line in run.evaluations:
        version, success = number(line.get("policy_version")), number(line.get("success"))
        if version is not None and success is not None:
            # The last one wins: a resumed run repeats some evaluations.
            marks.setdefault(str(line.get("task")), {})[version] = success
    return {task: sorted(found.items()) for task, found in marks.items()}


def _comparisons(run: RunRecord) -> str:
    """Show the same held-out samples before and after training, side by side."""
    parts: list[str] = []
    for task in run.tasks:
        before, after = _held_out(run, "before", task), _held_out(run, "after", task)
        both = [key for key in before if key in after]
        # Samples that training changed come first.
        both.sort(key=lambda key: bool(before[key].get("success")) - bool(after[key].get("success")))
        for key in both[:EXAMPLES_PER_TASK]:
            cards = episode_html(before[key], title="Before") + episode_html(after[key], title="After")
            title = f"{task}, sample {before[key].get('index')}: {_outcomes(before[key], after[key])}"
            parts.append(fold(title, cards, is_open=not parts))
        if not both:
            shown = list(before.values()) or list(after.values())
            cards = "".join(episode_html(one) for one in shown[:EXAMPLES_PER_TASK])
            parts += [fold(f"{task}, held-out samples", cards, is_open=not parts)] if cards else []
    if not parts:
        return ""
    note = "Held-out samples that the policy never trained on."
    return section_head("examples", "The same problem, before and after", note) + "".join(parts)


def _training_episodes(run: RunRecord) -> str:
    """Show the episodes of a few training steps, collapsed."""
    parts = []
    for name, episodes in run.episodes.items():
        if name.startswith("step_") and episodes:
            cards = "".join(episode_html(one) for one in episodes)
            parts.append(fold(f"Step {name.removeprefix('step_').lstrip('0')}", cards))
    if not parts:
        return ""
    note = "The best and the worst sibling of some groups, from steps spread over the run."
    return section_head("episodes", "Training episodes", note) + "".join(parts)


def _config(run: RunRecord) -> str:
    if not run.config:
        return ""
    return (
        '<h2 id="configuration">Configuration</h2><details class="card fold"><summary>config.toml</summary>'
        f"<pre>{escape(run.config)}</pre></details>"
    )


def _held_out(run: RunRecord, name: str, task: str) -> dict[tuple[str, str], Record]:
    episodes = run.episodes.get(f"held_out_{name}", ())
    return {_sample(one): one for one in episodes if one.get("task") == task}


def _outcomes(before: Record, after: Record) -> str:
    words = ["success" if one.get("success") else "no success" for one in (before, after)]
    return f"{words[0]} → {words[1]}"


def _sample(episode: Record) -> tuple[str, str]:
    return str(episode.get("split")), str(episode.get("index"))


def _spread(items: Sequence[Path], most: int) -> list[Path]:
    """Return up to ``most`` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _mean_success(run: RunRecord, name: str) -> float | None:
    found = [_interval(run.evaluation(name, task)) for task in run.tasks]
    values = [one.value for one in found if one is not None]
    return fmean(values) if values else None


def _interval(line: Record | None) -> Interval | None:
    value, low, high = (number((line or {}).get(key)) for key in ("success", "low", "high"))
    if value is None:
        return None
    return Interval(value=value, low=value if low is None else low, high=value if high is None else high)


def _values(run: RunRecord, name: str) -> list[float]:
    return [value for step in run.steps if (value := number(step.get(name))) is not None]
