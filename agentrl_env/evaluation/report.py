"""``report.html``: the results of an evaluation and its transcripts, in one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from agentrl_env.client.formatting import format_call, message_text
from agentrl_env.evaluation.record import EpisodeRecord, EvaluationError, EvaluationRun, TurnRecord
from agentrl_env.evaluation.summary import Estimate, Latency, Summary
from agentrl_env.types import FunctionCall, Message, ToolCall

LONGEST_TEXT = 20_000
"""Maximum number of characters shown of a message."""
TRANSCRIPTS = 200
"""Maximum number of shown episodes. Failed episodes come first, then episodes without success."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(
    path: str | os.PathLike[str], run: EvaluationRun, summary: Summary, *, transcripts: int = TRANSCRIPTS
) -> None:
    """Write the page, replacing an older one. Raises EvaluationError if it cannot be written.

    Args:
        path: The file.
        run: The evaluation.
        summary: Its results.
        transcripts: Maximum number of shown episodes.
    """
    temporary = Path(path).with_name(f".{Path(path).name}.tmp")
    page = report_html(run, summary, transcripts=transcripts)
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError as error:
        raise EvaluationError(f"{path} cannot be written: {error.strerror or error}") from error


def report_html(run: EvaluationRun, summary: Summary, *, transcripts: int = TRANSCRIPTS) -> str:
    """Return the page. All texts of models and environments are escaped."""
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    title = f"{summary.model} on {summary.task}/{summary.split}"
    sections = (
        f'<h1>{escape(title)}</h1><p class="dim">{escape(_facts(run, summary))}</p>',
        f'<div class="tiles">{"".join(_tiles(summary))}</div>',
        _several_attempts(summary),
        _table("Turns", ("", "p50", "p90", "p99", "max"), _latencies(summary)),
        _counts("Ends of episodes", summary.ends),
        _table(
            "Failures (not counted as results)",
            ("reason", "episodes", "by their turns"),
            [(reason, f"{n:,}", failed_after(summary, reason)) for reason, n in summary.failures.items()],
        ),
        _table("Metrics", ("metric", "mean"), [(k, f"{v:.4g}") for k, v in summary.metrics.items()]),
        _transcripts(run, transcripts),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>"
        f"<body><main>\n{chr(10).join(filter(None, sections))}\n</main></body></html>\n"
    )


def percent(estimate: Estimate | None) -> str:
    """Return a share as text, with its interval."""
    if estimate is None:
        return "–"
    return f"{estimate.value:.1%} ({estimate.low:.1%} – {estimate.high:.1%})"


def failed_after(summary: Summary, reason: str) -> str:
    """Return the number of failed episodes by number of turns, as text."""
    counts = summary.failed_after[reason]
    return ", ".join(
        f"{number:,} of {turns} turn{'' if turns == '1' else 's'}" for turns, number in counts.items()
    )


def _facts(run: EvaluationRun, summary: Summary) -> str:
    settings = run.settings
    facts = [f"{summary.samples} samples", f"{summary.attempts} attempts at each", f"seed {settings.seed}"]
    if settings.temperature is not None:
        facts.append(f"temperature {settings.temperature:g}")
    if settings.url:
        facts.append(settings.url)
    return " · ".join(facts)


def _tiles(summary: Summary) -> Iterator[str]:
    success, reward, tokens = summary.success, summary.reward, summary.tokens
    if success is not None:
        yield _tile("success", f"{success.value:.1%}", f"95 %: {success.low:.1%} – {success.high:.1%}")
    if reward is not None:
        yield _tile("mean reward", f"{reward.value:.3g}", f"95 %: {reward.low:.3g} – {reward.high:.3g}")
    yield _tile("episodes", f"{summary.episodes:,}", f"of {summary.planned:,} planned")
    yield _tile("failed", f"{summary.failed:,}", "endpoint, server or environment")
    if summary.turns is not None:
        yield _tile("turns of an episode", f"{summary.turns:.1f}", "mean")
    if tokens.output_per_episode is not None:
        note = f"{tokens.input or 0:,} read, {tokens.output or 0:,} written"
        yield _tile("tokens written in an episode", f"{tokens.output_per_episode:,.0f}", note)
    if tokens.cost is not None:
        yield _tile("cost", f"{tokens.cost:,.2f}", "at the prices given")


def _tile(name: str, value: str, note: str) -> str:
    parts = f"<span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(note)}</span>"
    return f'<div class="card tile">{parts}</div>'


def _several_attempts(summary: Summary) -> str:
    if summary.attempts == 1:
        return ""
    rows = [(str(k), f"{v:.1%}", f"{summary.pass_hat[k]:.1%}") for k, v in summary.pass_at.items()]
    return _table("Several attempts", ("k", "pass@k: one succeeds", "pass^k: all succeed"), rows)


def _latencies(summary: Summary) -> Iterator[tuple[str, ...]]:
    for name, found in (("model", summary.model_latency), ("environment", summary.environment_latency)):
        if found is not None:
            yield (name, *(_seconds(getattr(found, key)) for key in Latency.model_fields))


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def _counts(title: str, counts: Mapping[str, int]) -> str:
    return _table(title, ("", "episodes"), [(name, f"{number:,}") for name, number in counts.items()])


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return f'<h2>{escape(title)}</h2><div class="card"><table><tr>{head}</tr>{body}</table></div>'


def _transcripts(run: EvaluationRun, most: int) -> str:
    found = (run.episodes.get(key) for key in run.settings.plan())
    episodes = [episode for episode in found if episode is not None]
    episodes.sort(key=lambda episode: (episode.failed is None, episode.success))
    shown = "".join(map(_episode, episodes[:most]))
    left = len(episodes) - most
    note = f'<p class="dim">{left:,} more are in episodes.jsonl.</p>' if left > 0 and most else ""
    return f"<h2>Episodes</h2>{shown}{note}" if shown else ""


def _episode(episode: EpisodeRecord) -> str:
    kind, word = ("good", "success") if episode.success else ("bad", "no success")
    if episode.failed is not None:
        kind, word = "warn", "failed"
    count = len(episode.turns)
    facts = [f"attempt {episode.attempt + 1}", episode.end, f"{count} turn{'' if count == 1 else 's'}"]
    facts += [f"reward {episode.reward:g}"] if episode.failed is None else []
    facts += [f"{episode.seconds:.1f} s"]
    error = f'<p class="warn">{_text(episode.error)}</p>' if episode.error else ""
    turns = "".join(map(_turn, episode.turns))
    return (
        f'<details><summary>sample {escape(str(episode.index))} <b class="{kind}">{word}</b> '
        f'<span class="dim">{escape(" · ".join(facts))}</span></summary>{error}'
        f"{''.join(map(_message, episode.opening))}{turns}</details>"
    )


def _turn(turn: TurnRecord) -> str:
    facts = [_seconds(turn.model_s)] if turn.model_s is not None else []
    facts += [f"{turn.usage.output} tokens"] if turn.usage.output is not None else []
    facts += ["cut off"] if turn.finish_reason == "length" else []
    facts += [f"reward {turn.reward:+g}"] if turn.reward else []
    thought = f"<details><summary>thought</summary><pre>{_text(turn.thought)}</pre></details>"
    said = _message(turn.action, facts, thought if turn.thought else "")
    return said + "".join(map(_message, turn.messages)) + _user(turn.info.get("user"))


def _user(hidden: object) -> str:
    """Return the part of a user that the model does not see: instructions, thoughts and tool calls."""
    if not isinstance(hidden, Mapping):
        return ""
    parts = [str(hidden["instructions"])] if hidden.get("instructions") else []
    for message in hidden.get("messages", ()):
        parts += [f"thought: {message['thought']}"] if message.get("thought") else []
        for made in message.get("calls", ()):
            call = ToolCall(id="", function=FunctionCall.model_validate(made["call"]))
            parts.append(f"{format_call(call)}: {made['answer']}")
    text = "\n".join(parts)
    return f"<details><summary>user, hidden</summary><pre>{_text(text)}</pre></details>" if parts else ""


def _message(message: Message, facts: Sequence[str] = (), before: str = "") -> str:
    text = message_text(message)
    body = f"<pre>{_text(text)}</pre>" if text else ""
    calls = "".join(f'<div class="call">{_text(format_call(c))}</div>' for c in message.tool_calls or ())
    role = escape(" · ".join([message.role, *facts]))
    return f'<div class="message {message.role}"><div class="role">{role}</div>{before}{body}{calls}</div>'


def _text(text: str | None) -> str:
    shown = escape((text or "")[:LONGEST_TEXT])
    left = len(text or "") - LONGEST_TEXT
    return f"{shown} … {left:,} more characters" if left > 0 else shown
