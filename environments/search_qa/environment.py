"""Search QA: answer a question by searching an encyclopedia and reading its pages.

The encyclopedia has 40,000 generated pages. ``SEARCH_QA_DATA`` is a folder with another corpus and its
questions.
"""

from __future__ import annotations

import os
import re
import threading
from functools import lru_cache

from agentrl_env import Done, Environment, Message, ToolCall, ToolError, tool

from .grading import exact, f1
from .index import Index
from .official import StoredQuestions, open_folder, question_files
from .prose import pages
from .questions import LEVELS, NUM_QUESTIONS, Questions
from .world import world

DATA = os.environ.get("SEARCH_QA_DATA")
"""Folder of a corpus with questions. Without it both are generated."""
PAGE_SIZE = 10
"""Number of results that one call of ``search`` shows."""
PART = 2_000
"""Maximum number of characters of a page that one call of ``read`` shows."""
PARTS = re.compile(rf"(?s)\S.{{0,{PART - 1}}}(?!\S)|\S{{1,{PART}}}")
INSTRUCTIONS = (
    "Answer the question with the pages of an encyclopedia. search() finds pages, read() shows one, and "
    "answer() gives the answer: the name, number or words alone."
)
_opening = threading.Lock()


@lru_cache
def _open_index() -> Index:
    return open_folder(DATA) if DATA else Index.build(pages(world()))


def encyclopedia() -> Index:
    """Return the index of this process. The first call opens it."""
    with _opening:
        return _open_index()


def _splits() -> tuple[str, ...]:
    if DATA:
        return tuple(question_files(DATA))
    return tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NUM_QUESTIONS)


class SearchQa(Environment):
    """Answer a question by searching an encyclopedia and reading its pages."""

    splits = _splits()
    max_turns = 20
    reset_timeout = 3600.0 if DATA else 300.0

    @classmethod
    def startup(cls):
        encyclopedia()

    @classmethod
    def samples(cls, split):
        """Return the questions of "train", "validation", "test" (level 1), "train-2" ..., or of a file."""
        if DATA:
            return StoredQuestions(encyclopedia(), split)
        name, _, level = split.partition("-")
        return Questions(name, int(level or 1))

    def reset(self, sample, rng):
        data = sample.data
        self.gold, self.steps = list(data["answer"]), [tuple(step) for step in data.get("steps", ())]
        self.query, self.shown, self.read_titles = "", [], []
        self.searches, self.f1 = 0, 0.0
        return f"{INSTRUCTIONS}\n\nQuestion: {data['question']}"

    @tool
    def search(self, query: str, page: int = 1):
        """Search the encyclopedia; shows the titles of ten pages, the best first.

        Args:
            query: Words to search for, such as a name.
            page: Which ten of the results to show, from 1.
        """
        found = encyclopedia().search(query)
        if not found:
            raise ToolError(f"Nothing was found for {query!r:.200}; search for other words.")
        last = -(-len(found) // PAGE_SIZE)
        if not 1 <= page <= last:
            raise ToolError(f"There is no page {page} of the results; there are {last}.")
        shown = found[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]
        self.query, self.shown, self.searches = query, [title for title, _ in shown], self.searches + 1
        lines = (f"- {title}: {about}" if about else f"- {title}" for title, about in shown)
        return "\n".join((f"Results, page {page} of {last}:", *lines))

    @tool
    def read(self, title: str, part: int = 1):
        """Read a page, a long one in parts.

        Args:
            title: The title of the page, as search() shows it.
            part: Which part of the page to show, from 1.
        """
        page = encyclopedia().page(title)
        if page is None:
            raise ToolError(f"There is no page with the title {title!r:.200}; search() shows titles.")
        parts = PARTS.findall(page.text) or [""]
        if not 1 <= part <= len(parts):
            raise ToolError(f"There is no part {part} of this page; it has {len(parts)}.")
        if page.title not in self.read_titles:
            self.read_titles.append(page.title)
        heading = page.title if len(parts) == 1 else f"{page.title} (part {part} of {len(parts)})"
        return f"{heading}\n\n{parts[part - 1]}"

    @tool
    def answer(self, text: str):
        """Give the answer. This ends the task, so be sure.

        Args:
            text: The answer alone: a name, a number or a few words.
        """
        right, self.f1 = exact(text, self.gold), f1(text, self.gold)
        return Done("Correct." if right else "That is not the answer.", reward=float(right))

    def score(self):
        return {"f1": self.f1, "searches": float(self.searches), "pages": float(len(self.read_titles))}

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)

    def expert(self, rng):
        """Search for the next page on the way to the answer and read it. Answer when all are read.

        If the search does not find a page, read it by its title.
        """
        for query, title in self.steps:
            if title in self.read_titles or encyclopedia().page(title) is None:
                continue
            if title in self.shown:
                return _call("read", title=title)
            found = [name for name, _ in encyclopedia().search(query)]
            if title not in found or self.query == query:
                return _call("read", title=title)
            page = found.index(title) // PAGE_SIZE + 1
            return _call("search", query=query, **({"page": page} if page > 1 else {}))
        return _call("answer", text=self.gold[0])


def _call(name, **arguments):
    return Message.assistant(None, ToolCall.of(name, **arguments))
