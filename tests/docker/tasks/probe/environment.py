"""A task with tools that attempt forbidden operations."""

import os
import subprocess
from pathlib import Path

from agentrl_env import Environment, tool


class Probe(Environment):
    """Try things."""

    max_turns = 1000
    tool_timeout = 120.0

    def reset(self, sample, rng):
        return "Try."

    def respond(self, text):
        return f"{len(text)}:" + text[::-1]

    @tool
    def read(self, path: str):
        """Read a file, or list a folder."""
        place = Path(path)
        return "\n".join(sorted(os.listdir(place))) if place.is_dir() else place.read_text()

    @tool
    def write(self, path: str, size: int = 1):
        """Write a file of this size."""
        try:
            with open(path, "wb") as file:
                for _ in range(size >> 20):
                    file.write(bytes(1 << 20))
                file.write(bytes(size % (1 << 20)))
        except OSError as error:
            return type(error).__name__ + f" {error.errno}"
        return "written"

    @tool
    def identity(self):
        """Return the user id and the names of the environment variables."""
        return f"{os.getuid()}:{os.getgid()} " + " ".join(sorted(os.environ))

    @tool
    def connect(self, host: str, port: int):
        """Connect somewhere."""
        import socket

        try:
            socket.create_connection((host, port), timeout=3).close()
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return "connected"

    @tool
    def eat(self, megabytes: int):
        """Take memory."""
        return str(len(b"x" * (megabytes << 20)))

    @tool
    def spawn(self, processes: int):
        """Start processes and return how many started."""
        running = []
        try:
            for _ in range(processes):
                running.append(subprocess.Popen(["sleep", "60"]))
        except OSError:
            return str(len(running))
        finally:
            for process in running:
                process.kill()
                process.wait()
        return str(len(running))
