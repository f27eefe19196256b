"""Recorded episodes in the Agent Trajectory Interchange Format (ATIF), which Harbor and its viewers read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from agentrl_train.errors import ConfigError
from agentrl_train.report.transcript import Recorded

SCHEMA = "ATIF-v1.8"
_SOURCES = {"system": "system", "developer": "system", "user": "user"}
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_FACTS = (
    "task",
    "split",
    "index",
    "seed",
    "group_id",
    "sibling",
    "end",
    "error",
    "reward",
    "success",
    "metrics",
)


def write_atif(episodes: Iterable[Recorded], folder: Path, *, model: str) -> None:
    """Write each episode as ``FOLDER/MODEL_STEP_LINE.json``.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in episodes:
            text = json.dumps(atif(one, model=model), ensure_ascii=False, indent=1)
            path = folder / f"{one.name(model)}.json"
            path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"episodes cannot be written to {folder}: {error.strerror}") from error


def atif(recorded: Recorded, *, model: str) -> dict[str, Any]:
    """Return an episode as an ATIF trajectory, with the sampled tokens if they are recorded.

    An agent's step has the token ids and log-probabilities that training used. Their policy versions and
    advantages are in ``metrics.extra``. The environment's data about the episode is in ``extra``.

    Args:
        recorded: the episode.
        model: name of the policy.
    """
    episode = recorded.episode
    sampled = (recorded.tokens() or {}).get("turns", [])
    steps: list[dict[str, Any]] = []
    for message in episode.get("messages") or ():
        if message.get("role") == "assistant":
            steps.append(_agent_step(message, sampled))
        elif message.get("role") == "tool":
            _observe(steps, message)
        else:
            source = _SOURCES.get(str(message.get("role")), "user")
            steps.append({"source": source, "message": _content(message.get("content")), **_segment(message)})
    if not steps:  # an episode that failed before its first message
        steps.append({"source": "system", "message": str(episode.get("error") or "no message was recorded")})
    completions = [step["metrics"]["completion_tokens"] for step in steps if "metrics" in step]
    return {
        "schema_version": SCHEMA,
        "session_id": recorded.name(model),
        "trajectory_id": recorded.name(model),
        "agent": {"name": "agentrl-train", "version": version("agentrl-kit"), "model_name": model},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {"total_completion_tokens": sum(completions), "total_steps": len(steps)},
        "extra": {name: episode[name] for name in _FACTS if episode.get(name) is not None},
    }


def _agent_step(message: Mapping[str, Any], sampled: list[Mapping[str, Any]]) -> dict[str, Any]:
    turn = message.get("turn") or {}
    number = turn.get("number")
    tokens = sampled[number] if isinstance(number, int) and number < len(sampled) else {}
    step: dict[str, Any] = {"source": "agent", "message": _content(message.get("content"))}
    if turn.get("thought"):
        step["reasoning_content"] = turn["thought"]
    if calls := [_call(call, place) for place, call in enumerate(message.get("tool_calls") or (), 1)]:
        step["tool_calls"] = calls
    if turn:
        step["llm_call_count"] = 1
        step["metrics"] = _metrics(turn, tokens)
    return step | _segment(message)


def _metrics(turn: Mapping[str, Any], tokens: Mapping[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = {"completion_tokens": turn.get("tokens", 0)}
    if tokens.get("token_ids"):
        metrics["completion_token_ids"] = tokens["token_ids"]
    logprobs = tokens.get("logprobs") or ()
    if logprobs and all(map(math.isfinite, logprobs)):
        metrics["logprobs"] = logprobs
    extra = {name: tokens[name] for name in ("versions", "advantages") if tokens.get(name)}
    extra |= {
        name: turn[name] for name in ("reward", "finish_reason", "policy") if turn.get(name) is not None
    }
    return metrics | {"extra": extra}


def _call(call: Mapping[str, Any], place: int) -> dict[str, Any]:
    function = call.get("function") or {}
    text = function.get("arguments")
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        arguments = None
    shown = {
        "tool_call_id": str(call.get("id") or f"call {place}"),
        "function_name": str(function.get("name")),
    }
    if isinstance(arguments, dict):
        return shown | {"arguments": arguments}
    return shown | {"arguments": {}, "extra": {"arguments": text}}  # the policy did not write an object


def _observe(steps: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Add a tool's message to the agent's last step."""
    content = _content(message.get("content"))
    if not steps or steps[-1]["source"] != "agent":
        steps.append({"source": "system", "message": content, **_segment(message)})
        return
    result: dict[str, Any] = {"content": content}
    source = message.get("tool_call_id")
    if any(call["tool_call_id"] == source for call in steps[-1].get("tool_calls", ())):
        result["source_call_id"] = source
    steps[-1].setdefault("observation", {"results": []})["results"].append(result)


def _segment(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the segment of a message if the episode has several."""
    return {"extra": {"segment": message["segment"]}} if "segment" in message else {}


def _content(content: Any) -> str | list[dict[str, Any]]:
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return list(map(_part, content))


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "image_url":
        path = str((part.get("image_url") or {}).get("url"))
        if (kind := guess_type(path)[0]) in _IMAGES:
            return {"type": "image", "source": {"media_type": kind, "path": path}}
    return {"type": "text", "text": str(part.get("text", "")) or f"[{part.get('type')}]"}
