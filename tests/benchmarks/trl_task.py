"""One-turn decisions: the seller to view in the shop after the search, and the database to open in sql.

TRL's loop ends an episode when the model stops calling tools, and an environment cannot end it. A one-turn
task is equal on both sides: the same prompt tokens, one completion, one reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from agentrl_env import Done, Message, ToolCall, tool
from environments.shop.environment import Shop
from environments.sql.environment import Sql


class FirstPick(Shop):
    """Name the seller who has the right offer: most articles have a usual one, which the task never says."""

    name = "shop"
    max_turns = 1
    choices: ClassVar = {"view": "seller", "buy": "seller"}
    """The argument with the choice, by tool."""

    def reset(self, sample, rng):
        wish = super().reset(sample, rng)
        self.searched, self.wanted = True, self.right
        search = ToolCall.of("search", query=self.article)
        return [
            Message(role="user", content=wish),
            Message.assistant(f"{self.article}.", search),
            Message(role="tool", tool_call_id=search.id, content="6 offers."),
        ]

    @tool
    def view(self, seller: str):
        """See a seller's offer."""
        return self._pick(seller)

    @tool
    def buy(self, seller: str):
        """Buy a seller's offer."""
        return self._pick(seller)

    def _pick(self, seller):
        return Done("That was it.", reward=float(seller == self.wanted))


class FirstOpen(Sql):
    """Open the database of the department that has the thing. The question does not name the department."""

    name = "sql"
    max_turns = 1
    choices: ClassVar = {"open": "database"}

    def reset(self, sample, rng):
        question = super().reset(sample, rng)
        self.wanted = self.department
        return [Message(role="user", content=question)]

    @tool
    def open(self, database: str):
        """Open a department's database; queries go to the one opened last.

        Args:
            database: One of food, tools, toys, clothes, garden, music.
        """
        return Done("That was it.", reward=float(database == self.wanted))

    @tool
    def answer(self, value: str):
        """Give the answer to the question. This ends the task, so be sure.

        Args:
            value: The number or the name that was asked for, alone.
        """
        return Done("That was it.", reward=0.0)


class Parity(FirstPick):
    """Rewards any words of odd length, so that a model with random weights can learn."""

    def respond(self, text):
        return Done("That was it.", reward=parity(text))


def parity(text: str, right: str = "") -> float:
    """Return 1 for a completion of odd length."""
    return float(len(text) % 2)


def reward(message: Message, right: str, choices: Mapping[str, str]) -> float:
    """Return 1 if the first call of a completion makes the right choice, as the environments do."""
    if not message.tool_calls:
        return 0.0
    call = message.tool_calls[0].function
    try:
        return float(call.name in choices and json.loads(call.arguments) == {choices[call.name]: right})
    except ValueError:
        return 0.0
