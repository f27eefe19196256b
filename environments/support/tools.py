"""The tools that all desks have, and the changes of an episode."""

from __future__ import annotations

import copy
import json
from typing import Any, ClassVar

from typing_extensions import TypedDict

from agentrl_env import ToolError, tool


class Name(TypedDict):
    """The name of a person."""

    first: str
    last: str


class Address(TypedDict):
    """A postal address."""

    street: str
    city: str
    postcode: str


class DeskTools:
    """The tools of a desk, on records that all episodes share.

    An episode keeps its own copies of the records that it changes, in ``changes``, by their id.
    """

    tables: ClassVar[dict[str, dict[str, dict]]]
    """The records by table and id. No episode changes them, and no two tables share an id."""

    def open_records(self) -> None:
        """Start with the unchanged records."""
        self.changes: dict[str, dict] = {}
        self.calls: list[str] = []
        """Successful calls, as JSON."""

    @tool
    def find_customer(self, email: str):
        """Find the id of a customer by email address.

        Args:
            email: The email address, such as "ada.price12@example.com".
        """
        wanted = email.strip().lower()
        found = [c["customer_id"] for c in self.tables["customers"].values() if c["email"] == wanted]
        if not found:
            raise ToolError("No customer has this email address.")
        return self._answer("find_customer", {"email": email}, {"customer_id": found[0]})

    @tool
    def find_customer_by_name(self, name: Name, postcode: str):
        """Find the id of a customer by name and postcode, if the email address is not known.

        Args:
            name: First and last name.
            postcode: The postcode of the customer's own address.
        """
        wanted = {part: text.strip().lower() for part, text in name.items()}
        for customer in self.tables["customers"].values():
            own = {part: text.lower() for part, text in customer["name"].items()}
            if own == wanted and customer["address"]["postcode"] == postcode.strip():
                answer = {"customer_id": customer["customer_id"]}
                return self._answer(
                    "find_customer_by_name", {"name": dict(name), "postcode": postcode}, answer
                )
        raise ToolError("No customer has this name and postcode.")

    def _record(self, table: str, key: str) -> dict | None:
        """Return a record in this episode, or None if it does not exist."""
        return self.changes.get(key) if key in self.changes else self.tables[table].get(key)

    def _existing(self, table: str, key: str) -> dict:
        """Return a record in this episode. Raises ToolError if it does not exist."""
        if (record := self._record(table, key)) is None:
            raise ToolError(f"There is no {table.removesuffix('s')} {key}.")
        return record

    def _customer(self, customer_id: str) -> dict:
        return self._existing("customers", customer_id)

    def _copied(self, table: str, key: str, status: str) -> dict:
        """Return a copy of a record to change and keep. Raises ToolError if its status differs."""
        record = self._existing(table, key)
        if record["status"] != status:
            kind = table.removesuffix("s").capitalize()
            raise ToolError(f"{kind} {key} is not {status} but {record['status']}.")
        return copy.deepcopy(record)

    def _keep(self, key: str, record: dict) -> dict:
        self.changes[key] = record
        return record

    def _answer(self, name: str, given: dict[str, Any], answer: object) -> str:
        self.calls.append(call_key(name, given))
        return json.dumps(answer)


def call_key(name: str, given: dict[str, Any]) -> str:
    """Return a text that is the same for equal calls."""
    return json.dumps([name, given], sort_keys=True)
