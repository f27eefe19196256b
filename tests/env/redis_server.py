"""A private Redis server for a test, on a socket in a temporary folder."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest


class RedisServer:
    """``redis-server`` without persistence that can be paused, killed and restarted."""

    def __init__(self, folder: Path) -> None:
        self._binary = shutil.which("redis-server")
        if self._binary is None:
            pytest.skip("redis-server is not installed (.ci/system-packages redis-server)")
        self._socket = folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it listens."""
        self._socket.unlink(missing_ok=True)
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [str(self._binary), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while not self._listens():
            assert self._process.poll() is None, "redis-server exited immediately"
            assert time.monotonic() < deadline, "redis-server is not listening"
            time.sleep(0.01)

    def _listens(self) -> bool:
        """Return True if a connection is accepted. The socket file exists before that."""
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(self._socket)) == 0

    def kill(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Suspend the server."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the suspended server."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
