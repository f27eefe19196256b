"""Support: answer the customers of a shop by its policy, with tools on its records.

The customer is a program with rules, or the model behind the OpenAI-compatible endpoint ``SUPPORT_USER_URL``
(with ``SUPPORT_USER_MODEL``, ``SUPPORT_USER_KEY``, ``SUPPORT_USER_TEMPERATURE`` and ``SUPPORT_USER_CACHE``).
"""

from __future__ import annotations

import re

from agentrl_env import Done, Environment, Message, ToolCall, tool
from agentrl_env.users import Dialogue, Endpoint

from .customer import make_customer
from .problems import LEVELS, NUM_SAMPLES, Problem, Problems
from .records import SHOP, TODAY
from .tools import SupportTools, call_key

ENDPOINT = Endpoint.from_variables("SUPPORT_USER")
"""The endpoint of the model that plays the customers; None for customers with rules."""
MAX_MESSAGE = 600
"""Characters up to which the customer reads a message with care: facts in longer ones do not count."""
POLICY = f"""\
You work at the support desk of an online shop. Today is {TODAY.isoformat()}. Text that you write without a \
tool call goes to the customer. Keep each message below {MAX_MESSAGE} characters. Only the customer ends \
the conversation.

- First find out who the customer is: by email address, or by name and postcode. Help only with the \
customer's own orders.
- Pending orders can be cancelled. Their delivery address can be changed, and their items can be replaced by \
other variants of the same product. Orders that have been shipped can be neither changed nor cancelled.
- Delivered items can be returned or exchanged up to and including the 30th day after the delivery, and by \
members up to the 60th day.
- A replacement must be in stock. The customer chooses the payment method for a difference in price and for \
the refund of returned items.
- Do nothing that the customer did not ask for. If the customer has not given a detail, ask for it.
- If you cannot do what the customer asks for, change nothing. Say so, and give the date: the expected day \
of delivery of an order that has been shipped, or the last day on which the items could be returned.
- When you have done something, say so and give the amount that the customer gets back or pays. For a new \
delivery address, give the expected day of delivery. Write amounts like 12.50 and dates like \
{TODAY.isoformat()}."""


class Support(SupportTools, Environment):
    """Answer a customer of a shop: ask for details, look up and change records, keep to the policy."""

    splits = tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NUM_SAMPLES)
    max_turns = 50
    blocking = False
    tool_timeout = 300.0 if ENDPOINT else 30.0
    reset_timeout = 300.0 if ENDPOINT else 60.0

    @classmethod
    def samples(cls, split):
        """Return the problems of "train" or "test" (level 1), or of "train-2", "test-3" and so on."""
        name, _, level = split.partition("-")
        return Problems(name, int(level or 1))

    async def reset(self, sample, rng):
        self.data, self.seed = sample.data, sample.seed
        self.open_records()
        self.dialogue = self._dialogue()
        return [
            Message(role="system", content=POLICY),
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
        """Return 1 if the records are as they should be and the customer knows what it must know."""
        return float(self._records_right() and self._told() == 1.0)

    def score(self):
        right = {"records": float(self._records_right()), "told": self._told()}
        return {**right, **self.dialogue.metrics()}

    def snapshot(self):
        state = {name: value for name, value in vars(self).items() if name != "dialogue"}
        return {**state, "lines": self.dialogue.state()}

    def restore(self, state):
        lines = state.pop("lines")
        vars(self).update(state)
        self.dialogue = self._dialogue(lines)

    def expert(self, rng):
        """Ask for what is missing, call the tools, say what was done."""
        told = self.dialogue.told
        for request in self._problem().requests:
            for step in request.steps:
                if step.kind == "call" and call_key(step.text, step.given) not in self.calls:
                    return ToolCall.of(step.text, **step.given)
                if step.kind != "call" and step.text not in told:
                    return step.text
        return "Is there anything else?"

    def _dialogue(self, lines=()):
        return Dialogue(make_customer(self._problem(), ENDPOINT, seed=self.seed), state=lines)

    def _problem(self):
        return Problem(self.data)

    def _records_right(self):
        wanted, made = self._problem().changes(), self.changes
        return (
            all(
                wanted.get(key) == record or record == (SHOP["orders"].get(key) or SHOP["customers"].get(key))
                for key, record in made.items()
            )
            and wanted.keys() <= made.keys()
        )

    def _told(self):
        """Return the share of the amounts and dates that were told."""
        heard = " ".join(text for text in self.dialogue.told if len(text) <= MAX_MESSAGE)
        facts = self._problem().told
        if not facts:
            return 1.0
        return sum(bool(re.search(rf"(?<![\d.]){re.escape(f)}(?!\d)", heard)) for f in facts) / len(facts)
