"""One episode: its steps in order, its last turns, its limits, its end."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from agentrl_env.author_code import describe
from agentrl_env.definition import check_instance
from agentrl_env.errors import (
    AUTHOR_ERRORS,
    EnvironmentFailed,
    IdempotencyConflict,
    InvalidRequest,
    NotSupported,
    SeqConflict,
    ServerFull,
    SessionEnded,
    SessionExpired,
)
from agentrl_env.fast_wire import AssistantMessage, encode
from agentrl_env.session.executor import Executor, run_eagerly
from agentrl_env.session.observer import NO_OBSERVER, Observer, log_failure
from agentrl_env.session.threads import ThreadPool
from agentrl_env.tools import (
    LoopTimeSpent,
    StepBuilder,
    TimeLimitReached,
    as_messages,
    as_move,
    bounded,
    toolset,
)
from agentrl_env.types import Message, SessionInfo, SessionStatus, StepResult, TaskSample

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

T = TypeVar("T")
_RUNNING = SessionStatus.RUNNING  # looking up an enum member is slow
MESSAGE_LOOP_S = 5.0
"""Seconds for which the calls of one message may occupy the event loop."""
SETTLE_TIMEOUT_S = 10.0
"""Seconds that ``close`` waits for author code that is past its deadline."""
MAX_TURNS = 64
"""Number of turns that a session keeps."""
MAX_BYTES = 8 * 1024 * 1024
"""Default size of the turns that a session keeps. The last ``MIN_TURNS`` turns are always kept."""
MIN_TURNS = 2
_LARGE_BYTES = 64 * 1024
"""Turns up to this size are limited only by their number."""


class Session:
    """One episode of one environment instance.

    Steps are numbered from 1 by ``seq``. A repeated ``seq`` returns the stored result. Steps and other calls
    of author code run one at a time, in the order of submission, and run to their end even if the caller
    gives up. An exception in author code ends the session as ``failed_environment``; ``step`` does not raise
    it.

    Args:
        environment: class of the task.
        sample: problem of the episode.
        session_id: id on the wire.
        threads: pool for blocking author code.
        clock: returns the monotonic time in seconds.
        observer: counts, logs and traces.
        message_loop_s: seconds for which the calls of one message may occupy the event loop. Further calls
            are not executed, and the model gets an error for them.
        history_bytes: size of the turns to keep.
    """

    def __init__(
        self,
        environment: type[Environment],
        sample: TaskSample,
        *,
        session_id: str,
        threads: ThreadPool,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer = NO_OBSERVER,
        message_loop_s: float = MESSAGE_LOOP_S,
        history_bytes: int = MAX_BYTES,
    ) -> None:
        self.session_id = session_id
        self.sample = sample
        self.status = SessionStatus.RUNNING
        self.opening: tuple[Message, ...] = ()
        self.turn = 0
        """Number of steps taken."""
        self.history = History(history_bytes)
        self.episode_return = 0.0
        """Sum of the rewards so far."""
        self.began = clock()
        self._class = environment
        self._tools = toolset(environment)
        self._threads = threads
        self._executor = Executor(
            blocking=environment.blocking,
            threads=threads,
            on_tool=partial(observer.tool_ran, sample.task),
            session_id=session_id,
            opening=True,
        )
        self._clock = clock
        self._observer = observer
        self._message_loop_s = message_loop_s
        self._environment: Environment | None = None
        self._restore: Callable[[Environment], Any] | None = None
        self._queue_tail: asyncio.Future[Any] | None = None
        """The task submitted last. Each task waits for the previous one."""
        self._current: asyncio.Future[Any] | None = None
        """The task that runs author code now."""
        self._closing: asyncio.Task[None] | None = None
        self._queued_seq = 0
        """Highest ``seq`` that was enqueued."""

    def __repr__(self) -> str:
        return f"<Session {self.session_id} of {self.sample.task!r}: {self.status}, turn {self.turn}>"

    def info(self) -> SessionInfo:
        """Return the state of the session."""
        return SessionInfo(
            session_id=self.session_id,
            task=self.sample.task,
            sample=self.sample,
            messages=self.opening,
            tools=self._tools.specs,
            status=self.status,
            turn=self.turn,
            last=self.history.last,
        )

    async def start(self) -> SessionInfo:
        """Create the environment and reset or restore it. If this fails, the environment is closed.

        Raises EnvironmentFailed, or ServerFull if no thread becomes free.
        """

        def begin() -> Any:
            environment = self._environment = self._class()
            if self._restore is not None:
                return self._restore(environment)
            # Copy it, so that author code cannot change the dataset for other sessions.
            sample = self.sample.model_copy(deep=True)
            return environment.reset(sample, np.random.default_rng(sample.seed))

        calling = "reset" if self._restore is None else "restore"
        try:
            content = await self._executor.run(begin, self._class.reset_timeout)
            if self._restore is None:
                content, _ = bounded(content, self._class.max_output_chars)
                self.opening = tuple(as_messages(content, "reset()"))
            check_instance(self._environment)
            if self._class.overrides("session_tools"):
                calling = "session_tools"
                offered = await self._executor.run(self._alive().session_tools, self._class.reset_timeout)
                self._tools = self._tools.offer(offered)
            info = self.info()
        except ServerFull:
            self.begin_close(SessionStatus.FAILED_ENVIRONMENT)
            raise
        except AUTHOR_ERRORS as error:
            self.begin_close(SessionStatus.FAILED_ENVIRONMENT)
            raise self._failure(calling, error) from error
        except asyncio.CancelledError:
            self.begin_close()
            raise
        self._restore, self._executor.opening = None, False
        return info

    def continue_from(
        self,
        restore: Callable[[Environment], Any],
        *,
        opening: tuple[Message, ...],
        turn: int,
        episode_return: float,
        began: float,
        history: History,
    ) -> None:
        """Let ``start`` restore a snapshot instead of calling ``reset``.

        Args:
            restore: passes the snapshot to a new environment.
            opening: opening messages of the episode.
            turn: number of steps taken.
            episode_return: sum of their rewards.
            began: start of the episode, by the session's clock.
            history: last turns.
        """
        self._restore = restore
        self.opening, self.turn, self.episode_return = opening, turn, episode_return
        self.began, self.history = began, history

    async def step(self, message: AssistantMessage, seq: int | None = None) -> StepResult:
        """Play one assistant message. ``seq`` None means the next step.

        Raises SeqConflict on a gap, IdempotencyConflict if ``seq`` was played with another message,
        SessionEnded or SessionExpired if no step is possible, and InvalidRequest if the message is not an
        assistant message.
        """
        submitted = self.submit(message, seq)
        result = submitted if isinstance(submitted, bytes) else await self.result_of(submitted)
        return StepResult.model_validate_json(result)

    def submit(self, message: AssistantMessage, seq: int | None = None) -> bytes | asyncio.Future[bytes]:
        """Return the StepResult as JSON if the step ends immediately, else a future of the result.

        Raises the errors of ``step``. For a future, ``result_of`` raises them.
        """
        if message.role != "assistant":
            raise InvalidRequest(f"a step takes an assistant message, not one of {message.role!r}")
        if seq is not None and seq <= self.turn:
            return self.history.result(seq, self.turn, message)
        if self._queue_tail is not None and not self._queue_tail.done():
            last = max(self.turn, self._queued_seq)
            if seq is not None and seq > last + 1:
                raise _gap(seq, last)
            self._queued_seq = max(last, last + 1 if seq is None else seq)
            return self._enqueue(partial(self._step, message, seq))
        self._check_next(seq)
        self._queued_seq = self.turn + 1
        started = run_eagerly(self._play(message))
        if not isinstance(started, bytes):
            self._queue_tail = self._current = started
        return started

    async def result_of(self, task: asyncio.Future[T]) -> T:
        """Wait for a future of ``submit``. The step continues if the caller is cancelled.

        Raises the errors of ``step``.
        """
        await asyncio.wait((task,))
        return self.outcome(task)

    def outcome(self, task: asyncio.Future[T]) -> T:
        """Return the result of a completed future of ``submit``. Raises the errors of ``step``."""
        if task.cancelled():
            self.check_running()
            raise SessionEnded("the step was cancelled", status=self.status)
        return task.result()

    async def expert(self) -> Message:
        """Return the next message of the task's expert without taking a step.

        Raises NotSupported if the task has no expert, or EnvironmentFailed if the expert fails.
        """

        async def ask(environment: Environment, executor: Executor) -> Message:
            rng = np.random.default_rng([self.sample.seed, self.turn, 1])
            try:
                return as_move(await executor.run(partial(environment.expert, rng), environment.tool_timeout))
            except NotSupported:
                raise
            except AUTHOR_ERRORS as error:
                reason = f"expert of task {self.sample.task!r} failed: {describe(error, environment.expert)}"
                raise EnvironmentFailed(reason) from error

        return await self.between_steps(ask)

    async def fork(self, session_ids: Sequence[str]) -> list[Session]:
        """Return new sessions, not yet started, that continue from the state of this session.

        Raises NotSupported if the task cannot fork, EnvironmentFailed if ``snapshot`` fails, SessionEnded or
        SessionExpired.
        """
        self.check_fork()

        async def ask(environment: Environment, executor: Executor) -> list[Session]:
            timeout = environment.tool_timeout
            try:
                state = await executor.run(environment.snapshot, timeout)
                # Copied before the next step, which might modify objects in the state.
                copies = await executor.run(lambda: [_copy(state) for _ in session_ids], timeout)
            except AUTHOR_ERRORS as error:
                raise self._failure("snapshot", error) from error
            return [self._fork(*pair) for pair in zip(session_ids, copies, strict=True)]

        return await self.between_steps(ask)

    async def between_steps(self, ask: Callable[[Environment, Executor], Coroutine[Any, Any, T]]) -> T:
        """Run author code that takes no step, after the earlier steps have ended.

        Raises SessionEnded, SessionExpired.
        """

        async def run() -> T:
            self.check_running()
            return await ask(self._alive(), self._executor)

        task = self._enqueue(run)
        task.add_done_callback(_retrieve)
        return await self.result_of(task)

    def check_running(self) -> None:
        """Raise SessionExpired or SessionEnded if no more steps are possible."""
        if self.status is SessionStatus.EXPIRED:
            raise SessionExpired("the session was idle past its lease; open a new one")
        if self.status is not _RUNNING:
            raise SessionEnded(f"the session has ended ({self.status}); open a new one", status=self.status)

    def check_fork(self) -> None:
        """Raise NotSupported, SessionEnded or SessionExpired if no fork is possible."""
        if not can_fork(self._class):
            raise NotSupported(f"task {self.sample.task!r} cannot fork: it has no snapshot() and restore()")
        self.check_running()

    async def close(self, status: SessionStatus = SessionStatus.CANCELLED) -> None:
        """End the session and close its environment. A running step is cancelled. Idempotent.

        Args:
            status: final status, unless the session has already ended.
        """
        await asyncio.shield(self.begin_close(status))

    def begin_close(self, status: SessionStatus = SessionStatus.CANCELLED) -> asyncio.Task[None]:
        """Start the task that ``close`` waits for."""
        if not self.status.final:
            self.status = status
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(self._current))
        return self._closing

    @property
    def closing(self) -> asyncio.Task[None] | None:
        """The task that closes the environment. None before it starts, or if nothing needs closing."""
        return self._closing

    def _enqueue(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Run a coroutine as a task after the previously enqueued task."""
        previous = self._queue_tail
        if previous is None or previous.done():
            task = self._current = asyncio.create_task(begin())
        else:
            task = asyncio.create_task(self._after(previous, begin))
            task.add_done_callback(_retrieve)
        self._queue_tail = task
        return task

    async def _after(self, previous: asyncio.Future[Any], begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await asyncio.wait((previous,))
        self._current = asyncio.current_task()
        return await begin()

    async def _step(self, message: AssistantMessage, seq: int | None) -> bytes:
        """Play a step that had to wait for other tasks."""
        if seq is not None and seq <= self.turn:
            return self.history.result(seq, self.turn, message)
        self._check_next(seq)
        return await self._play(message)

    def _play(self, message: AssistantMessage) -> Coroutine[Any, Any, bytes]:
        turn = self._turn(StepBuilder(message, self._clock()))
        return self._observer.traced("step", turn, self)

    def _check_next(self, seq: int | None) -> None:
        """Raise SeqConflict, SessionEnded or SessionExpired if step ``seq`` cannot be the next step."""
        if seq is not None and seq > self.turn + 1:
            raise _gap(seq, self.turn)
        if self.status is not _RUNNING:
            self.check_running()

    async def _turn(self, result: StepBuilder) -> bytes:
        """Play one turn and return its StepResult as JSON. Errors of author code become its status."""
        self._executor.loop_s = 0.0
        try:
            try:
                await result.run(self._alive(), self._invoke, self._tools)
                status = self._status_after(result)
            except TimeLimitReached:
                status = SessionStatus.TRUNCATED_TIME
            if status is not _RUNNING:
                check_instance(self._environment)
                result.calling = self._alive().score
                scores = await self._executor.run(self._alive().score, self._class.tool_timeout)
                result.score(scores, self.episode_return)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):  # the step or the process ends
            raise
        except BaseException as error:
            log_failure(self, f"step {self.turn + 1}", error)
            result.fail(error)
            status = SessionStatus.FAILED_ENVIRONMENT
        return self._end_turn(result, status)

    def _invoke(self, name: str, call: Callable[[], Any], timeout: float | None) -> Coroutine[Any, Any, Any]:
        """Call a tool within its deadline and the session's time limit. Raises LoopTimeSpent."""
        if self._executor.loop_s > self._message_loop_s:
            reason = f"the calls of a message may hold the server for {self._message_loop_s:g} s"
            raise LoopTimeSpent(f"{reason}, and those before this one have; send fewer")
        own = self._class.tool_timeout if timeout is None else timeout
        left = math.inf if self._class.max_seconds is None else self._time_left()
        return self._observer.traced("tool", self._executor.run_tool(name, call, own, left), self, name)

    def _status_after(self, result: StepBuilder) -> SessionStatus:
        """Return the status of the session after a turn. Raises TimeLimitReached."""
        if result.done:
            return SessionStatus.TRUNCATED_TURNS if result.truncated else SessionStatus.COMPLETED
        if self.turn + 1 >= self._class.max_turns:
            return SessionStatus.TRUNCATED_TURNS
        if self._class.max_seconds is not None:
            self._time_left()
        return _RUNNING

    def _time_left(self) -> float:
        """Return the seconds until the session's time limit. Raises TimeLimitReached."""
        left = self.began + (self._class.max_seconds or math.inf) - self._clock()
        if left <= 0:
            raise TimeLimitReached
        return left

    def _end_turn(self, result: StepBuilder, status: SessionStatus) -> bytes:
        answer = result.result_json(self.session_id, self.turn + 1, status)
        self.history.add(encode(result.message), answer)
        self.turn += 1
        self.episode_return += result.reward
        if status is not _RUNNING:
            self.status, self._current = status, None  # so that closing does not cancel this turn
            if self._class.overrides("close"):
                self.begin_close()
            else:
                self._environment = None
        self._observer.stepped(self, result, self._clock() - result.begin)
        return answer

    def _fork(self, session_id: str, state: Any) -> Session:
        forked = Session(
            self._class,
            self.sample,
            session_id=session_id,
            threads=self._threads,
            clock=self._clock,
            observer=self._observer,
            message_loop_s=self._message_loop_s,
        )
        forked.continue_from(
            lambda environment: environment.restore(state),
            opening=self.opening,
            turn=self.turn,
            episode_return=self.episode_return,
            began=self.began,
            history=self.history.copy(session_id),
        )
        return forked

    async def _close(self, running: asyncio.Future[Any] | None) -> None:
        """Cancel the running task, then close the environment exactly once."""
        try:
            if running is not None and not running.done():
                running.cancel()
                await asyncio.wait((running,))
            # Author code past its deadline might still use what close() releases, or might only now have
            # created the environment.
            await self._executor.settle(SETTLE_TIMEOUT_S)
            environment = self._environment
            if environment is not None and environment.overrides("close"):
                await self._executor.run(environment.close, environment.reset_timeout)
        except AUTHOR_ERRORS as error:
            log_failure(self, "close", error)
        self._environment = None

    def _failure(self, what: str, error: BaseException) -> EnvironmentFailed:
        log_failure(self, what, error)
        return EnvironmentFailed(
            f"{what} of task {self.sample.task!r} failed: {describe(error, getattr(self._class, what))}"
        )

    def _alive(self) -> Environment:
        if self._environment is None:
            raise RuntimeError("call start() of the session first")
        return self._environment


def _gap(seq: int, last: int) -> SeqConflict:
    return SeqConflict(f"seq {seq} leaves a gap: the next is {last + 1}", expected=last + 1)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Mark the exception of a task as retrieved, because its caller might have given up."""
    if not task.cancelled():
        task.exception()


def _copy(state: Any) -> Any:
    """Return a deep copy of a snapshot. Raises TypeError, which names the value that cannot be copied."""
    try:
        return copy.deepcopy(state)
    except Exception as error:
        for name, value in state.items() if isinstance(state, dict) else ():
            try:
                copy.deepcopy(value)
            except Exception as found:
                raise TypeError(
                    f"{found}: the state holds {name!r}, a {type(value).__name__}, which cannot be copied; "
                    "leave it out, and create it again in restore()"
                ) from error
        raise


def can_fork(environment: type[Environment]) -> bool:
    """Return True if sessions of a task can be forked, which needs ``snapshot`` and ``restore``."""
    return environment.overrides("snapshot") and environment.overrides("restore")


class History:
    """Turns as JSON text, which is compact and not traversed by the garbage collector.

    If the turns of thousands of sessions were objects, garbage collection would take longer than the steps.

    Args:
        max_bytes: size of the turns to keep.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._turns: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_TURNS)
        self._max_bytes = max_bytes

    def add(self, message: bytes, result: bytes) -> None:
        """Append a turn: the assistant message and the StepResult."""
        self._turns.append((message, result))
        if len(message) + len(result) > _LARGE_BYTES:
            size = sum(len(message) + len(result) for message, result in self._turns)
            while size > self._max_bytes and len(self._turns) > MIN_TURNS:
                size -= sum(map(len, self._turns.popleft()))

    def result(self, seq: int, turn: int, message: AssistantMessage) -> bytes:
        """Return the stored result of step ``seq``, played with ``message``. ``turn`` is the last step.

        Raises SeqConflict, InvalidRequest, or IdempotencyConflict if it was played with another message.
        """
        if seq < 1:
            raise InvalidRequest(f"seq counts from 1, got {seq}")
        if turn - seq >= len(self._turns):
            raise SeqConflict(f"the answer to seq {seq} is no longer kept", expected=turn + 1)
        played, result = self._turns[seq - turn - 1]
        again = encode(message)
        if again != played and _parse(again) != _parse(played):  # a message can be written in several ways
            raise IdempotencyConflict(f"seq {seq} was played with another message; the next is {turn + 1}")
        return result

    @property
    def last(self) -> StepResult | None:
        """Result of the last step."""
        return StepResult.model_validate_json(self._turns[-1][1]) if self._turns else None

    def __iter__(self) -> Iterator[tuple[Message, StepResult]]:
        for message, result in self._turns:
            yield Message.model_validate_json(message), StepResult.model_validate_json(result)

    def tail(self, number: int = MAX_TURNS) -> tuple[tuple[str, str], ...]:
        """Return up to ``number`` last turns as JSON text."""
        turns = list(self._turns)[-number:]
        return tuple((message.decode(), result.decode()) for message, result in turns)

    @classmethod
    def of(cls, turns: Iterable[tuple[str, str]]) -> History:
        """Return a history with the turns that ``tail`` returned."""
        history = cls()
        for message, result in turns:
            history.add(message.encode(), result.encode())
        return history

    def copy(self, session_id: str) -> History:
        """Return the same turns under the id of another session."""
        copied = History(self._max_bytes)
        for message, result in self._turns:
            renamed = StepResult.model_validate_json(result).model_copy(update={"session_id": session_id})
            copied.add(message, renamed.model_dump_json().encode())
        return copied


def _parse(message: bytes) -> Message | bytes:
    try:
        return Message.model_validate_json(message)
    except ValueError:
        return message
