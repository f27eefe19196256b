"""The session of an episode for launchers: its tools, its limits and its rewards."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from agentrl_env.client import EnvClient
from agentrl_env.client.sync import SyncClientSession
from agentrl_env.types import Message, SessionStatus, StepResult, TaskSample, ToolCall, ToolSpec

SHELLS = ("bash", "shell", "bash_action")
"""Names of tools that run commands."""
ANSWERS = ("answer", "answer_action")
"""Names of tools that end an episode with an answer."""
ENDS = ("submit", "finish", "finish_action")
"""Names of tools that end an episode without an answer."""
_EXIT_CODE = re.compile(r"\((?:[^()]*; )?exit code (\d+)\)\s*\Z")
"""The note of a sandbox at the end of an output."""
_ENDED = (SessionStatus.COMPLETED, SessionStatus.TRUNCATED_TURNS, SessionStatus.TRUNCATED_TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output of one tool call."""

    text: str
    """The text that the task's tool returns to a model."""
    invalid: bool
    """True if the task rejected the call."""

    @property
    def code(self) -> int:
        """The exit code of a command: 0 if the output does not state one, 1 if the call was rejected."""
        found = _EXIT_CODE.search(self.text)
        return int(found[1]) if found else int(self.invalid)


class TaskSession:
    """A session of a task, in which an agent acts.

    Args:
        session: the open session.
        max_turns: turns of the task. Each call of a tool is one, and so is the call that ends the episode.
        earn: called with the reward of each call but the last.
    """

    def __init__(self, session: SyncClientSession, *, max_turns: int, earn: Callable[[float], None]) -> None:
        self._session = session
        self._tools = {spec.function.name: spec for spec in session.tools}
        self._earn = earn
        self._last: StepResult | None = None
        self.max_calls = max_turns - bool(self._tools.keys() & {*ANSWERS, *ENDS})
        """Number of calls that leave a turn to end the episode."""

    @property
    def task(self) -> str:
        """The opening messages of the episode as text."""
        return "\n\n".join(_text(message) for message in self._session.messages)

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools of the task."""
        return self._session.tools

    @property
    def takes_answer(self) -> bool:
        """True if the episode can end with an answer."""
        return bool(self._tools.keys() & set(ANSWERS))

    @property
    def over(self) -> bool:
        """True if the session has ended."""
        return self._last is not None and self._last.final

    @property
    def exhausted(self) -> bool:
        """True if the agent can call no further tool."""
        return self.over or self._session.turn >= self.max_calls

    def run(self, command: Any) -> Output:
        """Run a command with the tool of the task. The task rejects a command that is not text."""
        tool, argument = shell_tool(self.tools)
        return self.call(tool, {argument: command})

    def call(self, name: str, arguments: Mapping[str, Any]) -> Output:
        """Call a tool of the task."""
        result = self._step(ToolCall.of(name, **arguments))
        text = "\n".join(_text(message) for message in result.messages)
        return Output(text=text, invalid=bool(result.metrics.get("invalid_calls")))

    def end(self, answer: str = "") -> dict[str, Any]:
        """End the episode with the task's own tool, or with the answer as text if it has none.

        Returns:
            The reward of the last step and the metrics, as a program prints them.
        """
        if not self.over:
            self._step(self._ending(answer.strip()))
        assert self._last is not None
        reward = self._last.reward if self._last.final else 0.0
        return {"reward": reward, "metrics": dict(self._last.metrics)}

    def _ending(self, answer: str) -> ToolCall | Message:
        """Return the last move: a tool for answers if there is one to give, or a tool without arguments."""
        names = [*ANSWERS, *ENDS] if answer else [*ENDS, *ANSWERS]
        for name in names:
            if spec := self._tools.get(name):
                return ToolCall.of(name, **dict.fromkeys(_required_arguments(spec), answer))
        return Message.assistant(answer or "I am done.")

    def _step(self, action: ToolCall | Message) -> StepResult:
        result = self._last = self._session.step(action)
        if result.final and result.status not in _ENDED:
            raise RuntimeError(f"the session ended as {result.status}")
        if result.reward and not result.final:
            self._earn(result.reward)
        return result


def shell_tool(tools: Sequence[ToolSpec]) -> tuple[str, str]:
    """Return the name of the tool that runs commands, and the name of its argument.

    It is ``bash``, ``shell`` or ``bash_action`` with a single required argument of type string, or another
    tool with a single required argument ``command``.

    Raises:
        ValueError: there is no such tool.
    """
    arguments = {spec.function.name: _only_text(spec) for spec in tools}
    named = [(name, argument) for name in SHELLS if (argument := arguments.get(name))]
    others = [(name, argument) for name, argument in arguments.items() if argument == "command"]
    for found in [*named, *others]:
        return found
    raise ValueError(
        f"it needs a tool that runs commands, {', '.join(SHELLS)} or one with a single required argument "
        f"'command' of type string; the tools are {', '.join(arguments) or 'none'}"
    )


def play_session(play: Callable[[TaskSession, str], str]) -> None:
    """Play the session of this program's sample, end it, and print the reward in the last line.

    If the agent fails, its work is still graded. If the context was full, the gateway truncates the episode
    and keeps the reward. Otherwise the episode fails.

    Args:
        play: runs the agent in a session and with a ``base_url``; returns its answer, which can be empty.
    """
    # Close the session: a session that is left behind keeps its sandbox until its lease ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description="Play one episode for an agent program's run.")
    parser.add_argument("--max-turns", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    options = parser.parse_args()
    base_url = os.environ["OPENAI_BASE_URL"]
    sample = TaskSample.model_validate_json(Path(os.environ["AGENTRL_SAMPLE"]).read_text(encoding="utf-8"))

    def earn(reward: float, **more: Any) -> None:
        body = {"reward": reward, **more}
        httpx.post(f"{base_url}/reward", json=body, trust_env=False).raise_for_status()

    with (
        EnvClient.connect_sync(sample.data["url"], timeout=options.timeout) as client,
        client.open(**sample.data["open"], wait=options.timeout) as opened,
    ):
        session = TaskSession(opened, max_turns=options.max_turns, earn=earn)
        try:
            answer = play(session, base_url)
        except Exception:
            earn(**session.end())
            raise
        print(json.dumps(session.end(answer)))


def _required_arguments(spec: ToolSpec) -> list[str]:
    return list(spec.function.parameters.get("required", ()))


def _only_text(spec: ToolSpec) -> str:
    """Return the name of a tool's only required argument if it is text, or "" otherwise."""
    required = _required_arguments(spec)
    properties = spec.function.parameters.get("properties", {})
    if len(required) == 1 and properties.get(required[0], {}).get("type") == "string":
        return required[0]
    return ""


def _text(message: Message) -> str:
    if isinstance(message.content, list):
        return "\n".join(str(part["text"]) for part in message.content if "text" in part)
    return message.content or ""
