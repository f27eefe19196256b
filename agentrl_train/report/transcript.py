"""Episodes as plain text, for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentrl_train.errors import ConfigError
from agentrl_train.telemetry.metrics import read_jsonl
from agentrl_train.telemetry.tokens import SUFFIX, read_tokens

LONGEST_TEXT = 2000
"""Maximum number of characters shown per message."""


class Recorded(NamedTuple):
    """An episode of ``trajectories/``."""

    path: Path
    """Path of its file."""
    line: int
    """Its position in the file, from 0."""
    episode: dict[str, Any]

    @property
    def source(self) -> str:
        """Name of its file, which is its step or evaluation."""
        return self.path.stem

    def name(self, run: str) -> str:
        """Return a name that is unique among the episodes of a run."""
        return f"{run}_{self.source}_{self.line:06d}"

    def tokens(self) -> dict[str, Any] | None:
        """Return the sampled tokens (``agentrl_train.telemetry.tokens``), if they are recorded."""
        return read_tokens(self.path.with_name(self.path.stem + SUFFIX), self.line)


def last_episodes(run: Path, *, last: int, task: str | None = None, failed: bool = False) -> list[Recorded]:
    """Return the last recorded episodes of a run, oldest first.

    Args:
        run: the run folder.
        last: maximum number of episodes.
        task: only episodes of this task.
        failed: only episodes without success.

    Raises:
        ConfigError: the folder has no recorded episodes.
    """
    files = sorted((run / "trajectories").glob("step_*.jsonl"), reverse=True)
    files += sorted((run / "trajectories").glob("held_out_*.jsonl"), key=lambda path: -path.stat().st_mtime)
    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder; give the path of a run folder, such as runs/NAME.")
    if not files:
        raise ConfigError(
            f"{run} has no recorded episodes: name the folder of a run, such as runs/NAME; it records "
            "metrics.trajectories episodes of each step"
        )
    found: list[Recorded] = []
    for path in files:
        for line, episode in reversed(list(enumerate(read_jsonl(path)))):
            if (task is None or episode.get("task") == task) and not (failed and episode.get("success")):
                found.append(Recorded(path, line, episode))
        if len(found) >= last:
            break
    return found[:last][::-1]


def transcript(episode: Mapping[str, Any], *, source: str) -> str:
    """Return one line of ``trajectories/*.jsonl`` as text. ``source`` is the name of its file."""
    result = "success" if episode.get("success") else "no success"
    head = f"{source}: {episode.get('task')}, {episode.get('split')} sample {episode.get('index')}"
    lines = [f"=== {head}, {result}, reward {episode.get('reward'):g}, {episode.get('end')}"]
    if episode.get("error"):
        lines.append(f"error: {episode['error']}")
    for message in episode.get("messages") or ():
        lines += ["", *_message(message)]
    return "\n".join(map(_printable, lines))


def _message(message: Mapping[str, Any]) -> Iterator[str]:
    turn = message.get("turn") or {}
    facts = [f"{turn['tokens']} tokens"] if "tokens" in turn else []
    facts += ["cut off"] if turn.get("finish_reason") == "length" else []
    facts += [f"{turn['invalid_calls']} invalid calls"] if turn.get("invalid_calls") else []
    facts += [f"reward {turn['reward']:+g}"] if turn.get("reward") else []
    yield f"[{message.get('role')}]" + (f" {', '.join(facts)}" if facts else "")
    if thought := turn.get("thought"):
        yield _short(f"(thought) {thought}")
    content = message.get("content")
    if content:
        yield _short(content if isinstance(content, str) else str(content))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield _short(f"-> {function.get('name')}({function.get('arguments')})")


def _short(text: str) -> str:
    rest = len(text) - LONGEST_TEXT
    return text if rest <= 0 else f"{text[:LONGEST_TEXT]} ... {rest:,} more characters"


def _printable(text: str) -> str:
    """Return the text without control characters, which a model can send to the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)
