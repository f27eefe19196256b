"""Checks of the rules every session keeps: limits, numbering, closing, and honest results."""

from __future__ import annotations

import asyncio
import math

from agentrl_env.errors import SeqConflict, SessionEnded, WireError
from agentrl_env.testing.context import Probe
from agentrl_env.testing.report import Outcome, failed, passed
from agentrl_env.testing.rollouts import RandomPolicy, describe
from agentrl_env.types import Message, SessionStatus, StepResult, ToolCall

UNUSABLE = Message.assistant(None, ToolCall.of("no_such_tool"))
"""A turn that is spent without effect in every environment."""
MAX_TURNS = 10_000


async def limits(probe: Probe) -> Outcome:
    """Does an episode of unusable turns end at max_turns, truncated, and stay ended?"""
    limit = probe.task.max_turns
    if limit > MAX_TURNS:
        return failed(f"max_turns is {limit:,}; above {MAX_TURNS:,} an episode never ends.")
    session = await probe.open(probe.indices(1)[0])
    for turn in range(1, limit + 1):
        probe.doing = f"turn {turn} of an episode that should end after {limit}"
        result = await session.step(UNUSABLE)
        if result.final:
            break
    if not result.final:
        return failed(f"The episode still runs after max_turns = {limit} turns.")
    if result.status is SessionStatus.TRUNCATED_TURNS and turn < limit:
        return failed(f"The episode was cut after {turn} turns, max_turns is {limit}.")
    if result.status not in (SessionStatus.TRUNCATED_TURNS, SessionStatus.TRUNCATED_TIME):
        return failed(f"After {turn} unusable turns the status is {result.status}, not truncated.")
    if not result.truncated or result.terminated:
        return failed(f"At its limit an episode must be truncated and not terminated: {result}")
    try:
        await session.step(UNUSABLE)
    except WireError as refusal:
        return passed(f"Ended as {result.status} at turn {turn}; one more is refused ({refusal.type}).")
    return failed(f"Turn {turn + 1} was played although the episode had ended at turn {turn}.")


async def retry(probe: Probe) -> Outcome:
    """Does a repeated step give the stored answer, and a gap in the numbering a refusal?"""
    backend, index = probe.client.backend, probe.indices(1)[0]
    message = (await probe.play(RandomPolicy(0), index)).actions[0]
    session = await probe.open(index)
    probe.doing = "one step, sent twice at the same time"
    twins = [backend.step(session.session_id, 1, message) for _ in range(2)]
    first, twin = await asyncio.gather(*twins)
    if first != twin:
        return failed(f"seq 1, sent twice at once, had two answers: {first} and {twin}")
    again = await backend.step(session.session_id, 1, message)
    turn = (await backend.info(session.session_id)).turn
    if again != first or turn != 1:
        return failed(f"seq 1, sent three times, made {turn} turns: {first}, then {again}")
    try:
        await backend.step(session.session_id, 9, message)
    except (SeqConflict, SessionEnded) as refusal:
        return passed(f"seq 1, sent three times, was one turn; seq 9 was refused ({refusal.type}).")
    return failed("seq 9 was accepted after seq 1.")


async def close(probe: Probe) -> Outcome:
    """Can a session be closed twice, and is it closed then?"""
    session = await probe.open(probe.indices(1)[0])
    await session.step(UNUSABLE)
    for _ in range(2):
        probe.doing = "close() of a session"
        await probe.client.backend.close_session(session.session_id)
    try:
        await session.step(UNUSABLE)
    except WireError as refusal:
        return passed(f"Closed twice without complaint; a step after it is refused ({refusal.type}).")
    return failed("A closed session still takes steps.")


async def results(probe: Probe) -> Outcome:
    """Are rewards and metrics finite numbers, and do status and flags agree?"""
    turns = 0
    for transcript in probe.transcripts:
        for turn in transcript.turns:
            turns += 1
            if problem := _result_problem(turn.result):
                return failed(f"{transcript.name}, {describe(turn.action)}: {problem}")
    returns = [sum(t.result.reward for t in transcript.turns) for transcript in probe.transcripts]
    span = f"from {min(returns):g} to {max(returns):g}" if returns else "none"
    return passed(f"{turns} results of {len(returns)} episodes; episode rewards {span}.")


def _result_problem(result: StepResult) -> str | None:
    for name, value in {"reward": result.reward, **result.metrics}.items():
        if not math.isfinite(value):
            return f"{name} is {value}"
    if result.terminated != (result.status is SessionStatus.COMPLETED):
        return f"terminated is {result.terminated} and the status {result.status}"
    limited = result.status in (SessionStatus.TRUNCATED_TURNS, SessionStatus.TRUNCATED_TIME)
    if result.truncated and not limited and result.status is SessionStatus.RUNNING:
        return "truncated, and still running"
    if limited and not result.truncated:
        return f"the status is {result.status} and truncated is False"
    return None
