"""The table of ``agentrl-env check --quality``: a row for each task, and one for each of its splits."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from agentrl_env.testing.quality import Load, SplitQuality, TaskQuality, mean
from agentrl_env.testing.unskilled import UNSKILLED

_POLICIES = (*UNSKILLED, "expert")


def quality_table(tasks: Sequence[TaskQuality]) -> Table:
    """Return a table of several tasks. Empty columns are omitted."""
    columns: dict[str, list[str]] = {}
    names: list[Text] = []
    for task in tasks:
        rows = [(Text(task.task, style="bold"), _task_cells(task))]
        if len(task.splits) > 1:
            rows += [(Text(f"  {name}", style="dim"), _split_cells(s)) for name, s in task.splits.items()]
        for name, cells in rows:
            for header in [*columns, *cells]:
                column = columns.setdefault(header, [])
                column += [""] * (len(names) - len(column))
                if len(column) == len(names):
                    column.append(cells.get(header, ""))
            names.append(name)
    title = "Success and mean reward of each policy, and what an episode costs"
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("task", no_wrap=True)
    shown = [header for header, column in columns.items() if any(column)]
    for header in shown:
        table.add_column(header, justify="right", no_wrap=True)
    for number, name in enumerate(names):
        table.add_row(name, *(columns[header][number] for header in shown))
    return table


def _task_cells(task: TaskQuality) -> dict[str, str]:
    """Return the cells of a task: means over its splits, and the load of its server."""
    splits = list(task.splits.values())
    if len(splits) == 1:
        cells = _split_cells(splits[0])
    else:
        best = task.best_unskilled()
        typical = "random" if task.mean("expert", "turns") is None else "expert"
        cells = {
            name: _pair(task.mean(name, "success"), task.mean(name, "reward"), *_counts(name, splits))
            for name in _POLICIES
        }
        cells |= {
            "best": _number(best.best if best else None),
            "turns": _number(task.mean(typical, "turns"), 1),
            "chars": _number(task.mean(typical, "characters"), 0),
            "differ": "",
            "failed": str(sum(own.failed for split in splits for own in split.policies.values()) or ""),
        }
        cells |= _model_cells(splits, task.mean("model", "turns"), task.mean("model", "tokens"))
    return cells | {"same": f"{task.repeated}/{task.replayed}"} | _load_cells(task.load)


def _split_cells(split: SplitQuality) -> dict[str, str]:
    own = split.policies
    typical = own.get("expert", own["random"])
    best = [own[name].best for name in UNSKILLED if name in own]
    cells = {
        name: _pair(own[name].success, own[name].reward, *_counts(name, [split])) if name in own else ""
        for name in _POLICIES
    }
    cells |= {
        "best": _number(max((value for value in best if value is not None), default=None)),
        "turns": _number(typical.turns, 1),
        "chars": _number(typical.characters, 0),
        "differ": "" if split.distinct is None else f"{split.distinct}/{split.played}",
        "failed": str(sum(score.failed for score in own.values()) or ""),
    }
    if split.groups is not None:
        cells |= _model_cells([split], own["model"].turns, own["model"].tokens)
    return cells


def _counts(policy: str, splits: Sequence[SplitQuality]) -> tuple[int, int]:
    """Return the number of a policy's episodes that did not fail, and the number requested."""
    found = [split.policies[policy].whole for split in splits if policy in split.policies]
    return sum(found), sum(split.asked for split in splits)


def _model_cells(splits: Sequence[SplitQuality], turns: float | None, tokens: float | None) -> dict[str, str]:
    """Return the cells of a model: means over splits."""
    groups = [split.groups for split in splits if split.groups is not None]
    if not groups:
        return {}
    played, asked = sum(group.groups for group in groups), sum(split.asked for split in splits)
    return {
        "pass@1": _percent(mean(group.pass_1 for group in groups)) + _of(played, asked),
        f"pass@{groups[0].size}": _percent(mean(group.pass_k for group in groups)),
        "signal": _percent(mean(group.signal for group in groups)),
        "model turns": _number(turns, 1),
        "tokens": _number(tokens, 0),
    }


def _load_cells(load: Load | None) -> dict[str, str]:
    if load is None:
        return {}
    return {
        "epis./s": _number(load.episodes_per_s, 0),
        "steps/s": _number(load.steps_per_s, 0),
        "MB each": _number(load.mb_per_session),
        "start s": _number(load.start_s, 1),
        "held": f"{load.sessions}/{load.asked}",
    }


def _pair(success: float | None, reward: float | None, played: int, asked: int) -> str:
    return "" if success is None else f"{_percent(success)}{_of(played, asked)} {_number(reward)}"


def _of(played: int, asked: int) -> str:
    """Return the note on a share that is based on fewer episodes than were requested."""
    return f" of {played}" if played < asked else ""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
