"""The check of the expert's knowledge: whether its moves follow from the messages."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from agentrl_env.client.client import ClientSession
from agentrl_env.client.formatting import message_text
from agentrl_env.client.local import LocalBackend
from agentrl_env.environment import Environment
from agentrl_env.errors import AUTHOR_ERRORS
from agentrl_env.session.executor import Executor
from agentrl_env.testing.context import CheckContext, Policy, Rollout, describe, random_policy
from agentrl_env.testing.report import CheckOutcome, passed, skipped, warned
from agentrl_env.tools import as_move
from agentrl_env.types import Message, ToolSpec

EPISODES = 8
ADVICE = (
    "A policy cannot imitate that. Let the expert look before it acts, or use its success only as a bound."
)
_WORD = re.compile(r"[^\W_]{4,}")
"""Words and numbers that are too long to be guessed."""


class _ExpertBroke(Exception):
    """The expert raised an exception, which ``oracle`` reports."""


async def knowledge(context: CheckContext) -> CheckOutcome:
    """Does the expert use only what the messages have said?"""
    if not context.has_expert:
        return skipped("The task has no expert that works; see the check oracle.")
    if context.environment is None:
        return skipped("Not visible from outside: the expert runs in the server.")
    moves: dict[str, tuple[str, str]] = {}
    unsaid: list[tuple[Rollout, set[str]]] = []
    seen: list[set[str]] = []
    try:
        for index in context.while_time(context.indices(EPISODES)):
            rollout = await context.play(_attentive_expert(context), index)
            if rollout.reason:
                return skipped("Not run, for the reason that oracle reports.")
            if problem := _contradiction(rollout, moves):
                return warned(f"{problem} {ADVICE}")
            unsaid.append((rollout, _unsaid(rollout, context.task.tools)))
            seen.append(await _seen_by_chance(context, index))
    except _ExpertBroke:
        return skipped("Not run, for the reason that oracle reports.")
    common = Counter(word for words in seen for word in words)
    for (rollout, words), shown in zip(unsaid, seen, strict=True):
        if telling := sorted(word for word in words & shown if 2 * common[word] <= len(seen)):
            evidence = f"{rollout.name}: the expert's calls contain {telling[0]!r} before any message does."
            return warned(f"{evidence} {ADVICE}")
    return passed(f"{len(unsaid)} episodes: equal messages gave equal moves, and no call had a hidden word.")


def _attentive_expert(context: CheckContext) -> Policy:
    """Return a policy that plays the expert's moves, with the same random generator in every episode."""
    backend = context.client.backend
    assert isinstance(backend, LocalBackend)

    async def act(session: ClientSession, rollout: Rollout) -> Message:
        async def ask(environment: Environment, executor: Executor) -> Message:
            rng = np.random.default_rng(len(rollout.turns))
            try:
                return as_move(await executor.run(partial(environment.expert, rng), environment.tool_timeout))
            except AUTHOR_ERRORS as error:
                raise _ExpertBroke from error

        return await backend.pool.session(session.session_id).between_steps(ask)

    return act


def _contradiction(rollout: Rollout, moves: dict[str, tuple[str, str]]) -> str | None:
    """Record the moves of an episode by the preceding messages. Return two moves after the same messages."""
    messages = [message.wire() for message in rollout.opening]
    for turn in rollout.turns:
        move = describe(turn.action)
        other, name = moves.setdefault(json.dumps(messages), (move, rollout.name))
        if move != other:
            return f"After the same messages, the expert plays {other} ({name}) and {move} ({rollout.name})."
        messages += [turn.action.wire(), *(message.wire() for message in turn.result.messages)]
    return None


def _unsaid(rollout: Rollout, tools: tuple[ToolSpec, ...]) -> set[str]:
    """Return the words in the expert's calls that no earlier message and no tool contains."""
    said = _words(json.dumps([tool.model_dump() for tool in tools]))
    said |= _words(*map(message_text, rollout.opening))
    unsaid: set[str] = set()
    for turn in rollout.turns:
        unsaid |= _words(*_arguments(turn.action)) - said
        said |= _words(*map(message_text, turn.result.messages))
    return unsaid


async def _seen_by_chance(context: CheckContext, index: int) -> set[str]:
    """Return the words that appear in answers to random calls but not in the calls."""
    shown: set[str] = set()
    for seed in range(2):
        rollout = await context.play(random_policy(seed), index)
        answers = _words(*(message_text(m) for turn in rollout.turns for m in turn.result.messages))
        shown |= answers - _words(*(text for turn in rollout.turns for text in _arguments(turn.action)))
    return shown


def _arguments(action: Message) -> list[str]:
    """Return the texts and numbers in the calls of a message, or its text if it has no calls."""
    if not action.tool_calls:
        return [message_text(action)]
    return [text for call in action.tool_calls for text in _leaves(json.loads(call.function.arguments))]


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield str(value)


def _words(*texts: str) -> set[str]:
    return {word.lower() for text in texts for word in _WORD.findall(text)}
