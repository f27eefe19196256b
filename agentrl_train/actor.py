"""Step 4 of 9: ``Session`` x ``Engine`` -> ``Trajectory``, ``TrajectoryGroup``.

One episode is a conversation between an environment session and an engine. Two kinds of delay are handled
differently:

- *A call is not answered* by the environment or the engine within its own deadline. This is a failure. The
  episode is retried in a fresh session and then omitted from its group. It never gets a reward.
- *The episode is long*, but every call is answered. This is a truncation. The turn in progress ends, and the
  episode keeps its turns and its reward. It is never replayed, because replays would favour short episodes.

A call of a sub-agent (``sub_agent.py``) opens a segment with its own context in the same session.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from agentrl_env.client import ClientSession, EnvClient
from agentrl_env.errors import AgentRLError, CallTimeout, ProtocolError, ServerFull
from agentrl_env.types import Message, SessionStatus, StepResult, TaskSample, ToolSpec
from agentrl_train import sub_agent
from agentrl_train.chat import ChatFormat, plain_text
from agentrl_train.config import RolloutSection
from agentrl_train.errors import OUTAGES, EngineError
from agentrl_train.reward import Rewards
from agentrl_train.tool_calls.errors import with_syntax
from agentrl_train.types import (
    ROOT,
    UNTRACED,
    Completion,
    Engine,
    Episode,
    EpisodeEnd,
    Sampler,
    Sampling,
    Segment,
    Trace,
    Trajectory,
    TrajectoryGroup,
    Turn,
    succeeded,
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
MAX_TOKEN_CHARACTERS = 256
"""Upper bound on characters per token. Longer messages are rejected before they are encoded."""
MAX_REASON = 2_000
"""Characters of an environment's error message that are kept."""
MAX_VALUE = 1e12
"""Largest magnitude of a reward or metric. Its square still fits into the learner's float32."""
TIME_DIGITS = 4
"""Decimals of the times of turns, in seconds."""
NO_TOKENS = "the engine returned a completion without a token; a stop token is one"
_numbers = itertools.count()


class Program(Protocol):
    """Interface: plays episodes instead of the actor's own conversation."""

    async def play(
        self, episode: Episode, *, chat: ChatFormat, sampler: Sampler, limit_s: float
    ) -> tuple[Trajectory, Exception | None]:
        """Play once; return the trajectory and the exception that failed it, if any."""
        ...


class Actor:
    """Plays episodes concurrently, one per slot, in the order of their requests.

    ``rollout.stale.fraction`` is the probability that the stale policy samples a turn (cross-policy sampling,
    AgentRL section 3.1). The policy is drawn for every turn and recorded with the completion. ``greedy`` is
    another actor, which plays one additional episode of every group. ``rewards`` score every episode after it
    is played, outside its slot. ``programs`` play the tasks with their names instead of the actor's own
    conversation.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        chat: ChatFormat,
        clients: Mapping[str, EnvClient],
        sampling: Sampling | None = None,
        rollout: RolloutSection | None = None,
        slots: AbstractAsyncContextManager[None] | None = None,
        policy: str = "current",
        greedy: Actor | None = None,
        rewards: Rewards | None = None,
        programs: Mapping[str, Program] | None = None,
        trace: Trace = UNTRACED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.discarded_tokens = 0
        """Tokens sampled in attempts that infrastructure failed; they are not trained on."""
        self.engine = engine
        self.chat = chat
        self.sampling = sampling or Sampling()
        self.rollout = rollout or RolloutSection()
        self.policy = policy
        self.clock = clock
        self.limit_s = self.rollout.episode_limit_s(max_context=self.sampling.max_context)
        """Time limit of an episode."""
        self._clients = clients
        self._slots = slots or nullcontext()
        self._greedy = greedy
        self._rewards = rewards
        self._programs = programs or {}
        self._trace = trace
        self._unreachable: dict[str, float] = {}

    async def group(
        self, episode: Episode, *, size: int, group_id: int, admitted_version: int
    ) -> tuple[TrajectoryGroup, list[Trajectory]]:
        """Play ``size`` siblings; return the group and the episodes that failed every attempt.

        A group whose greedy episode failed has no trajectories.
        """
        episode = replace(episode, version=admitted_version)
        async with asyncio.TaskGroup() as playing:
            tasks = [playing.create_task(self.sibling(episode, number=number)) for number in range(size)]
            if self._greedy is not None:
                tasks.append(playing.create_task(self._greedy.sibling(episode, number=size)))
        siblings = [task.result() for task in tasks]
        greedy = siblings.pop() if self._greedy is not None else None
        failed = [t for t in siblings if t.end.failed]
        if greedy is not None and greedy.end.failed:
            self.discarded_tokens += sum(t.num_sampled_tokens for t in siblings if not t.end.failed)
            siblings, failed, greedy = [], [*failed, greedy], None
        played = [t for t in siblings if not t.end.failed]
        if self._rewards is not None:
            beside = [] if greedy is None else [greedy]
            scored = self._rewards.combined([*played, *beside], version=admitted_version)
            played, greedy = scored[: len(played)], scored[-1] if beside else None
        group = TrajectoryGroup(
            group_id=group_id,
            task=episode.task,
            trajectories=played,
            admitted_version=admitted_version,
            greedy=greedy,
        )
        return group, failed

    async def sibling(self, episode: Episode, *, number: int = 0) -> Trajectory:
        """Play one episode; retry it in a fresh session after infrastructure failures."""
        async with self._slots:
            with self._trace.lane("slots") as track:
                trajectory = await self._until_played(episode, number=number, track=track)
        if self._rewards is None or trajectory.end.failed:
            return trajectory
        scored = await self._rewards.score(trajectory)
        if scored.end.failed:
            self.discarded_tokens += scored.num_sampled_tokens
        return scored

    async def _until_played(self, episode: Episode, *, number: int, track: str) -> Trajectory:
        """Play until an attempt succeeds or all attempts are used.

        New draws are made only if the old ones can have caused the failure. Otherwise failures would bias the
        training data, because long episodes fail more often.
        """
        attempt, draws, pause_s = 0, 0, FIRST_BACKOFF_S
        started = time.monotonic()
        while True:
            begun = time.monotonic()
            trajectory, cause = await self._attempt(
                episode, draw_seed=(*episode.draw_seed, number, draws), track=track, attempt=attempt
            )
            if trajectory.opening:
                self._log_opened(episode.task, begun)
            if cause is None:
                return trajectory
            self.discarded_tokens += trajectory.num_sampled_tokens
            unreachable = isinstance(cause, OUTAGES) and not trajectory.opening
            if unreachable:
                self._log_outage(episode.task, str(trajectory.error))
            # A full server does answer, and has a free session once another episode ends.
            full = isinstance(cause, ServerFull)
            wait_s = self.limit_s if full else self.rollout.environment_wait_timeout_s
            if not (unreachable and time.monotonic() < started + wait_s):
                attempt += 1
                if attempt > self.rollout.environment_retries:
                    return trajectory
            draws += not isinstance(cause, OUTAGES)
            logger.info("an episode of %s is retried: %s", episode.task, trajectory.error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_BACKOFF_S)

    def _log_opened(self, task: str, begun: float) -> None:
        """Log the end of an outage; a session that was opened before the outage does not count."""
        since = self._unreachable.get(task)
        if since is not None and since < begun:
            del self._unreachable[task]
            away_s = time.monotonic() - since
            logger.warning("the environment of %s is reachable again after %.0f s", task, away_s)

    def _log_outage(self, task: str, reason: str) -> None:
        """Log an outage once for all episodes that wait for the environment."""
        if task not in self._unreachable:
            self._unreachable[task] = time.monotonic()
            logger.warning(
                "the environment of %s is unreachable (%s); its episodes wait up to %g s for it",
                task,
                reason,
                self.rollout.environment_wait_timeout_s,
            )

    async def _attempt(
        self, episode: Episode, *, draw_seed: tuple[int, ...], track: str, attempt: int
    ) -> tuple[Trajectory, Exception | None]:
        """Play once; return the trajectory and the exception that failed it, if any."""
        program = self._programs.get(episode.task)
        labels = {"index": episode.index, "sibling": draw_seed[-2], "attempt": attempt}
        with self._trace.span(track, episode.task, **labels) as facts:
            one = _Attempt(
                self,
                episode,
                client=None if program else self._clients[episode.task],
                program=program,
                draw_seed=draw_seed,
                # Calls of a program can overlap, but spans of one track must not.
                trace=self._trace if program is None else UNTRACED,
                track=track,
                facts=facts,
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
        actor: Actor,
        episode: Episode,
        *,
        client: EnvClient | None,
        program: Program | None,
        draw_seed: tuple[int, ...],
        trace: Trace,
        track: str,
        facts: dict[str, Any],
    ) -> None:
        self.cause: Exception | None = None
        """The exception that failed the attempt."""
        self.sampling = actor.sampling
        self._actor = actor
        self._episode = episode
        self._engine = actor.engine
        self._chat = actor.chat
        self._rollout = actor.rollout
        self._clock = actor.clock
        self._started, self._started_s = time.time(), actor.clock()
        self._client = client
        self._program = program
        self._trace = trace
        self._track = track
        self._facts = facts
        self._draws = np.random.default_rng(np.random.SeedSequence(draw_seed))
        # Unique in this process, because episodes with the same key would share a row of the engine's cache.
        self._key = f"{episode.task}-{next(_numbers)}"
        self._turns: list[Turn] = []
        self._segments: list[Segment] = []
        self._contexts = 1
        # Play the sample that was drawn last, because it is in the engine's cache.
        self._samples = range(1 + actor.rollout.alternatives)
        helper = actor.rollout.sub_agent
        self._sub_agent = helper if helper is not None and helper.serves(episode.task) else None
        self._opening: Sequence[Message] = ()
        self._sample = TaskSample(task=episode.task, split=episode.split, index=episode.index)
        self._metrics: dict[str, float] = {}

    async def run(self) -> Trajectory:
        error: str | None = None
        try:
            if self._program is not None:
                trajectory, self.cause = await self._program.play(
                    self._episode, chat=self._chat, sampler=self, limit_s=self._actor.limit_s
                )
                return trajectory
            end = await self._play_session()
        except EngineError as failure:
            end, error, self.cause = EpisodeEnd.FAILED_ENGINE, str(failure), failure
        except AgentRLError as failure:
            end, error = EpisodeEnd.FAILED_ENVIRONMENT, f"{type(failure).__name__}: {failure}"
            self.cause = failure
        finally:
            for number in range(self._contexts):
                self._engine.release(self._segment_key(number))
        reward = sum(turn.reward for turn in self._turns)
        return Trajectory(
            sample=self._sample,
            opening=self._opening,
            turns=self._turns,
            end=end,
            reward=reward,
            success=succeeded(self._metrics, reward),
            metrics=self._metrics,
            error=error,
            seconds=self._clock() - self._started_s,
            started=self._started,
            segments=tuple(self._segments) or (ROOT,),
        )

    async def _play_session(self) -> EpisodeEnd:
        episode, client = self._episode, self._client
        assert client is not None
        with self._trace.span(self._track, "open"):
            wait_s = self._rollout.environment_timeout_s
            opening = client.open(
                episode.task, split=episode.split, index=episode.index, seed=episode.seed, wait=wait_s
            )
            session = await self._call_environment(opening, wait_s=wait_s)
        try:
            self._facts["session"] = session.session_id
            _check_opening(session, episode)
            self._sample, self._opening = session.info.sample, session.messages
            return await self._converse(session)
        finally:
            with self._trace.span(self._track, "close"):
                await _close(session)

    async def _converse(self, session: ClientSession) -> EpisodeEnd:
        self._end_s = self._clock() + self._actor.limit_s
        tools: Sequence[ToolSpec] = session.tools
        if self._sub_agent is not None:
            tools = sub_agent.planner_tools(self._sub_agent, tools)
        end = await self._extend(session, ROOT, tools)
        assert isinstance(end, EpisodeEnd), "the first segment has nobody to report to"
        return end

    async def _extend(
        self, session: ClientSession, segment: Segment, tools: Sequence[ToolSpec]
    ) -> EpisodeEnd | str:
        """Play the turns of a new segment until the episode ends; return its end, or a worker's report."""
        number = len(self._segments)
        self._segments.append(segment)
        opening, turns_left = segment.opening or session.messages, math.inf
        new_ids = self._render(lambda: self._chat.opening(opening, tools), opening)
        context = list(new_ids)
        if number and self._sub_agent is not None:
            turns_left = self._sub_agent.max_turns
        else:
            require_room(self._episode.task, tokens=len(context), sampling=self.sampling)
        while len(context) < self.sampling.max_context:
            turns_left -= 1
            count, asked = len(self._turns) + 1, self._elapsed()
            with self._trace.span(self._track, f"turn {count}"):
                *spare, completion = [await self.complete(context, segment=number) for _ in self._samples]
                sampled = self._elapsed()
                message, thought, tolerant = self._chat.parse(
                    completion.token_ids, turn=count, tools=tools, prompt=context
                )
                turn = partial(
                    Turn,
                    prompt_ids=new_ids,
                    completion=completion,
                    message=message,
                    thought=thought,
                    tolerant=tolerant,
                    segment=number,
                    alternatives=spare,
                    times=(asked, sampled),
                )
                full = len(context) + len(completion.token_ids) >= self.sampling.max_context
                if full and completion.finish_reason == "length" and (message.tool_calls or not number):
                    self._turns.append(turn(reply=(), reward=0.0))  # truncated text is not executed
                    break
                if number and not (message.tool_calls and turns_left):
                    self._turns.append(turn(reply=(), reward=0.0))
                    return sub_agent.report(message)
                answer = self._answer if self._sub_agent is None else self._answer_calls
                reply = await answer(session, message, turn, tools)
            if isinstance(reply, EpisodeEnd):
                return reply
            if (end := self._limit_reached()) is not None:
                return end
            if turns_left == 1:
                reply = (*reply, Message(role="user", content=sub_agent.LAST_TURN))
                self._turns[-1] = replace(self._turns[-1], reply=reply)
            stop = completion.token_ids[-1] if completion.finish_reason == "stop" else None
            render = partial(self._chat.reply, reply, after=message, tools=tools, stop=stop)
            new_ids = self._render(render, reply)
            context = [*context, *completion.token_ids, *new_ids]
        return sub_agent.NO_REPORT if number else EpisodeEnd.TRUNCATED_LENGTH

    async def _answer(
        self, session: ClientSession, message: Message, turn: Callable[..., Turn], tools: Sequence[ToolSpec]
    ) -> EpisodeEnd | Sequence[Message]:
        """Step the environment and record the turn; return the reply, or how the episode ended."""
        with self._trace.span(self._track, "environment"):
            result = _valid(await self._call_environment(session.step(message)))
        invalid_calls = int(result.metrics.get("invalid_calls", 0))
        reply: Sequence[Message] = result.messages
        if invalid_calls or any(not call.function.name for call in message.tool_calls or ()):
            parser = self._chat.parser
            reply = with_syntax(reply, message, invalid_calls=invalid_calls, parser=parser, tools=tools)
        recorded = turn(reply=reply, reward=result.reward, invalid_calls=invalid_calls)
        self._turns.append(replace(recorded, times=(*recorded.times, self._elapsed())))
        if not result.final:
            return reply
        self._metrics = dict(result.metrics)
        return episode_end(result)

    async def _answer_calls(
        self, session: ClientSession, message: Message, turn: Callable[..., Turn], tools: Sequence[ToolSpec]
    ) -> EpisodeEnd | Sequence[Message]:
        """Like ``_answer``, but run each sub-agent call in its own segment."""
        assert self._sub_agent is not None
        index = len(self._turns)
        calls = sub_agent.divide_calls(message, sub_agent=self._sub_agent, tools=tools)
        if calls.sent is None:
            self._turns.append(turn(reply=(), reward=0.0))
        elif isinstance(end := await self._answer(session, calls.sent, turn, tools), EpisodeEnd):
            return end
        answers = dict(calls.errors)
        for call_id, task in calls.tasks.items():
            if (over := self._limit_reached()) is not None:
                return over
            segment = Segment(
                parent=self._turns[index].segment,
                after_turn=index,
                reason="sub_agent",
                agent=self._sub_agent.name,
                opening=sub_agent.worker_opening(self._sub_agent, task),
            )
            worker_tools = sub_agent.worker_tools(self._sub_agent, session.tools)
            played = await self._extend(session, segment, worker_tools)
            self._engine.release(self._segment_key(len(self._segments) - 1))
            if isinstance(played, EpisodeEnd):
                return played
            answers[call_id] = Message(role="tool", content=played, tool_call_id=call_id)
        recorded = self._turns[index]
        self._turns[index] = replace(
            recorded,
            reply=sub_agent.merge_answers(message, recorded.reply, answers),
            invalid_calls=recorded.invalid_calls + len(calls.errors),
            times=(*recorded.times[:2], self._elapsed()),
        )
        return self._turns[index].reply

    def _elapsed(self) -> float:
        """Return the seconds since the start. They are rounded, because every turn records three of them."""
        return round(self._clock() - self._started_s, TIME_DIGITS)

    def _segment_key(self, number: int) -> str:
        """Return the engine's key of a segment's context."""
        return f"{self._key}/{number}" if number else self._key

    def _limit_reached(self) -> EpisodeEnd | None:
        """Return how the episode ends now, if a limit of the run ends it."""
        if self._clock() >= self._end_s:
            return EpisodeEnd.TRUNCATED_TIME
        limit = turn_limit(self._rollout, self._episode.task, version=self._episode.version)
        return EpisodeEnd.TRUNCATED_TURNS if limit is not None and len(self._turns) >= limit else None

    async def _call_environment(self, call: Awaitable[_Answer], *, wait_s: float = 0.0) -> _Answer:
        """Await a call of the environment; raises CallTimeout if it is not answered in time."""
        limit_s = wait_s + self._rollout.environment_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError:
            raise CallTimeout(f"the environment did not answer within {limit_s:g} s") from None

    def _render(self, render: Callable[[], list[int]], messages: Sequence[Message]) -> list[int]:
        """Return the tokens of messages of the environment. Raises ProtocolError if it cannot be done."""
        size = sum(len(plain_text(one.content) or "") for one in messages)
        if size > MAX_TOKEN_CHARACTERS * self.sampling.max_context:
            raise ProtocolError(f"the environment sent {size} characters, more than any context can hold")
        try:
            return render()
        except Exception as error:  # templates raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ProtocolError(
                f"the chat template cannot render the environment's messages ({reason})"
            ) from error

    async def complete(
        self,
        context: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        segment: int = 0,
        grammar: str = "",
        seed: int | None = None,
    ) -> Completion:
        """Sample a turn with a seed that the run draws. The last turn of a full context can be cut short."""
        policy = "stale" if self._draws.random() < self._rollout.stale.fraction else self._actor.policy
        drawn = int(self._draws.integers(2**63))
        sampling = self.sampling.request(context, seed=drawn, limit=max_new_tokens, grammar=grammar)
        self._contexts, key = max(self._contexts, segment + 1), self._segment_key(segment)
        with self._trace.span(self._track, "engine", context=len(context), policy=policy) as facts:
            completion = await self._engine.generate(
                context, sampling=sampling, session_key=key, policy=policy
            )
            if not completion.token_ids:
                raise EngineError(NO_TOKENS)
            facts["tokens"] = len(completion.token_ids)
            facts["versions"] = sorted(set(completion.versions))
        return completion


def turn_limit(rollout: RolloutSection, task: str, *, version: int | None) -> int | None:
    """Return the turn limit of an episode admitted at a policy version; None if there is none.

    ``rollout.horizon`` does not apply to episodes without a version, such as those of an evaluation.
    """
    limits = [rollout.max_turns[task]] if task in rollout.max_turns else []
    if rollout.horizon and version is not None:
        stages = rollout.horizon.turns
        limits.append(stages[min(version // rollout.horizon.steps, len(stages) - 1)])
    return min(limits, default=None)


def require_room(task: str, *, tokens: int, sampling: Sampling) -> None:
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
    """Raise ProtocolError unless a session has the requested sample and at least one message."""
    sample = session.sample
    if sample.task != episode.task or (episode.index is not None and sample.index != episode.index):
        asked, got = (episode.task, episode.index), (sample.task, sample.index)
        raise ProtocolError(f"the environment opened a session of sample {got} in place of {asked}")
    if not session.messages:
        raise ProtocolError(f"the environment of {episode.task} opened a session without a message")


def _valid(result: StepResult) -> StepResult:
    """Return the result if its numbers are valid. Raises ProtocolError otherwise."""
    for name, value in {"reward": result.reward, **result.metrics}.items():
        if not -MAX_VALUE <= value <= MAX_VALUE:
            raise ProtocolError(f"the environment answered {name} = {value:g}; the most is {MAX_VALUE:g}")
    return result


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
