"""Episodes played for a check: who acts (a policy), what happened (a transcript), what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from agentrl_env.client.client import ClientSession
from agentrl_env.client.formatting import format_messages, message_text
from agentrl_env.client.schema_sampler import WORDS, sample_call, words_in
from agentrl_env.types import Message, SessionStatus, StepResult, TaskSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One assistant message and the environment's answer."""

    action: Message
    result: StepResult


@dataclass(slots=True, kw_only=True)
class Transcript:
    """One episode as it was seen from outside."""

    sample: TaskSample
    opening: tuple[Message, ...]
    turns: list[Turn] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Which sample it was, for evidence."""
        return f"sample {self.sample.split}/{self.sample.index}, seed {self.sample.seed}"

    @property
    def actions(self) -> list[Message]:
        """The assistant messages in order."""
        return [turn.action for turn in self.turns]

    @property
    def last(self) -> StepResult | None:
        """The last answer; None before the first turn."""
        return self.turns[-1].result if self.turns else None

    @property
    def success(self) -> bool:
        """Whether the episode reached its goal: the ``success`` metric, else a reward of 1."""
        if self.last is not None and "success" in self.last.metrics:
            return self.last.metrics["success"] >= 0.5
        return sum(turn.result.reward for turn in self.turns) >= 1.0

    @property
    def broken(self) -> str | None:
        """Which turn broke the environment, and how; None where none did."""
        for turn in self.turns:
            if turn.result.status is SessionStatus.FAILED_ENVIRONMENT:
                error = turn.result.info.get("error", "no reason given")
                reason = error.get("message", error) if isinstance(error, dict) else error
                return f"{describe(turn.action)} broke the environment: {reason}"
        return None

    def difference(self, other: Transcript) -> str | None:
        """Return the first thing that differs, in words; None where both are the same."""
        if _plain(self.opening) != _plain(other.opening):
            return f"the opening: {_both(self.opening, other.opening)}"
        for number, (one, two) in enumerate(zip(self.turns, other.turns, strict=False), start=1):
            if field_differs := _result_difference(one.result, two.result):
                return f"turn {number} after {describe(one.action)}: {field_differs}"
        if len(self.turns) != len(other.turns):
            return f"the length: {len(self.turns)} turns, then {len(other.turns)}"
        return None


class Policy(Protocol):
    """Chooses the next assistant message."""

    async def act(self, session: ClientSession, transcript: Transcript) -> Message | None:
        """Return the next message; None ends the episode early."""


class RandomPolicy:
    """Draws schema-valid calls; free strings are often words the environment has said."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    async def act(self, session: ClientSession, transcript: Transcript) -> Message:
        """Return one random call; of a task without tools, a random word."""
        words = _words(transcript)
        if not session.tools:
            return Message.assistant(str(self._rng.choice(words)))
        call_id = f"call_{len(transcript.turns)}"
        return Message.assistant(None, sample_call(session.tools, self._rng, call_id=call_id, words=words))


class ReplayPolicy:
    """Repeats recorded messages, and stops where they end."""

    def __init__(self, actions: Sequence[Message]) -> None:
        self._actions = actions

    async def act(self, session: ClientSession, transcript: Transcript) -> Message | None:
        """Return the recorded message of this turn."""
        turn = len(transcript.turns)
        return self._actions[turn] if turn < len(self._actions) else None


class ExpertPolicy:
    """Asks the task's oracle."""

    async def act(self, session: ClientSession, transcript: Transcript) -> Message:
        """Return the oracle's move."""
        return await session.expert()


class WanderingExpert:
    """Asks the oracle, but every other move is random: it gets to states that chance does not."""

    def __init__(self, seed: int) -> None:
        self._expert = ExpertPolicy()
        self._random = RandomPolicy(seed)
        self._rng = np.random.default_rng(seed)

    async def act(self, session: ClientSession, transcript: Transcript) -> Message:
        """Return the oracle's move or a random one."""
        policy = self._expert if self._rng.random() < 0.5 else self._random
        return await policy.act(session, transcript)


async def advance(session: ClientSession, policy: Policy, transcript: Transcript) -> bool:
    """Play one turn; False once the episode has ended or the policy has nothing more to say."""
    if transcript.last is not None and transcript.last.final:
        return False
    action = await policy.act(session, transcript)
    if action is None:
        return False
    transcript.turns.append(Turn(action=action, result=await session.step(action)))
    return True


def describe(action: Message) -> str:
    """Return an action in a few words."""
    text = format_messages([action]).removeprefix("assistant: ")
    return text if len(text) <= 120 else f"{text[:117]}..."


def _words(transcript: Transcript) -> list[str]:
    """Words of the episode so far, the latest last, after a few of the sampler's own."""
    messages = [*transcript.opening, *(m for turn in transcript.turns for m in turn.result.messages)]
    heard = [word for message in messages for word in words_in(message_text(message))]
    return [*WORDS[:4], *dict.fromkeys(heard[-200:])]


def _result_difference(one: StepResult, two: StepResult) -> str | None:
    compared: dict[str, Callable[[StepResult], Any]] = {
        "messages": lambda result: _plain(result.messages),
        "reward": lambda result: result.reward,
        "terminated": lambda result: result.terminated,
        "truncated": lambda result: result.truncated,
        "status": lambda result: str(result.status),
        "metrics": lambda result: result.metrics,
    }
    for name, value in compared.items():
        if value(one) != value(two):
            if name == "messages":
                return f"the answer: {_both(one.messages, two.messages)}"
            return f"{name}: {value(one)}, then {value(two)}"
    return None


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.wire() for message in messages]


def _both(one: Sequence[Message], two: Sequence[Message]) -> str:
    return f"{_quote(one)}, then {_quote(two)}"


def _quote(messages: Sequence[Message]) -> str:
    text = " / ".join(message_text(message) for message in messages)
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
