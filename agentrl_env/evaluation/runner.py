"""Evaluation of a policy: plays the missing episodes of an evaluation, many at a time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from inspect import isawaitable
from typing import Any, Literal

from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.dataset import empty_split
from agentrl_env.errors import (
    AgentRLError,
    BodyTooLarge,
    DefinitionError,
    Forbidden,
    InvalidRequest,
    ProtocolError,
    Unauthorized,
    UnknownSample,
    UnknownTask,
    WireError,
)
from agentrl_env.evaluation.chat_model import ChatModel, Completion, ContextFull, ModelFailed, ModelRefused
from agentrl_env.evaluation.record import EpisodeRecord, EvaluationError, EvaluationRun, RunFile, TurnRecord
from agentrl_env.types import TRUNCATED, Message, SessionStatus, StepResult, TaskInfo, ToolSpec

RETRY_PAUSE_S = 1.0
"""Seconds before a failed episode is started again. Each further pause is twice as long."""
FAILURES_IN_A_ROW = 20
"""Failed episodes in a row after which an evaluation stops. More if more are played at a time."""
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
"""Errors that would also occur in every further episode."""
TOO_LONG = "the first request exceeds the model's context: lower max_tokens, or raise the context"

Policy = Callable[[Sequence[Message], Sequence[ToolSpec]], Awaitable[Completion]]
"""Returns the next message of an episode, from the conversation and the tools."""
PolicyOf = Callable[[int | str, int], Policy]
"""Returns the policy of an episode, from the index of its sample and the number of the attempt."""


def choose_indices(task: TaskInfo, split: str, samples: int, *, seed: int = 0) -> tuple[int, ...]:
    """Return the samples to play: all samples of a split, or ``samples`` of them, drawn with a seed.

    For an endless split, these are the first samples. Raises UnknownSample if the split is unknown or empty.
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
    """Return the policy of a model. If the settings require it, requests contain the episode's seed."""

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
    """Return a policy that repeats the messages of an evaluation, such as after changing the grader."""

    def of(index: int | str, attempt: int) -> Policy:
        episode = recorded.episodes.get((index, attempt))
        turns = iter(episode.turns if episode is not None and episode.failed is None else ())

        async def act(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Completion:
            turn = next(turns, None)
            if turn is None:
                raise ModelFailed("the recorded episode has no further turn, but this episode has not ended")
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
    """Play the missing episodes of a run and append each to its file.

    Failures of the endpoint, the server and the environment are recorded separately and are not results.

    Args:
        client: The client of the task.
        policy: Plays the episodes.
        file: The file of the evaluation.
        concurrency: Number of episodes that are played at the same time.
        retries: Number of times that a failed episode is started again.
        wait: Seconds to wait for a place on a full server.
        on_episode: Called after each episode.

    Returns:
        The evaluation, including the episodes of earlier runs.

    Raises:
        EvaluationError: Too many episodes failed in a row.
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
            await file.append_async(episode)
            on_episode(episode)
            streak = streak + 1 if episode.failed else 0
            if streak >= patience:
                raise EvaluationError(
                    f"{streak} episodes of {settings.task} failed in a row, the last with: {episode.error}; "
                    "fix it and run the same command to continue the evaluation"
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
    """One episode in progress."""

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
        """Play until the episode ends and return its final status."""
        settings = self._settings
        async with await self._client.open(
            settings.task, split=settings.split, index=self._index, wait=self._wait
        ) as session:
            self._session = session
            self._begun = time.perf_counter()  # exclude the time in the queue
            messages = list(session.messages)
            while not session.status.final:
                try:
                    completion = await _answer(self._policy(messages, session.tools))
                except ContextFull as error:
                    if not self._turns:  # nothing was measured, and often no episode can start
                        raise ModelFailed(f"{error}; {TOO_LONG}") from error
                    return "truncated_context"
                begin = time.perf_counter()
                try:
                    result = await session.step(completion.message)
                except (BodyTooLarge, InvalidRequest) as error:  # an error of the model: too many calls
                    self._turns.append(_rejected_turn(completion, error))
                    return "rejected_message"
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
        ends = (SessionStatus.COMPLETED, *TRUNCATED, "truncated_context", "rejected_message")
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


async def _answer(answer: object) -> Completion:
    """Return the answer of a policy. Raises EvaluationError if the policy has another type."""
    completion = await answer if isawaitable(answer) else f"a plain {type(answer).__name__}"
    if isinstance(completion, Completion):
        return completion
    raise EvaluationError(
        f"a policy must be an async function that returns a Completion, but returned {completion!r:.200}"
    )


def _turn(completion: Completion, result: StepResult, seconds: float) -> TurnRecord:
    return _turn_record(
        completion,
        invalid_calls=int(result.metrics.get("invalid_calls", 0)),
        environment_s=seconds,
        messages=result.messages,
        reward=result.reward,
        info=result.info,
    )


def _rejected_turn(completion: Completion, error: WireError) -> TurnRecord:
    calls = len(completion.message.tool_calls or ())
    return _turn_record(completion, invalid_calls=calls, info={"rejected": error.message})


def _turn_record(completion: Completion, **of_environment: Any) -> TurnRecord:
    return TurnRecord(
        action=completion.message,
        thought=completion.thought,
        finish_reason=completion.finish_reason,
        usage=completion.usage,
        model_s=completion.seconds,
        repeats=completion.repeats,
        **of_environment,
    )


def _reason(last: StepResult | None, end: str) -> str:
    error = last.info.get("error") if last is not None else None
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return f"the session ended as {end}"
