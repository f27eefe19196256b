"""Warm start: supervised fine-tuning on episodes of the environments' experts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np

from agentrl_env.client import EnvClient
from agentrl_env.errors import AgentRLError
from agentrl_train.actor import episode_end
from agentrl_train.batch import pack
from agentrl_train.chat import ChatFormat
from agentrl_train.errors import ConfigError
from agentrl_train.learner import Learner
from agentrl_train.types import TaskSource, TokenSequence

T = TypeVar("T")
FULL_SERVER_S = 120.0
"""Seconds to wait for a session of a server that is full."""


async def expert_sequence(
    client: EnvClient, chat: ChatFormat, *, task: str, split: str, index: int, seed: int | None = None
) -> tuple[TokenSequence, bool]:
    """Play one episode with the expert; return its tokens and whether it succeeded.

    The tokens are those that a policy would sample to produce the same messages; ``loss_mask`` covers exactly
    the tokens of the expert.

    Raises:
        AgentRLError: the session failed, or the task has no expert.
        ConfigError: the chat template rejects the messages of the task.
    """
    ids: list[int] = []
    mask: list[float] = []
    turn = 0
    session = await client.open(task, split=split, index=index, seed=seed, wait=FULL_SERVER_S)
    try:
        with template_errors(task, chat):
            new_ids = chat.opening(session.messages, session.tools)
        while True:
            completion = chat.completion(await session.expert(), prompt=new_ids)
            turn += 1
            # The message as it would be parsed from a policy, with call ids that the template accepts.
            message = chat.parse(completion, turn=turn, tools=session.tools, prompt=new_ids).message
            ids += [*new_ids, *completion]
            mask += [0.0] * len(new_ids) + [1.0] * len(completion)
            result = await session.step(message)
            if result.final:
                episode_end(result)
                break
            with template_errors(task, chat):
                new_ids = chat.reply(result.messages, after=message, tools=session.tools, stop=completion[-1])
    finally:
        await session.close()
    size = len(ids)
    sequence = TokenSequence(
        token_ids=np.array(ids, dtype=np.int64),
        loss_mask=np.array(mask, dtype=np.float32),
        logprobs=np.zeros(size, dtype=np.float32),
        versions=np.full(size, -1, dtype=np.int64),
        advantages=np.array(mask, dtype=np.float32),
        task=task,
        group_id=index,
    )
    return sequence, result.metrics.get("success", 0.0) >= 0.5


class ExpertEpisodes(NamedTuple):
    """Episodes of the experts of some tasks."""

    sequences: list[TokenSequence]
    success: dict[str, float]
    """Success of each expert in the episodes that did not fail."""
    failures: dict[str, list[AgentRLError]]
    """Errors of the episodes that failed, by task."""


async def expert_sequences(
    clients: Mapping[str, EnvClient],
    chat: ChatFormat,
    *,
    sources: Mapping[str, TaskSource],
    count: int,
    max_sessions: int = 64,
) -> ExpertEpisodes:
    """Play ``count`` episodes of every task with its expert.

    If a split has fewer samples, they are repeated with other seeds. Episodes that fail are omitted.

    Raises:
        AgentRLError: more than half of the episodes of a task failed, as without an expert.
        ConfigError: the chat template rejects the messages of a task.
    """
    slots = asyncio.Semaphore(max_sessions)

    async def play(task: str, number: int) -> tuple[TokenSequence, bool]:
        source = sources[task]
        size = source.num_samples or count
        seed = number if number >= size else None
        async with slots:
            return await expert_sequence(
                clients[task], chat, task=task, split=source.split, index=number % size, seed=seed
            )

    episodes = ExpertEpisodes(sequences=[], success={}, failures={})
    for task in clients:
        plays = (_or_failure(play(task, number)) for number in range(count))
        played = await asyncio.gather(*plays)
        failures = [one for one in played if isinstance(one, AgentRLError)]
        traces = [one for one in played if not isinstance(one, AgentRLError)]
        if len(failures) > count / 2:
            raise failures[0]
        episodes.sequences.extend(sequence for sequence, _ in traces)
        episodes.success[task] = sum(ok for _, ok in traces) / len(traces)
        episodes.failures[task] = failures
    return episodes


async def _or_failure(played: Awaitable[T]) -> T | AgentRLError:
    try:
        return await played
    except AgentRLError as error:
        return error


def longest_turn(sequences: Sequence[TokenSequence]) -> int:
    """Return the tokens of the longest turn of the experts."""
    longest = 0
    for sequence in sequences:
        edges = np.flatnonzero(np.diff(sequence.loss_mask > 0, prepend=False, append=False))
        longest = max(longest, int(np.diff(edges)[::2].max(initial=0)))
    return longest


def longest_episode(sequences: Sequence[TokenSequence]) -> int:
    """Return the tokens of the longest episode of the experts."""
    return max(map(len, sequences), default=0)


@contextmanager
def template_errors(task: str, chat: ChatFormat) -> Iterator[None]:
    """Raise errors of a chat template that cannot render the messages of a task as ``ConfigError``."""
    try:
        yield
    except Exception as error:  # templates raise anything
        raise ConfigError(
            f"the chat template of {chat.name} cannot render the messages of {task} ({type(error).__name__}: "
            f"{error}): set model.tool_parser = 'prompt', or model.chat_template to another template"
        ) from error


def train_sft(
    learner: Learner,
    sequences: Sequence[TokenSequence],
    *,
    steps: int,
    batch_size: int,
    micro_batch_tokens: int,
    seed: int,
    report: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
) -> None:
    """Run ``steps`` optimizer steps on the tokens of the experts, in a seeded order for each epoch.

    The objective of the learner must be ``sft_loss``.
    """
    order = _epochs(len(sequences), seed)
    for step in range(1, steps + 1):
        chosen = [sequences[next(order)] for _ in range(batch_size)]
        batches = pack(
            chosen,
            aggregation="token_mean",
            max_tokens=micro_batch_tokens,
            packed=learner.packs_rows,
            shared=learner.shares_prefixes,
        )
        report(step, learner.step(batches))


def _epochs(size: int, seed: int) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(size).tolist()
