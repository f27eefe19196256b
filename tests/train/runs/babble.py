"""A task that gives a random policy different rewards, for runs that need a learning signal."""

import asyncio
import random

from agentrl_env import Environment, Reply, tool


class Babble(Environment):
    """Say anything."""

    max_turns = 2
    blocking = False

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        return f"Speak {int(rng.integers(10))}."

    @tool
    def stop(self) -> str:
        """Do nothing."""
        return "fine"

    async def respond(self, text: str) -> Reply:
        """Reward the text by its length, after a varying delay."""
        await asyncio.sleep(random.random() * 0.05)
        return Reply("go on", reward=float(len(text) % 3))
