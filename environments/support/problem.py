"""Common parts of the problems of all desks: the requests of a customer, and the steps that settle them."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from .device import Device
from .tools import DeskTools

LEVELS = (1, 2, 3)
NUM_SAMPLES = {"train": 10_000, "test": 1_000}
HELD_OUT = 4
"""One in this many customers is in the test split."""
SPARE = 8
"""Number of samples of a customer to draw at a time."""
IDENTITY = {"identity": r"e-?mail|\bnames?\b|post ?code|zip|who (are|am) "}
"""The topic of the question for the customer's identity, which all desks ask."""
ASK_IDENTITY = "What is your email address? Or else tell me your name and postcode."


class Step(NamedTuple):
    """A move of the expert: a question for a fact, a call of a tool, or a message that settles a request."""

    kind: Literal["ask", "call", "tell"]
    text: str
    """The message, or the name of the tool."""
    given: dict[str, Any]
    """Arguments of a call; the ``topic`` of a question; the ``fact`` of a message, if it must be told."""


class Request(NamedTuple):
    """One request of the customer."""

    opening: str
    facts: dict[str, str]
    """The customer's answers, by the topics of the desk's questions."""
    steps: list[Step]
    told: list[str]
    """Facts that the customer must be told: amounts, dates and numbers."""
    on_device: bool = False
    """True if the request is settled when the customer's device works, by the customer's own test."""


class Problem(ABC):
    """A problem as an episode uses it, from its sample.

    Args:
        data: The data of a sample.
    """

    tools: ClassVar[type[DeskTools]]
    """The tools that the steps call."""
    topics: ClassVar[dict[str, str]]
    """Topics of a question, as regular expressions."""
    actions: ClassVar[str] = ""
    """Additional verbs with which the desk reports its actions, as a regular expression of their stems."""
    instructions: ClassVar[str]
    """Instructions of a model that plays the customer, with the fields ``first``, ``last``, ``identity`` and
    ``requests``."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.level: int = data["level"]
        self.customer: dict[str, Any] = self.tools.tables["customers"][data["customer"]]
        self.identity = self._introduction()
        self.requests = [self.request(number, wish) for number, wish in enumerate(data["requests"])]

    @abstractmethod
    def request(self, number: int, wish: dict[str, Any]) -> Request:
        """Return one request from the data of the sample."""

    def device(self, desk: DeskTools) -> Device | None:
        """Return the customer's device in its state before the dialogue, or None if there is no device.

        Args:
            desk: The desk, with the records of the episode. A test of the device can depend on them.
        """
        return None

    def identify(self) -> list[Step]:
        """Return the question for the customer's identity, and the call that finds the customer."""
        steps = [ask("identity", ASK_IDENTITY)]
        if self.data["by_name"]:
            postcode = self.customer["address"]["postcode"]
            return [*steps, call("find_customer_by_name", name=self.customer["name"], postcode=postcode)]
        return [*steps, call("find_customer", email=self.customer["email"])]

    def _introduction(self) -> str:
        first, last = self.customer["name"].values()
        if self.data["by_name"]:
            postcode = self.customer["address"]["postcode"]
            return f"I do not have the email address at hand. I am {first} {last}, postcode {postcode}."
        return f"My email address is {self.customer['email']}."

    @property
    def told(self) -> list[str]:
        """All facts that the customer must be told."""
        return [fact for request in self.requests for fact in request.told]

    def changes(self) -> dict[str, dict]:
        """Return the right records at the end. Raises ToolError if a step is refused."""
        desk = self.tools()
        desk.open_records()
        for request in self.requests:
            for step in request.steps:
                if step.kind == "call":
                    getattr(desk, step.text)(**step.given)
        return desk.changes


def tell(text: str, fact: str = "") -> Step:
    """Return the message that settles a request, with the fact that the customer must be told."""
    return Step("tell", text, {"fact": fact} if fact else {})


def ask(topic: str, text: str) -> Step:
    """Return the question for a fact."""
    return Step("ask", text, {"topic": topic})


def call(tool: str, **given: Any) -> Step:
    """Return the call of a tool."""
    return Step("call", tool, given)


def facts_told(steps: list[Step]) -> list[str]:
    """Return the facts that the customer must be told in some steps."""
    return [str(step.given["fact"]) for step in steps if step.kind == "tell" and "fact" in step.given]


Draw = Callable[[str, int, random.Random], "list[dict[str, Any]] | None"]
"""Returns requests of a customer by its id and the level, or None if a draw is ambiguous or impossible."""


class Problems:
    """The samples of a split, all different. They alternate between the customers.

    Args:
        split: "train" or "test".
        level: The level.
        customers: Ids of the customers that can ask for something, by their number in the table.
        draw: Draws the requests of a customer.
    """

    def __init__(self, split: str, level: int, customers: dict[int, str], draw: Draw) -> None:
        self._level, self._size, self._draw = level, NUM_SAMPLES[split], draw
        self._customers = [
            name for number, name in customers.items() if (number % HELD_OUT == 0) == (split == "test")
        ]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(self._size)[index]
        number, place = divmod(index, len(self._customers))
        return _samples(self._customers[place], self._level, number, self._draw)[number]


_made: dict[tuple[Draw, str, int], tuple[Any, list[dict[str, Any]]]] = {}
"""The samples of a customer so far, and the state of the generator after them."""


def _samples(name: str, level: int, number: int, draw: Draw) -> list[dict[str, Any]]:
    """Return the samples of a customer, up to the one with this number at least."""
    rng = random.Random(f"{name} {level}")
    state, made = _made.get((draw, name, level), (rng.getstate(), []))
    if number < len(made):
        return made
    rng.setstate(state)
    made = list(made)  # another thread can still read the old list
    seen = {_problem_key(sample) for sample in made}
    while len(made) < number + SPARE:
        if (requests := draw(name, level, rng)) is None:
            continue
        data = {"level": level, "customer": name, "requests": requests}
        if (key := _problem_key(data)) not in seen:
            seen.add(key)
            made.append({**data, "style": rng.randrange(2), "by_name": level > 1 and rng.random() < 0.5})
    _made[draw, name, level] = rng.getstate(), made
    return made


def _problem_key(data: dict[str, Any]) -> str:
    """Return a text that is the same for equal problems with different words."""
    return json.dumps([data[name] for name in ("level", "customer", "requests")], sort_keys=True)
