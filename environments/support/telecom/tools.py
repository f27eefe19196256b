"""The tools of the operator's support desk, and the changes that they make."""

from __future__ import annotations

import copy
from typing import Annotated, Literal

from pydantic import Field

from agentrl_env import ToolError, tool

from ..records import TODAY, cents, money
from ..tools import Address, DeskTools
from .records import ACTIVE, NEXT_MONTH, OVERDUE, PAID, SUSPENDED, TELECOM

SuspendReason = Literal["lost", "stolen", "travel"]
SimReason = Literal["lost", "damaged"]
MAX_GB = 200


class TelecomTools(DeskTools):
    """The tools of the desk."""

    tables = TELECOM

    @tool
    def get_customer(self, customer_id: str):
        """Return a customer: name, address, payment methods, and the numbers and labels of the lines.

        Args:
            customer_id: The id, such as "C2007".
        """
        return self._answer("get_customer", {"customer_id": customer_id}, self._customer(customer_id))

    @tool
    def get_line(self, number: str):
        """Return a line: plan, contract, status, data of this month, roaming and SIM card.

        Args:
            number: The phone number, such as "070-5512345".
        """
        return self._answer("get_line", {"number": number}, self.line(number))

    @tool
    def get_bills(self, number: str):
        """Return the bills of a line with their items, the oldest first.

        Args:
            number: The phone number of the line.
        """
        bills = [self._bill(name) for name in self.line(number)["bills"]]
        return self._answer("get_bills", {"number": number}, bills)

    @tool
    def list_plans(self):
        """Return the plans with the prices of a month, a day abroad, more data and a new SIM card."""
        return self._answer("list_plans", {}, list(TELECOM["plans"].values()))

    @tool
    def change_plan(self, number: str, plan_id: str):
        """Change the plan of a line from the next month on.

        Args:
            number: The phone number of the line.
            plan_id: The id of the new plan, such as "PL04".
        """
        line = self._edited(number, ACTIVE)
        if plan_id not in TELECOM["plans"]:
            raise ToolError(f"There is no plan {plan_id}.")
        if plan_id == line["plan_id"]:
            raise ToolError(f"Line {number} has the plan {plan_id} already.")
        line["next_plan"] = {"plan_id": plan_id, "from": NEXT_MONTH}
        return self._answer("change_plan", {"number": number, "plan_id": plan_id}, self._keep(number, line))

    @tool
    def add_data(self, number: str, gb: Annotated[int, Field(ge=1, le=MAX_GB)]):
        """Add data to an active line for this month. The next bill has the amount.

        Args:
            number: The phone number of the line.
            gb: Gigabytes.
        """
        line = self._edited(number, ACTIVE)
        line["data"]["added_gb"] += gb
        return self._answer("add_data", {"number": number, "gb": gb}, self._keep(number, line))

    @tool
    def set_roaming(self, number: str, on: bool):
        """Turn roaming, the use abroad, on or off for an active line.

        Args:
            number: The phone number of the line.
            on: True for on.
        """
        line = self._edited(number, ACTIVE)
        line["roaming"] = on
        return self._answer("set_roaming", {"number": number, "on": on}, self._keep(number, line))

    @tool
    def take_payment(self, bill_ids: list[str], payment_id: str):
        """Take the payment of overdue bills of one customer.

        Args:
            bill_ids: The ids of the bills.
            payment_id: The id of the payment method.
        """
        if not bill_ids or len(set(bill_ids)) < len(bill_ids):
            raise ToolError("Name at least one bill, and each once.")
        bills = [copy.deepcopy(self._bill(name)) for name in bill_ids]
        for bill in bills:
            if bill["status"] != OVERDUE:
                raise ToolError(f"Bill {bill['bill_id']} is not overdue but {bill['status']}.")
            self._check_payment(bill, payment_id)
        for bill in bills:
            bill.update(status=PAID, paid_on=TODAY.isoformat(), paid_with=payment_id)
            self._keep(bill["bill_id"], bill)
        total = money(sum(cents(bill["amount"]) for bill in bills))
        given = {"bill_ids": list(bill_ids), "payment_id": payment_id}
        return self._answer("take_payment", given, {"paid": total, "bills": bills})

    @tool
    def refund(self, bill_id: str, amount: str, refund_to: str):
        """Refund a part of a bill that has been paid.

        Args:
            bill_id: The id of the bill.
            amount: The amount, such as "4.50".
            refund_to: The id of the payment method that receives it.
        """
        bill = copy.deepcopy(self._bill(bill_id))
        if bill["status"] != PAID:
            raise ToolError(f"Bill {bill_id} is not paid but {bill['status']}.")
        self._check_payment(bill, refund_to)
        try:
            value = cents(amount)
        except (ValueError, OverflowError):
            raise ToolError(f"{amount!r} is not an amount; write it like 4.50.") from None
        if not 0 < value <= cents(bill["amount"]):
            raise ToolError(f"The amount must be above 0.00 and at most {bill['amount']}.")
        bill["refund"] = {"amount": money(value), "to": refund_to}
        given = {"bill_id": bill_id, "amount": amount, "refund_to": refund_to}
        return self._answer("refund", given, self._keep(bill_id, bill))

    @tool
    def suspend_line(self, number: str, reason: SuspendReason):
        """Suspend an active line, so that it can neither call nor be called.

        Args:
            number: The phone number of the line.
            reason: The customer's reason.
        """
        line = self._edited(number, ACTIVE)
        line.update(status=SUSPENDED, suspension={"since": TODAY.isoformat(), "reason": reason})
        return self._answer("suspend_line", {"number": number, "reason": reason}, self._keep(number, line))

    @tool
    def resume_line(self, number: str):
        """Make a suspended line active again.

        Args:
            number: The phone number of the line.
        """
        line = self._edited(number, SUSPENDED)
        line.update(status=ACTIVE, suspension=None)
        return self._answer("resume_line", {"number": number}, self._keep(number, line))

    @tool
    def order_sim(self, number: str, reason: SimReason, address: Address):
        """Send a new SIM card for a line. The next bill has the amount.

        Args:
            number: The phone number of the line.
            reason: What happened to the old SIM card.
            address: The address that the card is sent to.
        """
        line = copy.deepcopy(self.line(number))
        sent_to = {name: text.strip() for name, text in address.items()}
        line["sim"]["ordered"] = {"reason": reason, "address": sent_to}
        given = {"number": number, "reason": reason, "address": dict(address)}
        return self._answer("order_sim", given, self._keep(number, line))

    def line(self, number: str) -> dict:
        """Return a line in this episode. Raises ToolError if it does not exist."""
        return self._existing("lines", number)

    def _bill(self, bill_id: str) -> dict:
        return self._existing("bills", bill_id)

    def _edited(self, number: str, status: str) -> dict:
        return self._copied("lines", number, status)

    def _check_payment(self, bill: dict, payment_id: str) -> None:
        customer = self._customer(self.line(bill["number"])["customer_id"])
        methods = [method["payment_id"] for method in customer["payment_methods"]]
        if payment_id not in methods:
            raise ToolError(f"The customer has no payment method {payment_id}, but {', '.join(methods)}.")
