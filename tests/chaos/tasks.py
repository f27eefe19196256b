"""Tasks that write every applied step to a file."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from agentrl_env import Done, Environment, Reply, tool

FOLDER = Path(os.environ.get("CHAOS_LEDGER", tempfile.gettempdir()))
"""Folder of the ledgers, one per serving process, and of the sessions' folders."""
_ledger: int | None = None


def write(*words: object) -> None:
    """Append a line to this process's ledger in one atomic write."""
    global _ledger
    if _ledger is None:
        path = FOLDER / f"{os.getpid()}.ledger"
        _ledger = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(_ledger, (" ".join(map(str, (f"{time.time():.3f}", *words))) + "\n").encode())


class Ledger(Environment):
    """Count on the event loop."""

    max_turns = 10**6
    blocking = False

    def reset(self, sample, rng):
        self.begin(0)
        write("open", self.key, sample.data.get("opening", "-"))
        return self.key

    def begin(self, count: int) -> None:
        self.key = secrets.token_hex(8)
        self.count = count
        self.folder = tempfile.mkdtemp(prefix=f"{os.getpid()}-{self.key}-", dir=FOLDER)

    def apply(self, nonce: str) -> str:
        self.count += 1
        write("step", self.key, self.count, nonce)
        return f"{self.key} {self.count} {nonce}"

    @tool
    def add(self, nonce: str):
        """Add one."""
        return self.apply(nonce)

    @tool
    def finish(self, nonce: str):
        """Add one, and end."""
        return Done(self.apply(nonce), reward=1.0)

    def snapshot(self):
        return self.key, self.count

    def restore(self, state):
        before, count = state
        self.begin(count)
        write("restore", self.key, before, count)

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        write("close", self.key)


class SlowLedger(Ledger):
    """Count after a delay, and answer after another."""

    @tool
    async def add(self, nonce: str, seconds: float = 0.05):
        """Add one, slowly."""
        await asyncio.sleep(seconds / 2)
        text = self.apply(nonce)
        await asyncio.sleep(seconds / 2)
        return text


class ThreadLedger(Ledger):
    """Count on a thread."""

    blocking = True

    @tool
    def add(self, nonce: str, seconds: float = 0.01):
        """Add one, blocking."""
        time.sleep(seconds / 2)
        text = self.apply(nonce)
        time.sleep(seconds / 2)
        return text


class Tally(Environment):
    """Say letters; the return of each episode is written to the ledger."""

    max_turns = 3
    blocking = False

    def reset(self, sample, rng):
        self.key, self.total = secrets.token_hex(8), 0.0
        write("open", self.key)
        return f"{self.key} Say {int(rng.integers(100))}."

    @tool
    def nothing(self):
        """Do nothing."""
        return "fine"

    async def respond(self, text: str) -> Reply:
        """Reward the share of letters, after a delay."""
        await asyncio.sleep(0.02 * (len(text) % 5))
        reward = sum(one.isascii() and one.isalpha() for one in text) / max(1, len(text))
        self.total += reward
        write("turn", self.key, reward)
        return Reply("go on", reward=reward)

    def close(self):
        write("close", self.key, self.total)


class OwnTally(Tally):
    """The same task, but served by the trainer."""
