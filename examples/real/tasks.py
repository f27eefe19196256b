"""Tasks that need reading: a house, recipes, questions about a database, a shop's offers.

Their experts make mistakes, so a policy that imitates them has something to unlearn.
"""

from pathlib import Path

from agentrl_env import Message
from agentrl_env.hosting.loader import load_target

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


class Laconic:
    """Mixin with an expert that calls tools without text and makes mistakes."""

    expert_noise = 0.2

    def expert(self, rng):
        return Message.assistant(None, *super().expert(rng).tool_calls)


class Household(Laconic, load_target(str(ENVIRONMENTS / "household"))):
    """Find a thing in a house and bring it to a place."""


class Shop(Laconic, load_target(str(ENVIRONMENTS / "shop"))):
    """Buy an article under conditions: look at the offers of up to six sellers."""


class Sql(Laconic, load_target(str(ENVIRONMENTS / "sql"))):
    """Answer a question about a store by queries of its databases."""


class Textcraft(Laconic, load_target(str(ENVIRONMENTS / "textcraft"))):
    """Craft an item by recipes that build on each other."""

    max_turns = 5
