"""Evaluation of a policy: plays the episodes that an evaluation still lacks, many at a time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.dataset import empty_split
from agentrl_env.errors import (
    AgentRLError,
    DefinitionError,
    Forbidden,
    InvalidRequest,
    ProtocolError,
    Unauthorized,
    UnknownSample,
    UnknownTask,
)
from agentrl_env.evaluation.chat_model import ChatModel, Completion, ContextFull, ModelFailed, ModelRefused
from agentrl_env.evaluation.record import EpisodeRecord, EvaluationError, EvaluationRun, RunFile, TurnRecord
from agentrl_env.types import TRUNCATED, Message, SessionStatus, StepResult, TaskInfo, ToolSpec

RETRY_PAUSE_S = 1.0
"""Seconds before an episode that failed is begun again; each further pause is twice as long."""
FAILURES_IN_A_ROW = 20
"""Failed episodes in a row after which an evaluation stops; more if more are played at a time."""
FATAL = (
    DefinitionError,
    EvaluationError,
    Forbidden,
    InvalidRequest,
    ModelRefused,
    ProtocolError,
    Unauthorized,
    UnknownSample,
    UnknownTask,
)
"""Errors that every further episode would have as well."""

Policy = Callable[[Sequence[Message], Sequence[ToolSpec]], Awaitable[Completion]]
"""Returns the next message of an episode, from the conversation and the tools."""
PolicyOf = Callable[[int | str, int], Policy]
"""Returns the policy of an episode, from the index of its sample and the number of the attempt."""


def choose_indices(task: TaskInfo, split: str, samples: int, *, seed: int = 0) -> tuple[int, ...]:
    """Return the samples to play: all of a split, or as many as asked, drawn with a seed.

    Of an endless split they are the first ones. Raises UnknownSample if the split is unknown or empty.
    """
    if split not in task.splits:
        known = ", ".join(task.splits)
        raise UnknownSample(f"task {task.name!r} has no split {split!r}; splits: {known}")
    size = task.splits[split].num_samples
    if size == 0:
        raise UnknownSample(empty_split(split))
    if size is None or size <= samples:
        return tuple(range(samples if size is None else size))
    return tuple(sorted(random.Random(seed).sample(range(size), samples)))


def model_policy(model: ChatModel, run: EvaluationRun) -> PolicyOf:
    """Return the policy of a model; requests carry the episode's seed if the settings say so."""

    def of(index: int | str, attempt: int) -> Policy:
        seed = run.settings.episode_seed(index, attempt) if run.settings.send_seed else None
        originals: dict[int, Mapping[str, Any]] = {}

        async def act(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Completion:
            completion = await model.complete(messages, tools, seed=seed, originals=originals)
            if completion.original is not None:
                originals[len(messages)] = completion.original
            return completion

        return act

    return of


def replay_policy(recorded: EvaluationRun) -> PolicyOf:
    """Return a policy that repeats the messages of an evaluation, such as after a change of the grader."""

    def of(index: int | str, attempt: int) -> Policy:
        episode = recorded.episodes.get((index, attempt))
        turns = iter(episode.turns if episode is not None and episode.failed is None else ())

        async def act(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Completion:
            turn = next(turns, None)
            if turn is None:
                raise ModelFailed("the recorded episode has no further turn, and this one has not ended")
            return Completion(
                message=turn.action,
                thought=turn.thought,
                finish_reason=turn.finish_reason,
                usage=turn.usage,
                seconds=turn.model_s or 0.0,
                repeats=turn.repeats,
            )

        return act

    return of


async def evaluate(
    client: EnvClient,
    policy: PolicyOf,
    file: RunFile,
    *,
    concurrency: int = 16,
    retries: int = 2,
    wait: float = 3600.0,
    on_episode: Callable[[EpisodeRecord], None] = lambda episode: None,
) -> EvaluationRun:
    """Play the episodes that a run still lacks, and append each to its file.

    Failures of the endpoint, the server and the environment are recorded apart; they count as no result.

    Args:
        client: The client of the task.
        policy: Plays the episodes.
        file: The file of the evaluation.
        concurrency: Episodes that are played at the same time.
        retries: Times that an episode that failed is begun again.
        wait: Seconds to wait for a place on a full server.
        on_episode: Called after each episode.

    Returns:
        The evaluation, with the episodes of earlier starts.

    Raises:
        EvaluationError: Episode after episode failed.
        AgentRLError: An error that every further episode would have, such as a wrong key.
    """
    settings = file.run.settings
    pending, streak = deque(file.run.pending), 0
    patience = max(FAILURES_IN_A_ROW, 2 * concurrency)

    async def play_some() -> None:
        nonlocal streak
        while pending:
            index, attempt = pending.popleft()
            episode = await _play_with_retries(
                client, policy, file, index=index, attempt=attempt, retries=retries, wait=wait
            )
            file.append(episode)
            on_episode(episode)
            streak = streak + 1 if episode.failed else 0
            if streak >= patience:
                raise EvaluationError(
                    f"{streak} episodes of {settings.task} failed in a row, the last with: {episode.error}; "
                    "after mending it, the same command goes on with the evaluation"
                )

    errors: list[AgentRLError] = []
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(pending))):
                group.create_task(play_some())
    except* AgentRLError as raised:
        errors += [error for error in raised.exceptions if isinstance(error, AgentRLError)]
    if errors:
        raise errors[0]
    return file.run


async def _play_with_retries(
    client: EnvClient,
    policy: PolicyOf,
    file: RunFile,
    *,
    index: int | str,
    attempt: int,
    retries: int,
    wait: float,
) -> EpisodeRecord:
    for number in range(retries + 1):
        if number:
            await asyncio.sleep(RETRY_PAUSE_S * 2 ** (number - 1))
        play = _Play(client, policy(index, attempt), file.run, index=index, attempt=attempt, wait=wait)
        episode = await play.run(tries=number + 1)
        if episode.failed is None:
            break
    return episode


class _Play:
    """One episode under way."""

    def __init__(
        self,
        client: EnvClient,
        policy: Policy,
        run: EvaluationRun,
        *,
        index: int | str,
        attempt: int,
        wait: float,
    ) -> None:
        self._client, self._policy, self._settings = client, policy, run.settings
        self._index, self._attempt, self._wait = index, attempt, wait
        self._session: ClientSession | None = None
        self._turns: list[TurnRecord] = []
        self._begun = time.perf_counter()
        self._started = datetime.now(UTC).isoformat(timespec="milliseconds")

    async def run(self, *, tries: int) -> EpisodeRecord:
        """Play the episode and return its record. Raises the errors in ``FATAL``."""
        try:
            return self._record(await self._play(), tries)
        except FATAL:
            raise
        except ModelFailed as error:
            return self._record("failed_model", tries, error=str(error), failed="model")
        except AgentRLError as error:
            reason = f"{type(error).__name__}: {error}"
            return self._record("failed_environment", tries, error=reason, failed="environment")

    async def _play(self) -> str:
        """Play until the end and return its name."""
        settings = self._settings
        async with await self._client.open(
            settings.task, split=settings.split, index=self._index, wait=self._wait
        ) as session:
            self._session = session
            self._begun = time.perf_counter()  # not the time in the queue
            messages = list(session.messages)
            while not session.status.final:
                try:
                    completion = await self._policy(messages, session.tools)
                except ContextFull:
                    return "truncated_context"
                begin = time.perf_counter()
                result = await session.step(completion.message)
                self._turns.append(_turn(completion, result, time.perf_counter() - begin))
                messages += [completion.message, *result.messages]
        return str(session.status)

    def _record(
        self,
        end: str,
        tries: int,
        *,
        error: str | None = None,
        failed: Literal["model", "environment"] | None = None,
    ) -> EpisodeRecord:
        last = self._session.last if self._session is not None else None
        ends = (SessionStatus.COMPLETED, *TRUNCATED, "truncated_context")
        if failed is None and end not in ends:
            failed, error = "environment", _reason(last, end)
        reward = sum(turn.reward for turn in self._turns)
        metrics = dict(last.metrics) if last is not None else {}
        return EpisodeRecord(
            index=self._index,
            attempt=self._attempt,
            seed=self._session.sample.seed if self._session is not None else None,
            opening=self._session.messages if self._session is not None else (),
            turns=tuple(self._turns),
            end=end,
            reward=reward,
            success=failed is None and metrics.get("success", float(reward >= 1.0)) >= 0.5,
            metrics=metrics,
            error=error,
            failed=failed,
            tries=tries,
            seconds=time.perf_counter() - self._begun,
            started=self._started,
        )


def _turn(completion: Completion, result: StepResult, seconds: float) -> TurnRecord:
    return TurnRecord(
        action=completion.message,
        thought=completion.thought,
        finish_reason=completion.finish_reason,
        usage=completion.usage,
        invalid_calls=int(result.metrics.get("invalid_calls", 0)),
        model_s=completion.seconds,
        repeats=completion.repeats,
        environment_s=seconds,
        messages=result.messages,
        reward=result.reward,
        info=result.info,
    )


def _reason(last: StepResult | None, end: str) -> str:
    error = last.info.get("error") if last is not None else None
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return f"the session ended as {end}"
