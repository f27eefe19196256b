"""Watchdog: a small process beside a server, which ends the server where it cannot end itself.

Code that holds the interpreter's lock, such as a regular expression that backtracks, stops the event loop,
all threads and all signal handlers of its process. This file is also the program of the other process, which
imports nothing but the standard library.
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
"""Interval in which the event loop shows that it runs."""
TICK_S = 0.25
"""Interval in which the watchdog looks; a longer one means that it was suspended itself."""
STUCK_S = 10.0
"""Default of ``--stuck-after``."""
STACKS_S = 0.2
"""Seconds that a stuck server gets to print the stacks of its threads."""
KILLED = "killed by its watchdog"
"""Start of the line that it logs."""
END_S = 2.0
"""Seconds that the watchdog's own process may take to end."""
KILL_S = 5.0
"""Seconds that a server may take to stop, after the drain."""
BUSY_S = 0.2
"""CPU time of a thread that has not only slept, or waited for the interpreter's lock, for some seconds."""
TICKS = os.sysconf("SC_CLK_TCK")
CALLS_BYTES = 80 * 4096
"""Size of the file in which the server shows its running calls (``RunningCalls``)."""

logger = logging.getLogger("agentrl_env")


class Watchdog:
    """Kills this process where its event loop is stuck, or where it outlives its parent.

    On SIGQUIT it prints the stacks of all threads.

    Args:
        stuck_s: seconds without the event loop after which the process is killed; 0 never kills it. Seconds
            in which its threads waited for a processor do not count, where the system tells them (Linux).
        log_format: ``text`` or ``json``.
    """

    def __init__(self, stuck_s: float = STUCK_S, log_format: str = "text") -> None:
        self._stuck_s = stuck_s
        self._options: dict[str, object] = {"pid": os.getpid(), "stuck_s": stuck_s, "log_format": log_format}
        self._process: subprocess.Popen[bytes] | None = None
        self._beats = -1
        self._calls = _new_file()
        self.calls: mmap.mmap | None = None
        """Memory for ``RunningCalls``, which the other process reads; None where files must be smaller."""
        with contextlib.suppress(OSError):
            os.truncate(self._calls, CALLS_BYTES)
            self.calls = mmap.mmap(self._calls, CALLS_BYTES)

    def start(self, drain_s: float | None = None, *, unreachable: bool = False) -> None:
        """Start the process, if there is anything that it has to watch.

        Args:
            drain_s: stop when standard input closes, by SIGTERM, and by SIGKILL after a drain of so many
                seconds; by default it is not watched.
            unreachable: no client can continue the open sessions then, so that they are not waited for.
        """
        if not self._stuck_s and drain_s is None:
            return
        self._options |= {"drain_s": drain_s, "unreachable": unreachable}
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # standard error is no file
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
            logger.warning("no watchdog: a stuck server is neither noticed nor killed (%s)", error)
        finally:
            os.close(reading)

    async def keep_beating(self) -> None:
        """Show that the event loop runs, until cancelled."""
        while self._stuck_s and self._process is not None:
            try:
                os.write(self._beats, b".")
            except BlockingIOError:
                pass  # the watchdog is suspended
            except BrokenPipeError:
                logger.warning("the watchdog of this process has ended; another one starts")
                self.stop()
                self._spawn()
            await asyncio.sleep(BEAT_S)

    def stop(self) -> None:
        """End the process."""
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
    """Return a descriptor of an empty file that has no name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("agentrl-env-calls")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def signal_own_group(number: signal.Signals) -> None:
    """Signal this process and its children, where it leads a process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), number)


class _Running(NamedTuple):
    """A call of a session's author code, on a thread."""

    session: str
    thread: int


def _stat(pid: int, thread: int) -> list[str]:
    """Return the state of a thread and the numbers that follow it in Linux's ``/proc``."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []


class _Look(NamedTuple):
    """The scheduling of a thread at one moment, as Linux tells it."""

    counts: str
    """Nanoseconds on a processor, and in wait of one, until it was last on one."""
    at: float
    """Time of the first look at these counts."""
    waited_s: float
    """Seconds in which it could run, and had no processor, the wait that goes on included."""


def _look(pid: int, thread: int, before: _Look | None, now: float) -> _Look | None:
    """Return how long a thread has waited for a processor; None where the system does not tell it."""
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
    """The program of the watchdog's process: a child of the server that it watches."""

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
        """Seconds since the last beat; None before the first."""
        self._left_s: float | None = None
        """Seconds until a server without a parent is killed."""
        self._limit_s = (0.0 if unreachable else drain_s or 0.0) + KILL_S
        self._has_parent = drain_s is not None
        self._before: dict[_Running, float] = {}
        """CPU time of the running calls, at a moment when the event loop was stuck already."""
        self._seen: dict[int, _Look] = {}
        """The event loop's thread and those of running calls, at the last look."""

    def watch(self) -> None:
        """Return when the server has ended."""
        last = time.monotonic()
        while os.getppid() == self._pid:
            ready, _, _ = select.select(self._inputs, [], [], TICK_S)
            now = time.monotonic()
            passed = min(now - last, 2 * TICK_S)  # without the time for which this process was suspended
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
                if self._signals:  # one at a time: two at once would be delivered as one
                    self._signals -= 1
                    self._signal(signal.SIGTERM)
                if self._left_s < 0:
                    self._kill("it has no parent any more, and did not stop in time")
            if self._silent_s is not None and 0 < self._stuck_s / 2 < self._silent_s:
                self._before = self._before or self._cpu_seconds()
            if self._silent_s is not None and 0 < self._stuck_s < self._silent_s:
                sessions: list[str] = []
                with contextlib.suppress(OSError, ValueError):  # it is killed without a reason too
                    sessions = self._blocking()
                held = f" session {' or '.join(sessions)} held it;" if sessions else ""
                self._tell_parent(sessions)
                why = f"its event loop has not run for {self._stuck_s:g} s (--stuck-after)"
                self._kill(f"{why};{held} its stacks follow")

    def _blocking(self) -> list[str]:
        """Return the sessions whose call may be what the event loop waits for; none where that is unknown.

        That is the call on the event loop, or one that has used the processor meanwhile, since it may hold
        the interpreter's lock; else one that sleeps.
        """
        after = self._cpu_seconds()
        used = {call: after[call] - before for call, before in self._before.items() if call in after}
        limit = max((BUSY_S, *used.values())) / 2
        found = {call.session for call in used if call.thread == self._pid or used[call] > limit}
        return sorted(found or {call.session for call in used})

    def _starved_s(self, now: float) -> float:
        """Return the seconds since the last look in which the event loop waited for a processor.

        Itself, or by way of a call that holds the interpreter's lock. A thread that waits for that lock
        runs now and then; where it did not run at all, it sleeps, and waits for nothing that others use.
        """
        before, self._seen = self._seen, {}
        calls = self._running() if (self._silent_s or 0) > BEAT_S else []
        for thread in {self._pid, *(call.thread for call in calls)}:
            if (look := _look(self._pid, thread, before.get(thread), now)) is not None:
                self._seen[thread] = look
        if before.get(self._pid) == self._seen.get(self._pid):
            return 0.0
        seen = self._seen.items()
        return max((look.waited_s - before[one].waited_s for one, look in seen if one in before), default=0.0)

    def _running(self) -> list[_Running]:
        """Return the running calls."""
        rows = os.pread(self._calls, CALLS_BYTES, 0).decode("ascii", "replace").splitlines()
        running = [row.split() for row in rows if row[:1].strip(" \0")]
        return [_Running(row[0], int(row[1])) for row in running if len(row) == 2 and row[1].isdigit()]

    def _cpu_seconds(self) -> dict[_Running, float]:
        """Return the CPU time of the threads of running calls; of none where the process is stopped."""
        if _stat(self._pid, self._pid)[:1] == ["T"]:
            return {}
        return {call: sum(map(int, _stat(self._pid, call.thread)[11:13])) / TICKS for call in self._running()}

    def _tell_parent(self, sessions: list[str]) -> None:
        """Write the sessions to standard input, where that is the parent's socket (``ServerProcess``)."""
        if self._has_parent:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(0)) as parent:
                parent.send(json.dumps(sessions).encode())

    def _kill(self, reason: str) -> None:
        """Kill the server and, where it leads a process group, its children, among them this process."""
        self._say(f"{KILLED}: {reason}", "ERROR")
        self._signal(signal.SIGQUIT)
        time.sleep(STACKS_S)
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(self._pid) == self._pid:
                os.killpg(self._pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if os.getppid() == self._pid:  # else the id may be another's by now
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
