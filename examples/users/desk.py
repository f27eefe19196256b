"""Requests of environments/support that need no arithmetic, with short instructions for small models."""

from pathlib import Path

from agentrl_env.hosting.loader import load_target

Support = load_target(str(Path(__file__).parents[2] / "environments" / "support"))
KINDS = ("cancel", "address", "shipped")
NUM_DRAWN = {"train": 4000, "test": 1000}
POLICY = """\
You work at the support desk of an online shop. Text without a tool call goes to the customer.
Find the customer, then look at the order.
Pending orders can be cancelled, and their delivery address can be changed. When you have done it, give the \
amount that the customer gets back, or the expected day of delivery.
Shipped orders can be neither changed nor cancelled. Say so, and give the expected day of delivery."""


class Desk(Support):
    """Cancel an order of one item, or change its address, if it has not been shipped. Say what was done."""

    splits = ("train", "test")
    max_turns = 8
    policy = POLICY

    @classmethod
    def samples(cls, split):
        drawn = super().samples(split)
        return [data for n in range(NUM_DRAWN[split]) if cls._is_simple(data := drawn[n])]

    @classmethod
    def _is_simple(cls, data):
        (request,) = data["requests"]
        order = cls.tables["orders"][request["order"]]
        return request["kind"] in KINDS and len(order["items"]) == 1
