"""Episodes as HTML: chat bubbles with tool calls, results, rewards and policy versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any

from agentrl_train.report.curves import number

_NONE: Mapping[int, str] = MappingProxyType({})

LONGEST_TEXT = 4000
"""Maximum number of characters shown per message."""

ENDS = {
    "terminated": ("ended by the task", ""),
    "truncated_turns": ("out of turns", "warn"),
    "truncated_time": ("out of time", "warn"),
    "truncated_length": ("context full", "warn"),
    "failed_environment": ("environment failed", "bad"),
    "failed_engine": ("engine failed", "bad"),
    "failed_reward": ("reward missing", "bad"),
}
REASONS = {"sub_agent": "sub-agent", "rewritten": "history rewritten"}


def episode_html(episode: Mapping[str, Any], *, title: str = "", tokens: Mapping[int, str] = _NONE) -> str:
    """Return one line of ``trajectories/*.jsonl`` as a card.

    ``tokens`` are shown below the messages of turns, by number of the turn.
    """
    messages = [one for one in episode.get("messages") or () if isinstance(one, Mapping)]
    bubbles = "".join(_conversation(messages, _segments(episode), tokens))
    error = episode.get("error")
    problem = f'<p class="small down">{_text(str(error))}</p>' if error else ""
    return (
        f'<div class="card episode"><div class="head">{_head(episode, title)}</div>'
        f'<div class="facts">{escape(_facts(episode))}</div>{problem}{bubbles}</div>'
    )


def _segments(episode: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in episode.get("segments") or () if isinstance(one, Mapping)]


def _conversation(
    messages: Iterable[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]], tokens: Mapping[int, str]
) -> Iterator[str]:
    """Yield the bubbles, with boxes around the bubbles of a segment and its inner segments."""
    open_boxes: list[int] = []
    for message in messages:
        path = _ancestry(message.get("segment"), segments)
        while open_boxes != path[: len(open_boxes)]:
            open_boxes.pop()
            yield "</div>"
        for one in (segments[index] for index in path[len(open_boxes) :]):
            words = f"{one.get('agent')} · {REASONS.get(str(one.get('reason')), one.get('reason'))}"
            yield f'<div class="segment"><div class="role">{escape(words)}</div>'
        open_boxes = path
        yield _bubble(message, tokens)
    yield "</div>" * len(open_boxes)


def _ancestry(segment: Any, segments: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return a segment and its ancestors without the first segment, outermost first."""
    path: list[int] = []
    while isinstance(segment, int) and 0 < segment < len(segments) and segment not in path:
        path.insert(0, segment)
        segment = segments[segment].get("parent")
    return path


def _head(episode: Mapping[str, Any], title: str) -> str:
    success = bool(episode.get("success"))
    end = str(episode.get("end", ""))
    words, kind = ENDS.get(end, (end or "end unknown", ""))
    failed = kind == "bad"
    badges = [] if failed else [badge("success" if success else "no success", "good" if success else "bad")]
    badges.append(badge(words, kind))
    if not failed and (reward := number(episode.get("reward"))) is not None:
        badges.append(badge(f"reward {reward:g}"))
    return f"<b>{escape(title or str(episode.get('task', 'episode')))}</b>{''.join(badges)}"


def _facts(episode: Mapping[str, Any]) -> str:
    facts = [f"{episode.get('task')}, {episode.get('split')} sample {episode.get('index')}"]
    turns = [one["turn"] for one in episode.get("messages") or () if _turn(one)]
    facts.append(f"{len(turns)} turn{'' if len(turns) == 1 else 's'}")
    if (count := len(_segments(episode))) > 1:
        facts.append(f"{count} segments")
    versions = [version for turn in turns for version in turn.get("versions") or ()]
    if versions:
        facts.append(f"policy version {_span(min(versions), max(versions))}")
    if episode.get("group_id") is not None:
        facts.append(f"group {episode['group_id']}")
    scores = episode.get("scores")
    for name, value in scores.items() if isinstance(scores, Mapping) else ():
        if (score := number(value)) is not None:
            facts.append(f"{name} {score:g}")
    if (seconds := number(episode.get("seconds"))) is not None:
        facts.append(f"{seconds:.1f} s")
    return " · ".join(facts)


def _bubble(message: Mapping[str, Any], tokens: Mapping[int, str]) -> str:
    role = str(message.get("role", "message"))
    text = _text(_plain(message.get("content")))
    body = f'<div class="text">{text}</div>' if text else ""
    calls = "".join(_call(call) for call in message.get("tool_calls") or ())
    if role in ("system", "developer"):
        return f'<details class="bubble"><summary>{escape(role)}</summary>{body}</details>'
    labels = "".join(f"<span>{label}</span>" for label in [escape(role), *_labels(message)])
    if thought := _text(_plain((_turn(message) or {}).get("thought"))):
        body = f'<details><summary>thought</summary><div class="text">{thought}</div></details>{body}'
    kind = role if role in ("assistant", "tool") else "user"
    sampled = tokens.get(_turn(message).get("number", -1), "")
    return f'<div class="bubble {kind}"><div class="role">{labels}</div>{body}{calls}{sampled}</div>'


def _labels(message: Mapping[str, Any]) -> Iterable[str]:
    turn = _turn(message)
    if not turn:
        return
    versions = turn.get("versions") or ()
    if versions:
        yield escape(f"version {_span(min(versions), max(versions))}")
    if turn.get("tokens") is not None:
        yield escape(f"{turn['tokens']} tokens")
    if turn.get("policy") not in (None, "current"):
        yield escape(f"{turn['policy']} policy")
    if turn.get("finish_reason") == "length":
        yield '<b class="down">cut off</b>'
    if invalid := number(turn.get("invalid_calls")):
        yield f'<b class="down">{invalid:g} invalid call{"" if invalid == 1 else "s"}</b>'
    if reward := number(turn.get("reward")):
        yield f'<b class="{"up" if reward > 0 else "down"}">reward {reward:+g}</b>'


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return ""
    name, arguments = str(function.get("name")), function.get("arguments")
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        values = None
    if isinstance(values, Mapping):
        listed = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
    else:
        listed = str(arguments)
    return f'<div class="call"><b>{escape(name)}</b>({_text(listed)})</div>'


def _plain(content: Any) -> str:
    """Return the content of a message as text. Other parts are shown by their type."""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping)]
        return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
    return "" if content is None else str(content)


def _text(text: str) -> str:
    rest = len(text) - LONGEST_TEXT
    if rest <= 0:
        return escape(text)
    return f'{escape(text[:LONGEST_TEXT])}<span class="cut"> … {rest:,} more characters</span>'


def _turn(message: Any) -> Mapping[str, Any]:
    turn = message.get("turn") if isinstance(message, Mapping) else None
    return turn if isinstance(turn, Mapping) else {}


def badge(text: str, kind: str = "") -> str:
    """Return a short text in a frame. ``kind`` is "good", "bad", "warn" or empty."""
    return f'<span class="badge {kind}">{escape(text)}</span>'


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
