"""Watchdog: a small process that kills a server that cannot stop itself.

Code that holds the interpreter lock, such as a backtracking regular expression, blocks the event loop, all
threads and all signal handlers of its process. This file is also the watchdog's program, which imports only
the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from typing import NamedTuple, Self

BEAT_S = 0.5
"""Seconds between the beats by which the event loop shows that it runs."""
TICK_S = 0.25
"""Seconds between checks of the watchdog. A longer interval means that the watchdog was suspended."""
STUCK_S = 10.0
"""Default of ``--stuck-after``."""
STACKS_S = 0.2
"""Seconds for a stuck server to print the stacks of its threads."""
KILLED = "killed by its watchdog"
"""Start of the log line about a killed server."""
END_S = 2.0
"""Seconds for the watchdog's own process to end."""
KILL_S = 5.0
"""Seconds for a server to stop after the drain."""
BUSY_S = 0.2
"""CPU seconds above which a thread was busy, and did not only sleep or wait for the interpreter lock."""
TICKS = os.sysconf("SC_CLK_TCK")
CALLS_BYTES = 80 * 4096
"""Size of the file with the server's running calls (``RunningCalls``)."""

logger = logging.getLogger("agentrl_env")


class Watchdog:
    """Kills this process if its event loop is stuck or it outlives its parent.

    On SIGQUIT it prints the stacks of all threads.

    Args:
        stuck_s: seconds after which the process is killed if its event loop does not run. 0 never kills it.
            Time in which its threads waited for a processor does not count on Linux.
        log_format: ``text`` or ``json``.
    """

    def __init__(self, stuck_s: float = STUCK_S, log_format: str = "text") -> None:
        self._stuck_s = stuck_s
        self._options: dict[str, object] = {"pid": os.getpid(), "stuck_s": stuck_s, "log_format": log_format}
        self._process: subprocess.Popen[bytes] | None = None
        self._beats = -1
        self._calls = _new_file()
        self.calls: mmap.mmap | None = None
        """Memory for ``RunningCalls``, which the watchdog reads. None if the file size limit is too small."""
        with contextlib.suppress(OSError):
            os.truncate(self._calls, CALLS_BYTES)
            self.calls = mmap.mmap(self._calls, CALLS_BYTES)

    def start(self, drain_s: float | None = None, *, unreachable: bool = False) -> None:
        """Start the watchdog's process, if there is anything to watch.

        Args:
            drain_s: when standard input closes, stop the server with SIGTERM, and with SIGKILL after a drain
                of this many seconds. By default standard input is not watched.
            unreachable: when standard input closes, no client can reach the server, so the drain does not
                wait for open sessions.
        """
        if not self._stuck_s and drain_s is None:
            return
        self._options |= {"drain_s": drain_s, "unreachable": unreachable}
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # standard error is not a file
            faulthandler.register(signal.SIGQUIT, all_threads=True)
        self._spawn()

    def _spawn(self) -> None:
        reading, self._beats = os.pipe()
        os.set_blocking(self._beats, False)
        options = {**self._options, "beats": reading, "calls": self._calls}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, json.dumps(options)],
                stdin=subprocess.DEVNULL if self._options["drain_s"] is None else None,
                stdout=subprocess.DEVNULL,
                pass_fds=(reading, self._calls),
            )
        except OSError as error:
            os.close(self._beats)
            logger.warning("no watchdog: a stuck server is not detected and not killed (%s)", error)
        finally:
            os.close(reading)

    async def keep_beating(self) -> None:
        """Send beats that show that the event loop runs, until cancelled."""
        while self._stuck_s and self._process is not None:
            try:
                os.write(self._beats, b".")
            except BlockingIOError:
                pass  # the watchdog is suspended
            except BrokenPipeError:
                logger.warning("the watchdog of this process has ended; starting another one")
                self.stop()
                self._spawn()
            await asyncio.sleep(BEAT_S)

    def stop(self) -> None:
        """End the watchdog's process."""
        if self._process is not None:
            os.close(self._beats)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        os.close(self._calls)


def _new_file() -> int:
    """Return a descriptor of an empty file without a name, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("agentrl-env-calls")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def signal_own_group(number: signal.Signals) -> None:
    """If this process leads a process group, signal the group, which includes its children."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), number)


class _Running(NamedTuple):
    """A call of a session's author code on a thread."""

    session: str
    thread: int


def _stat(pid: int, thread: int) -> list[str]:
    """Return the state of a thread and the numbers that follow it in Linux's ``/proc``."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []


class _Look(NamedTuple):
    """The scheduling statistics of a thread at one moment, from Linux."""

    counts: str
    """Nanoseconds spent on a processor and waiting for one, as of the last time it ran."""
    at: float
    """Time at which these counts were first seen."""
    waited_s: float
    """Seconds for which the thread was runnable without a processor, including the current wait."""


def _look(pid: int, thread: int, before: _Look | None, now: float) -> _Look | None:
    """Return how long a thread has waited for a processor, or None if the system does not report it."""
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open(f"/proc/{pid}/task/{thread}/schedstat") as file,
    ):
        counts = file.read()
        at, waited_s = now, int(counts.split()[1]) / 1e9
        if before is not None and before.counts == counts:
            at = before.at
            waited_s += now - at if _stat(pid, thread)[:1] == ["R"] else 0.0
        return _Look(counts, at, waited_s)
    return None


class _Guard:
    """The watchdog's program, which runs as a child process of the server that it watches."""

    def __init__(
        self,
        *,
        pid: int,
        beats: int,
        calls: int,
        stuck_s: float,
        drain_s: float | None,
        unreachable: bool,
        log_format: str,
    ) -> None:
        self._pid, self._beats, self._stuck_s, self._log_format = pid, beats, stuck_s, log_format
        self._calls = calls
        self._signals = 2 if unreachable else 1
        self._inputs = [beats] if drain_s is None else [beats, 0]
        self._silent_s: float | None = None
        """Seconds since the last beat. None before the first beat."""
        self._left_s: float | None = None
        """Seconds until a server without a parent is killed."""
        self._limit_s = (0.0 if unreachable else drain_s or 0.0) + KILL_S
        self._has_parent = drain_s is not None
        self._before: dict[_Running, float] = {}
        """CPU seconds of the running calls, measured after the event loop stopped."""
        self._seen: dict[int, _Look] = {}
        """Statistics of the event loop's thread and the threads of running calls, at the last check."""

    def watch(self) -> None:
        """Watch the server, and return when it has ended."""
        last = time.monotonic()
        while os.getppid() == self._pid:
            ready, _, _ = select.select(self._inputs, [], [], TICK_S)
            now = time.monotonic()
            passed = min(now - last, 2 * TICK_S)  # ignore the time in which this process was suspended
            if self._silent_s is not None:
                starved_s = self._starved_s(now) if self._stuck_s else 0.0
                self._silent_s = max(0.0, self._silent_s + min(now - last - starved_s, passed))
            last = now
            if self._beats in ready:
                if not os.read(self._beats, 4096):
                    return
                self._silent_s, self._before = 0.0, {}
            if 0 in ready and not os.read(0, 4096):
                self._inputs.remove(0)
                self._left_s = self._limit_s
                self._say("its parent has ended: the server stops", "WARNING")
            if self._left_s is not None:
                self._left_s -= passed
                if self._signals:  # one per check, since two pending ones are merged
                    self._signals -= 1
                    self._signal(signal.SIGTERM)
                if self._left_s < 0:
                    self._kill("its parent has ended, and it did not stop in time")
            if self._silent_s is not None and 0 < self._stuck_s / 2 < self._silent_s:
                self._before = self._before or self._cpu_seconds()
            if self._silent_s is not None and 0 < self._stuck_s < self._silent_s:
                sessions: list[str] = []
                with contextlib.suppress(OSError, ValueError):  # kill it even if the reason is unknown
                    sessions = self._blocking_sessions()
                held = f" session {' or '.join(sessions)} held it;" if sessions else ""
                self._tell_parent(sessions)
                why = f"its event loop has not run for {self._stuck_s:g} s (--stuck-after)"
                self._kill(f"{why};{held} its stacks follow")

    def _blocking_sessions(self) -> list[str]:
        """Return the sessions whose calls might block the event loop, or none if they are unknown.

        These are the call on the event loop and calls that have used the processor meanwhile, since they
        might hold the interpreter lock. Without such calls, all running calls count.
        """
        after = self._cpu_seconds()
        used = {call: after[call] - before for call, before in self._before.items() if call in after}
        limit = max((BUSY_S, *used.values())) / 2
        found = {call.session for call in used if call.thread == self._pid or used[call] > limit}
        return sorted(found or {call.session for call in used})

    def _starved_s(self, now: float) -> float:
        """Return the seconds since the last check in which the event loop waited for a processor.

        The wait of a call that holds the interpreter lock counts too. A thread that waits for this lock runs
        from time to time. If the event loop's thread did not run at all, it sleeps, and nothing counts.
        """
        before, self._seen = self._seen, {}
        calls = self._running_calls() if (self._silent_s or 0) > BEAT_S else []
        for thread in {self._pid, *(call.thread for call in calls)}:
            if (look := _look(self._pid, thread, before.get(thread), now)) is not None:
                self._seen[thread] = look
        if before.get(self._pid) == self._seen.get(self._pid):
            return 0.0
        seen = self._seen.items()
        return max((look.waited_s - before[one].waited_s for one, look in seen if one in before), default=0.0)

    def _running_calls(self) -> list[_Running]:
        """Return the running calls."""
        rows = os.pread(self._calls, CALLS_BYTES, 0).decode("ascii", "replace").splitlines()
        running = [row.split() for row in rows if row[:1].strip(" \0")]
        return [_Running(row[0], int(row[1])) for row in running if len(row) == 2 and row[1].isdigit()]

    def _cpu_seconds(self) -> dict[_Running, float]:
        """Return the CPU seconds of the threads of running calls, or nothing if the process is stopped."""
        if _stat(self._pid, self._pid)[:1] == ["T"]:
            return {}
        return {
            call: sum(map(int, _stat(self._pid, call.thread)[11:13])) / TICKS
            for call in self._running_calls()
        }

    def _tell_parent(self, sessions: list[str]) -> None:
        """Send the sessions to the parent over standard input, if it is a socket (``ServerProcess``)."""
        if self._has_parent:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(0)) as parent:
                parent.send(json.dumps(sessions).encode())

    def _kill(self, reason: str) -> None:
        """Kill the server. If it leads a process group, also kill its children, including this process."""
        self._say(f"{KILLED}: {reason}", "ERROR")
        self._signal(signal.SIGQUIT)
        time.sleep(STACKS_S)
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(self._pid) == self._pid:
                os.killpg(self._pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if os.getppid() == self._pid:  # otherwise the id might belong to another process
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _say(self, event: str, level: str) -> None:
        """Write a line to the server's log."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = f"{moment} {level} {event} pid={self._pid}"
        if self._log_format == "json":
            fields = {"time": moment, "level": level.lower(), "event": event, "logger": "agentrl_env"}
            line = json.dumps({**fields, "pid": self._pid})
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    _Guard(**json.loads(sys.argv[1])).watch()
