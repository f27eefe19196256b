"""Agent programs: commands or functions that play episodes through the gateway.

A program gets a ``base_url`` and a sample, calls the model as often as it needs, and returns a reward. A
crash or a missing reward fails the episode, which then has no reward. The time limit and a full context are
truncations, as in the episodes that the run plays itself: the episode keeps its turns and the reward posted
so far. It is never replayed, because replays would favour short episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from agentrl_env.types import TaskSample
from agentrl_train.chat import ChatFormat
from agentrl_train.config.functions import described
from agentrl_train.errors import USER_ERRORS, ProgramFailed, raise_own_cancellation
from agentrl_train.gateway.server import Gateway, Reward, Session
from agentrl_train.telemetry.watchdog import in_thread
from agentrl_train.types import Episode, EpisodeEnd, Sampler, Sampling, Trajectory, succeeded

logger = logging.getLogger(__name__)

CANCEL_S = 10.0
"""Seconds to wait for the end of a program that is cancelled."""
KILL_S = 2.0
"""Seconds between the signals TERM and KILL for a program that exceeded its time limit."""
MAX_OUTPUT = 65_536
"""Number of bytes to read from the end of a program's output."""
MAX_PRINTED = 256_000_000
"""Number of bytes that a program can print."""
OUTPUT_CHECK_S = 0.5
"""Seconds between checks of the size of a program's output."""
LAST_LINES = 5
"""Number of lines of a program's errors in messages."""

Function = Callable[[str, TaskSample], Any]


class AgentProgram:
    """Plays the episodes of one task with a program of the user.

    Args:
        run: command line of the program, or a function of ``base_url`` and sample, which may be asynchronous.
        gateway: serves the model to the program.
        samples: data of the samples of each split. Without it the samples come from a server.
        url: address of the server of the task.
        token: its token.
        folder: working directory of a command.
        stated: values that sampling parameters in requests must have; None allows any, without effect.
        ignored: parameters of requests that are not read.
    """

    def __init__(
        self,
        run: Sequence[str] | Function,
        *,
        gateway: Gateway,
        samples: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        url: str | None = None,
        token: str | None = None,
        folder: Path | None = None,
        stated: Sampling | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        self._run = run
        self._gateway = gateway
        self._samples = samples
        self._url = url
        self._token = token
        self._folder = folder
        self._stated = stated
        self._ignored = ignored

    async def play(
        self, episode: Episode, *, chat: ChatFormat, sampler: Sampler, limit_s: float
    ) -> tuple[Trajectory, Exception | None]:
        """Run the program once; return the trajectory and the exception that failed it, if any."""
        started = time.monotonic()
        session = self._gateway.open(chat=chat, sampler=sampler, stated=self._stated, ignored=self._ignored)
        sample = self._sample(episode)
        end, cause = EpisodeEnd.TERMINATED, None
        try:
            end = await self._play(session, sample, limit_s=limit_s)
        except ProgramFailed as failure:
            cause = session.failure or failure
            end = EpisodeEnd.FAILED_ENGINE if session.failure else EpisodeEnd.FAILED_ENVIRONMENT
        finally:
            await self._gateway.close(session)
        error = None if cause is None else f"{type(cause).__name__}: {cause}"
        return trajectory(
            session, sample=sample, end=end, error=error, seconds=time.monotonic() - started
        ), cause

    async def _play(self, session: Session, sample: TaskSample, *, limit_s: float) -> EpisodeEnd:
        """Run the program until it ends or reaches its time limit. Return how the episode ended."""
        running = asyncio.create_task(self._run_once(session, sample))
        # The error of a program that has exceeded its time is not read.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait((running,), timeout=limit_s)
            if late := not running.done():
                await session.finish()  # let the turn in progress end, however long it takes
        finally:
            running.cancel()
            await asyncio.wait((running,), timeout=CANCEL_S)
        if not running.done():
            logger.warning(
                "the program of %s catches CancelledError and continues after its time limit of %g s: let it "
                "raise the error again",
                sample.task,
                limit_s,
            )
        given = None
        if late:
            if session.failure is not None:
                raise ProgramFailed(f"the engine gave no answer within {limit_s:g} s")
        else:
            try:
                given = running.result()
            except ProgramFailed:
                if not session.context_full:
                    raise
        if not session.recorder.rollout()[0]:
            raise ProgramFailed(_reason_without_answer(session, limit_s=limit_s if late else None))
        if given is not None:
            session.reward(_reward(given))
        if late:
            return EpisodeEnd.TRUNCATED_TIME
        if session.context_full:
            return EpisodeEnd.TRUNCATED_LENGTH
        if not session.rewarded:
            raise ProgramFailed(
                "the program ended without a reward: return it, print it in the last line, or post it to "
                "base_url/reward"
            )
        return EpisodeEnd.TERMINATED

    async def _run_once(self, session: Session, sample: TaskSample) -> Any:
        """Return the reward that the program reports, or None if it reports none."""
        base_url = self._gateway.base_url(session)
        if callable(self._run):
            return await _call(self._run, base_url, sample)
        return await self._command(self._run, base_url, session.key, sample)

    def _sample(self, episode: Episode) -> TaskSample:
        data: Mapping[str, Any]
        if self._samples is not None:
            data = self._samples[episode.split][int(episode.index or 0)]
        else:
            asked = {"split": episode.split, "index": episode.index, "seed": episode.seed}
            data = {"url": self._url, "open": {"task": episode.task} | asked}
        return TaskSample(
            task=episode.task,
            split=episode.split,
            index=episode.index,
            seed=episode.seed or 0,
            data=dict(data),
        )

    async def _command(self, command: Sequence[str], base_url: str, key: str, sample: TaskSample) -> Any:
        """Run a command; return the reward in the last line of its output, if there is one."""
        with _files(sample) as (sample_file, output, errors):
            environment = self._environment(base_url, key, sample_file)
            process = await self._start(command, environment, output, errors)
            try:
                await _until_ended(process, output, errors)
            finally:
                await _stop(process)
            if process.returncode:
                raise ProgramFailed(
                    f"the program exited with status {process.returncode}: "
                    f"{_last_lines(errors) or 'it printed no error'}"
                )
            return _printed_reward(output)

    def _environment(self, base_url: str, key: str, sample_file: Path) -> dict[str, str]:
        """Return the environment variables of a command."""
        environment = {name: value for name, value in os.environ.items() if name != "AGENTRL_TOKEN"}
        # "python" is the interpreter of the run.
        path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        for name in ("NO_PROXY", "no_proxy"):
            environment[name] = ",".join(filter(None, [environment.get(name), "127.0.0.1", "localhost"]))
        if self._token:
            environment["AGENTRL_TOKEN"] = self._token
        return environment | {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
            "AGENTRL_SAMPLE": str(sample_file),
            "PATH": path,
        }

    async def _start(
        self, command: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self._folder,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ProgramFailed(f"the program {command[0]!r} cannot be started: {error}") from error


def trajectory(
    session: Session, *, sample: TaskSample, end: EpisodeEnd, error: str | None = None, seconds: float = 0.0
) -> Trajectory:
    """Return the record of a session as a trajectory."""
    turns, segments = session.recorder.rollout()
    reward = sum(turn.reward for turn in turns)
    return Trajectory(
        sample=sample,
        opening=session.recorder.opening,
        turns=turns,
        end=end,
        reward=reward,
        success=succeeded(session.metrics, reward),
        metrics=session.metrics,
        error=error,
        seconds=seconds,
        started=session.started,
        segments=segments,
    )


async def _call(function: Function, base_url: str, sample: TaskSample) -> Any:
    """Call a function, on a thread if it blocks. Raises ``ProgramFailed`` if it raises."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(base_url, sample)
        # Not ``to_thread``: on the few threads of the event loop, programs would wait for the engine, which
        # needs one of them.
        call = partial(copy_context().run, function, base_url, sample)
        given = await in_thread(call, within_s=None, doing="an agent program")
        return await given if inspect.isawaitable(given) else given  # the object can have an async __call__
    except USER_ERRORS as error:
        raise_own_cancellation(error)
        raise ProgramFailed(f"the program raised {described(error)}") from error


def _reason_without_answer(session: Session, *, limit_s: float | None) -> str:
    """Return why an episode has no turn; ``limit_s`` is the time limit if that ended the program."""
    if session.context_full:
        return "the program got no answer from the model: its messages do not fit engine.max_context"
    if limit_s is not None:
        return (
            f"the program got no answer from the model within {limit_s:g} s: call the model earlier, or "
            "raise rollout.episode_timeout_s"
        )
    return "the program ended without an answer from the model: let its client use the base_url that it gets"


def _reward(value: Any) -> Reward:
    """Return a value as a reward: a number, or a mapping with ``reward`` and ``metrics``."""
    try:
        return Reward.model_validate(value if isinstance(value, Mapping) else {"reward": value})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ProgramFailed(
            f"the program gave {value!r:.200}, which is not a reward ({reason}): give a finite number, or an "
            "object with 'reward' and optionally 'metrics'"
        ) from error


@contextlib.contextmanager
def _files(sample: TaskSample) -> Iterator[tuple[Path, IO[bytes], IO[bytes]]]:
    """Yield the path of a file with a sample, and files for the output and the errors of a program.

    They are files, because pipes stay open while processes that the program left behind are running. The
    program can delete them, and can write new files while the folder is removed.
    """
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            sample_file, output, errors = (Path(folder, name) for name in ("sample.json", "out", "err"))
            sample_file.write_text(sample.model_dump_json(), encoding="utf-8")
            with output.open("w+b") as out, errors.open("w+b") as err:
                yield sample_file, out, err
    except OSError as error:
        raise ProgramFailed(f"the files of the program cannot be written or read: {error}") from error


async def _until_ended(process: asyncio.subprocess.Process, *printed: IO[bytes]) -> None:
    """Return once a program has ended. Raises ``ProgramFailed`` if its output would fill the disk."""
    ended = asyncio.create_task(process.wait())
    try:
        while not (await asyncio.wait((ended,), timeout=OUTPUT_CHECK_S))[0]:
            if sum(os.fstat(file.fileno()).st_size for file in printed) > MAX_PRINTED:
                raise ProgramFailed(
                    f"the program printed more than {MAX_PRINTED / 1e6:.0f} MB, which would fill the disk: "
                    "print less"
                )
    finally:
        ended.cancel()


def _printed_reward(output: IO[bytes]) -> Any:
    """Return the reward in the last line of a program's output; None if the line is something else."""
    last = _last_lines(output, count=1)
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and "reward" not in value:
        return None
    return value if isinstance(value, int | float | dict) else None


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a program and the processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_S):
                await process.wait()


def _last_lines(output: IO[bytes], *, count: int = LAST_LINES) -> str:
    """Return the last lines that a program has printed."""
    size = os.fstat(output.fileno()).st_size
    text = os.pread(output.fileno(), MAX_OUTPUT, max(0, size - MAX_OUTPUT)).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    return " | ".join([line for line in lines if line][-count:])
