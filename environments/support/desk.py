"""A desk: the part of an episode that does not depend on what the customers want."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from agentrl_env import Done, Environment, Message, ToolCall, tool
from agentrl_env.users import Dialogue, Endpoint

from .customer import make_customer
from .problem import LEVELS, NUM_SAMPLES, Problem, Problems
from .records import MAX_MESSAGE, original
from .tools import DeskTools, call_key

ENDPOINT = Endpoint.from_variables("SUPPORT_USER")
"""The endpoint of the model that plays the customers, or None for customers with rules."""

TRANSFERS = 0.3
"""Share of transfers among the mistakes of a noisy expert."""


class Desk(DeskTools, Environment):
    """Answer a customer: ask for details, look up and change records, keep to the policy."""

    splits = tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NUM_SAMPLES)
    max_turns = 50
    blocking = False
    tool_timeout = 300.0 if ENDPOINT else 30.0
    reset_timeout = 300.0 if ENDPOINT else 60.0
    expert_noise = 0.0
    """Share of the expert's moves that settle no request: a transfer, or the claim that all is done."""
    policy: ClassVar[str]
    """The rules of the desk, which the agent reads first."""
    problem: ClassVar[type[Problem]]
    problems: ClassVar[Callable[[str, int], Problems]]
    """Returns the samples of "train" or "test" at a level."""

    @classmethod
    def samples(cls, split):
        """Return the problems of "train" or "test" (level 1), or of "train-2", "test-3" and so on."""
        name, _, level = split.partition("-")
        return cls.problems(name, int(level or 1))

    async def reset(self, sample, rng):
        self.data, self.seed = sample.data, sample.seed
        self.open_records()
        self.dialogue = self._dialogue()
        return [
            Message(role="system", content=self.policy),
            Message(role="user", content=await self.dialogue.open()),
        ]

    async def respond(self, text):
        return await self.dialogue.answer(text, grade=self.grade)

    @tool
    def transfer_to_colleague(self, summary: str):
        """Hand the customer over to a colleague, for what neither the policy nor the tools cover.

        This ends the conversation.

        Args:
            summary: The request in a sentence.
        """
        return Done("The customer has been transferred.", reward=self.grade())

    def grade(self):
        """Return 1 if records and device are right and the customer was told all required facts."""
        return float(self._records_right() and self._told() == 1.0 and all(self._device_right().values()))

    def score(self):
        right = {"records": float(self._records_right()), "told": self._told(), **self._device_right()}
        return {**right, **self.dialogue.metrics()}

    def snapshot(self):
        state = {name: value for name, value in vars(self).items() if name != "dialogue"}
        return {**state, "lines": self.dialogue.state()}

    def restore(self, state):
        lines = state.pop("lines")
        vars(self).update(state)
        self.dialogue = self._dialogue(lines)

    def expert(self, rng):
        """Ask for missing facts, call the tools, and report the result."""
        if rng.random() < self.expert_noise:
            return self._slip(rng)
        told = self.dialogue.told
        for request in self._problem().requests:
            for step in request.steps:
                if step.kind == "call" and call_key(step.text, step.given) not in self.calls:
                    return ToolCall.of(step.text, **step.given)
                if step.kind != "call" and step.text not in told:
                    return step.text
        return "Is there anything else?"

    def _slip(self, rng):
        """Return the move of a careless clerk, which settles no request."""
        if rng.random() < TRANSFERS:
            return ToolCall.of("transfer_to_colleague", summary="A customer has a request.")
        return "It has been done."

    def _dialogue(self, lines=()):
        user = make_customer(self._problem(), ENDPOINT, seed=self.seed, desk=self)
        return Dialogue(user, state=lines)

    def _problem(self) -> Problem:
        return self.problem(self.data)

    def _records_right(self) -> bool:
        wanted: dict[str, Any] = self._problem().changes()
        return wanted.keys() <= self.changes.keys() and all(
            record in (wanted.get(key), original(self.tables, key)) for key, record in self.changes.items()
        )

    def _device_right(self) -> dict[str, float]:
        """Return the metric of the customer's device, if the customer has one."""
        if (device := self._problem().device(self)) is None:
            return {}
        return {device.name: float(device.after(self.dialogue.lines).right())}

    def _told(self) -> float:
        """Return the share of the required facts that were told."""
        heard = " ".join(text for text in self.dialogue.told if len(text) <= MAX_MESSAGE)
        facts = self._problem().told
        if not facts:
            return 1.0
        return sum(bool(re.search(rf"(?<![\d.]){re.escape(f)}(?!\d)", heard)) for f in facts) / len(facts)
