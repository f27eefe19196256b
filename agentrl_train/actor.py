"""Step 4 of 9: ``Session`` x ``Engine`` -> ``Trajectory``, ``TrajectoryGroup``.

One episode is a conversation between an environment session and an engine. Two things that take time are kept
apart:

- *A call is not answered* by the environment or the engine within its own deadline: a failure. The episode is
  retried in a fresh session, then left out of its group; it never gets a reward.
- *The episode is long*, and every call is answered: a truncation. The turn in progress ends, and the episode
  keeps its turns and its reward. It is never replayed, because replays would favour short episodes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from agentrl_env.client import ClientSession, EnvClient
from agentrl_env.errors import (
    AgentRLError,
    CallTimeout,
    ProtocolError,
    ServerDraining,
    ServerFull,
    ServerUnreachable,
    SessionExpired,
    SessionLost,
    StateUnavailable,
    UnknownSession,
)
from agentrl_env.types import Message, SessionStatus, StepResult, TaskSample
from agentrl_train.chat import ChatFormat
from agentrl_train.errors import EngineError
from agentrl_train.runtime.config import EngineSection, RolloutSection
from agentrl_train.types import (
    UNTRACED,
    Completion,
    Engine,
    EpisodeEnd,
    SamplingParams,
    Trace,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

_ENDS = {
    SessionStatus.COMPLETED: EpisodeEnd.TERMINATED,
    SessionStatus.TRUNCATED_TURNS: EpisodeEnd.TRUNCATED_TURNS,
    SessionStatus.TRUNCATED_TIME: EpisodeEnd.TRUNCATED_TIME,
}

_Answer = TypeVar("_Answer")

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Timeout for closing a session."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
"""Exponential backoff between two attempts at an episode."""
OUTAGES = (
    CallTimeout,
    EngineError,
    ServerDraining,
    ServerFull,
    ServerUnreachable,
    SessionExpired,
    SessionLost,
    StateUnavailable,
    UnknownSession,
)
"""Failures independent of what the policy sampled: the same draws may be repeated."""
MAX_TOKEN_CHARACTERS = 256
"""Characters of a token, at most; longer messages are refused before they are encoded."""
MAX_REASON = 2_000
"""Characters of an environment's error message that are kept."""
MAX_VALUE = 1e12
"""Largest magnitude of a reward or metric: its square still fits the float32 of the learner."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode to play: its sample, and the seed of all its draws."""

    task: str
    split: str
    index: int | str | None
    seed: int | None
    draw_seed: tuple[int, ...]


class Actor:
    """Plays episodes concurrently, one per slot, in the order of their requests.

    ``rollout.stale_fraction`` is the probability that the stale policy samples a turn (cross-policy sampling,
    AgentRL section 3.1); it is drawn for every turn and recorded with the completion.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        chat: ChatFormat,
        clients: Mapping[str, EnvClient],
        sampling: EngineSection,
        rollout: RolloutSection,
        slots: AbstractAsyncContextManager[None],
        policy: str = "current",
        trace: Trace = UNTRACED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.discarded_tokens = 0
        """Tokens sampled in attempts that infrastructure failed; they are not trained on."""
        self._engine = engine
        self._chat = chat
        self._clients = clients
        self._sampling = sampling
        self._rollout = rollout
        self._slots = slots
        self._policy = policy
        self._trace = trace
        self._clock = clock
        self._limit_s = rollout.episode_limit_s(max_context=sampling.max_context)
        self._completion_s = sampling.completion_deadline_s
        self._unreachable: dict[str, float] = {}

    async def group(
        self, episode: Episode, *, size: int, group_id: int, admitted_version: int
    ) -> tuple[TrajectoryGroup, list[Trajectory]]:
        """Play ``size`` siblings; return the group and the episodes that failed every attempt."""
        async with asyncio.TaskGroup() as playing:
            tasks = [playing.create_task(self.sibling(episode, number=number)) for number in range(size)]
        siblings = [task.result() for task in tasks]
        group = TrajectoryGroup(
            group_id=group_id,
            task=episode.task,
            trajectories=[t for t in siblings if not t.end.failed],
            admitted_version=admitted_version,
        )
        return group, [t for t in siblings if t.end.failed]

    async def sibling(self, episode: Episode, *, number: int = 0) -> Trajectory:
        """Play one episode; retry it in a fresh session after infrastructure failures."""
        async with self._slots:
            with self._trace.lane("slots") as track:
                return await self._until_played(episode, number=number, track=track)

    async def _until_played(self, episode: Episode, *, number: int, track: str) -> Trajectory:
        """Play until an attempt succeeds or all attempts are used.

        New draws are made only where the old ones may have caused the failure. Otherwise failures would bias
        what is trained: long episodes fail more often.
        """
        attempt, draws, pause_s = 0, 0, FIRST_BACKOFF_S
        started = time.monotonic()
        while True:
            trajectory, cause = await self._attempt(
                episode, draw_seed=(*episode.draw_seed, number, draws), track=track, attempt=attempt
            )
            if trajectory.opening and (since := self._unreachable.pop(episode.task, None)) is not None:
                away_s = time.monotonic() - since
                logger.warning("the environment of %s is reachable again after %.0f s", episode.task, away_s)
            if cause is None:
                return trajectory
            self.discarded_tokens += trajectory.num_sampled_tokens
            unreachable = isinstance(cause, OUTAGES) and not trajectory.opening
            if unreachable:
                self._log_outage(episode.task, str(trajectory.error))
            # A full server answers, and has a session free once another episode has ended.
            full = isinstance(cause, ServerFull)
            wait_s = self._limit_s if full else self._rollout.environment_wait_timeout_s
            if not (unreachable and time.monotonic() < started + wait_s):
                attempt += 1
                if attempt > self._rollout.environment_retries:
                    return trajectory
            draws += not isinstance(cause, OUTAGES)
            logger.info("an episode of %s is retried: %s", episode.task, trajectory.error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_BACKOFF_S)

    def _log_outage(self, task: str, reason: str) -> None:
        """Log an outage once for all episodes that wait for the environment."""
        if task not in self._unreachable:
            self._unreachable[task] = time.monotonic()
            logger.warning(
                "the environment of %s is unreachable (%s); its episodes wait up to %g s for it",
                task,
                reason,
                self._rollout.environment_wait_timeout_s,
            )

    async def _attempt(
        self, episode: Episode, *, draw_seed: tuple[int, ...], track: str, attempt: int
    ) -> tuple[Trajectory, Exception | None]:
        """Play once; return the trajectory and the exception that failed it, if any."""
        labels = {"index": episode.index, "sibling": draw_seed[-2], "attempt": attempt}
        with self._trace.span(track, episode.task, **labels) as facts:
            one = _Attempt(
                episode,
                engine=self._engine,
                chat=self._chat,
                client=self._clients[episode.task],
                sampling=self._sampling,
                rollout=self._rollout,
                draw_seed=draw_seed,
                policy=self._policy,
                trace=self._trace,
                track=track,
                facts=facts,
                clock=self._clock,
                limit_s=self._limit_s,
                completion_s=self._completion_s,
            )
            trajectory = await one.run()
            facts.update(
                end=trajectory.end.value,
                reward=trajectory.reward,
                turns=len(trajectory.turns),
                tokens=trajectory.num_sampled_tokens,
            )
        return trajectory, one.cause


class _Attempt:
    """One attempt at one episode."""

    def __init__(
        self,
        episode: Episode,
        *,
        engine: Engine,
        chat: ChatFormat,
        client: EnvClient,
        sampling: EngineSection,
        rollout: RolloutSection,
        draw_seed: tuple[int, ...],
        policy: str,
        trace: Trace,
        track: str,
        facts: dict[str, Any],
        clock: Callable[[], float],
        limit_s: float,
        completion_s: float,
    ) -> None:
        self.cause: Exception | None = None
        """The exception that failed the attempt."""
        self._episode = episode
        self._engine = engine
        self._chat = chat
        self._client = client
        self._sampling = sampling
        self._rollout = rollout
        self._policy = policy
        self._trace = trace
        self._track = track
        self._facts = facts
        self._clock = clock
        self._limit_s = limit_s
        self._completion_s = completion_s
        self._draws = np.random.default_rng(np.random.SeedSequence(draw_seed))
        # Unique in the process: episodes with the same key would share a row of the engine's cache.
        self._key = f"{episode.task}-{next(_numbers)}"
        self._turns: list[Turn] = []
        self._opening: Sequence[Message] = ()
        self._sample = TaskSample(task=episode.task, split=episode.split, index=episode.index)
        self._metrics: dict[str, float] = {}

    async def run(self) -> Trajectory:
        started = self._clock()
        error: str | None = None
        try:
            end = await self._play_session()
        except EngineError as failure:
            end, error, self.cause = EpisodeEnd.FAILED_ENGINE, str(failure), failure
        except AgentRLError as failure:
            end, error = EpisodeEnd.FAILED_ENVIRONMENT, f"{type(failure).__name__}: {failure}"
            self.cause = failure
        finally:
            self._engine.release(self._key)
        reward = sum(turn.reward for turn in self._turns)
        return Trajectory(
            sample=self._sample,
            opening=self._opening,
            turns=self._turns,
            end=end,
            reward=reward,
            success=self._metrics.get("success", float(reward >= 1.0)) >= 0.5,
            metrics=self._metrics,
            error=error,
            seconds=self._clock() - started,
        )

    async def _play_session(self) -> EpisodeEnd:
        episode = self._episode
        with self._trace.span(self._track, "open"):
            wait_s = self._rollout.environment_timeout_s
            opening = self._client.open(
                episode.task, split=episode.split, index=episode.index, seed=episode.seed, wait=wait_s
            )
            session = await self._answered(opening, wait_s=wait_s)
        try:
            self._facts["session"] = session.session_id
            _check_opening(session, episode)
            self._sample, self._opening = session.info.sample, session.messages
            return await self._converse(session)
        finally:
            with self._trace.span(self._track, "close"):
                await _close(session)

    async def _converse(self, session: ClientSession) -> EpisodeEnd:
        end_s = self._clock() + self._limit_s
        new_ids = self._render(lambda: self._chat.opening(session.messages, session.tools), session.messages)
        context = list(new_ids)
        require_room(self._episode.task, tokens=len(context), sampling=self._sampling)
        while (room := self._sampling.max_context - len(context)) > 0:
            number = len(self._turns) + 1
            with self._trace.span(self._track, f"turn {number}"):
                completion = await self._complete(context, room=room)
                message, thought = self._chat.parse(completion.token_ids, turn=number, tools=session.tools)
                with self._trace.span(self._track, "environment"):
                    result = _valid(await self._answered(session.step(message)))
            self._turns.append(_turn(new_ids, completion, message, thought, result))
            if result.final:
                self._metrics = dict(result.metrics)
                return episode_end(result)
            if self._clock() >= end_s:
                return EpisodeEnd.TRUNCATED_TIME
            if number == self._rollout.max_turns.get(self._episode.task):
                return EpisodeEnd.TRUNCATED_TURNS
            stop = completion.token_ids[-1] if completion.finish_reason == "stop" else None
            reply = partial(self._chat.reply, after=message, tools=session.tools, stop=stop)
            new_ids = self._render(partial(reply, result.messages), result.messages)
            context = [*context, *completion.token_ids, *new_ids]
        return EpisodeEnd.TRUNCATED_LENGTH

    async def _answered(self, call: Awaitable[_Answer], *, wait_s: float = 0.0) -> _Answer:
        """Await a call of the environment; raises CallTimeout if it is not answered in time."""
        limit_s = wait_s + self._rollout.environment_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError:
            raise CallTimeout(f"the environment did not answer within {limit_s:g} s") from None

    def _render(self, render: Callable[[], list[int]], messages: Sequence[Message]) -> list[int]:
        """Return the tokens of messages of the environment. Raises ProtocolError where there are none."""
        size, most = sum(map(_size, messages)), MAX_TOKEN_CHARACTERS * self._sampling.max_context
        if size > most:
            raise ProtocolError(f"the environment sent {size} characters, more than any context can hold")
        try:
            return render()
        except Exception as error:  # templates raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ProtocolError(
                f"the chat template cannot render the environment's messages ({reason})"
            ) from error

    async def _complete(self, context: Sequence[int], *, room: int) -> Completion:
        """Sample a turn; the last one may be shorter, with the tokens that a longer one would begin with."""
        policy = "stale" if self._draws.random() < self._rollout.stale_fraction else self._policy
        own = self._sampling
        sampling = SamplingParams(
            max_new_tokens=min(own.max_new_tokens, room),
            temperature=own.temperature,
            top_p=own.top_p,
            top_k=own.top_k,
            min_p=own.min_p,
            seed=int(self._draws.integers(2**63)),
        )
        with self._trace.span(self._track, "engine", context=len(context), policy=policy) as facts:
            completion = await self._generate(context, sampling, policy=policy)
            facts["tokens"] = len(completion.token_ids)
            facts["versions"] = sorted(set(completion.versions))
        return completion

    async def _generate(self, context: Sequence[int], sampling: SamplingParams, *, policy: str) -> Completion:
        limit_s = self._completion_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._engine.generate(
                    context, sampling=sampling, session_key=self._key, policy=policy
                )
        except TimeoutError:
            raise EngineError(f"the engine returned no completion within {limit_s:g} s") from None


def require_room(task: str, *, tokens: int, sampling: EngineSection) -> None:
    """Raise ``EngineError`` if an opening of this many tokens leaves no room for a turn."""
    if (needed := tokens + sampling.max_new_tokens) > sampling.max_context:
        raise EngineError(
            f"the opening of {task} takes {tokens} tokens and a turn up to engine.max_new_tokens = "
            f"{sampling.max_new_tokens}: raise engine.max_context from {sampling.max_context} to at least "
            f"{needed}"
        )


async def _close(session: ClientSession) -> None:
    """Close a session without masking the exception in flight; a session left open ends with its lease."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await session.close()
    except (AgentRLError, TimeoutError) as error:
        logger.debug("session %s was not closed: %s", session.session_id, error)


def _check_opening(session: ClientSession, episode: Episode) -> None:
    """Raise ProtocolError unless a session is one of the problem that was asked for, and says something."""
    sample = session.sample
    if sample.task != episode.task or (episode.index is not None and sample.index != episode.index):
        asked, got = (episode.task, episode.index), (sample.task, sample.index)
        raise ProtocolError(f"the environment opened a session of sample {got} in place of {asked}")
    if not session.messages:
        raise ProtocolError(f"the environment of {episode.task} opened a session without a message")


def _size(message: Message) -> int:
    """Return the number of characters of a message."""
    return len(message.content if isinstance(message.content, str) else str(message.content))


def _valid(result: StepResult) -> StepResult:
    """Return a result with which a run can go on. Raises ProtocolError for any other."""
    for name, value in {"reward": result.reward, **result.metrics}.items():
        if not -MAX_VALUE <= value <= MAX_VALUE:
            raise ProtocolError(
                f"the environment answered {name} = {value:g}; at most {MAX_VALUE:g} is valid"
            )
    return result


def _turn(
    new_ids: Sequence[int], completion: Completion, message: Message, thought: str | None, result: StepResult
) -> Turn:
    return Turn(
        prompt_ids=new_ids,
        completion=completion,
        message=message,
        reply=result.messages,
        reward=result.reward,
        invalid_calls=int(result.metrics.get("invalid_calls", 0)),
        thought=thought,
    )


def episode_end(result: StepResult) -> EpisodeEnd:
    """Return how a finished session ended.

    Raises:
        AgentRLError: the session failed.
    """
    if result.status in _ENDS:
        return _ENDS[result.status]
    error = result.info.get("error")
    reason = error.get("message") if isinstance(error, dict) else error
    raise AgentRLError(f"the session ended as {result.status}: {reason or 'no reason given'}"[:MAX_REASON])
