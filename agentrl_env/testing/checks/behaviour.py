"""Checks of what happens in episodes: they survive, repeat, stay apart, and can be solved."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from agentrl_env.client.client import ClientSession
from agentrl_env.testing.context import Probe
from agentrl_env.testing.fuzz import Case, fuzz_cases
from agentrl_env.testing.report import Outcome, failed, passed, skipped, warned
from agentrl_env.testing.rollouts import (
    ExpertPolicy,
    Policy,
    RandomPolicy,
    ReplayPolicy,
    Transcript,
    WanderingExpert,
    describe,
)
from agentrl_env.types import Message, SessionStatus, StepResult

EXPERT_EPISODES = 20
EXPERT_SUCCESS = 0.2
"""The least success rate of an oracle. Experts may be noisy, on purpose; one that fails more often
proves little about the task and teaches less."""


async def random_play(probe: Probe) -> Outcome:
    """Does the environment survive schema-valid calls, and answer each one?"""
    turns, by_chance = 0, []
    for index in probe.while_time(probe.indices(10)):
        for policy in _wanderers(probe, index):
            transcript = await probe.play(policy, index)
            turns += len(transcript.turns)
            if isinstance(policy, RandomPolicy):
                by_chance.append(transcript.success)
            if transcript.broken:
                return failed(f"{transcript.name}: {transcript.broken}")
            for turn in transcript.turns:
                if problem := _unanswered(turn.action, turn.result):
                    return failed(f"{transcript.name}: {problem}")
    if len(by_chance) >= 5 and all(by_chance):
        return warned(f"Random calls solve every one of {len(by_chance)} episodes: is it a task?")
    return passed(f"{turns} turns; random calls solve {sum(by_chance)} of {len(by_chance)} episodes.")


def _wanderers(probe: Probe, seed: int) -> list[Policy]:
    """Who makes random calls: one at random throughout, one who gets further in between."""
    return [RandomPolicy(seed), *([WanderingExpert(seed)] if probe.has_expert else [])]


def _unanswered(action: Message, result: StepResult) -> str | None:
    """Say which call has no answer of its own; every call needs exactly one, in order."""
    if result.status is SessionStatus.FAILED_ENVIRONMENT:
        return None
    asked = [call.id for call in action.tool_calls or ()]
    answered = [message.tool_call_id for message in result.messages if message.role == "tool"]
    if asked != answered:
        return f"{describe(action)}: calls {asked} got answers to {answered}"
    if not result.messages and not result.final:
        return f"{describe(action)} got no message back, so the model has nothing to go on"
    return None


async def seed_replay(probe: Probe) -> Outcome:
    """Do the same sample, seed and actions give the same episode twice?"""
    count = 0
    for index in probe.while_time(probe.indices(6), least=1):
        for policy in _explorers(probe, index):
            first = await probe.play(policy, index, seed=index + 1)
            second = await probe.play(ReplayPolicy(first.actions), index, seed=index + 1)
            count += 1
            if difference := first.difference(second):
                return failed(
                    f"{first.name}, played twice, differs in {difference}. "
                    "Draw every random choice from the rng that reset() is given."
                )
    return passed(f"{count} episodes were the same when played again.")


def _explorers(probe: Probe, seed: int) -> list[Policy]:
    """Who plays where depth matters: a random policy, and the expert who gets further."""
    return [RandomPolicy(seed), *([ExpertPolicy()] if probe.has_expert else [])]


async def seed_effect(probe: Probe) -> Outcome:
    """Do different seeds give different problems, where nothing else makes them?"""
    for policy in [*_explorers(probe, 0), RandomPolicy(1)]:
        first = await probe.play(policy, index=None, seed=0)
        if first.sample.data:
            return skipped("Problems come from a data set; the seed need not change them.")
        for seed in probe.while_time(range(1, 13)):
            other = await probe.play(ReplayPolicy(first.actions), index=None, seed=seed)
            if first.difference(other):
                return passed(f"Seeds 0 and {seed} give different episodes.")
    return warned("Every seed gave the same episode: is the rng that reset() is given used?")


async def order(probe: Probe) -> Outcome:
    """Is an episode the same after others have been played, or does state leak?"""
    count = 0
    for index in probe.while_time(probe.indices(3), least=1):
        for policy in _explorers(probe, index):
            before = await probe.play(policy, index, seed=index + 1)
            for other in probe.indices(4):
                await probe.play(RandomPolicy(other), other, seed=other + 2)
                count += 1
            after = await probe.play(ReplayPolicy(before.actions), index, seed=index + 1)
            if difference := before.difference(after):
                return failed(
                    f"{before.name}, played again after {count} others, differs in {difference}. "
                    "Something outlives a session: a class attribute, a global, a file."
                )
    return passed(f"Episodes were the same after {count} others had been played in between.")


async def isolation(probe: Probe) -> Outcome:
    """Do sessions played at the same time give the same results as one by one?"""
    alone: list[Transcript] = []
    for index in probe.while_time(probe.indices(4), least=1):
        for policy in _explorers(probe, index):
            alone.append(await probe.play(policy, index, seed=index + 1))
    plans = [transcript for transcript in alone for _ in range(2)]
    together = await probe.play_interleaved(
        [(ReplayPolicy(p.actions), int(p.sample.index or 0), p.sample.seed) for p in plans]
    )
    if len(together) < 2:
        return skipped("The server has no room for two sessions at the same time.")
    for plan, transcript in zip(plans, together, strict=False):
        if difference := plan.difference(transcript):
            return failed(
                f"{plan.name}, played among {len(together)} sessions at once, differs in {difference}. "
                "Keep the state of an episode on self, set in reset()."
            )
    return passed(f"{len(together)} sessions at once gave the results they give alone.")


async def fuzz(probe: Probe) -> Outcome:
    """Does any odd message (broken JSON, wrong types, unknown tools, strange text) break it?"""
    rng = np.random.default_rng(0)
    cases = list(fuzz_cases(probe.task.tools, rng))
    rng.shuffle(cases)
    session, sent, refused = None, 0, 0
    for case in probe.while_time(cases, least=20):
        session = await _running(probe, session, sent, rng)
        probe.doing = describe(case.message)
        result = await session.step(case.message)
        sent += 1
        refused += result.metrics.get("invalid_calls", 0) > 0
        if problem := _fuzz_problem(case, result):
            return failed(f"{case.label}: {problem}")
    return passed(f"{sent} of {len(cases)} odd messages sent, {refused} refused, none broke it.")


async def _running(
    probe: Probe, session: ClientSession | None, count: int, rng: np.random.Generator
) -> ClientSession:
    """Return a session that still runs, and now and then one that the expert has led further."""
    if session is not None and not session.status.final and probe.has_expert and rng.random() < 0.3:
        probe.doing = f"the expert's move in turn {session.turn + 1}"
        await session.step(await session.expert())
    if session is None or session.status.final:
        indices = probe.indices(8)
        session = await probe.open(indices[count % len(indices)])
    return session


def _fuzz_problem(case: Case, result: StepResult) -> str | None:
    if result.status is SessionStatus.FAILED_ENVIRONMENT:
        error = result.info.get("error")
        reason = error.get("message") if isinstance(error, dict) else error
        return f"{describe(case.message)} broke the environment: {reason}"
    if case.refused and not result.metrics.get("invalid_calls", 1.0):
        return f"{describe(case.message)} does not fit the schema and was accepted"
    return _unanswered(case.message, result)


async def oracle(probe: Probe) -> Outcome:
    """Does the expert reach the goal, so that the task can be solved at all?"""
    if not probe.has_expert:
        return skipped("No expert is offered: the task has none, or the server lacks --oracle.")
    played = []
    for split, index in probe.while_time(_expert_plan(probe), least=4):
        transcript = await probe.play(ExpertPolicy(), index, split=split)
        played.append(transcript)
        if transcript.broken:
            return failed(f"{transcript.name}: {transcript.broken}")
        for turn in transcript.turns:
            if turn.result.metrics.get("invalid_calls"):
                return failed(f"The expert's own call is invalid: {describe(turn.action)}")
    wins = sum(transcript.success for transcript in played)
    rate = f"The expert solves {wins} of {len(played)} episodes"
    if wins < EXPERT_SUCCESS * len(played):
        return failed(f"{rate}; at least {EXPERT_SUCCESS:.0%} are needed to trust task and reward.")
    return passed(f"{rate}.")


def _expert_plan(probe: Probe) -> list[tuple[str, int]]:
    splits = [split for split in ("train", "test") if split in probe.task.splits] or ["train"]
    share = EXPERT_EPISODES // len(splits)
    by_split = [[(split, index) for index in probe.indices(share, split)] for split in splits]
    return [plan for plans in zip_longest(*by_split) for plan in plans if plan is not None]
