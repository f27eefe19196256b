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
import os
import select
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Self

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
KILL_S = 10.0
"""Seconds that a server may take to stop, after the drain."""

logger = logging.getLogger("agentrl_env")


class Watchdog:
    """Kills this process where its event loop is stuck, or where it outlives its parent.

    On SIGQUIT it prints the stacks of all threads.

    Args:
        stuck_s: seconds without the event loop after which the process is killed; 0 never kills it.
        log_format: ``text`` or ``json``.
    """

    def __init__(self, stuck_s: float = STUCK_S, log_format: str = "text") -> None:
        self._stuck_s = stuck_s
        self._options: dict[str, object] = {"pid": os.getpid(), "stuck_s": stuck_s, "log_format": log_format}
        self._process: subprocess.Popen[bytes] | None = None
        self._beats = -1

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
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, json.dumps({**self._options, "beats": reading})],
                stdin=subprocess.DEVNULL if self._options["drain_s"] is None else None,
                stdout=subprocess.DEVNULL,
                pass_fds=(reading,),
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


def signal_own_group(number: signal.Signals) -> None:
    """Signal this process and its children, where it leads a process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), number)


class _Guard:
    """The program of the watchdog's process: a child of the server that it watches."""

    def __init__(
        self,
        *,
        pid: int,
        beats: int,
        stuck_s: float,
        drain_s: float | None,
        unreachable: bool,
        log_format: str,
    ) -> None:
        self._pid, self._beats, self._stuck_s, self._log_format = pid, beats, stuck_s, log_format
        self._signals = 2 if unreachable else 1
        self._inputs = [beats] if drain_s is None else [beats, 0]
        self._silent_s: float | None = None
        """Seconds since the last beat; None before the first."""
        self._left_s: float | None = None
        """Seconds until a server without a parent is killed."""
        self._limit_s = (drain_s or 0.0) + KILL_S

    def watch(self) -> None:
        """Return when the server has ended."""
        last = time.monotonic()
        while os.getppid() == self._pid:
            ready, _, _ = select.select(self._inputs, [], [], TICK_S)
            now = time.monotonic()
            passed = min(now - last, 2 * TICK_S)  # without the time for which this process was suspended
            last = now
            if self._silent_s is not None:
                self._silent_s += passed
            if self._beats in ready:
                if not os.read(self._beats, 4096):
                    return
                self._silent_s = 0.0
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
            if self._silent_s is not None and 0 < self._stuck_s < self._silent_s:
                self._kill(
                    f"its event loop has not run for {self._stuck_s:g} s (--stuck-after); its stacks follow"
                )

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
