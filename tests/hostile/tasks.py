"""The tasks of the servers under attack, for honest clients and for attackers."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import threading
import time
from typing import Any, ClassVar

from agentrl_env import Done, Environment, Reply, ToolCall, tool
from agentrl_env.sandbox import open_sandbox

ANSWER = "hidden-answer-"
"""Prefix of every solution. No agent must receive it."""
PRIVATE = "neighbour-"
"""Prefix of the private data in neighbours' sessions."""
SAID = "said-by-agent-"
"""Prefix of agents' text. Logs must not contain it without ``--log-messages``."""
ON_PURPOSE = "on purpose"
"""Part of the message of exceptions that a task raises on purpose."""
METRIC = 0.4815162342
"""A metric that only the operator sees."""
HANG_S = 3.0
"""Timeout of a tool that hangs."""


class Tally(Environment):
    """Sums numbers, on the event loop."""

    max_turns = 1000
    blocking = False

    def reset(self, sample, rng):
        self.total = 0
        return f"Add up for {sample.data.get('secret', 'nobody')}."

    @tool
    def add(self, n: int):
        """Add a number."""
        self.total += n
        return str(self.total)

    @tool
    def finish(self):
        """End."""
        return Done(str(self.total), reward=1.0)

    def snapshot(self):
        return self.total

    def restore(self, state):
        self.total = state


class ThreadTally(Tally):
    """Sums numbers, on a thread."""

    blocking = True


class Vault(Environment):
    """Holds an answer that the agent has to guess."""

    max_turns = 100_000
    blocking = False

    @classmethod
    def samples(cls, split):
        return [{"answer": f"{ANSWER}{split}-{n}"} for n in range(8)]

    def reset(self, sample, rng):
        self.answer = str(sample.data.get("answer"))
        self.count = 0
        return "Guess the answer."

    @tool
    def guess(self, text: str):
        """Guess."""
        self.count += 1
        if text == self.answer:
            return Done("right", reward=1.0)
        return Reply(f"wrong {self.count}", metrics={"distance": METRIC})

    @tool
    def echo(self, text: str):
        """Return the text."""
        return text

    @tool
    def crack(self):
        """Fail with a message that holds the answer."""
        raise ValueError(f"the answer {self.answer} was not found, {ON_PURPOSE}")

    @tool
    def complain(self, text: str):
        """Fail with a message that holds what the agent said."""
        raise ValueError(f"{text}, {ON_PURPOSE}")

    def expert(self, rng):
        return ToolCall.of("guess", text=self.answer)

    def snapshot(self):
        return self.answer, self.count

    def restore(self, state):
        self.answer, self.count = state


class Leak(BaseException):
    """An exception that ``except Exception`` does not catch."""


class Trap(Environment):
    """Author code that hangs or ends its process, on the event loop."""

    max_turns = 100_000
    blocking = False
    tool_timeout = HANG_S

    def reset(self, sample, rng):
        self.count = 0
        return "Step in."

    @tool
    def loop(self):
        """Never return."""
        while True:
            self.count += 1

    @tool
    def backtrack(self, text: str = "a" * 40 + "!"):
        """Match a pattern in exponential time."""
        return str(re.search(r"(a+)+$", text))

    @tool
    def slow(self):
        """Block for a moment, as a query that finds nothing does."""
        time.sleep(0.17)
        return "nothing"

    @tool
    async def block_async(self):
        """Block the event loop although it is async."""
        time.sleep(HANG_S + 1)  # noqa: ASYNC251  -- on purpose
        return "late"

    @tool
    def exit(self, code: int = 3):
        """Exit the process immediately."""
        os._exit(code)

    @tool
    def kill(self):
        """End the process as the kernel does."""
        os.kill(os.getpid(), signal.SIGKILL)

    @tool
    def crash(self):
        """Read address 0."""
        return ctypes.string_at(0)

    @tool
    def fork(self):
        """Leave a copy of the process behind that holds its sockets."""
        if os.fork() == 0:
            time.sleep(HANG_S)
            os._exit(0)
        return "forked"

    @tool
    def hog(self):
        """Ask for more memory than there is."""
        return str(len(bytearray(1 << 50)))

    @tool
    def shout(self):
        """Answer at great length."""
        return "x" * (32 << 20)

    @tool
    def recurse(self, n: int = 0):
        """Recurse without end."""
        return self.recurse(n + 1)

    @tool
    def fail(self, name: str = "SystemExit"):
        """Raise an exception that is not an Exception."""
        kinds = {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit, "Leak": Leak}
        kinds |= {"GeneratorExit": GeneratorExit, "CancelledError": asyncio.CancelledError}
        raise kinds.get(name, Leak)(ON_PURPOSE)

    @tool
    def call_me(self):
        """Return an answer that is not text."""
        return {"surprise": object()}

    def snapshot(self):
        return self.count

    def restore(self, state):
        self.count = state


class ThreadTrap(Trap):
    """The same on threads."""

    blocking = True

    @tool(timeout=HANG_S)
    def hang(self):
        """Wait for ever."""
        threading.Event().wait()

    @tool(timeout=3600)
    def hang_long(self):
        """Wait for ever, within its timeout."""
        threading.Event().wait()


class Shell(Environment):
    """Runs commands in a sandbox."""

    max_turns = 1000
    limits: ClassVar[dict[str, Any]] = {"memory": "96m", "disk": "16m", "pids": 32, "timeout": 5.0}

    def reset(self, sample, rng):
        files = {"mine.txt": f"{sample.data.get('secret', 'nobody')}\n"}
        kind, image = os.environ.get("HOSTILE_SANDBOX", "auto"), os.environ.get("HOSTILE_IMAGE")
        self.box = open_sandbox(kind, image=image, files=files, **self.limits)
        return "Type a command."

    @tool
    def run(self, command: str):
        """Run a command."""
        return self.box.run(command).text

    @tool
    def finish(self):
        """End."""
        return Done("bye", reward=1.0)

    def close(self):
        if hasattr(self, "box"):
            self.box.close()
