"""The server's side of the engine: one process that forks a child for each session."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import BoundedSemaphore, Lock

ENGINE = Path(__file__).with_name("engine.py")
ANSWER_SECONDS = 280
"""Seconds to wait for an answer. This is a last resort, because the engine ends slower children itself."""


class EngineFailed(RuntimeError):
    """The engine cannot start, or the child of a session crashed, hung or reported an error."""


class Engine:
    """Starts the engine's process when the first session needs it, and again if it died.

    Args:
        cpu_seconds: Limit of the processor time of one request of a session, in seconds.
        starts: Number of games that can start at the same time, each with a compiler. Others wait.
    """

    def __init__(self, cpu_seconds: float = 60.0, starts: int | None = None) -> None:
        self.cpu_seconds = cpu_seconds
        self.starts = BoundedSemaphore(starts or os.cpu_count() or 1)
        self.lock = Lock()
        self.process: subprocess.Popen | None = None

    def open(self) -> Player:
        """Return a new child process that can play one game. Raises EngineFailed."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.close()
                self._start()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self.control, [b"+"], [theirs.fileno()])
                except OSError as error:
                    ours.close()
                    raise EngineFailed(f"the TextWorld engine ended: {error}") from error
            return Player(ours, self.starts)

    def close(self) -> None:
        """End the engine; children end when their sessions do."""
        if self.process is not None:
            self.control.close()
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        self.control, theirs = socket.socketpair()
        environment = {
            **os.environ,
            # The game generated from a seed depends on the order of sets.
            "PYTHONHASHSEED": "0",
        }
        python = os.environ.get("TEXTWORLD_PYTHON", sys.executable)
        with theirs:
            self.process = subprocess.Popen(
                [python, str(ENGINE), str(self.cpu_seconds)],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        self.control.settimeout(ANSWER_SECONDS)
        with self.control.makefile("rb") as stream:
            started = json.loads(stream.readline() or '{"error": "it ended before it was ready"}')
        if "error" in started:
            self.close()
            raise EngineFailed(
                f"the TextWorld engine cannot start ({started['error']}): "
                "pip install 'agentrl-kit[textworld]' or set TEXTWORLD_PYTHON to the interpreter of an "
                "environment that has textworld"
            )


class Player:
    """The child process of one session. Calls of its methods raise EngineFailed."""

    def __init__(self, connection: socket.socket, starts: BoundedSemaphore) -> None:
        self.connection = connection
        self.starts = starts
        connection.settimeout(ANSWER_SECONDS)
        self.stream = connection.makefile("rb")

    def call(self, name: str, *arguments):
        """Call a method of the engine's ``Game``."""
        try:
            self.connection.sendall(json.dumps([name, *arguments]).encode() + b"\n")
            line = self.stream.readline()
        except OSError as error:
            raise EngineFailed(f"the engine of this session does not answer: {error}") from error
        if not line:
            raise EngineFailed(
                "the engine of this session ended: it crashed, or it reached its limit of time or memory"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"the engine could not {name}: {answer['error']}")
        return answer["value"]

    def start(self, name: str, *arguments):
        """Call a method that starts a game, whose files are in the folder until it returns."""
        with (
            self.starts,
            tempfile.TemporaryDirectory(prefix="textworld-", ignore_cleanup_errors=True) as folder,
        ):
            return self.call(name, folder, *arguments)

    def close(self) -> None:
        """Close the connection, which ends the child."""
        self.stream.close()
        self.connection.close()
