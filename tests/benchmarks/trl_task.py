"""A one-turn decision in the shop after the search: the seller to view.

TRL's loop ends an episode when the model stops calling tools, and an environment cannot end it. A one-turn
task is equal on both sides: the same prompt tokens, one completion, one reward.
"""

from __future__ import annotations

import json

from agentrl_env import Done, Message, ToolCall, tool
from environments.shop.environment import Shop


class FirstPick(Shop):
    """Name the seller who has the right offer: most articles have a usual one, which the task never says."""

    name = "shop"
    max_turns = 1

    def reset(self, sample, rng):
        wish = super().reset(sample, rng)
        self.searched = True
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
        return Done("That was it.", reward=float(seller == self.right))


class Parity(FirstPick):
    """Rewards any words of odd length, so that a model with random weights can learn."""

    def respond(self, text):
        return Done("That was it.", reward=parity(text))


def parity(text: str, right: str = "") -> float:
    """Return 1 for a completion of odd length."""
    return float(len(text) % 2)


def reward(message: Message, right: str) -> float:
    """Return the reward of ``FirstPick`` for a completion: 1 if the first call names the right seller."""
    called = [call.function for call in message.tool_calls][:1]
    try:
        return float(
            any(
                one.name in ("view", "buy") and json.loads(one.arguments) == {"seller": right}
                for one in called
            )
        )
    except ValueError:
        return 0.0
