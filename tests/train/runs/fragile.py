"""A task that always fails on one sample and sometimes on another."""

from collections.abc import Sequence
from typing import Any

from agentrl_env import Reply

from .babble import Babble

COUNT, BROKEN = 4, 2


class Fragile(Babble):
    """Say anything."""

    @classmethod
    def samples(cls, split: str) -> Sequence[dict[str, Any]]:
        return [{"number": number} for number in range(COUNT)]

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.number = sample.data["number"]
        return super().reset(sample, rng)

    async def respond(self, text: str) -> Reply:
        if self.number == BROKEN:
            raise OSError("the database is gone")
        return await super().respond(text)
