"""Step 4 of 9: ``Session`` x ``Engine`` -> ``Trajectory``, ``TrajectoryGroup``.

One episode is a conversation between an environment session and an engine. Whatever breaks on the way is
data: an episode that an environment or an engine failed is played again in a fresh session, then left out of
its group. It is never given a reward.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl_env.client import ClientSession, EnvClient
from agentrl_env.errors import (
    AgentRLError,
    CallTimeout,
    ServerDraining,
    ServerFull,
    ServerUnreachable,
    SessionExpired,
    SessionLost,
    StateUnavailable,
    UnknownSession,
)
from agentrl_env.types import Message, SessionStatus, StepResult, TaskSample
from agentrl_train.engine.chat import ChatFormat
from agentrl_train.errors import EngineError
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


logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest wait for a session to be closed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Between two attempts at an episode."""
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
"""Failures that have nothing to do with what the policy said: the same draws may be made again."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Which episode to play: a sample, a sibling's number, and the seed all its draws come from."""

    task: str
    split: str
    index: int | str | None
    seed: int | None
    draw_seed: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """How episodes are played.

    ``stale_fraction`` is the probability of a turn to be taken by the stale policy (cross-policy sampling,
    AgentRL section 3.1): the choice is made anew each turn and recorded with the completion.
    """

    max_new_tokens: int
    max_context: int
    temperature: float = 1.0
    stale_fraction: float = 0.0
    episode_s: float = 600.0
    retries: int = 2
    patience_s: float = 0.0
    """How long an environment may be out of reach before that counts as an attempt."""


class Actor:
    """Plays episodes, each in one of ``places``, first come first served."""

    def __init__(
        self,
        *,
        engine: Engine,
        chat: ChatFormat,
        clients: Mapping[str, EnvClient],
        play: Play,
        places: asyncio.Semaphore,
        trace: Trace = UNTRACED,
    ) -> None:
        self.discarded_tokens = 0
        """Tokens sampled in attempts that infrastructure failed: nobody trains on them."""
        self._engine = engine
        self._chat = chat
        self._clients = clients
        self._play = play
        self._places = places
        self._trace = trace
        self._away: dict[str, float] = {}

    async def group(
        self, episode: Episode, *, size: int, group_id: int, admitted_version: int
    ) -> tuple[TrajectoryGroup, list[Trajectory]]:
        """Play ``size`` siblings; return the group, and beside it the episodes that failed to the last."""
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
        """Play one episode, again in a fresh session where infrastructure failed it."""
        async with self._places:
            with self._trace.lane("slots") as track:
                return await self._until_played(episode, number=number, track=track)

    async def _until_played(self, episode: Episode, *, number: int, track: str) -> Trajectory:
        """Play until nothing fails, or all attempts are made.

        New draws are made only where the old ones may be to blame. Otherwise what fails would decide what is
        trained: long episodes fail more often.
        """
        attempt, draws, pause_s = 0, 0, FIRST_PAUSE_S
        patient_until = time.monotonic() + self._play.patience_s
        while True:
            trajectory, cause = await self._attempt(
                episode, draw_seed=(*episode.draw_seed, number, draws), track=track, attempt=attempt
            )
            if trajectory.opening and (since := self._away.pop(episode.task, None)) is not None:
                away_s = time.monotonic() - since
                logger.warning("the environment of %s is back, %.0f s later", episode.task, away_s)
            if cause is None:
                return trajectory
            self.discarded_tokens += trajectory.num_sampled_tokens
            away = isinstance(cause, OUTAGES) and not trajectory.opening
            if away:
                self._note_outage(episode.task, str(trajectory.error))
            if not (away and time.monotonic() < patient_until):
                attempt += 1
                if attempt > self._play.retries:
                    return trajectory
            draws += not isinstance(cause, OUTAGES)
            logger.info("an episode of %s is played again: %s", episode.task, trajectory.error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _note_outage(self, task: str, reason: str) -> None:
        """Say at once, and once for all episodes, that an environment is out of reach."""
        if task not in self._away:
            self._away[task] = time.monotonic()
            logger.warning(
                "the environment of %s is out of reach (%s); its episodes wait up to %g s for it",
                task,
                reason,
                self._play.patience_s,
            )

    async def _attempt(
        self, episode: Episode, *, draw_seed: tuple[int, ...], track: str, attempt: int
    ) -> tuple[Trajectory, Exception | None]:
        """Play once; return what came of it, and what failed."""
        facts = {"index": episode.index, "sibling": draw_seed[-2], "attempt": attempt}
        with self._trace.span(track, episode.task, **facts) as told:
            one = _Episode(
                episode,
                engine=self._engine,
                chat=self._chat,
                client=self._clients[episode.task],
                play=self._play,
                draw_seed=draw_seed,
                trace=self._trace,
                track=track,
                told=told,
            )
            trajectory = await one.run()
            told.update(
                end=trajectory.end.value,
                reward=trajectory.reward,
                turns=len(trajectory.turns),
                tokens=trajectory.num_sampled_tokens,
            )
        return trajectory, one.cause


class _Episode:
    """One attempt at one episode."""

    def __init__(
        self,
        episode: Episode,
        *,
        engine: Engine,
        chat: ChatFormat,
        client: EnvClient,
        play: Play,
        draw_seed: tuple[int, ...],
        trace: Trace,
        track: str,
        told: dict[str, Any],
    ) -> None:
        self.cause: Exception | None = None
        """What failed it."""
        self._episode = episode
        self._engine = engine
        self._chat = chat
        self._client = client
        self._play = play
        self._trace = trace
        self._track = track
        self._told = told
        self._draws = np.random.default_rng(np.random.SeedSequence(draw_seed))
        # Unique in the process: two episodes under one key would share a row of the engine's cache.
        self._key = f"{episode.task}-{next(_numbers)}"
        self._turns: list[Turn] = []
        self._opening: Sequence[Message] = ()
        self._sample = TaskSample(task=episode.task, split=episode.split, index=episode.index)
        self._metrics: dict[str, float] = {}

    async def run(self) -> Trajectory:
        started = time.monotonic()
        error: str | None = None
        try:
            async with asyncio.timeout(self._play.episode_s):
                end = await self._play_session()
        except EngineError as failure:
            end, error, self.cause = EpisodeEnd.FAILED_ENGINE, str(failure), failure
        except AgentRLError as failure:
            end, error = EpisodeEnd.FAILED_ENVIRONMENT, f"{type(failure).__name__}: {failure}"
            self.cause = failure
        except TimeoutError as failure:
            end, self.cause = EpisodeEnd.FAILED_ENVIRONMENT, failure
            error = f"the episode took longer than {self._play.episode_s:g} s"
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
            seconds=time.monotonic() - started,
        )

    async def _play_session(self) -> EpisodeEnd:
        wanted = self._episode
        with self._trace.span(self._track, "open"):
            session = await self._client.open(
                wanted.task,
                split=wanted.split,
                index=wanted.index,
                seed=wanted.seed,
                wait=self._play.episode_s,
            )
        try:
            self._told["session"] = session.session_id
            self._sample, self._opening = session.info.sample, session.messages
            return await self._converse(session)
        finally:
            with self._trace.span(self._track, "close"):
                await _close(session)

    async def _converse(self, session: ClientSession) -> EpisodeEnd:
        new_ids = self._chat.opening(session.messages, session.tools)
        context = list(new_ids)
        while len(context) + self._play.max_new_tokens <= self._play.max_context:
            number = len(self._turns) + 1
            with self._trace.span(self._track, f"turn {number}"):
                completion = await self._complete(context)
                message = self._chat.parse(completion.token_ids, turn=number)
                with self._trace.span(self._track, "environment"):
                    result = await session.step(message)
            self._turns.append(_turn(new_ids, completion, message, result))
            if result.final:
                self._metrics = dict(result.metrics)
                return episode_end(result)
            new_ids = self._chat.reply(result.messages, stopped=completion.finish_reason == "stop")
            context = [*context, *completion.token_ids, *new_ids]
        if not self._turns:
            needed = len(context) + self._play.max_new_tokens
            raise EngineError(
                f"the opening of {self._episode.task} takes {len(context)} tokens and a turn up to "
                f"engine.max_new_tokens = {self._play.max_new_tokens}: raise engine.max_context from "
                f"{self._play.max_context} to {needed} at least"
            )
        return EpisodeEnd.TRUNCATED_LENGTH

    async def _complete(self, context: Sequence[int]) -> Completion:
        policy = "stale" if self._draws.random() < self._play.stale_fraction else "current"
        sampling = SamplingParams(
            max_new_tokens=self._play.max_new_tokens,
            temperature=self._play.temperature,
            seed=int(self._draws.integers(2**63)),
        )
        with self._trace.span(self._track, "engine", context=len(context), policy=policy) as told:
            completion = await self._engine.generate(
                context, sampling=sampling, session_key=self._key, policy=policy
            )
            told["tokens"] = len(completion.token_ids)
            told["versions"] = sorted(set(completion.versions))
        return completion


async def _close(session: ClientSession) -> None:
    """End a session; one that does not hear of it ends with its lease. Never hides why it is closed."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await session.close()
    except (AgentRLError, TimeoutError) as error:
        logger.debug("session %s was not closed: %s", session.session_id, error)


def _turn(new_ids: Sequence[int], completion: Completion, message: Message, result: StepResult) -> Turn:
    return Turn(
        prompt_ids=new_ids,
        completion=completion,
        message=message,
        reply=result.messages,
        reward=result.reward,
        invalid_calls=int(result.metrics.get("invalid_calls", 0)),
    )


def episode_end(result: StepResult) -> EpisodeEnd:
    """Say how a finished session ended.

    Raises:
        AgentRLError: it did not end, it failed.
    """
    if result.status in _ENDS:
        return _ENDS[result.status]
    error = result.info.get("error") or {}
    raise AgentRLError(f"the session ended as {result.status}: {error.get('message', 'no reason given')}")
