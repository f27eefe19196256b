"""A task that a random policy gets different rewards in, for runs that must really train."""

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
        """Reward what is said by its length, after a while that differs."""
        await asyncio.sleep(random.random() * 0.05)
        return Reply("go on", reward=float(len(text) % 3))
