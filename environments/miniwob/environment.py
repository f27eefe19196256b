"""MiniWoB++: do what an instruction says on a small web page, in a real Chromium."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from agentrl_env import Done, Environment, Reply, ToolCall, ToolError, tool
from agentrl_env.dataset import stable_seed

from .browser import Browser, CannotAct
from .oracle import CHOICES, must_be_read, next_call

LEVELS = {
    1: ("click-button", "click-link", "click-option", "choose-list"),
    2: (
        "click-dialog-2", "enter-text", "enter-text-dynamic", "enter-password", "login-user",
        "click-checkboxes", "simple-algebra", "read-table",
    ),
    3: (
        "find-word", "multi-orderings", "click-collapsible-2-nodelay", "use-autocomplete-nodelay",
        "search-engine", "social-media",
    ),
}  # fmt: skip
"""The pages of each level: one or two clicks; several actions on visible elements; a search first."""
PAGES = {page for pages in LEVELS.values() for page in pages}
NUM_SAMPLES = {"train": 10_000, "validation": 1_000, "test": 1_000}
REMAINDERS = {"train": 0, "validation": 1, "test": 2}
"""Seeds of a split have this remainder when divided by the number of splits."""
TEXT_FIELDS = {"text", "password", "textarea", "search", "number", "email"}
RULES = "Do what the instruction says. Elements have numbers in brackets, which change with the page."


class Problems:
    """The problems of a split and a level. The pages alternate, and each problem has its own seed."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_SAMPLES[self.split]

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        pages = LEVELS[self.level]
        drawn = stable_seed("miniwob", self.split, self.level, index) % 2**29
        seed = len(REMAINDERS) * drawn + REMAINDERS[self.split]
        problem = {"page": pages[index % len(pages)], "seed": seed}
        return problem | {"must_be_read": True} if self.level == 1 else problem


class Miniwob(Environment):
    """Do what an instruction says on a small web page."""

    splits = tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NUM_SAMPLES)
    max_turns = 20
    tool_timeout = reset_timeout = 120.0

    browser = Browser()
    visit = None

    @classmethod
    def samples(cls, split):
        """Return the problems of "train", "validation" or "test" (level 1), or of "train-2", "test-3" ..."""
        name, _, level = split.partition("-")
        return Problems(name, int(level or 1))

    @classmethod
    def shutdown(cls):
        cls.browser.close()

    def reset(self, sample, rng):
        self._begin(sample.data)
        return f"{RULES}\n\n{self._text()}"

    @tool
    def click(self, element: Annotated[int, Field(ge=1)]):
        """Click an element.

        Args:
            element: Its number.
        """
        self._line(element)
        return self._after("click", element)

    @tool(name="type")
    def write(self, element: Annotated[int, Field(ge=1)], text: Annotated[str, Field(max_length=200)]):
        """Replace the text of a field.

        Args:
            element: The number of the field.
            text: What to write.
        """
        if self._line(element).get("type") not in TEXT_FIELDS:
            raise ToolError(f"Element {element} is not a text field.")
        return self._after("write", element, "".join(letter for letter in text if letter.isprintable()))

    @tool
    def select(self, element: Annotated[int, Field(ge=1)], option: str):
        """Choose an option of a list.

        Args:
            element: The number of the list.
            option: The text of the option.
        """
        options = self._line(element).get("options")
        if options is None:
            raise ToolError(f"Element {element} is not a list.")
        if option not in options:
            raise ToolError(f"The list has no such option. It has: {', '.join(options)}.")
        return self._after("choose", element, option)

    @tool
    def press(self, key: Literal["Enter", "Tab", "Escape", "ArrowDown", "ArrowUp", "Backspace"]):
        """Press a key in the element that was used last.

        Args:
            key: Name of the key.
        """
        return self._after("press", key)

    def close(self):
        if self.visit is not None:
            self.visit.close()

    def score(self):
        """Return the page's own reward, between -1 and 1."""
        return {"raw_reward": float(self.seen["raw"]) if self.seen["done"] else 0.0}

    def expert(self, rng):
        name, arguments = next_call(self.data["page"], self.seen["query"], self.seen["lines"])
        return ToolCall.of(name, **arguments)

    def snapshot(self):
        return {"data": self.data, "calls": self.calls}

    def restore(self, state):
        self._begin(state["data"])
        for name, *arguments in state["calls"]:
            self._after(name, *arguments)

    def _begin(self, data):
        page, seed, read = data["page"], data["seed"], data.get("must_be_read", False)
        if page not in PAGES or not isinstance(seed, int):
            raise ValueError("a problem has a page, one of those listed above, and a whole number as seed")
        if read and page not in CHOICES:
            raise ValueError(f"must_be_read is for the pages {', '.join(CHOICES)}, not for {page}")
        self.visit = self.browser.open(page, seed)
        if read:
            wanted = partial(must_be_read, page)
            seed = self.visit.seek(seed, len(REMAINDERS), lambda seen: wanted(seen["query"], seen["lines"]))
        self.data, self.calls = {"page": page, "seed": seed}, []
        self.seen = self.visit.look()

    def _line(self, element):
        for line in self.seen["lines"]:
            if line.get("ref") == element:
                return line
        raise ToolError(f"There is no element {element} on the page now.")

    def _after(self, name, *arguments):
        """Act on the page, and return its new content, or the end of the episode."""
        try:
            getattr(self.visit, name)(*arguments)
        except CannotAct as error:
            raise ToolError(str(error)) from error
        self.calls.append([name, *arguments])
        self.seen = self.visit.look()
        if self.seen["done"]:
            success = float(self.seen["raw"] >= 1.0)
            return Done("Done." if success else "That was wrong.", reward=success)
        return Reply(self._text())

    def _text(self):
        return "\n".join([f"Instruction: {self.seen['query']}", *map(line_text, self.seen["lines"])])


def line_text(line) -> str:
    """Return a line of the page as the model reads it."""
    if "ref" not in line:
        return line["text"]
    name = ".".join([line["tag"], *line["classes"].split()])
    words = [f"[{line['ref']}] {name}"]
    if "checked" in line:
        words += [line["type"], "checked" if line["checked"] else "not checked"]
    elif "value" in line:
        words += [f'"{line["value"]}"']
    elif line["text"]:
        words += [f'"{line["text"]}"']
    if line["active"]:
        words += ["active"]
    if "options" in line:
        words += [f"options: {' | '.join(line['options'])}"]
    return " ".join(words)
