"""Recorded episodes as spans, by OpenTelemetry's conventions for generative AI.

An episode is one trace. Its spans, for a task ``shop`` of the run ``mine``::

    invoke_agent shop            the episode
        chat mine                a turn: from the request to the completion
        execute_tool search      a call: from the completion to the reply of the environment
        invoke_agent delegate    the turns and calls of a sub-agent

The environment executes the calls of a turn in one step, so their spans have the same times. A call without a
recorded reply has no span: it was not executed, for example because the context was full. Ids are hashes, so
that the same episode has the same spans in every export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from agentrl_train.report.curves import number
from agentrl_train.report.transcript import Recorded

PROVIDER = "agentrl"
"""``gen_ai.provider.name``: the engine of the run."""
MAIN = 0
"""Number of the segment of the main agent."""
_FACTS = (
    "task",
    "split",
    "index",
    "group_id",
    "sibling",
    "admitted_version",
    "end",
    "error",
    "reward",
    "success",
)
_TURN_FACTS = ("reward", "policy", "invalid_calls")

Attribute = str | bool | int | float | Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpan:
    """One span of an episode."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    """None for the episode itself."""
    start_ns: int
    """Nanoseconds since the Unix epoch."""
    end_ns: int
    attributes: Mapping[str, Attribute]
    calls_model: bool = False
    error: str | None = None
    """Reason of a failure."""


class _Interval(NamedTuple):
    """Seconds since the start of the episode."""

    start: float
    end: float


_NOTHING = _Interval(0.0, 0.0)


@dataclass(slots=True, kw_only=True)
class _Turn:
    number: int
    message: Mapping[str, Any]
    segment: int
    context: Sequence[Mapping[str, Any]]
    """Messages before the completion."""
    results: dict[Any, Any] = field(default_factory=dict)
    """Results of its calls, by their ids."""
    chat: _Interval = _NOTHING
    tools: _Interval = _NOTHING

    @property
    def facts(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.message["turn"]
        return found

    @property
    def replied(self) -> bool:
        """Return True if the record has the time of a reply."""
        return len(self.facts.get("times") or ()) > 2


def episode_spans(recorded: Recorded, *, run: str, messages: bool = False) -> list[EpisodeSpan]:
    """Return the spans of an episode, parents first.

    If an episode was recorded without times, its duration is divided evenly among its turns, and its spans
    have the attribute ``agentrl.times_estimated``.

    Args:
        recorded: the episode.
        run: name of the run, which is the name of its policy.
        messages: include messages, and the arguments and results of calls.
    """
    return list(_Trace(recorded, run=run, messages=messages).spans())


class _Trace:
    """Creates the spans of one episode."""

    def __init__(self, recorded: Recorded, *, run: str, messages: bool) -> None:
        self._episode = recorded.episode
        self._source = recorded.source
        self._run = run
        self._messages = messages
        self._conversation = recorded.name(run)
        identity = [self._conversation, self._episode.get("started"), self._episode.get("seed")]
        self._digest = hashlib.sha256(json.dumps(identity).encode()).digest()
        self._turns = _turns(self._episode)
        self._segments: Sequence[Mapping[str, Any]] = self._episode.get("segments") or ({},)
        self._agents = _agents(self._segments)
        self._tokens = (recorded.tokens() or {}).get("turns", [])
        seconds = number(self._episode.get("seconds")) or 0.0
        started = number(self._episode.get("started"))
        self._estimated = started is None or not all(turn.facts.get("times") for turn in self._turns)
        if started is None:
            started = recorded.path.stat().st_mtime - seconds  # the file is written after the episode
        self._started_ns = round(started * 1e6) * 1000
        if self._estimated:
            _share(self._turns, seconds)
        else:
            _place(self._turns)
        self._intervals = self._agent_intervals(seconds)

    def spans(self) -> Iterator[EpisodeSpan]:
        """Yield the episode, its sub-agents, and its turns with their calls."""
        for segment in sorted(self._intervals):
            yield self._agent_span(segment)
        for turn in self._turns:
            yield self._chat_span(turn)
            yield from self._tool_spans(turn)

    def _agent_intervals(self, seconds: float) -> dict[int, _Interval]:
        """Return the interval of each agent, with its sub-agents, by the segment that it starts with."""
        found = {MAIN: _Interval(0.0, seconds)}
        for turn in self._turns:
            agent, inner = self._agents[turn.segment], _union(turn.chat, turn.tools)
            found[agent] = _union(found.get(agent, inner), inner)
        for agent in sorted(found, reverse=True):
            if agent != MAIN:
                caller = self._caller(agent)
                found[caller] = _union(found[caller], found[agent])
        return found

    def _caller(self, agent: int) -> int:
        """Return the agent that opened the first segment of a sub-agent."""
        parent: int = self._segments[agent]["parent"]
        return self._agents[parent]

    def _agent_span(self, segment: int) -> EpisodeSpan:
        main = segment == MAIN
        task = str(self._episode.get("task"))
        name = task if main else str(self._segments[segment].get("agent"))
        attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
        attributes |= {"gen_ai.conversation.id": self._conversation}
        return self._span(
            f"invoke_agent {name}",
            key=f"agent {segment}",
            parent=None if main else f"agent {self._caller(segment)}",
            interval=self._intervals[segment],
            attributes=attributes | (self._episode_facts() if main else {}),
            error=_failure(self._episode) if main else None,
        )

    def _episode_facts(self) -> dict[str, Any]:
        episode, failed = self._episode, _failure(self._episode) is not None
        facts = {f"agentrl.{name}": episode.get(name) for name in _FACTS}
        if failed:
            facts |= {"agentrl.reward": None, "agentrl.success": None, "error.type": str(episode.get("end"))}
        for kind in ("metric", "score"):
            values = episode.get(f"{kind}s") or {}
            facts |= {f"agentrl.{kind}.{name}": number(value) for name, value in values.items()}
        seed = episode.get("seed")
        versions = [version for turn in self._turns for version in turn.facts.get("versions") or ()]
        return facts | {
            "agentrl.run": self._run,
            "agentrl.seed": None if seed is None else str(seed),  # it can exceed a signed integer
            **_occasion(self._source),
            "agentrl.policy_versions": [min(versions), max(versions)] if versions else None,
            "agentrl.advantage": _mean([value for turn in self._turns for value in self._advantages(turn)]),
        }

    def _advantages(self, turn: _Turn) -> Sequence[float]:
        tokens = self._tokens[turn.number] if turn.number < len(self._tokens) else {}
        return tokens.get("advantages") or ()

    def _chat_span(self, turn: _Turn) -> EpisodeSpan:
        facts, reason = turn.facts, turn.facts.get("finish_reason")
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._run,
            "gen_ai.conversation.id": self._conversation,
            "gen_ai.response.finish_reasons": [reason] if reason else None,
            "gen_ai.usage.input_tokens": facts.get("context"),
            "gen_ai.usage.output_tokens": facts.get("tokens") or None,
            "agentrl.turn": turn.number,
            "agentrl.segment": turn.message.get("segment"),
            "agentrl.policy_versions": facts.get("versions"),
            "agentrl.advantage": _mean(self._advantages(turn)),
            **{f"agentrl.{name}": facts.get(name) for name in _TURN_FACTS},
        }
        if self._messages:
            said = {"role": "assistant", "parts": _parts(turn.message), "finish_reason": reason}
            heard = [{"role": str(one.get("role")), "parts": _parts(one)} for one in turn.context]
            attributes |= {"gen_ai.input.messages": _json(heard), "gen_ai.output.messages": _json([said])}
        return self._span(
            f"chat {self._run}",
            key=f"turn {turn.number}",
            parent=f"agent {self._agents[turn.segment]}",
            interval=turn.chat,
            attributes=attributes,
            calls_model=True,
        )

    def _tool_spans(self, turn: _Turn) -> Iterator[EpisodeSpan]:
        for place, call in enumerate(turn.message.get("tool_calls") or ()):
            answered = call.get("id") in turn.results
            if not answered and not turn.replied:
                continue
            failure = None if answered else _failure(self._episode)
            function = call.get("function") or {}
            name = str(function.get("name") or "")
            attributes = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": name,
                "gen_ai.tool.type": "function",
                "gen_ai.tool.call.id": call.get("id"),
                "agentrl.turn": turn.number,
                "error.type": None if failure is None else str(self._episode.get("end")),
            }
            if self._messages:
                attributes["gen_ai.tool.call.arguments"] = _text(function.get("arguments"))
                if answered:
                    attributes["gen_ai.tool.call.result"] = _text(turn.results[call.get("id")])
            yield self._span(
                f"execute_tool {name}".strip(),
                key=f"turn {turn.number} call {place}",
                parent=f"agent {self._agents[turn.segment]}",
                interval=turn.tools,
                attributes=attributes,
                error=failure,
            )

    def _span(
        self,
        name: str,
        *,
        key: str,
        parent: str | None,
        interval: _Interval,
        attributes: Mapping[str, Any],
        calls_model: bool = False,
        error: str | None = None,
    ) -> EpisodeSpan:
        estimated = {"agentrl.times_estimated": True} if self._estimated else {}
        return EpisodeSpan(
            name=name,
            trace_id=int.from_bytes(self._digest[:16]),
            span_id=self._span_id(key),
            parent_id=None if parent is None else self._span_id(parent),
            start_ns=self._started_ns + round(interval.start * 1e6) * 1000,
            end_ns=self._started_ns + round(interval.end * 1e6) * 1000,
            attributes={key: value for key, value in attributes.items() if value is not None} | estimated,
            calls_model=calls_model,
            error=error,
        )

    def _span_id(self, key: str) -> int:
        return int.from_bytes(hashlib.sha256(self._digest + key.encode()).digest()[:8])


def _turns(episode: Mapping[str, Any]) -> list[_Turn]:
    """Return the turns in the order in which they were sampled."""
    turns: list[_Turn] = []
    latest: dict[int, _Turn] = {}
    histories: dict[int, list[Mapping[str, Any]]] = {}
    for message in episode.get("messages") or ():
        segment = message.get("segment", MAIN)
        history = histories.setdefault(segment, [])
        if facts := message.get("turn"):
            turn = _Turn(
                number=facts.get("number", len(turns)),
                message=message,
                segment=segment,
                context=tuple(history),
            )
            latest[segment] = turn
            turns.append(turn)
        elif message.get("role") == "tool" and segment in latest:
            latest[segment].results[message.get("tool_call_id")] = message.get("content")
        history.append(message)
    return sorted(turns, key=lambda turn: turn.number)


def _agents(segments: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the agent that acts in each segment, by the number of its first segment."""
    agents: list[int] = []
    for place, segment in enumerate(segments):
        opened = place != MAIN and segment.get("reason") != "sub_agent"
        agents.append(agents[segment["parent"]] if opened else place)
    return agents


def _place(turns: Sequence[_Turn]) -> None:
    """Set the intervals of turns from their recorded times."""
    for turn in turns:
        asked, sampled, *answered = turn.facts["times"]
        turn.chat = _Interval(asked, sampled)
        turn.tools = _Interval(sampled, answered[0] if answered else sampled)


def _share(turns: Sequence[_Turn], seconds: float) -> None:
    """Give each turn the same share of an episode, half for its completion and half for its calls."""
    half = seconds / (2 * max(1, len(turns)))
    for place, turn in enumerate(turns):
        turn.chat = _Interval(2 * place * half, (2 * place + 1) * half)
        turn.tools = _Interval(turn.chat.end, (2 * place + 2) * half)


def _union(one: _Interval, other: _Interval) -> _Interval:
    return _Interval(min(one.start, other.start), max(one.end, other.end))


def _failure(episode: Mapping[str, Any]) -> str | None:
    """Return why an episode has no reward, or None if it has one."""
    end = str(episode.get("end", ""))
    return str(episode.get("error") or end) if end.startswith("failed") else None


def _occasion(source: str) -> dict[str, Any]:
    """Return the step or the evaluation of an episode, by the name of its file."""
    kind, _, rest = source.partition("_")
    if kind == "step" and rest.isdecimal():
        return {"agentrl.step": int(rest)}
    return {"agentrl.evaluation": source.removeprefix("held_out_")}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message, in the JSON form that the conventions define."""
    content = message.get("content")
    if message.get("role") == "tool":
        return [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}]
    parts: list[dict[str, Any]] = []
    if thought := (message.get("turn") or {}).get("thought"):
        parts.append({"type": "reasoning", "content": thought})
    if isinstance(content, list):
        parts += map(_part, content)
    elif content:
        parts.append({"type": "text", "content": content})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = _arguments(function.get("arguments"))
        parts.append(
            {"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments}
        )
    return parts


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "text", "content": part.get("text")}
    if part.get("type") != "image_url":
        return dict(part)
    url = str((part.get("image_url") or {}).get("url"))
    header, _, data = url.partition(",")
    if not url.startswith("data:"):
        return {"type": "uri", "modality": "image", "uri": url}
    kind = header.removeprefix("data:").partition(";")[0]
    return {"type": "blob", "modality": "image", "mime_type": kind, "content": data}


def _arguments(text: Any) -> Any:
    """Return arguments as an object, or unchanged if the model did not write an object."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    """Return JSON that UTF-8 can encode. Models can write lone surrogates."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
