"""The conformance checks: the contract of an environment, one function for each rule.

A check takes a ``CheckContext`` and returns a ``CheckOutcome``. The first line of its docstring is the
question in the report. ``agentrl_env.testing.checker`` runs ``CHECKS`` in order, each under a deadline.
"""

from __future__ import annotations

import asyncio
import math
from itertools import zip_longest

import numpy as np

from agentrl_env.client.client import ClientSession
from agentrl_env.client.formatting import message_text
from agentrl_env.client.schema_sampler import CannotSample, sample_arguments
from agentrl_env.errors import SeqConflict, ServerFull, SessionEnded, WireError
from agentrl_env.session.loop_watch import ADVICE
from agentrl_env.testing.context import (
    CheckContext,
    EpisodesBroke,
    Rollout,
    describe,
    expert_policy,
    failure_reason,
    random_policy,
    replay_policy,
)
from agentrl_env.testing.description import hooks, samples, schema
from agentrl_env.testing.fuzz import FuzzCase, fuzz_cases
from agentrl_env.testing.knowledge import knowledge
from agentrl_env.testing.processes import data_set, processes
from agentrl_env.testing.report import CheckOutcome, failed, passed, shorten, skipped, warned
from agentrl_env.types import TRUNCATED, Message, SessionStatus, StepResult, ToolCall

BLOCKED_S = 0.1
"""Seconds that one call may block the event loop."""
LONG_OUTPUT = 250_000
"""Characters above which an answer is too long for a model. An argument of a check has up to 100,000
characters, which the answer might quote."""
EXPERT_EPISODES = 20
EXPERT_SUCCESS = 0.2
"""Minimum success rate of an expert. Experts can be noisy on purpose, but an expert that fails more often
is not evidence that the task can be solved."""
RELIABLE_SUCCESS = 0.8
"""Success rate of an expert below which a warning reports that many episodes might not be solvable."""
INVALID_TURN = Message.assistant(None, ToolCall.of("no_such_tool"))
"""A turn that has no effect in any environment."""
MAX_TURNS = 10_000


# The protocol: limits, numbering, closing, results


async def limits(context: CheckContext) -> CheckOutcome:
    """Does an episode of invalid turns end at max_turns, truncated, and reject further steps?"""
    limit = context.task.max_turns
    if limit > MAX_TURNS:
        return failed(f"max_turns is {limit:,}; above {MAX_TURNS:,} an episode never ends in practice.")
    session = await context.open(context.indices(1)[0])
    for turn in range(1, limit + 1):
        context.doing = f"turn {turn} of an episode that should end after {limit}"
        result = await session.step(INVALID_TURN)
        if result.final:
            break
    if not result.final:
        return failed(f"The episode still runs after max_turns = {limit} turns.")
    if result.status is SessionStatus.TRUNCATED_TURNS and turn < limit:
        return failed(f"The episode was truncated after {turn} turns, max_turns is {limit}.")
    if reason := failure_reason(result):
        return context.broke(reason, f"After {turn} invalid turns the environment failed: {reason}")
    if result.status not in TRUNCATED:
        return failed(f"After {turn} invalid turns the status is {result.status}, not truncated.")
    if not result.truncated or result.terminated:
        return failed(f"At its limit an episode must be truncated and not terminated: {result}")
    try:
        await session.step(INVALID_TURN)
    except WireError as error:
        return passed(f"Ended as {result.status} at turn {turn}; a further step is rejected ({error.type}).")
    return failed(f"Turn {turn + 1} was played after the episode had ended at turn {turn}.")


async def retry(context: CheckContext) -> CheckOutcome:
    """Does a repeated step return the stored result, and is a gap in the numbering rejected?"""
    index = context.indices(1)[0]
    played = await context.play(random_policy(0), index)
    if played.reason and len(played.turns) == 1:
        raise EpisodesBroke(played)
    message = played.actions[0]
    session = await context.open(index)
    twin = await context.client.resume(session.session_id)
    context.doing = "one step, sent twice at the same time"
    first, second = await asyncio.gather(session.step(message), twin.step(message))
    if first != second:
        return failed(f"seq 1, sent twice at once, had two results: {first} and {second}")
    twin.turn = 0
    again = await twin.step(message)
    turn = (await context.client.resume(session.session_id)).turn
    if again != first or turn != 1:
        return failed(f"seq 1, sent three times, made {turn} turns: {first}, then {again}")
    twin.turn = 8
    try:
        await twin.step(message)
    except (SeqConflict, SessionEnded) as error:
        return passed(f"seq 1, sent three times, was one turn; seq 9 was rejected ({error.type}).")
    return failed("seq 9 was accepted after seq 1.")


async def close(context: CheckContext) -> CheckOutcome:
    """Can a session be closed twice without an error, and does it reject steps afterwards?"""
    session = await context.open(context.indices(1)[0])
    await session.step(INVALID_TURN)
    twins = [await context.client.resume(session.session_id) for _ in range(2)]
    for twin in twins:  # two objects, because a closed ClientSession sends no second request
        context.doing = "close() of a session"
        await twin.close()
    if raised := context.failures["close"]:
        return failed(f"close() raised {raised[0]}; its resources might not be released.")
    try:
        await session.step(INVALID_TURN)
    except WireError as error:
        return passed(f"Closed twice without an error; a step afterwards is rejected ({error.type}).")
    return failed("A closed session still accepts steps.")


async def results(context: CheckContext) -> CheckOutcome:
    """Are rewards and metrics finite numbers, and do status and flags agree?"""
    turns = 0
    if not context.rollouts:
        return skipped("Not run: no episode was played.")
    if all(rollout.reason for rollout in context.rollouts):
        raise EpisodesBroke(context.rollouts[-1])
    for rollout in context.rollouts:
        for turn in rollout.turns:
            turns += 1
            if problem := _result_problem(turn.result):
                return failed(f"{rollout.name}, {describe(turn.action)}: {problem}")
    accepted, refused = _calls(context)
    if context.task.tools and not accepted:
        answers = (f"; {action} was answered with {answer!r}" for action, answer in refused.values())
        return failed(f"No call of a tool was accepted in any episode{next(answers, '')}.")
    returns = [sum(t.result.reward for t in r.turns) for r in context.rollouts if not r.reason]
    span = f"from {min(returns):g} to {max(returns):g}"
    return passed(f"{turns} results of {len(context.rollouts)} episodes; episode rewards {span}.")


def _result_problem(result: StepResult) -> str | None:
    for name, value in {"reward": result.reward, **result.metrics}.items():
        if not math.isfinite(value):
            return f"{name} is {value}"
    if result.terminated != (result.status is SessionStatus.COMPLETED):
        return f"terminated is {result.terminated} and the status {result.status}"
    limited = result.status in TRUNCATED
    if result.truncated and not limited and result.status is SessionStatus.RUNNING:
        return "truncated, and still running"
    if limited and not result.truncated:
        return f"the status is {result.status} and truncated is False"
    return None


# The episodes: robust, reproducible, isolated, solvable


async def random_play(context: CheckContext) -> CheckOutcome:
    """Does the environment survive valid calls, and answer each of them?"""
    turns, by_chance = 0, []
    for index in context.while_time(context.indices(10)):
        rollouts = [await context.play(random_policy(index), index)]
        by_chance.append(rollouts[0].success)
        if context.has_expert:
            rollouts.append(await context.play(context.mixed_policy(index), index))
        for rollout in rollouts:
            turns += len(rollout.turns)
            if rollout.reason:
                return context.broke(rollout.reason, f"{rollout.name}: {rollout.failure}")
            for turn in rollout.turns:
                if problem := _answer_problem(turn.action, turn.result):
                    return failed(f"{rollout.name}: {problem}")
    if problem := _refused_tools(context):
        return warned(problem)
    if len(by_chance) >= 5 and all(by_chance):
        return warned(f"Random calls solve all of {len(by_chance)} episodes; the task may be trivial.")
    return passed(f"{turns} turns; random calls solve {sum(by_chance)} of {len(by_chance)} episodes.")


def _refused_tools(context: CheckContext) -> str | None:
    """Return the tools for which no call could be drawn, or which refused every valid call."""
    for tool in context.task.tools:
        try:
            sample_arguments(tool, np.random.default_rng(0))
        except CannotSample as error:
            return f"Not called: {error}"
    accepted, refused = _calls(context)
    for name, (action, answer) in refused.items():
        if name not in accepted:
            return f"{name} accepted no call that fits its schema: {action} was answered with {answer!r}."
    return None


def _calls(context: CheckContext) -> tuple[set[str], dict[str, tuple[str, str]]]:
    """Return the tools that accepted a call, and for each tool a refused call with its answer."""
    accepted: set[str] = set()
    refused: dict[str, tuple[str, str]] = {}
    known = {tool.function.name for tool in context.task.tools}
    for turn in (turn for rollout in context.rollouts for turn in rollout.turns):
        names = {call.function.name for call in turn.action.tool_calls or ()}
        invalid = turn.result.metrics.get("invalid_calls", 0.0)
        if not invalid:
            accepted |= names
        elif len(names) == 1 and names <= known:
            answer = shorten(" ".join(map(message_text, turn.result.messages)))
            refused.setdefault(names.pop(), (describe(turn.action), answer))
    return accepted, refused


def _answer_problem(action: Message, result: StepResult) -> str | None:
    """Return a description of unanswered calls. Each call needs exactly one answer, in order."""
    if result.status is SessionStatus.FAILED_ENVIRONMENT:
        return None
    called = [call.id for call in action.tool_calls or ()]
    answered = [message.tool_call_id for message in result.messages if message.role == "tool"]
    if called != answered:
        return f"{describe(action)}: calls {called} got answers to {answered}"
    if not result.messages and not result.final:
        return f"{describe(action)} got no message back"
    return None


async def expert(context: CheckContext) -> CheckOutcome:
    """Does asking the expert leave the episode as it is, so that it can be asked at any time?"""
    if not context.has_expert:
        return skipped("The task has no expert that works; see the check oracle.")
    count = 0
    async for asked, problem in context.asked_twice(4):
        count += 1
        if problem is None and (difference := asked.difference(await context.replay(asked))):
            again = [await context.replay(asked) for _ in range(5)]
            if any(again[0].difference(other) for other in again[1:]):
                return skipped("Not run, for the reason that seed_replay reports.")
            problem = f"{asked.name}, played again without asking the expert, differs in {difference}"
        if problem is not None:
            context.ignore_expert()
            return failed(
                f"{problem}: expert() changes the episode{context.place_of('expert')}. It returns a move, "
                "changes nothing on self, and draws from its own rng."
            )
    if not count:
        return skipped("Not run, for the reason that oracle reports.")
    return passed(f"{count} episodes were the same whether the expert was asked or not.")


async def seed_replay(context: CheckContext) -> CheckOutcome:
    """Do the same sample, seed and actions give the same episode twice?"""
    count = 0
    async for first in context.explored(6):
        count += 1
        if difference := first.difference(await context.replay(first)):
            return failed(
                f"{first.name}, played twice, differs in {difference}. "
                f"{context.advice('Draw every random choice from the rng passed to reset().')}"
            )
    return passed(f"{count} episodes were identical when played again.")


async def seed_effect(context: CheckContext) -> CheckOutcome:
    """Do different seeds give different problems, unless the problems come from a data set?"""
    for policy in [*context.explorers(0), random_policy(1)]:
        first = await context.play(policy, index=None, seed=0)
        if first.reason:
            raise EpisodesBroke(first)
        if first.sample.data:
            return skipped("Problems come from a data set; the seed need not change them.")
        for seed in context.while_time(range(1, 13)):
            other = await context.play(replay_policy(first.actions), index=None, seed=seed)
            if first.difference(other):
                return passed(f"Seeds 0 and {seed} give different episodes.")
    return warned("Every seed gave the same episode; is the rng passed to reset() used?")


async def order(context: CheckContext) -> CheckOutcome:
    """Is an episode the same after other episodes, or does state leak between them?"""
    count = 0
    async for before in context.explored(3):
        for other in context.indices(4):
            await context.play(random_policy(other), other, seed=other + 2)
            count += 1
        if difference := before.difference(await context.replay(before)):
            return failed(
                f"{before.name}, played again after {count} others, differs in {difference}. "
                f"{context.advice('Some state outlives a session: a class attribute, a global, a file.')}"
            )
    return passed(f"Episodes were identical after {count} others in between.")


async def isolation(context: CheckContext) -> CheckOutcome:
    """Do concurrent sessions give the same results as sequential ones?"""
    expected = 2 * [alone async for alone in context.explored(4)]
    concurrent = await context.replay_interleaved(expected)
    if len(concurrent) < 2:
        return skipped("The server has no capacity for two sessions at the same time.")
    for one, other in zip(expected, concurrent, strict=False):
        if difference := one.difference(other):
            return failed(
                f"{one.name}, played among {len(concurrent)} concurrent sessions, differs in {difference}. "
                f"{context.advice('Keep the state of an episode on self, set in reset().')}"
            )
    return passed(f"{len(concurrent)} concurrent sessions gave the same results as sequential ones.")


async def fork(context: CheckContext) -> CheckOutcome:
    """Do forks continue like the original, independently of it and of each other?"""
    if "fork" not in context.task.capabilities:
        return skipped("The task does not support forks: it has no snapshot() and restore().")
    count = 0
    lost: list[str] = []
    async for whole in context.explored(4):
        for turn in sorted({0, len(whole.turns) // 2, max(len(whole.turns) - 1, 0)}):
            try:
                problem = await _fork_problem(context, whole, turn, lost)
            except ServerFull:
                return skipped("The server has no capacity for three sessions at the same time.")
            if problem:
                return failed(
                    f"{whole.name}, forked after turn {turn}: {problem} snapshot() must hold all that "
                    "later turns depend on, the random generator too; restore() must only set it on self."
                )
            count += 2
    forks = f"{count} forks gave the results of their originals"
    if any(lost):
        why = f"{max(lost)}{context.place_of('snapshot')}"
        return warned(f"{forks}, but sessions have no failover (serve --resume): {why}.")
    return passed(f"{forks}.")


async def _fork_problem(context: CheckContext, whole: Rollout, turn: int, lost: list[str]) -> str | None:
    """Replay an episode, fork it twice after a turn, and return what differs afterwards.

    The first fork plays different actions before the others continue, so that shared state is detected. If
    the state could not be sent to another server, the reason is added to ``lost``.
    """
    index, seed = whole.sample.index, whole.sample.seed
    original = await context.open(index, seed)
    prefix = Rollout(sample=original.sample, opening=original.messages)
    await context.play_on(original, replay_policy(whole.actions[:turn]), prefix)
    stray, twin = await context.fork(original, 2)
    lost.append(await context.why_lost(original))
    for session in (stray, twin):
        if (session.turn, session.status, session.messages) != (turn, original.status, original.messages):
            return f"the fork is at turn {session.turn}, {session.status}."
    await context.play_on(stray, random_policy(seed + turn), prefix.copy())
    for name, session in (("the fork", twin), ("the original", original)):
        played = prefix.copy()
        await context.play_on(session, replay_policy(whole.actions), played)
        await session.close()
        if difference := whole.difference(played):
            return f"{name} differs from the episode without forks in {difference}."
    await stray.close()
    return None


async def fuzz(context: CheckContext) -> CheckOutcome:
    """Does the environment survive odd messages (broken JSON, wrong types, unknown tools, strange text)?"""
    rng = np.random.default_rng(0)
    cases = list(fuzz_cases(context.task.tools, rng))
    rng.shuffle(cases)
    session, sent, rejected = None, 0, 0
    for case in context.while_time(cases, least=20):
        session = await _running_session(context, session, sent, rng)
        context.doing = describe(case.message)
        result = await context.step(session, case.message)
        sent += 1
        rejected += result.metrics.get("invalid_calls", 0) > 0
        if reason := failure_reason(result):
            broken = f"{describe(case.message)} broke the environment: {reason}"
            return context.broke(reason, f"{case.label}: {broken}")
        if problem := _fuzz_problem(case, result):
            return failed(f"{case.label}: {problem}")
    return passed(f"{sent} of {len(cases)} odd messages sent, {rejected} rejected, no failure.")


async def _running_session(
    context: CheckContext, session: ClientSession | None, count: int, rng: np.random.Generator
) -> ClientSession:
    """Return a running session. Sometimes the expert has made a move, to reach later states."""
    if session is not None and not session.status.final and context.has_expert and rng.random() < 0.3:
        context.doing = f"the expert's move in turn {session.turn + 1}"
        rollout = Rollout(sample=session.sample, opening=session.messages)
        if move := await context.explore_with_expert(session, rollout):
            await context.step(session, move)
    if session is None or session.status.final:
        indices = context.indices(8)
        session = await context.open(indices[count % len(indices)])
    return session


def _fuzz_problem(case: FuzzCase, result: StepResult) -> str | None:
    if case.invalid and not result.metrics.get("invalid_calls", 1.0):
        return f"{describe(case.message)} does not fit the schema but was accepted"
    return _answer_problem(case.message, result)


async def oracle(context: CheckContext) -> CheckOutcome:
    """Does the expert reach the goal, so that the task is known to be solvable?"""
    if not context.offers_expert:
        return skipped("No expert is available: the task has none, or the server lacks --oracle.")
    played = []
    for split, index in context.while_time(_expert_plan(context), least=4):
        rollout = await context.play(expert_policy, index, split=split)
        played.append(rollout)
        if rollout.reason:
            return context.broke(rollout.reason, f"{rollout.name}: {rollout.failure}")
        for turn in rollout.turns:
            if turn.result.metrics.get("invalid_calls"):
                return failed(f"The expert's own call is invalid: {describe(turn.action)}")
    wins = sum(rollout.success for rollout in played)
    rate = f"The expert solves {wins} of {len(played)} episodes"
    if wins < EXPERT_SUCCESS * len(played):
        rewards = sorted(sum(turn.result.reward for turn in rollout.turns) for rollout in played)
        return failed(
            f"{rate} (rewards {rewards[0]:.3g} to {rewards[-1]:.3g}; success is score()['success'], or else "
            f"a reward of 1 in all); at least {EXPERT_SUCCESS:.0%} are needed to trust task and reward."
        )
    if wins < RELIABLE_SUCCESS * len(played):
        lost = ", ".join(rollout.name for rollout in played if not rollout.success)
        return warned(f"{rate}; unless it errs on purpose, these might have no solution: {shorten(lost)}.")
    return passed(f"{rate}.")


def _expert_plan(context: CheckContext) -> list[tuple[str, int]]:
    known = context.task.splits
    splits = [split for split in ("train", "test") if split in known and context.size(split) != 0] or [
        "train"
    ]
    share = EXPERT_EPISODES // len(splits)
    by_split = [[(split, index) for index in context.indices(share, split)] for split in splits]
    return [plan for plans in zip_longest(*by_split) for plan in plans if plan is not None]


# The process: effects of one session on the others


async def output(context: CheckContext) -> CheckOutcome:
    """Are answers short enough for a model to read?"""
    if not context.longest:
        return skipped("Not run: no episode was played.")
    size, action = context.longest
    if size <= LONG_OUTPUT:
        return passed(f"The longest answer has {size:,} characters.")
    return warned(
        f"{action} was answered with {size:,} characters. Cut long output in the tool, say how much is "
        "missing, and set max_output_chars, from which on the answers to a message are cut."
    )


async def event_loop(context: CheckContext) -> CheckOutcome:
    """Does the task leave the event loop to the other sessions of its process?"""
    if context.environment is None:
        return skipped("Not visible from outside: a server logs a warning for code that blocks its loop.")
    if not context.blocks:
        return passed(f"No call blocked it for more than {BLOCKED_S:g} s.")
    places = "; ".join(dict.fromkeys(map(str, context.blocks)))
    evidence = f"{places}, for more than {BLOCKED_S:g} s, while all sessions of the process wait. {ADVICE}"
    repeated = [block for block in context.blocks if not block.function.endswith((".startup", ".shutdown"))]
    return failed(evidence) if len(repeated) > 1 else warned(f"Once: {evidence}")


async def shutdown(context: CheckContext) -> CheckOutcome:
    """Are the resources of a process released at its end, without an error?"""
    if context.environment is None:
        return skipped("Not visible from outside: a server logs a warning if shutdown() raises.")
    if raised := context.failures["shutdown"]:
        return failed(f"shutdown() raised {raised[0]}; the resources of startup() might not be released.")
    if not context.environment.overrides("shutdown"):
        return passed("The task has no shutdown().")
    if context.not_closed:
        return warned(f"shutdown() did not end: {context.not_closed}")
    return passed("It ran after the last session, without an error.")


CHECKS = (
    schema, hooks, samples, data_set, random_play, limits, retry, expert, seed_replay, processes, seed_effect,
    order, isolation, fork, fuzz, oracle, knowledge, close, results, output, event_loop, shutdown,
)  # fmt: skip
"""All checks, in the order they run."""
RECORDS = (results, output, event_loop, shutdown)
"""Checks of what other checks recorded. They run even if an earlier check did not finish."""
LAST = (event_loop, shutdown)
"""Checks of records that are complete only after the client is closed."""
