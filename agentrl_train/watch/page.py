"""The parts of the live page as HTML: overview, curves, list of episodes, one episode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from urllib.parse import urlencode

from agentrl_train.report.curves import curves
from agentrl_train.report.efficiency import efficiency
from agentrl_train.report.episodes import badge, episode_html
from agentrl_train.report.html import section_head
from agentrl_train.report.page import results, source, task_metrics, tiles
from agentrl_train.watch.episodes import PAGE, Entry, Filter
from agentrl_train.watch.run import WatchedRun
from agentrl_train.watch.tokens import Vocabulary, token_views

COLOURINGS = (("probability", "probability"), ("advantage", "advantage"), ("version", "policy version"))
"""Values and labels of the choices for colouring tokens."""


def overview(runs: Sequence[WatchedRun], numbers: Sequence[str]) -> str:
    """Return the state and the main numbers of each run, and the tables of its evaluations.

    Args:
        runs: the runs.
        numbers: the result of ``numbers`` for each run.
    """
    return "\n".join(_header(run) + of_run for run, of_run in zip(runs, numbers, strict=True))


def _header(run: WatchedRun) -> str:
    state, planned = run.state(), run.planned_steps
    facts = [f"step {run.step:,}" + (f" of {planned:,}" if planned else "")]
    if run.record.steps and (version := run.record.steps[-1].get("policy_version")) is not None:
        facts.append(f"policy version {version}")
    if run.episodes.waiting and state.badge == "running":
        facts.append(f"{run.episodes.waiting:,} finished groups wait to be trained")
    note = f'<p class="dim">{escape(state.note)}</p>' if state.note else ""
    return (
        f'<header><div class="line"><h1>{escape(run.name)}</h1>{badge(state.badge, state.kind)}</div>'
        f'<div class="dim">{escape(" · ".join(facts))}</div>{note}</header>'
    )


def numbers(run: WatchedRun) -> str:
    """Return the main numbers of a run and the tables of its evaluations. They depend only on its records."""
    cards = "".join(tiles(run.record))
    shown = f'<div class="tiles">{cards}</div>' if cards else ""
    return shown + results(run.record) + task_metrics(run.record)


def curve_section(runs: Sequence[WatchedRun]) -> str:
    """Return the charts. Two runs are in the same charts, the second dashed."""
    tasks = list(dict.fromkeys(task for run in runs for task in run.tasks))
    charts = curves([replace(source(run.record), steps=run.thinned.means()) for run in runs], tasks=tasks)
    if not charts:
        return '<p class="dim">No step is trained yet.</p>'
    sizes = [run.thinned.size for run in runs]
    note = "Moving averages over training steps; single steps are faint."
    if max(sizes) > 1:
        each = " and ".join(f"{size:,}" for size in dict.fromkeys(sizes))
        note = f"Each point is the mean of {each} steps. Lines are moving averages; single points are faint."
    if len(runs) > 1:
        note = f"{note} Solid: {runs[0].name}. Dashed: {runs[1].name}."
    return f'{section_head("curves", "Curves", note)}<div class="charts">{charts}</div>{_uses(runs)}'


def _uses(runs: Sequence[WatchedRun]) -> str:
    parts = []
    for run in runs:
        if cards := efficiency(run.record.steps):
            title = "Time and tokens" + f", {run.name}" * (len(runs) > 1)
            head = section_head("efficiency", title, "Over the whole run.")
            parts.append(f'{head}<div class="charts">{cards}</div>')
    return "".join(parts)


def episode_list(run: WatchedRun, number: int, chosen: Filter, page: int) -> str:
    """Return a page of the episodes of a run, the ``number``-th of the watched runs."""
    found = run.episodes.select(chosen)
    last = max(0, (len(found) - 1) // PAGE)
    page = min(max(page, 0), last)
    rows = "".join(_row(one, number) for one in found[page * PAGE : (page + 1) * PAGE])
    facts = [f"{len(found):,} episode{'' if len(found) == 1 else 's'}"]
    if last:
        facts.append(f"page {page + 1:,} of {last + 1:,}")
    if run.episodes.pending:
        facts.append(f"reading {run.episodes.pending:,} more files")
    return (
        f'<p class="dim small">{escape(" · ".join(facts))}</p>{rows}<p class="pages">'
        f'<button type="button" data-page="{page - 1}"{"" if page else " disabled"}>Newer</button>'
        f'<button type="button" data-page="{page + 1}"{"" if page < last else " disabled"}>Older</button></p>'
    )


def _row(one: Entry, run: int) -> str:
    kind = "bad" if one.failed or not one.success else "good"
    outcome = one.end.replace("_", " ") if one.failed else "success" if one.success else "no success"
    badges = badge(outcome, kind)
    if one.reward is not None and not one.failed:
        badges += badge(f"reward {one.reward:g}")
    if one.held_out:
        badges += badge("held-out")
    elif one.step is None:
        badges += badge("not trained yet", "warn")
    facts = [] if one.step is None else [f"{'after ' if one.held_out else ''}step {one.step}"]
    facts += [f"{one.split} sample {one.sample}", f"{one.turns} turn{'' if one.turns == 1 else 's'}"]
    facts += [] if one.group is None else [f"group {one.group}"]
    facts += [] if one.seconds is None else [f"{one.seconds:.1f} s"]
    address = urlencode({"run": run, "key": json.dumps(one.key)})
    return (
        f'<details class="card fold episode-row" data-load="episode?{escape(address)}">'
        f'<summary><b>{escape(one.task)}</b>{badges}<span class="dim small">{escape(" · ".join(facts))}'
        '</span></summary><div class="inside"></div></details>'
    )


def episode(run: WatchedRun, vocabulary: Vocabulary, key: tuple[str, int, int]) -> str:
    """Return one episode with its tokens, or a sentence if it is no longer on disk."""
    found = run.episodes.load(key)
    if found is None:
        return '<p class="dim">This episode is no longer on disk: a checkpoint made its journal obsolete.</p>'
    shown, tokens = found
    views = token_views(tokens, vocabulary)
    trained = any(turn.get("advantages") for turn in (tokens or {}).get("turns") or ())
    note = "Point at a token, or tap it, for its log-probability, advantage and policy version."
    if not views:
        note = "The tokens of this episode were not recorded."
    elif not trained:
        note += " Advantages are recorded for the episodes of a step that trajectories/ keeps."
    return f'<p class="dim small">{escape(note)}</p>{episode_html(shown, tokens=views)}'


def options(choices: Sequence[tuple[str, str]]) -> str:
    """Return the options of a select element from values and labels."""
    return "".join(f'<option value="{escape(value)}">{escape(label)}</option>' for value, label in choices)


def document() -> str:
    """Return the page, which loads the data of the runs itself."""
    kinds = (("", "all"), ("trained", "trained"), ("waiting", "not trained yet"), ("held-out", "held-out"))
    outcomes = (("", "any"), ("success", "success"), ("no success", "no success"), ("failed", "failed"))
    orders = (("newest", "newest"), ("lowest", "lowest reward"), ("highest", "highest reward"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<title>agentrl-train watch</title><link rel="stylesheet" href="watch.css">'
        '<link rel="icon" href="data:,"><script type="module" src="watch.js"></script></head><body><main>'
        '<div id="trouble" class="card" role="status" hidden></div>'
        '<section id="overview" aria-label="Overview"></section>'
        '<section id="curves" aria-label="Curves"></section>'
        f"{section_head('episodes', 'Episodes', 'They appear as they finish; open one for its tokens.')}"
        '<form id="filter"><label hidden>run <select name="run"></select></label>'
        '<label>task <select name="task"><option value="">all</option></select></label>'
        f'<label>show <select name="kind">{options(kinds)}</select></label>'
        f'<label>outcome <select name="outcome">{options(outcomes)}</select></label>'
        f"{_bounds('reward', 'lowest', 'highest')}{_bounds('step', 'first_step', 'last_step')}"
        f'<label>order <select name="order">{options(orders)}</select></label>'
        f'<label>colour tokens by <select id="colouring">{options(COLOURINGS)}</select></label></form>'
        '<p id="newer" hidden><button type="button">Show new episodes</button></p>'
        '<section id="list" data-colour="probability" aria-label="Episodes"></section></main>'
        '<div id="tip" role="tooltip" hidden></div>'
        '<dialog id="ask-token"><form method="dialog"><label>Token of this page<input id="token" '
        'type="password" autocomplete="off" required></label><button>Continue</button></form></dialog>'
        "<noscript>This page needs JavaScript. report.html in the run folder does not.</noscript>"
        "</body></html>\n"
    )


def _bounds(label: str, low: str, high: str) -> str:
    return (
        f'<label class="bounds">{label} <input name="{low}" type="number" step="any" aria-label="{label}, '
        f'at least" placeholder="from"><input name="{high}" type="number" step="any" aria-label="{label}, '
        'at most" placeholder="to"></label>'
    )
