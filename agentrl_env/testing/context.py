"""The context of a check: one task of a client, a deadline, and the episodes that policies play in it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.client.formatting import format_message, message_text
from agentrl_env.client.schema_sampler import WORDS, sample_call, words_in
from agentrl_env.errors import AgentRLError, ServerFull
from agentrl_env.types import Message, SessionStatus, StepResult, TaskInfo, TaskSample

T = TypeVar("T")
CLOSE_TIMEOUT = 5.0
"""Seconds to wait for hanging sessions to close; at most the deadline of a check."""
WAIT = 5.0
"""Seconds to wait for a free session on a full server."""
ENDLESS = 1_000
"""Indices of an endless split are drawn below this."""


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


Policy = Callable[[ClientSession, Rollout], Awaitable[Message | None]]
"""Returns the next assistant message, or None to stop."""


def random_policy(seed: int) -> Policy:
    """Return a policy that draws valid calls, with strings that are often words of the environment.

    Without tools it sends random words.
    """
    rng = np.random.default_rng(seed)

    async def act(session: ClientSession, rollout: Rollout) -> Message:
        words = _words(rollout)
        if not session.tools:
            return Message.assistant(str(rng.choice(words)))
        call_id = f"call_{len(rollout.turns)}"
        return Message.assistant(None, sample_call(session.tools, rng, call_id=call_id, words=words))

    return act


def replay_policy(actions: Sequence[Message]) -> Policy:
    """Return a policy that repeats recorded messages, then stops."""

    async def act(session: ClientSession, rollout: Rollout) -> Message | None:
        turn = len(rollout.turns)
        return actions[turn] if turn < len(actions) else None

    return act


async def expert_policy(session: ClientSession, rollout: Rollout) -> Message:
    """Return the move of the task's expert."""
    return await session.expert()


def mixed_policy(seed: int) -> Policy:
    """Return a policy that alternates at random between the expert and a random policy."""
    random_move, rng = random_policy(seed), np.random.default_rng(seed)

    async def act(session: ClientSession, rollout: Rollout) -> Message | None:
        return await (expert_policy if rng.random() < 0.5 else random_move)(session, rollout)

    return act


@dataclass(slots=True, kw_only=True)
class CheckContext:
    """One task under test. Each check may take ``deadline`` seconds."""

    client: EnvClient
    task: TaskInfo
    deadline: float
    clock: Callable[[], float] = time.monotonic
    doing: str = ""
    """The call that the check is waiting for, reported if the deadline passes."""
    rollouts: list[Rollout] = field(default_factory=list)
    """The episodes played so far, by all checks."""
    _open: list[ClientSession] = field(default_factory=list)
    _begin: float = 0.0

    @property
    def has_expert(self) -> bool:
        """True if the client offers the task's expert."""
        return "expert" in self.task.capabilities

    def begin(self) -> None:
        """Start the clock of a new check."""
        self._begin, self.doing = self.clock(), ""

    def while_time(self, items: Iterable[T], least: int = 2) -> Iterator[T]:
        """Yield items until half of the deadline has passed, but at least ``least`` of them."""
        for count, item in enumerate(items):
            if count >= least and self.clock() - self._begin > self.deadline / 2:
                return
            yield item

    def size(self, split: str) -> int | None:
        """Return the number of samples of a split, or None if it is endless."""
        info = self.task.splits.get(split)
        return info.num_samples if info else None

    def indices(self, count: int, split: str = "train") -> list[int]:
        """Return up to ``count`` different indices, spread over the split and always the same."""
        size = self.size(split)
        total = ENDLESS if size is None else size
        return random.Random(0).sample(range(total), min(count, total))

    async def open(
        self, index: int | str | None, seed: int | None = None, split: str = "train"
    ) -> ClientSession:
        """Open a session, which is closed at the end of the check."""
        self.doing = f"reset() of sample {split}/{index}"
        session = await self.client.open(self.task.name, split=split, index=index, seed=seed, wait=WAIT)
        self._open.append(session)
        return session

    async def fork(self, session: ClientSession, n: int) -> list[ClientSession]:
        """Fork a session; the forks are closed at the end of the check."""
        self.doing = f"fork of a session after turn {session.turn}"
        forks = await session.fork(n)
        self._open += forks
        return forks

    async def play(
        self, policy: Policy, index: int | str | None, seed: int | None = None, split: str = "train"
    ) -> Rollout:
        """Play one episode until it ends or the policy stops."""
        session = await self.open(index, seed, split)
        rollout = Rollout(sample=session.sample, opening=session.messages)
        self.rollouts.append(rollout)
        await self.play_on(session, policy, rollout)
        self.doing = f"close() of {rollout.name}"
        await session.close()
        self._open.remove(session)
        return rollout

    async def play_on(self, session: ClientSession, policy: Policy, rollout: Rollout) -> None:
        """Continue an episode until it ends or the policy stops."""
        while await self._advance(session, policy, rollout):
            continue

    async def replay(self, rollout: Rollout) -> Rollout:
        """Play the same sample and seed again, with the same messages."""
        return await self.play(replay_policy(rollout.actions), rollout.sample.index, rollout.sample.seed)

    async def replay_interleaved(self, recorded: Sequence[Rollout]) -> list[Rollout]:
        """Replay rollouts concurrently and turn by turn; only those that a full server can open."""
        sessions: list[ClientSession] = []
        try:
            for rollout in recorded:
                sessions.append(await self.open(rollout.sample.index, rollout.sample.seed))
        except ServerFull:
            if not sessions:
                raise
        rollouts = [Rollout(sample=s.sample, opening=s.messages) for s in sessions]
        self.rollouts += rollouts
        policies = [replay_policy(rollout.actions) for rollout in recorded]
        running = True
        while running:
            turns = map(self._advance, sessions, policies, rollouts)
            running = any(await asyncio.gather(*turns))
        await self.close_all()
        return rollouts

    async def close_all(self) -> None:
        """Close the sessions that the check left open; cancel those that do not close in time."""

        async def close(session: ClientSession) -> None:
            with contextlib.suppress(AgentRLError):  # the verdict of the check does not depend on it
                await session.close()

        sessions, self._open = self._open, []
        closing = [asyncio.create_task(close(session)) for session in sessions]
        if closing:
            _, pending = await asyncio.wait(closing, timeout=min(CLOSE_TIMEOUT, self.deadline))
            for task in pending:
                task.cancel()

    async def _advance(self, session: ClientSession, policy: Policy, rollout: Rollout) -> bool:
        """Play one turn; return False if the episode has ended or the policy stopped."""
        self.doing = f"turn {len(rollout.turns) + 1} of {rollout.name}"
        if rollout.last is not None and rollout.last.final:
            return False
        action = await policy(session, rollout)
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
