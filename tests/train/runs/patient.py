"""A task with held-out episodes that wait for a file, so that a test controls the end of an evaluation."""

import asyncio
import os
import random
from pathlib import Path

from agentrl_env import Environment, Reply, tool

RELEASED = "PATIENT_RELEASED"
"""Environment variable with the path of the file."""


class Patient(Environment):
    """Say anything."""

    max_turns = 2
    blocking = False

    @classmethod
    def samples(cls, split):  # type: ignore[no-untyped-def]
        return [{"number": number} for number in range(8)]

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.held_out = sample.split == "test"
        return f"Speak {int(rng.integers(10))}."

    @tool
    def stop(self) -> str:
        """Do nothing."""
        return "fine"

    async def respond(self, text: str) -> Reply:
        """Reward the text by its length."""
        while self.held_out and not _released():  # noqa: ASYNC110 (another process writes the file)
            await asyncio.sleep(0.01)
        await asyncio.sleep(random.random() * 0.02)
        return Reply("go on", reward=float(len(text) % 3))


def _released() -> bool:
    return Path(os.environ[RELEASED]).exists()
