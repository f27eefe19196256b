"""Runs the conformance checks, each under a deadline, on anything an ``EnvClient`` can reach."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from agentrl_env.client.client import EnvClient
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.client.schema_sampler import CannotSample
from agentrl_env.environment import Environment
from agentrl_env.errors import AgentRLError, ServerUnreachable, UnknownTask
from agentrl_env.server.loader import load_target
from agentrl_env.testing.checks import CHECKS
from agentrl_env.testing.context import CLOSE_TIMEOUT, Probe
from agentrl_env.testing.report import CheckResult, Outcome, Report, failed, skipped, warned
from agentrl_env.types import TaskInfo

Check = Callable[[Probe], Awaitable[Outcome]]
DEADLINE = 60.0
"""Seconds a check may take."""
GRACE = 1.0
"""Seconds that a check may need past its deadline to say so itself."""
logger = logging.getLogger("agentrl_env")


def check_environment(environment: type[Environment] | str, *, deadline: float = DEADLINE) -> Report:
    """Assert that an environment keeps the contract; for a test suite.

    Example::

        def test_guess_keeps_the_contract():
            check_environment(Guess)

    Args:
        environment: the class, or a target such as the folder that it is in.
        deadline: seconds each check may take.

    Raises:
        AssertionError: a check failed; the message has the evidence of each.
        TargetError: the class cannot be loaded, or has nothing that a model could do.
    """
    (report,) = run_checks(load_target(environment).local, deadline=deadline)
    if not report.ok:
        raise AssertionError(report.text())
    return report


def run_checks(
    connect: Callable[[], EnvClient],
    *,
    task: str | None = None,
    deadline: float = DEADLINE,
    checks: tuple[Check, ...] = CHECKS,
    on_result: Callable[[str, CheckResult], None] = lambda task, result: None,
) -> list[Report]:
    """Check one task, or all that the client reaches, and return a report each.

    Args:
        connect: makes the client: ``Guess.local``, or a call of ``EnvClient.connect``.
        task: which task; all by default.
        deadline: seconds each check may take.
        checks: which checks, in order.
        on_result: told the task and every result as it comes.

    Raises:
        AgentRLError: no task could be looked at (no server, a wrong token, an unknown task).
    """
    loop = LoopThread("agentrl-env-check")
    client = connect()
    try:
        reports = []
        for info in loop.run(_tasks(client, task), deadline):
            probe = Probe(client=client, task=info, deadline=deadline)
            results = []
            for result in _run_all(loop, probe, checks):
                on_result(info.name, result)
                results.append(result)
            reports.append(Report(task=info.name, results=tuple(results)))
        return reports
    finally:
        _end(loop, client, min(CLOSE_TIMEOUT, deadline))


def _end(loop: LoopThread, client: EnvClient, timeout: float) -> None:
    """Release the client; where the environment blocks the loop there is nothing to wait for."""
    try:
        loop.run(client.aclose(), timeout)
    except (TimeoutError, AgentRLError) as error:
        logger.warning("the client could not be closed: %s", error)
    loop.stop(timeout)


async def _tasks(client: EnvClient, task: str | None) -> list[TaskInfo]:
    tasks = await client.tasks()
    if task is None:
        return list(tasks.values())
    if task not in tasks:
        raise UnknownTask(f"No task {task!r} is served; there are: {', '.join(tasks)}.")
    return [tasks[task]]


def _run_all(loop: LoopThread, probe: Probe, checks: tuple[Check, ...]) -> Iterator[CheckResult]:
    """Run the checks until one shows that the rest would tell nothing."""
    stopped_by = ""
    for check in checks:
        begin = time.monotonic()
        if stopped_by:
            outcome = skipped(f"Not run, because {stopped_by} came to no end.")
        else:
            outcome, usable = _watched(loop, check, probe)
            if not usable:
                stopped_by = check.__name__
        yield CheckResult(
            name=check.__name__,
            question=(check.__doc__ or "").splitlines()[0],
            verdict=outcome.verdict,
            evidence=outcome.evidence,
            seconds=round(time.monotonic() - begin, 3),
        )


def _watched(loop: LoopThread, check: Check, probe: Probe) -> tuple[Outcome, bool]:
    """Run one check, and give it up from outside where the event loop itself hangs."""
    try:
        return loop.run(_run_one(check, probe), probe.deadline + min(CLOSE_TIMEOUT, probe.deadline) + GRACE)
    except TimeoutError:
        blocked = "Its code blocks the event loop: leave blocking = True for code that can wait."
        return failed(f"{_no_end(probe)} {blocked}"), False


async def _run_one(check: Check, probe: Probe) -> tuple[Outcome, bool]:
    """Return a check's outcome, and whether it makes sense to go on with the next."""
    probe.begin()
    try:
        async with asyncio.timeout(probe.deadline):
            return await check(probe), True
    except TimeoutError:
        return failed(_no_end(probe)), False
    except CannotSample as error:
        return warned(f"Not checked: {error}"), True
    except AgentRLError as error:
        gone = isinstance(error, ServerUnreachable)
        return failed(f"{probe.doing}: {type(error).__name__}: {error}"), not gone
    finally:
        await probe.close_all()


def _no_end(probe: Probe) -> str:
    where = probe.doing or "the first call"
    return f"No end within {probe.deadline:g} s (give a slow task more: --deadline); it was at: {where}."
