"""The tools of the shop's support desk, and the changes that they make."""

from __future__ import annotations

import copy
from typing import Literal

from typing_extensions import TypedDict

from agentrl_env import ToolError, tool

from ..records import cents, money
from ..tools import Address, DeskTools
from .records import DELIVERED, PENDING, SHOP

Reason = Literal["no longer needed", "ordered by mistake", "found cheaper elsewhere", "takes too long"]
MAX_FOUND = 5


class Replacement(TypedDict):
    """An item of an order, and the item that replaces it."""

    item_id: str
    new_item_id: str


class ShopTools(DeskTools):
    """The tools of the desk."""

    tables = SHOP

    @tool
    def get_customer(self, customer_id: str):
        """Return a customer: name, address, membership, payment methods and the ids of the orders.

        Args:
            customer_id: The id, such as "C1007".
        """
        return self._answer("get_customer", {"customer_id": customer_id}, self._customer(customer_id))

    @tool
    def get_order(self, order_id: str):
        """Return an order: status, dates, address, items with their prices, and how it was paid.

        Args:
            order_id: The id, such as "W10007".
        """
        return self._answer("get_order", {"order_id": order_id}, self._order(order_id))

    @tool
    def search_products(self, query: str):
        """Find products by a word of their name.

        Args:
            query: A word, such as "lamp".
        """
        words = query.lower().split()
        found = [
            {"product_id": p["product_id"], "name": p["name"]}
            for p in SHOP["products"].values()
            if words and all(word in p["name"] for word in words)
        ]
        if not found:
            raise ToolError("No product has this name.")
        return self._answer("search_products", {"query": query}, found[:MAX_FOUND])

    @tool
    def get_product(self, product_id: str):
        """Return a product with its variants: item id, colour, size, price, and how many are in stock.

        Args:
            product_id: The id, such as "P107".
        """
        if product_id not in SHOP["products"]:
            raise ToolError(f"There is no product {product_id}.")
        return self._answer("get_product", {"product_id": product_id}, SHOP["products"][product_id])

    @tool
    def cancel_order(self, order_id: str, reason: Reason):
        """Cancel a pending order. The whole amount goes back to the payment method of the order.

        Args:
            order_id: The id of the order.
            reason: The customer's reason.
        """
        order = self._edited(order_id, PENDING)
        order.update(status="cancelled", reason=reason)
        return self._answer(
            "cancel_order", {"order_id": order_id, "reason": reason}, self._keep(order_id, order)
        )

    @tool
    def change_delivery_address(self, order_id: str, address: Address):
        """Change the delivery address of a pending order.

        Args:
            order_id: The id of the order.
            address: The new address.
        """
        order = self._edited(order_id, PENDING)
        order["address"] = {name: text.strip() for name, text in address.items()}
        given = {"order_id": order_id, "address": dict(address)}
        return self._answer("change_delivery_address", given, self._keep(order_id, order))

    @tool
    def change_default_address(self, customer_id: str, address: Address):
        """Change the address of a customer for later orders. Orders that exist keep theirs.

        Args:
            customer_id: The id of the customer.
            address: The new address.
        """
        customer = copy.deepcopy(self._customer(customer_id))
        customer["address"] = {name: text.strip() for name, text in address.items()}
        self._keep(customer_id, customer)
        given = {"customer_id": customer_id, "address": dict(address)}
        return self._answer("change_default_address", given, customer)

    @tool
    def change_items(self, order_id: str, replacements: list[Replacement], payment_id: str):
        """Replace items of a pending order by other variants of the same products.

        Args:
            order_id: The id of the order.
            replacements: The items and their replacements.
            payment_id: The payment method that pays or receives the difference in price.
        """
        order = self._edited(order_id, PENDING)
        difference = self._replace(order, replacements, payment_id)
        order.setdefault("payments", []).append({"payment_id": payment_id, "difference": difference})
        given = {"order_id": order_id, "replacements": _plain(replacements), "payment_id": payment_id}
        return self._answer("change_items", given, self._keep(order_id, order))

    @tool
    def return_items(self, order_id: str, item_ids: list[str], refund_to: str):
        """Register the return of items of a delivered order.

        Args:
            order_id: The id of the order.
            item_ids: The ids of the items that go back.
            refund_to: The id of the payment method that receives the refund.
        """
        order = self._edited(order_id, DELIVERED)
        own = [item["item_id"] for item in order["items"]]
        if not item_ids or len(set(item_ids)) < len(item_ids) or not set(item_ids) <= set(own):
            raise ToolError(f"Name items of the order, each once: {', '.join(own)}.")
        self._check_payment(order, refund_to)
        order.update(status="return requested", returned=sorted(item_ids), refund_to=refund_to)
        given = {"order_id": order_id, "item_ids": list(item_ids), "refund_to": refund_to}
        return self._answer("return_items", given, self._keep(order_id, order))

    @tool
    def exchange_items(self, order_id: str, replacements: list[Replacement], payment_id: str):
        """Register the exchange of items of a delivered order for other variants of the same products.

        Args:
            order_id: The id of the order.
            replacements: The items and their replacements.
            payment_id: The payment method that pays or receives the difference in price.
        """
        order = self._edited(order_id, DELIVERED)
        kept = copy.deepcopy(order["items"])
        difference = self._replace(order, replacements, payment_id)
        order.update(items=kept, status="exchange requested", exchanged=_plain(replacements))
        order["payments"] = [{"payment_id": payment_id, "difference": difference}]
        given = {"order_id": order_id, "replacements": _plain(replacements), "payment_id": payment_id}
        return self._answer("exchange_items", given, self._keep(order_id, order))

    def _order(self, order_id: str) -> dict:
        return self._existing("orders", order_id)

    def _edited(self, order_id: str, status: str) -> dict:
        return self._copied("orders", order_id, status)

    def _check_payment(self, order: dict, payment_id: str) -> dict:
        methods = {m["payment_id"]: m for m in self._customer(order["customer_id"])["payment_methods"]}
        if payment_id not in methods:
            raise ToolError(f"The customer has no payment method {payment_id}, but {', '.join(methods)}.")
        return methods[payment_id]

    def _replace(self, order: dict, replacements: list[Replacement], payment_id: str) -> str:
        """Replace items of an order and return the difference in price."""
        method, difference = self._check_payment(order, payment_id), 0
        if not replacements:
            raise ToolError("Name at least one item and its replacement.")
        for replacement in replacements:
            item = next((i for i in order["items"] if i["item_id"] == replacement["item_id"]), None)
            if item is None:
                own = ", ".join(item["item_id"] for item in order["items"])
                raise ToolError(f"Order {order['order_id']} has no item {replacement['item_id']}, but {own}.")
            variants = SHOP["products"][item["product_id"]]["variants"]
            new = next((v for v in variants if v["item_id"] == replacement["new_item_id"]), None)
            if new is None or new["item_id"] == item["item_id"]:
                raise ToolError(f"{replacement['new_item_id']} is not another variant of the {item['name']}.")
            if not new["in_stock"]:
                raise ToolError(f"{new['item_id']} is not in stock.")
            difference += cents(new["price"]) - cents(item["price"])
            item.update({name: new[name] for name in ("item_id", "colour", "size", "price")})
        if "balance" in method and difference > cents(method["balance"]):
            raise ToolError(f"The balance of {payment_id} does not cover {money(difference)}.")
        return f"{'-' * (difference < 0)}{money(abs(difference))}"


def _plain(replacements: list[Replacement]) -> list[dict[str, str]]:
    return [dict(replacement) for replacement in replacements]
