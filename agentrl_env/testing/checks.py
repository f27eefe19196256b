"""The conformance checks: what "a valid environment" means, one small function each.

Every check takes a ``Probe`` and returns an ``Outcome``; its docstring's first line is the question
it asks. ``agentrl_env.testing.checker`` runs them in the order of ``CHECKS``, each under a deadline.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from itertools import zip_longest

import numpy as np
from jsonschema import Draft202012Validator, SchemaError

from agentrl_env.errors import SeqConflict, SessionEnded, UnknownSample, WireError
from agentrl_env.testing.episodes import (
    ExpertPolicy,
    Policy,
    RandomPolicy,
    ReplayPolicy,
    Transcript,
    describe,
)
from agentrl_env.testing.fuzz import Case, fuzz_cases
from agentrl_env.testing.probe import Probe
from agentrl_env.testing.report import Outcome, failed, passed, skipped, warned
from agentrl_env.types import FunctionSpec, Message, SessionStatus, StepResult, ToolCall

UNUSABLE = Message.assistant(None, ToolCall.of("no_such_tool"))
"""A turn that is spent without effect in every environment."""
ENDLESS_INDEX = 10**6
"""An index that a split without end must have."""
MAX_TURNS = 10_000
EXPERT_EPISODES = 20
EXPERT_SUCCESS = 0.2
"""The least success rate of an oracle. Experts may be noisy, on purpose; one that fails more often
proves little about the task and teaches less."""


async def schema(probe: Probe) -> Outcome:
    """Are the tools described in valid JSON Schema, with names that model APIs accept?"""
    functions = [tool.function for tool in probe.task.tools]
    if not functions:
        return warned("The task has no tools: a model can only talk to it.")
    names = [function.name for function in functions]
    for function in functions:
        if problem := _schema_problem(function):
            return failed(f"Tool {function.name!r}: {problem}")
    if len(set(names)) < len(names):
        return failed(f"Two tools have the same name: {', '.join(sorted(names))}.")
    if lacking := list(_lacking_descriptions(probe)):
        return warned(f"No description: {', '.join(lacking)}. A model knows only what it is told.")
    return passed(f"Valid names and schemas: {', '.join(names)}.")


def _schema_problem(function: FunctionSpec) -> str | None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function.name):
        return "its name must be 1 to 64 letters, digits, '_' or '-'."
    try:
        Draft202012Validator.check_schema(function.parameters)
    except SchemaError as error:
        return f"its parameters are no valid JSON Schema: {error.message}."
    if function.parameters.get("type") != "object":
        return 'its parameters must be a JSON Schema of type "object".'
    return None


def _lacking_descriptions(probe: Probe) -> Iterator[str]:
    if not probe.task.description.strip():
        yield "the task"
    for tool in probe.task.tools:
        if not tool.function.description.strip():
            yield f"{tool.function.name}()"
        for name, part in tool.function.parameters.get("properties", {}).items():
            if isinstance(part, dict) and not part.get("description") and "$ref" not in part:
                yield f"{tool.function.name}({name})"


async def samples(probe: Probe) -> Outcome:
    """Do all splits open, refuse what is beyond them, and keep test samples out of train?"""
    if "train" not in probe.task.splits:
        return failed("There is no split named 'train'.")
    for split in probe.task.splits:
        if problem := await _split_problem(probe, split):
            return failed(problem)
    try:
        await probe.open(0, split="no_such_split")
        return failed("A split that does not exist, 'no_such_split', was opened.")
    except UnknownSample:
        pass
    sizes = ", ".join(f"{split} {_count(probe.size(split))}" for split in probe.task.splits)
    if "test" not in probe.task.splits:
        return warned(f"There is no split named 'test' to evaluate on ({sizes}).")
    seen = {split: await _data_of(probe, split) for split in ("train", "test")}
    if shared := seen["train"].keys() & seen["test"].keys():
        one = min(shared)
        where = f"train/{seen['train'][one]} and test/{seen['test'][one]}"
        return failed(f"The samples {where} have the same data: {one[:120]}")
    looked = sum(len(data) for data in seen.values())
    if not looked:
        return passed(f"{sizes}; the seed alone makes the problem, and it differs by split.")
    return passed(f"{sizes}; no shared data among the {looked} samples compared.")


def _count(size: int | None) -> str:
    return "endless" if size is None else f"{size:,}"


async def _split_problem(probe: Probe, split: str) -> str | None:
    size = probe.size(split)
    if size == 0:
        return f"The split {split!r} has no samples."
    for index in (0, ENDLESS_INDEX if size is None else size - 1):
        session = await probe.open(index, split=split)
        if not any(message.content for message in session.messages):
            return f"Sample {split}/{index} opens without a word: reset() must return a message."
        await session.close()
    for index in (-1,) if size is None else (size, size + 1000, -1):
        try:
            await probe.open(index, split=split)
        except UnknownSample:
            continue
        return f"Index {index} of split {split!r} ({_count(size)} samples) was opened."
    return None


async def _data_of(probe: Probe, split: str) -> dict[str, int]:
    """Return the canonical data of up to 200 samples, and the index of each."""
    found: dict[str, int] = {}
    for index in probe.while_time(probe.indices(200, split)):
        session = await probe.open(index, split=split)
        if session.sample.data:
            found[json.dumps(session.sample.data, sort_keys=True)] = index
        await session.close()
    return found


async def random_play(probe: Probe) -> Outcome:
    """Does the environment survive schema-valid calls, and answer each one?"""
    played = []
    for index in probe.while_time(probe.indices(10)):
        transcript = await probe.play(RandomPolicy(seed=index), index)
        played.append(transcript)
        if transcript.broken:
            return failed(f"{transcript.name}: {transcript.broken}")
        for turn in transcript.turns:
            if problem := _unanswered(turn.action, turn.result):
                return failed(f"{transcript.name}: {problem}")
    turns = sum(len(transcript.turns) for transcript in played)
    wins = sum(transcript.success for transcript in played)
    if len(played) >= 5 and wins == len(played):
        return warned(f"Random calls solve every one of {len(played)} episodes: is it a task?")
    return passed(f"{len(played)} episodes, {turns} random calls, {wins} solved by chance.")


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
    for index in probe.while_time(probe.indices(6)):
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
    session = await probe.open(index)
    message = (await probe.play(RandomPolicy(0), index)).actions[0]
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


async def fuzz(probe: Probe) -> Outcome:
    """Does any odd message (broken JSON, wrong types, unknown tools, strange text) break it?"""
    rng = np.random.default_rng(0)
    cases = list(fuzz_cases(probe.task.tools, rng))
    rng.shuffle(cases)
    session, sent, refused = None, 0, 0
    for case in probe.while_time(cases, least=20):
        if session is None or session.status.final:
            session = await probe.open(probe.indices(8)[sent % len(probe.indices(8))])
        probe.doing = describe(case.message)
        result = await session.step(case.message)
        sent += 1
        refused += result.metrics.get("invalid_calls", 0) > 0
        if problem := _fuzz_problem(case, result):
            return failed(f"{case.label}: {problem}")
    return passed(f"{sent} of {len(cases)} odd messages sent, {refused} refused, none broke it.")


def _fuzz_problem(case: Case, result: StepResult) -> str | None:
    if result.status is SessionStatus.FAILED_ENVIRONMENT:
        error = result.info.get("error")
        reason = error.get("message") if isinstance(error, dict) else error
        return f"{describe(case.message)} broke the environment: {reason}"
    if case.refused and not result.metrics.get("invalid_calls", 1.0):
        return f"{describe(case.message)} does not fit the schema and was accepted"
    return _unanswered(case.message, result)


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


CHECKS = (
    schema, samples, random_play, limits, retry, close, seed_replay, seed_effect, order, isolation,
    fuzz, oracle, results,
)  # fmt: skip
