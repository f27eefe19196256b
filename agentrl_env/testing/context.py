"""The context of a check: one task of a client, a deadline, and the played episodes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from agentrl_env.author_code import place
from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.client.formatting import format_message, message_text
from agentrl_env.client.local import LocalBackend
from agentrl_env.client.schema_sampler import WORDS, sample_call, words_in
from agentrl_env.dataset import empty_split
from agentrl_env.environment import Environment
from agentrl_env.errors import AgentRLError, EnvironmentFailed, ServerFull, StateError, UnknownSample
from agentrl_env.session.executor import Executor
from agentrl_env.session.loop_watch import Block
from agentrl_env.session.state_codec import MAX_BYTES, encode
from agentrl_env.testing.report import CheckOutcome, failed, same_reason, shorten, skipped
from agentrl_env.types import Message, SessionStatus, StepResult, TaskInfo, TaskSample

T = TypeVar("T")
CLOSE_TIMEOUT = 5.0
"""Seconds to wait for hanging sessions to close, but at most the deadline of a check."""
WAIT = 5.0
"""Seconds to wait for a free session on a full server."""
ENDLESS = 1_000
"""Indices of an endless split are drawn below this number."""


class SharedState:
    """A record of the values that all instances of a class share, for a later comparison.

    Args:
        environment: The class, after its ``startup``.
    """

    def __init__(self, environment: type[Environment]) -> None:
        self._environment = environment
        self._before = {where: _content(value) for where, value in _shared_values(environment)}

    def changed(self) -> list[str]:
        """Return the name and place of each changed value, such as ``Guess.seen (task.py:9)``."""
        now = {where: _content(value) for where, value in _shared_values(self._environment)}
        changed = [where for where, content in now.items() if content != self._before.get(where, b"")]
        return [_text(owner, name) for owner, name in changed]


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
        """Return a copy of the rollout that can be continued separately."""
        return replace(self, turns=list(self.turns))

    @property
    def name(self) -> str:
        """The sample and seed as text."""
        return f"sample {self.sample.split}/{self.sample.index}, seed {self.sample.seed}"

    @property
    def actions(self) -> list[Message]:
        """The assistant messages, in order."""
        return [turn.action for turn in self.turns]

    @property
    def last(self) -> StepResult | None:
        """The last result, or None before the first turn."""
        return self.turns[-1].result if self.turns else None

    @property
    def success(self) -> bool:
        """True if the episode reached its goal, by the ``success`` metric or else a total reward of 1."""
        if self.last is not None and "success" in self.last.metrics:
            return self.last.metrics["success"] >= 0.5
        return sum(turn.result.reward for turn in self.turns) >= 1.0

    @property
    def reason(self) -> str | None:
        """The reason why the environment failed, or None if it did not fail."""
        return failure_reason(self.last) if self.last is not None else None

    @property
    def failure(self) -> str | None:
        """The turn in which the environment failed and the reason, or None if it did not fail."""
        return self.reason and f"{describe(self.actions[-1])} broke the environment: {self.reason}"

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


class EpisodesBroke(AgentRLError):
    """Every episode of a check broke the environment, so the check cannot be made."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__(f"every episode broke the environment, such as {rollout.name}: {rollout.failure}")
        self.reason = rollout.reason or ""


Policy = Callable[[ClientSession, Rollout], Awaitable[Message | None]]
"""Returns the next assistant message, or None to stop."""


def random_policy(seed: int, text_share: float = 0.0) -> Policy:
    """Return a policy that draws valid calls, with strings that are often words of the environment.

    It sends a random word without tools, and in ``text_share`` of the turns.
    """
    rng = np.random.default_rng(seed)

    async def act(session: ClientSession, rollout: Rollout) -> Message:
        words = _words(rollout)
        if not session.tools or (text_share and rng.random() < text_share):
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


@dataclass(slots=True, kw_only=True)
class CheckContext:
    """One task under test. Each check may take ``deadline`` seconds."""

    client: EnvClient
    task: TaskInfo
    deadline: float
    clock: Callable[[], float] = time.monotonic
    doing: str = ""
    """The call that the check is waiting for. It is reported if the deadline passes."""
    rollouts: list[Rollout] = field(default_factory=list)
    """The episodes played so far, by all checks."""
    environment: type[Environment] | None = None
    """The class of the task, if it runs in this process."""
    blocks: list[Block] = field(default_factory=list)
    """Calls of the task that blocked the event loop of this process."""
    failures: dict[str, list[str]] = field(default_factory=lambda: {"close": [], "shutdown": []})
    """Exceptions of these methods of the task in this process, which are not raised to any caller."""
    not_closed: str = ""
    """Why the client could not be closed after the checks. Empty if it was closed."""
    longest: tuple[int, str] | None = None
    """The number of characters of the longest answer, and the message that it answers."""
    shared: SharedState | None = None
    """The values that the sessions share, before the checks. None if the task runs elsewhere."""
    _reported: dict[str, str] = field(default_factory=dict)
    """The check that first reported each reason of a failure."""
    _expert_failed: bool = False
    _open: list[ClientSession] = field(default_factory=list)
    _check: str = ""
    _begin: float = 0.0

    @property
    def offers_expert(self) -> bool:
        """True if the client offers the task's expert."""
        return "expert" in self.task.capabilities

    @property
    def has_expert(self) -> bool:
        """True if the client offers the task's expert and it has not failed."""
        return self.offers_expert and not self._expert_failed

    def begin(self, check: str) -> None:
        """Start the clock of a new check."""
        self._check, self._begin, self.doing = check, self.clock(), ""

    def broke(self, reason: str, evidence: str) -> CheckOutcome:
        """Return the outcome of a check that found a failed environment. Each reason is reported once."""
        first = self._reported.setdefault(same_reason(reason), self._check)
        return failed(evidence if first == self._check else f"The same failure as in {first}.")

    def stopped(self, error: AgentRLError) -> CheckOutcome:
        """Return the outcome of a check that an error ended: a failure, unless it was already reported."""
        reason = error.reason if isinstance(error, EpisodesBroke) else str(error)
        first = self._reported.setdefault(same_reason(reason), self._check)
        if first == self._check:
            return failed(f"{self.doing}: {type(error).__name__}: {error}")
        return skipped(f"Not run, for the reason that {first} reports.")

    def while_time(self, items: Iterable[T], least: int = 2) -> Iterator[T]:
        """Yield items until half of the deadline has passed, but at least ``least`` of them.

        If the task blocks the event loop, yield only these: the verdict is known, and each call is slow.
        """
        for count, item in enumerate(items):
            late = self.clock() - self._begin > self.deadline / 2
            if count >= least and (late or len(self.blocks) > 1):
                return
            yield item

    def size(self, split: str) -> int | None:
        """Return the number of samples of a split, or None if it is endless."""
        info = self.task.splits.get(split)
        return info.num_samples if info else None

    def indices(self, count: int, split: str = "train") -> list[int]:
        """Return up to ``count`` different indices that are spread over the split. They are always the same.

        Raises UnknownSample if there are none.
        """
        size = self.size(split)
        if size == 0:
            raise UnknownSample(empty_split(split))
        total = ENDLESS if size is None else size
        return random.Random(0).sample(range(total), min(count, total))

    async def open(
        self, index: int | str | None, seed: int | None = None, split: str = "train"
    ) -> ClientSession:
        """Open a session that is closed at the end of the check."""
        self.doing = f"reset() of sample {split}/{index}"
        session = await self.client.open(self.task.name, split=split, index=index, seed=seed, wait=WAIT)
        self._open.append(session)
        return session

    async def step(self, session: ClientSession, action: Message) -> StepResult:
        """Take a step, and record the length of its answer."""
        result = await session.step(action)
        size = max((len(message_text(message)) for message in result.messages), default=0)
        if self.longest is None or size > self.longest[0]:
            self.longest = size, describe(action)
        return result

    async def fork(self, session: ClientSession, n: int) -> list[ClientSession]:
        """Fork a session. The forks are closed at the end of the check."""
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

    def explorers(self, seed: int) -> list[Policy]:
        """Return a random policy, one that also sends text if the task answers it, and the expert, if any."""
        answers_text = bool(self.task.tools) and "respond" in self.task.capabilities
        talking = [random_policy(seed, text_share=0.5)] if answers_text else []
        return [random_policy(seed), *talking, *([self.explore_with_expert] if self.has_expert else [])]

    async def explored(self, count: int) -> AsyncIterator[Rollout]:
        """Yield the episodes that did not break, of up to ``count`` samples, each played by all explorers.

        Raises EpisodesBroke if all episodes broke.
        """
        whole, broken = 0, None
        for index in self.while_time(self.indices(count), least=1):
            for policy in self.explorers(index):
                rollout = await self.play(policy, index, seed=index + 1)
                if rollout.reason:
                    broken = rollout
                elif rollout.turns:
                    whole += 1
                    yield rollout
        if broken is not None and not whole:
            raise EpisodesBroke(broken)

    async def asked_twice(self, count: int) -> AsyncIterator[tuple[Rollout, str | None]]:
        """Yield episodes whose expert was called twice in each turn, and the two moves if they differ.

        For each sample, one episode plays the expert's moves and another plays random moves. The iteration
        ends if the expert fails. Raises EpisodesBroke if all episodes broke.
        """
        differs: list[str] = []

        def asking(then: Policy) -> Policy:
            async def act(session: ClientSession, rollout: Rollout) -> Message | None:
                one, other = [await self.explore_with_expert(session, rollout) for _ in range(2)]
                if one is None or other is None:
                    return None
                if describe(one) != describe(other):
                    moves = f"{describe(one)}, then {describe(other)}"
                    turn = f"{rollout.name}, turn {len(rollout.turns) + 1}"
                    differs.append(f"{turn}: two calls of expert() gave {moves}")
                    return None
                return one if then is expert_policy else await then(session, rollout)

            return act

        whole, broken = 0, None
        for index in self.while_time(self.indices(count), least=1):
            for policy in (expert_policy, random_policy(index)):
                rollout = await self.play(asking(policy), index, seed=index + 1)
                if not self.has_expert:
                    return
                if rollout.reason:
                    broken = rollout
                    continue
                whole += 1
                yield rollout, differs[0] if differs else None
        if broken is not None and not whole:
            raise EpisodesBroke(broken)

    async def why_lost(self, session: ClientSession) -> str:
        """Return why no other server could continue a session. "" if one could, or for a remote task."""
        backend = self.client.backend
        if not isinstance(backend, LocalBackend):
            return ""

        async def ask(environment: Environment, executor: Executor) -> str:
            state = await executor.run(environment.snapshot, environment.tool_timeout)
            data: bytes = await executor.run(
                lambda: encode(state, type(environment)), environment.tool_timeout
            )
            too_large = f"its snapshot() takes {len(data):,} bytes; at most {MAX_BYTES:,} are kept"
            return too_large if len(data) > MAX_BYTES else ""

        try:
            return await backend.pool.session(session.session_id).between_steps(ask)
        except StateError as error:
            return str(error)

    def ignore_expert(self) -> None:
        """Stop using the expert to explore."""
        self._expert_failed = True

    def place_of(self, method: str) -> str:
        """Return the file and line of a method of the task in brackets, or "" if the task runs elsewhere."""
        where = place(getattr(self.environment, method)) if self.environment else ""
        return f" ({where})" if where else ""

    def advice(self, usual: str) -> str:
        """Return advice about episodes that differ: the shared values that changed, else ``usual``."""
        changed = self.shared.changed() if self.shared else []
        if not changed:
            return usual
        own = "Keep the state of an episode on self, set in reset()."
        return f"{'; '.join(changed)}, which all sessions share. {own}"

    async def explore_with_expert(self, session: ClientSession, rollout: Rollout) -> Message | None:
        """Return the move of the task's expert, or None if the expert fails, which ``oracle`` reports."""
        try:
            return await session.expert()
        except EnvironmentFailed:
            self._expert_failed = True
            return None

    def mixed_policy(self, seed: int) -> Policy:
        """Return a policy that alternates at random between the expert and a random policy."""
        random_move, rng = random_policy(seed), np.random.default_rng(seed)

        async def act(session: ClientSession, rollout: Rollout) -> Message | None:
            expert = self.explore_with_expert if self.has_expert and rng.random() < 0.5 else random_move
            return await expert(session, rollout) or await random_move(session, rollout)

        return act

    async def play_on(self, session: ClientSession, policy: Policy, rollout: Rollout) -> None:
        """Continue an episode until it ends or the policy stops."""
        while await self._advance(session, policy, rollout):
            continue

    async def replay(self, rollout: Rollout) -> Rollout:
        """Play the same sample and seed again, with the same messages."""
        sample = rollout.sample
        return await self.play(replay_policy(rollout.actions), sample.index, sample.seed, sample.split)

    async def replay_interleaved(self, recorded: Sequence[Rollout]) -> list[Rollout]:
        """Replay rollouts concurrently, turn by turn: those that can be opened in half of the deadline."""
        sessions: list[ClientSession] = []
        try:
            for rollout in self.while_time(recorded):
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
        """Close the sessions that the check left open. Cancel closing after a timeout."""

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
        """Play one turn. Return False if the episode has ended or the policy stopped."""
        self.doing = f"turn {len(rollout.turns) + 1} of {rollout.name}"
        if rollout.last is not None and rollout.last.final:
            return False
        action = await policy(session, rollout)
        if action is None:
            return False
        rollout.turns.append(RolloutTurn(action=action, result=await self.step(session, action)))
        return True


def failure_reason(result: StepResult) -> str | None:
    """Return the reason of a result whose environment failed, or None if it did not."""
    if result.status is not SessionStatus.FAILED_ENVIRONMENT:
        return None
    error = result.info.get("error", "no reason given")
    return str(error.get("message", error) if isinstance(error, dict) else error)


def describe(action: Message) -> str:
    """Return an action as at most 120 characters of text."""
    text = format_message(action).removeprefix("assistant: ")
    return shorten(text)


def _words(rollout: Rollout) -> list[str]:
    """Return some of the sampler's default words, then the last words of the environment's messages."""
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


def _shared_values(environment: type[Environment]) -> Iterator[tuple[tuple[type | ModuleType, str], Any]]:
    """Yield the values, except code, of an author's classes and their modules."""
    bases = environment.__mro__[: environment.__mro__.index(Environment)]
    owners: list[type | ModuleType] = [*bases]
    owners += dict.fromkeys(sys.modules[base.__module__] for base in bases if base.__module__ in sys.modules)
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if not name.startswith(("__", "_abc_")) and not callable(value) and not hasattr(value, "__get__"):
                yield (owner, name), value


def _content(value: Any) -> bytes | None:
    """Return the bytes by which a value is compared, or None if it cannot be compared."""
    try:
        return encode(value)
    except (StateError, ValueError):  # not plain data, too large, or not a finite number
        return None


def _text(owner: type | ModuleType, name: str) -> str:
    where = place(owner, name) if isinstance(owner, type) else ""
    own = owner.__name__.rpartition(".")[2]
    return f"{own}.{name} has changed{where and f' ({where})'}"
