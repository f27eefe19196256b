"""An episode under way: its steps in order, its limits, its end."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl_env.errors import (
    EnvironmentFailed,
    InvalidRequest,
    NotSupported,
    SeqConflict,
    SessionEnded,
    SessionExpired,
)
from agentrl_env.fast_wire import Said
from agentrl_env.session.answering import Answering, Awaited, follow, settled
from agentrl_env.session.history import History
from agentrl_env.session.hooks import can_fork, expert_move, release, reset, snapshots
from agentrl_env.session.observer import UNOBSERVED, Observer, log_failure
from agentrl_env.session.runner import Runner, run_through
from agentrl_env.session.threads import AUTHOR_ERRORS, AuthorTimeout, Outcome, Threads, attempt
from agentrl_env.tools import (
    Call,
    Done,
    TimeOver,
    Tool,
    Turn,
    as_messages,
    describe,
    find_call,
    tool_name,
    toolset,
)
from agentrl_env.types import Message, SessionInfo, SessionStatus, StepResult, TaskSample

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

T = TypeVar("T")
_RUNNING = SessionStatus.RUNNING  # an enum's member takes long to look up


class Session:
    """An episode under way.

    Steps are numbered from 1 by ``seq``; a repeated one gets the stored answer. At most one step
    runs at a time, and it runs to its end even when its caller goes away. Author code that raises
    ends the session as ``failed_environment``; nothing it raises leaves ``step``.
    """

    def __init__(
        self,
        environment: type[Environment],
        sample: TaskSample,
        *,
        session_id: str,
        threads: Threads,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer = UNOBSERVED,
    ) -> None:
        self.session_id = session_id
        self.sample = sample
        self.status = SessionStatus.RUNNING
        self.opening: tuple[Message, ...] = ()
        self._class = environment
        self._tools = toolset(environment)
        self._threads = threads
        self._runner = Runner(blocking=environment.blocking, threads=threads, limit=environment.tool_timeout)
        self._clock = clock
        self._observer = observer
        self.begin = clock()
        self._environment: Environment | None = None
        self.restored: Callable[[Environment], Any] | None = None
        """How a fork begins, instead of with ``reset``."""
        self.turn = 0
        """Number of steps taken."""
        self.turns = History()
        self.total = 0.0
        """Sum of the rewards so far."""
        self._task: Awaited[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.inline = not environment.blocking and self._tools.all_sync
        """Whether a step never suspends: it then needs no task, and no other can interleave."""
        self._plain = self._tools.all_sync and environment.max_seconds is None
        """Whether a step may be no more than one call of a plain method."""
        self._scored = environment.overrides("score")

    def info(self) -> SessionInfo:
        """Return how the session stands."""
        return SessionInfo(
            session_id=self.session_id,
            task=self.sample.task,
            sample=self.sample,
            messages=self.opening,
            tools=self._tools.specs,
            status=self.status,
            turn=self.turn,
            last=self.turns.last,
        )

    async def start(self) -> SessionInfo:
        """Create the environment and reset it, in a fork restore it; where that fails it is closed.

        Raises EnvironmentFailed.
        """

        def begin() -> Any:
            environment = self._environment = self._class()
            return self.restored(environment) if self.restored else reset(environment, self.sample)

        try:
            content = await self._runner.call(begin, self._class.reset_timeout)
            if self.restored is None:
                self.opening = tuple(as_messages(content, "reset()"))
        except AUTHOR_ERRORS as error:
            what = "reset" if self.restored is None else "restore"
            self.begin_close(SessionStatus.FAILED_ENVIRONMENT)
            raise self._broken(what, error) from error
        except asyncio.CancelledError:
            self.begin_close()
            raise
        self.restored = None
        return self.info()

    async def step(self, message: Message, seq: int | None = None) -> StepResult:
        """Play one assistant message; ``seq`` None means the next.

        Raises SeqConflict on a gap, SessionEnded or SessionExpired where no step is possible,
        InvalidRequest where the message is not an assistant's.
        """
        return StepResult.model_validate_json(await self.answer(Said.of(message), seq))

    async def answer(self, message: Said, seq: int | None = None) -> bytes:
        """Do what ``step`` does, and return the StepResult as JSON."""
        while True:
            step = self.begin_step(message, seq)
            if isinstance(step, bytes):
                return step
            if step is not None:
                await settled(step)
                return self.finished(step)
            await self._at_rest()

    def begin_step(self, message: Said, seq: int | None = None) -> bytes | Awaited[bytes] | None:
        """Return the answer where it is there at once, else the step that will give it to ``finished``.

        None stands for a session in which another step is under way. Raises what ``step`` does.
        """
        if message.role != "assistant":
            raise InvalidRequest(f"a step takes an assistant message, not one of {message.role!r}")
        if seq is not None and seq <= self.turn:
            return self.turns.answer(seq, self.turn)
        if seq is not None and seq > self.turn + (1 if self._task is None else 2):
            raise SeqConflict(f"seq {seq} leaves a gap: the next is {self.turn + 1}", expected=self.turn + 1)
        if self._task is not None:
            return None
        self.refuse_ended()
        turn = Turn(message, self._clock())
        found = find_call(self._tools, message) if self._plain and not self._observer.traces() else None
        if found is not None:
            call = partial(getattr(self._alive(), found[0].attribute), **found[1])
            return (self._call_here if self.inline else self._call_on_thread)(turn, found[0], call)
        played = self._observer.step(self, self._play(turn, self._call))
        return run_through(played) if self.inline else self._begin_task(played)

    def finished(self, step: Awaited[T]) -> T:
        """Return the answer of a step that has ended. Raises what ``step`` does."""
        if step.cancelled():
            self.refuse_ended()
            raise SessionEnded("the step was cancelled", status=self.status)
        return step.result()

    async def expert(self) -> Message:
        """Return the oracle's next assistant message, without taking a step.

        Raises NotSupported where the task has none, EnvironmentFailed where it breaks.
        """
        return await self.between_steps(
            lambda *alive: expert_move(alive[0], self.sample, self.turn, alive[1])
        )

    async def fork(self, session_ids: Sequence[str]) -> list[Session]:
        """Return sessions, to be started, that stand where this one stands between two steps.

        Raises NotSupported where the task cannot, EnvironmentFailed where ``snapshot`` breaks,
        SessionEnded, SessionExpired.
        """
        self.refuse_fork()
        return await self.between_steps(lambda *_: self._fork(session_ids))

    def refuse_fork(self) -> None:
        """Raise NotSupported, SessionEnded or SessionExpired where no fork is possible."""
        if not can_fork(self._class):
            raise NotSupported(f"task {self.sample.task!r} cannot fork: it has no snapshot() and restore()")
        self.refuse_ended()

    async def close(self, status: SessionStatus = SessionStatus.CANCELLED) -> None:
        """End the session and release its environment; a step under way is cancelled. Idempotent.

        Args:
            status: how the session ends, where it has not ended yet.
        """
        await asyncio.shield(self.begin_close(status))

    def begin_close(self, status: SessionStatus = SessionStatus.CANCELLED) -> asyncio.Task[None]:
        """Start what ``close`` waits for."""
        if not self.status.final:
            self.status = status
        if self._closing is None:
            self._closing = asyncio.create_task(self._release(self._task))
        return self._closing

    @property
    def released(self) -> asyncio.Task[None] | None:
        """The closing of the environment, once begun; None where nothing needs closing."""
        return self._closing

    async def between_steps(self, ask: Callable[[Environment, Runner], Coroutine[Any, Any, T]]) -> T:
        """Run author code that takes no step, while no step runs. Raises SessionEnded, SessionExpired."""
        await self._at_rest()
        self.refuse_ended()
        task = self._begin_task(ask(self._alive(), self._runner))
        await settled(task)
        return self.finished(task)

    def _call_here(self, turn: Turn, tool: Tool, call: Callable[[], Any]) -> bytes:
        """Play a message that is one call of a plain tool, as most are."""
        outcome = attempt(call)
        self._observer.tool_ran(self, tool.name, self._clock() - turn.begin)
        answer = self._take(turn, tool, outcome)
        return answer or run_through(self._play(turn, partial(self._runner.known, outcome)))

    def _call_on_thread(self, turn: Turn, tool: Tool, call: Callable[[], Any]) -> Answering:
        """Begin to play a message that is one call of a plain tool."""
        step = Answering()

        def play(outcome: Outcome) -> None:  # only now, so that no coroutine has to wait
            if step.done():  # the session was closed
                return
            self._observer.tool_ran(self, tool.name, self._clock() - turn.begin)
            if isinstance(outcome[1], AuthorTimeout):
                outcome = (None, AuthorTimeout(f"{tool.attribute}(): {outcome[1]}"))
            at_once = isinstance(outcome[0], str) or not inspect.isawaitable(outcome[0])
            answer = self._take(turn, tool, outcome) if at_once else None
            if answer is not None:
                self._task = None
                step.set_result(answer)
                return
            played = self._play(turn, partial(self._runner.known, outcome))
            follow(asyncio.ensure_future(played), step, self._end_task)

        seconds = self._class.tool_timeout if tool.timeout is None else tool.timeout
        self._runner.start(call, seconds, play)
        self._task = step
        return step

    async def _at_rest(self) -> None:
        while (task := self._task) is not None:
            await settled(task)
            self._end_task(task)  # its callback may come only once the event loop has had a turn

    def _begin_task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._task = asyncio.create_task(coroutine)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: Awaited[Any]) -> None:
        if self._task is task:
            self._task = None

    def refuse_ended(self) -> None:
        """Raise SessionExpired or SessionEnded where no further step is possible."""
        if self.status is SessionStatus.EXPIRED:
            raise SessionExpired("the session was idle past its lease; open a new one")
        if self.status is not _RUNNING:
            raise SessionEnded(f"the session has ended ({self.status}); open a new one", status=self.status)

    def _take(self, turn: Turn, tool: Tool, outcome: Outcome) -> bytes | None:
        """Return the answer to a message's only call; None where author code has to score it first."""
        if self._scored and (isinstance(outcome[0], Done) or self.turn + 1 >= self._class.max_turns):
            return None
        try:
            turn.take(tool, *outcome)
            status = self._standing(turn)
            if status is not _RUNNING:
                turn.score({}, self.total)
        except AUTHOR_ERRORS as error:
            log_failure(self, f"step {self.turn + 1}", error)
            turn.fail(error)
            status = SessionStatus.FAILED_ENVIRONMENT
        return self._end_turn(turn, status)

    async def _play(self, turn: Turn, call: Call) -> bytes:
        """Run one turn to its StepResult; author errors become its status."""
        try:
            try:
                await turn.play(self._alive(), call)
                status = self._standing(turn)
            except TimeOver:
                status = SessionStatus.TRUNCATED_TIME
            if status is not SessionStatus.RUNNING:
                scores = await self._runner.call(self._alive().score, self._class.tool_timeout)
                turn.score(scores, self.total)
        except AUTHOR_ERRORS as error:
            log_failure(self, f"step {self.turn + 1}", error)
            turn.fail(error)
            status = SessionStatus.FAILED_ENVIRONMENT
        return self._end_turn(turn, status)

    def _standing(self, turn: Turn) -> SessionStatus:
        """Return how the session stands after a turn. Raises TimeOver."""
        if turn.done:
            return SessionStatus.COMPLETED
        if self.turn + 1 >= self._class.max_turns:
            return SessionStatus.TRUNCATED_TURNS
        self._time_left()
        return _RUNNING

    def _end_turn(self, turn: Turn, status: SessionStatus) -> bytes:
        """Make what a turn has brought the answer of its step, and return it as JSON."""
        answer = turn.answer(self.session_id, self.turn + 1, status)
        self.turns.add(turn.message.json(), answer)
        self.turn += 1
        self.total += turn.reward
        if status is not _RUNNING:
            self.status, self._task = status, None  # closing must not give up this very turn
            if self._class.overrides("close"):
                self.begin_close()
            else:
                self._environment = None
        self._observer.stepped(self, turn, self._clock() - turn.begin)
        return answer

    async def _call(
        self, function: Callable[..., Any], timeout: float | None, /, *args: Any, **kw: Any
    ) -> Any:
        """Call author code within its own deadline and the session's."""
        left, own = self._time_left(), self._class.tool_timeout if timeout is None else timeout
        with self._observer.tool(self, tool_name(function)):
            if self.inline:
                return function(*args, **kw)
            try:
                return await self._runner.call(function, min(own, left), *args, **kw)
            except AuthorTimeout as error:
                if left < own:
                    raise TimeOver from None
                raise AuthorTimeout(f"{function.__name__}(): {error}") from None

    async def _fork(self, session_ids: Sequence[str]) -> list[Session]:
        try:
            states = await snapshots(self._alive(), len(session_ids), self._runner)
        except AUTHOR_ERRORS as error:
            raise self._broken("snapshot", error) from error
        return [self._twin(*pair) for pair in zip(session_ids, states, strict=True)]

    def _twin(self, session_id: str, state: Any) -> Session:
        """Return a session that has come as far as this one, and begins from a snapshot."""
        twin = Session(
            self._class,
            self.sample,
            session_id=session_id,
            threads=self._threads,
            clock=self._clock,
            observer=self._observer,
        )
        twin.restored = lambda environment: environment.restore(state)
        twin.opening, twin.turn, twin.total, twin.begin = self.opening, self.turn, self.total, self.begin
        twin.turns = self.turns.copy(session_id)
        return twin

    async def _release(self, step: Awaited[Any] | None) -> None:
        """Cancel a step under way, then close the environment exactly once."""
        try:
            await release(lambda: self._environment, step, self._runner)
        except AUTHOR_ERRORS as error:
            log_failure(self, "close", error)
        self._environment = None

    def _broken(self, what: str, error: BaseException) -> EnvironmentFailed:
        log_failure(self, what, error)
        return EnvironmentFailed(f"{what} of task {self.sample.task!r} failed: {describe(error)}")

    def _alive(self) -> Environment:
        if self._environment is None:
            raise RuntimeError("start() the session first")
        return self._environment

    def _time_left(self) -> float:
        """Return the seconds until the session's time limit. Raises TimeOver."""
        limit = self._class.max_seconds
        left = math.inf if limit is None else self.begin + limit - self._clock()
        if left <= 0:
            raise TimeOver
        return left
