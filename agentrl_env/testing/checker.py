"""Runs the conformance checks on the tasks of an ``EnvClient``, each under a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import cast

from agentrl_env.author_code import describe
from agentrl_env.client.client import EnvClient
from agentrl_env.client.local import LocalBackend
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.client.schema_sampler import CannotSample
from agentrl_env.environment import Environment
from agentrl_env.errors import AgentRLError, CallTimeout, ServerUnreachable, UnknownSample, UnknownTask
from agentrl_env.evaluation.chat_model import ChatModel
from agentrl_env.hosting.loader import load_target
from agentrl_env.session.loop_watch import ADVICE, Block, LoopWatch
from agentrl_env.testing.checks import BLOCKED_S, CHECKS, LAST, RECORDS
from agentrl_env.testing.context import CLOSE_TIMEOUT, CheckContext, SharedState
from agentrl_env.testing.quality import START_S, TaskQuality, measure_quality, time_limit
from agentrl_env.testing.report import CheckOutcome, CheckResult, Report, failed, skipped, warned
from agentrl_env.types import TaskInfo
from agentrl_env.wire import choose_task

Check = Callable[[CheckContext], Awaitable[CheckOutcome]]
DEADLINE = 60.0
"""Default deadline of a check in seconds."""
GRACE = 1.0
"""Extra seconds in which a check can report its own timeout."""
logger = logging.getLogger("agentrl_env")


def check_environment(environment: type[Environment] | str, *, deadline: float = DEADLINE) -> Report:
    """Assert in a test suite that an environment passes all checks.

    Example::

        def test_guess_conforms():
            check_environment(Guess)

    Args:
        environment: The class, or a target such as the task's folder.
        deadline: Seconds that each check may take.

    Returns:
        The report, which has no failures.

    Raises:
        AssertionError: A check failed. The message contains the evidence.
        TargetError: The class cannot be loaded, or has neither tools nor ``respond``.
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
    """Check one task, or all tasks of the client, and return a report for each.

    Args:
        connect: Returns the client, for example ``Guess.local`` or a call of ``EnvClient.connect``.
        task: Name of the task. By default all tasks are checked.
        deadline: Seconds that each check may take.
        checks: The checks to run, in order.
        on_result: Called with the task's name and each result, as soon as it is known.

    Raises:
        AgentRLError: The tasks could not be listed (no server, wrong token, no or unknown task, timeout).
    """
    loop = LoopThread("agentrl-env-check")
    client = connect()
    contexts: list[CheckContext] = []
    failures = _Failures(contexts)
    logger.addHandler(failures)
    watch = _Watch()
    try:
        if isinstance(client.backend, LocalBackend):
            loop.run(watch.start())
        tasks = _tasks_of(loop, client, deadline)
        selected = tasks.values() if task is None else [tasks[choose_task(task, tasks)]]
        contexts += [CheckContext(client=client, task=info, deadline=deadline) for info in selected]
        early = tuple(check for check in checks if check not in LAST)
        results = [_run_watched(loop, context, watch, early, on_result) for context in contexts]
    finally:
        not_closed = _close(loop, client, min(CLOSE_TIMEOUT, deadline))
        logger.removeHandler(failures)
        watch.stop()
    reports = []
    for context, found in zip(contexts, results, strict=True):
        context.not_closed = not_closed
        context.blocks += [block for block in watch.outside if _is_hook(context, block)]
        for result in _run_checks(loop, context, tuple(check for check in checks if check in LAST)):
            on_result(context.task.name, result)
            found.append(result)
        reports.append(Report(task=context.task.name, results=tuple(found)))
    return reports


def run_quality(
    connect: Callable[[], EnvClient],
    *,
    task: str | None = None,
    deadline: float = DEADLINE,
    samples: int = 40,
    splits: Sequence[str] = (),
    model: ChatModel | None = None,
) -> list[TaskQuality]:
    """Measure the quality of one task, or of all tasks of the client.

    Args:
        connect: Returns the client, as for ``run_checks``.
        task: Name of the task. By default all tasks are measured.
        deadline: Seconds in which episodes of one policy on one split can start.
        samples: Number of samples of each split.
        splits: Names of splits. By default all splits are played.
        model: A model to play groups of episodes. It is closed at the end.

    Raises:
        AgentRLError: The tasks could not be listed, a split is unknown, or a call blocks forever.
    """

    async def measure(tasks: Sequence[TaskInfo]) -> list[TaskQuality]:
        async with model or contextlib.nullcontext():
            contexts = [CheckContext(client=client, task=info, deadline=deadline) for info in tasks]
            return [
                await measure_quality(context, samples=samples, splits=splits, model=model)
                for context in contexts
            ]

    loop, client = LoopThread("agentrl-env-quality"), connect()
    try:
        tasks = _tasks_of(loop, client, max(deadline, START_S))
        selected = list(tasks.values()) if task is None else [tasks[choose_task(task, tasks)]]
        for info in selected:
            if unknown := [split for split in splits if split not in info.splits]:
                known = ", ".join(info.splits)
                raise UnknownSample(f"task {info.name!r} has no split {unknown[0]!r}; splits: {known}")
        limit = time_limit(deadline, [len(splits or info.splits) for info in selected])
        try:
            return loop.run(measure(selected), limit)
        except TimeoutError:
            reason = "a call of the task might block the event loop"
            raise CallTimeout(f"the tasks could not be measured in {limit:g} s; {reason}") from None
    finally:
        _close(loop, client, CLOSE_TIMEOUT)


def _tasks_of(loop: LoopThread, client: EnvClient, deadline: float) -> dict[str, TaskInfo]:
    """Return the tasks of a client, of which there is at least one. Raises CallTimeout, UnknownTask."""
    try:
        tasks = loop.run(client.tasks(), deadline)
    except TimeoutError:
        raise CallTimeout(
            f"the tasks were not listed within {deadline:g} s (--deadline sets a longer time); "
            "startup() might hang, or the server is busy"
        ) from None
    if not tasks:
        served_by = getattr(client.backend, "url", "this client")
        raise UnknownTask(f"{served_by} serves no task; is a server linked to the controller?")
    return tasks


def _close(loop: LoopThread, client: EnvClient, timeout: float) -> str:
    """Close the client and the loop, which an environment can block. Return the reason if this fails."""
    problem = ""
    try:
        loop.run(client.aclose(), timeout)
    except (TimeoutError, AgentRLError) as error:
        problem = str(error)
        logger.warning("the client could not be closed: %s", problem)
    loop.stop(timeout)
    return problem


def _run_watched(
    loop: LoopThread,
    context: CheckContext,
    watch: _Watch,
    checks: tuple[Check, ...],
    on_result: Callable[[str, CheckResult], None],
) -> list[CheckResult]:
    """Run the checks of a task. Code that blocks the event loop meanwhile is attributed to the task."""
    name, backend = context.task.name, context.client.backend
    if isinstance(backend, LocalBackend):
        context.environment = backend.pool.environment(name)
        context.shared = SharedState(context.environment)
    results = []
    with watch.giving_to(context.blocks):
        for result in _run_checks(loop, context, checks):
            on_result(name, result)
            results.append(result)
    return results


class _Watch:
    """Finds code that blocks the event loop, in the checks of a task or outside them, as in ``startup``."""

    def __init__(self) -> None:
        self.outside: list[Block] = []
        self._found = self.outside
        self._watch = LoopWatch(BLOCKED_S, lambda block: self._found.append(block))

    async def start(self) -> None:
        """Watch the running event loop."""
        self._watch.start()

    def stop(self) -> None:
        """Stop watching."""
        self._watch.stop()

    @contextlib.contextmanager
    def giving_to(self, found: list[Block]) -> Iterator[None]:
        """Add the blocking code that is found in this context to a list."""
        self._found = found
        try:
            yield
        finally:
            self._found = self.outside


def _is_hook(context: CheckContext, block: Block) -> bool:
    """Return True if the blocking code is ``startup`` or ``shutdown`` of the task."""
    bases = context.environment.__mro__ if context.environment else ()
    return block.function in {f"{base.__name__}.{name}" for base in bases for name in ("startup", "shutdown")}


class _Failures(logging.Handler):
    """Collects exceptions of the tasks' close() and shutdown(), which are logged and not raised."""

    def __init__(self, contexts: list[CheckContext]) -> None:
        super().__init__()
        self._contexts = contexts

    def emit(self, record: logging.LogRecord) -> None:
        """Collect the exception of a record."""
        error = record.exc_info and record.exc_info[1]
        for context in self._contexts if error else ():
            for method, found in context.failures.items():
                start = f"{method} of task {context.task.name} failed"
                if error and context.environment and record.getMessage().startswith(start):
                    found.append(describe(error, getattr(context.environment, method)))


def _run_checks(loop: LoopThread, context: CheckContext, checks: tuple[Check, ...]) -> Iterator[CheckResult]:
    """Run the checks. Skip the rest after a check that did not finish."""
    stopped_by = ""
    for check in checks:
        begin = time.monotonic()
        if check in RECORDS:
            outcome = _read_record(check, context)
        elif stopped_by:
            outcome = skipped(f"Not run, because {stopped_by} did not finish.")
        else:
            outcome, usable = _run_check(loop, check, context)
            if not usable:
                stopped_by = check.__name__
        yield CheckResult(
            name=check.__name__,
            question=(check.__doc__ or "").splitlines()[0],
            verdict=outcome.verdict,
            evidence=outcome.evidence,
            seconds=round(time.monotonic() - begin, 3),
        )


def _run_check(loop: LoopThread, check: Check, context: CheckContext) -> tuple[CheckOutcome, bool]:
    """Run one check, with a second timeout outside the event loop in case the loop itself hangs."""
    timeout = context.deadline + min(CLOSE_TIMEOUT, context.deadline) + GRACE
    try:
        return loop.run(_run_within_deadline(check, context), timeout)
    except TimeoutError:
        blocked = str(context.blocks[-1]) if context.blocks else "Its code blocks the event loop"
        return failed(f"{_timeout_evidence(context)} {blocked}. {ADVICE}"), False


def _read_record(check: Check, context: CheckContext) -> CheckOutcome:
    """Run a check that awaits nothing, without the event loop, which might be stuck."""
    context.begin(check.__name__)
    try:
        next(check(context).__await__())
    except StopIteration as end:
        return cast(CheckOutcome, end.value)
    except AgentRLError as error:
        return context.stopped(error)
    raise RuntimeError(f"{check.__name__} awaits something")


async def _run_within_deadline(check: Check, context: CheckContext) -> tuple[CheckOutcome, bool]:
    """Return the outcome of a check, and False if the remaining checks cannot run."""
    context.begin(check.__name__)
    try:
        async with asyncio.timeout(context.deadline):
            return await check(context), True
    except TimeoutError:
        return failed(_timeout_evidence(context)), False
    except CannotSample as error:
        return warned(f"Not checked: {error}"), True
    except AgentRLError as error:
        reachable = not isinstance(error, ServerUnreachable)
        return context.stopped(error), reachable
    except Exception as error:  # report the other checks anyway
        logger.warning("check %s failed", check.__name__, exc_info=error)
        return failed(f"{context.doing}: the check itself failed: {describe(error)}"), True
    finally:
        await context.close_all()


def _timeout_evidence(context: CheckContext) -> str:
    doing = context.doing or "the first call"
    return f"Not finished within {context.deadline:g} s (--deadline sets a longer time); waited for: {doing}."
