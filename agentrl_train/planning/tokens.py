"""Tokens of a step: lengths of episodes, from expert turns or from the limits of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from agentrl_env.client import EnvClient
from agentrl_train.chat import ChatFormat
from agentrl_train.sft import expert_sequence, template_errors
from agentrl_train.types import Sampling, TaskSource, TokenSequence

EPISODES = 16
"""Number of expert episodes of each task to measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of the episodes of a task, in tokens."""

    task: str
    opening: float
    """Mean length of the opening, which siblings share."""
    sampled: float
    """Mean of the tokens that the policy samples in an episode."""
    total: float
    """Mean length of an episode."""
    turns: float
    longest_turn: int
    longest: int
    """Length of the longest episode."""
    by_expert: bool
    """True if measured with the expert, False for upper bounds from the limits."""
    success: float | None = None
    """Success of the expert."""


async def measured_lengths(
    clients: Mapping[str, EnvClient],
    chat: ChatFormat,
    *,
    sources: Sequence[TaskSource],
    sampling: Sampling,
    max_turns: Mapping[str, int],
    episodes: int = EPISODES,
) -> list[Lengths]:
    """Return the lengths of every task, measured with its expert if it has one.

    Args:
        clients: task -> client of its server.
        chat: chat format of the policy.
        sources: tasks and splits.
        sampling: limits of the turns.
        max_turns: turn limits that are lower than the task's own.
        episodes: expert episodes of each task.

    Raises:
        ConfigError: the chat template rejects the messages of a task.
    """
    found = []
    for source in sources:
        client = clients[source.task]
        info = (await client.tasks())[source.task]
        if "expert" in info.capabilities:
            found.append(of_experts(source.task, await _play(client, chat, source, episodes)))
            continue
        session = await client.open(source.task, split=source.split, index=0)
        await session.close()
        with template_errors(source.task, chat):
            opening = len(chat.opening(session.messages, session.tools))
        turns = min(max_turns.get(source.task, info.max_turns), info.max_turns)
        found.append(of_limits(source.task, opening=opening, turns=turns, sampling=sampling))
    return found


async def _play(
    client: EnvClient, chat: ChatFormat, source: TaskSource, episodes: int
) -> list[tuple[TokenSequence, bool]]:
    """Return the tokens and the success of expert episodes."""
    size = source.num_samples or episodes
    plays = (
        expert_sequence(
            client,
            chat,
            task=source.task,
            split=source.split,
            index=number % size,
            seed=number if number >= size else None,
        )
        for number in range(episodes)
    )
    return await asyncio.gather(*plays)


def of_experts(task: str, played: Sequence[tuple[TokenSequence, bool]]) -> Lengths:
    """Return the lengths of expert episodes, given as their tokens and success."""
    turns = [turn_lengths(sequence) for sequence, _ in played]
    return Lengths(
        task=task,
        opening=fmean(int(np.argmax(sequence.loss_mask)) for sequence, _ in played),
        sampled=fmean(sum(one) for one in turns),
        total=fmean(len(sequence) for sequence, _ in played),
        turns=fmean(len(one) for one in turns),
        longest_turn=max(max(one) for one in turns),
        longest=max(len(sequence) for sequence, _ in played),
        by_expert=True,
        success=fmean(success for _, success in played),
    )


def of_limits(task: str, *, opening: int, turns: int, sampling: Sampling) -> Lengths:
    """Return upper bounds for a policy that fills every turn, or the context."""
    sampled = min(turns * sampling.max_new_tokens, max(0, sampling.max_context - opening))
    return Lengths(
        task=task,
        opening=opening,
        sampled=sampled,
        total=sampling.max_context,
        turns=turns,
        longest_turn=sampling.max_new_tokens,
        longest=sampling.max_context,
        by_expert=False,
    )


def turn_lengths(sequence: TokenSequence) -> list[int]:
    """Return the number of tokens of each turn of the policy."""
    changes = np.diff(np.concatenate([[0], (sequence.loss_mask > 0).astype(np.int8), [0]]))
    return [int(n) for n in np.flatnonzero(changes == -1) - np.flatnonzero(changes == 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Tokens of one step of training."""

    episodes: int
    sampled: float
    prefilled: float
    trained: float
    """Tokens of an update, with the openings of a group computed once."""


def step_tokens(lengths: Sequence[Lengths], *, groups: int, group_size: int) -> StepTokens:
    """Return the tokens of a step if tasks have equal shares of the groups."""
    opening, sampled, total = (
        fmean(getattr(one, name) for one in lengths) for name in ("opening", "sampled", "total")
    )
    return StepTokens(
        episodes=groups * group_size,
        sampled=groups * group_size * sampled,
        prefilled=groups * (opening + group_size * (total - opening - sampled)),
        trained=groups * (opening + group_size * (total - opening)),
    )
