"""Support: answer the customers of a shop by its policy, with tools on its records.

The customer is a program with rules, or the model behind the OpenAI-compatible endpoint ``SUPPORT_USER_URL``
(with ``SUPPORT_USER_MODEL``, ``SUPPORT_USER_KEY``, ``SUPPORT_USER_TEMPERATURE`` and ``SUPPORT_USER_CACHE``).
"""

from __future__ import annotations

from .desk import Desk
from .records import MAX_MESSAGE, TODAY
from .shop.problems import ShopProblem, problems
from .shop.tools import ShopTools

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


class Support(ShopTools, Desk):
    """Answer a customer of a shop: ask for details, look up and change records, keep to the policy."""

    policy = POLICY
    problem = ShopProblem
    problems = staticmethod(problems)
