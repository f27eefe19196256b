"""Episodes played by a check: policies, recorded rollouts, and the differences between rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from agentrl_env.client.client import ClientSession
from agentrl_env.client.formatting import format_message, message_text
from agentrl_env.client.schema_sampler import WORDS, sample_call, words_in
from agentrl_env.types import Message, SessionStatus, StepResult, TaskSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTurn:
    """One assistant message and the environment's answer."""

    action: Message
    result: StepResult


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One recorded episode."""

    sample: TaskSample
    opening: tuple[Message, ...]
    turns: list[RolloutTurn] = field(default_factory=list)

    def copy(self) -> Rollout:
        """Return a rollout with the same turns, to be continued separately."""
        return replace(self, turns=list(self.turns))

    @property
    def name(self) -> str:
        """The sample and seed as text."""
        return f"sample {self.sample.split}/{self.sample.index}, seed {self.sample.seed}"

    @property
    def actions(self) -> list[Message]:
        """The assistant messages in order."""
        return [turn.action for turn in self.turns]

    @property
    def last(self) -> StepResult | None:
        """The last result, or None before the first turn."""
        return self.turns[-1].result if self.turns else None

    @property
    def success(self) -> bool:
        """True if the episode reached its goal: by the ``success`` metric, else a reward of 1."""
        if self.last is not None and "success" in self.last.metrics:
            return self.last.metrics["success"] >= 0.5
        return sum(turn.result.reward for turn in self.turns) >= 1.0

    @property
    def failure(self) -> str | None:
        """The turn in which the environment failed, with the reason; None if it did not."""
        for turn in self.turns:
            if turn.result.status is SessionStatus.FAILED_ENVIRONMENT:
                error = turn.result.info.get("error", "no reason given")
                reason = error.get("message", error) if isinstance(error, dict) else error
                return f"{describe(turn.action)} broke the environment: {reason}"
        return None

    def difference(self, other: Rollout) -> str | None:
        """Return a description of the first difference, or None if the rollouts are identical."""
        if _wire(self.opening) != _wire(other.opening):
            return f"the opening: {_quote(self.opening)}, then {_quote(other.opening)}"
        for number, (one, two) in enumerate(zip(self.turns, other.turns, strict=False), start=1):
            if difference := _result_difference(one.result, two.result):
                return f"turn {number} after {describe(one.action)}: {difference}"
        if len(self.turns) != len(other.turns):
            return f"the length: {len(self.turns)} turns, then {len(other.turns)}"
        return None


class Policy(Protocol):
    """Chooses the next assistant message."""

    async def act(self, session: ClientSession, rollout: Rollout) -> Message | None:
        """Return the next message, or None to stop."""


class RandomPolicy:
    """Draws valid calls, with strings that are often words from the environment's messages."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    async def act(self, session: ClientSession, rollout: Rollout) -> Message:
        """Return one random call, or a random word if the task has no tools."""
        words = _words(rollout)
        if not session.tools:
            return Message.assistant(str(self._rng.choice(words)))
        call_id = f"call_{len(rollout.turns)}"
        return Message.assistant(None, sample_call(session.tools, self._rng, call_id=call_id, words=words))


class ReplayPolicy:
    """Repeats recorded messages, then stops."""

    def __init__(self, actions: Sequence[Message]) -> None:
        self._actions = actions

    async def act(self, session: ClientSession, rollout: Rollout) -> Message | None:
        """Return the recorded message of this turn."""
        turn = len(rollout.turns)
        return self._actions[turn] if turn < len(self._actions) else None


class ExpertPolicy:
    """Plays the moves of the task's expert."""

    async def act(self, session: ClientSession, rollout: Rollout) -> Message:
        """Return the expert's move."""
        return await session.expert()


class MixedPolicy:
    """Alternates at random between the expert and a random policy, to reach unusual states."""

    def __init__(self, seed: int) -> None:
        self._expert = ExpertPolicy()
        self._random = RandomPolicy(seed)
        self._rng = np.random.default_rng(seed)

    async def act(self, session: ClientSession, rollout: Rollout) -> Message:
        """Return the expert's move or a random one."""
        policy = self._expert if self._rng.random() < 0.5 else self._random
        return await policy.act(session, rollout)


async def advance(session: ClientSession, policy: Policy, rollout: Rollout) -> bool:
    """Play one turn; return False if the episode has ended or the policy stopped."""
    if rollout.last is not None and rollout.last.final:
        return False
    action = await policy.act(session, rollout)
    if action is None:
        return False
    rollout.turns.append(RolloutTurn(action=action, result=await session.step(action)))
    return True


def describe(action: Message) -> str:
    """Return an action as at most 120 characters of text."""
    text = format_message(action).removeprefix("assistant: ")
    return text if len(text) <= 120 else f"{text[:117]}..."


def _words(rollout: Rollout) -> list[str]:
    """Return some of the sampler's words, then the last words of the environment's messages."""
    messages = [*rollout.opening, *(m for turn in rollout.turns for m in turn.result.messages)]
    found = [word for message in messages for word in words_in(message_text(message))]
    return [*WORDS[:4], *dict.fromkeys(found[-200:])]


def _result_difference(one: StepResult, two: StepResult) -> str | None:
    if _wire(one.messages) != _wire(two.messages):
        return f"the answer: {_quote(one.messages)}, then {_quote(two.messages)}"
    for name in ("reward", "terminated", "truncated", "status", "metrics"):
        before, after = getattr(one, name), getattr(two, name)
        if before != after:
            return f"{name}: {before}, then {after}"
    return None


def _wire(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.wire() for message in messages]


def _quote(messages: Sequence[Message]) -> str:
    text = " / ".join(message_text(message) for message in messages)
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
