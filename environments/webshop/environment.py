"""Webshop: find an article that fits a request among 100,000, choose its options, and buy it.

WebShop (Yao et al. 2022) with the tools of AgentBench. The catalogue is generated, with ``WEBSHOP_PRODUCTS``
products. If the variable ``WEBSHOP_DATA`` names the folder of the official files, they are used instead.
"""

from __future__ import annotations

import os
import threading
from dataclasses import asdict
from functools import lru_cache

from agentrl_env import Done, Environment, Message, Reply, ToolCall, ToolError, Wording, tool

from .catalogue import generate_goals, generate_products
from .official import open_official, split_goals
from .reward import grade, same
from .store import Store, content_words
from .visit import (
    BACK,
    BUY,
    NEXT,
    PAGE_SIZE,
    PREVIOUS,
    Visit,
    as_text,
    as_webshop,
    available_actions,
    click,
    page_of,
    search,
)

NUM_PRODUCTS = int(os.environ.get("WEBSHOP_PRODUCTS", 100_000))
OFFICIAL = os.environ.get("WEBSHOP_DATA")
"""Folder of WebShop's official files. Without it the catalogue is generated."""
LEVELS = 1 if OFFICIAL else 3
_SHOWN = ("page", "observation", "available_actions")
"""Fields of a page. The last two describe it in WebShop's form."""
TEXTS = {
    "opening": ("{page}", *_SHOWN),
    "page": ("{page}", "action", *_SHOWN),
    "refused": ("{reason}", "action", *_SHOWN),
    "no_tool_call": ("Call one of the tools: search_action, click_action.", *_SHOWN),
}

_opening = threading.Lock()


@lru_cache
def _open_store() -> Store:
    return open_official(OFFICIAL) if OFFICIAL else Store.build(generate_products(NUM_PRODUCTS))


def shop() -> Store:
    """Return the store of this process. The first call opens it."""
    with _opening:
        return _open_store()


@lru_cache
def goals_of(level: int) -> dict[str, list[dict[str, object]]]:
    """Return the generated goals of a level by split."""
    return generate_goals(level, NUM_PRODUCTS)


class Webshop(Environment):
    """Buy what the instruction asks for: search, open a product, choose its options, click Buy Now."""

    splits = tuple(
        f"{name}-{level}" if level > 1 else name
        for level in range(1, LEVELS + 1)
        for name in ("train", "validation", "test")
    )
    max_turns = 20
    wording = Wording(os.environ.get("WEBSHOP_WORDING"), **TEXTS)
    reset_timeout = 3600.0 if OFFICIAL else 120.0
    expert_noise = 0.0
    """Probability that the expert clicks a random element of the page, if there is one."""
    show = staticmethod(as_text)
    """Renders the pages."""

    @classmethod
    def startup(cls):
        shop()

    @classmethod
    def shutdown(cls):
        with _opening:
            if _open_store.cache_info().currsize:
                _open_store().close()
                _open_store.cache_clear()

    @classmethod
    def samples(cls, split):
        """Return the goals of "train", "validation" or "test" (level 1), or of "train-2", "test-3" ..."""
        name, _, level = split.partition("-")
        if OFFICIAL:
            return shop().goals(split_goals(shop().count("goals"), name))
        return goals_of(int(level or 1))[name]

    def reset(self, sample, rng):
        self.goal = sample.data
        self.visit = Visit()
        self.reward = None
        return self.wording.opening(**self._shown())

    @tool
    def search_action(self, keywords: str):
        """Search the shop; possible where the page has a search bar.

        Args:
            keywords: Words that describe the article, such as "wireless headphones black".
        """
        action = f"search[{keywords}]"
        try:
            search(self.visit, keywords, shop(), ranked=bool(OFFICIAL))
        except ToolError as error:
            return self._answer("refused", action, reason=str(error))
        return self._answer("page", action)

    @tool
    def click_action(self, value: str):
        """Click something on the page: a button, a product's identifier, or the value of an option.

        Args:
            value: What stands in brackets on the page, without the brackets, such as "Next >" or "Buy Now".
        """
        store, action = shop(), f"click[{value}]"
        try:
            click(self.visit, value, store)
        except ToolError as error:
            return self._answer("refused", action, reason=str(error))
        if not self.visit.bought:
            return self._answer("page", action)
        bought, target = store.get(self.visit.asin), store.get(self.goal["asin"])
        self.reward = grade(bought, self.visit.chosen, self.goal, target)
        paid = self.reward.score if OFFICIAL else self.reward.product
        return Done("Thank you for shopping with us.", reward=paid)

    def respond(self, text):
        return Reply(self._answer("no_tool_call"), metrics={"invalid_calls": 1.0})

    def score(self):
        if self.reward is None:
            return {"success": 0.0}
        return {"success": float(self.reward.score == 1.0), **self.reward.metrics()}

    def expert(self, rng):
        """Return the next click on the way to a product that meets every wish.

        Searches with the words of the instruction, or with the target's title if no result fits.
        """
        slip = rng.random() < self.expert_noise
        buttons = page_of(self.visit, shop()).buttons() if slip else []
        call = _click(str(rng.choice(buttons))) if buttons else self._next_call()
        return Message.assistant(None, call)

    def snapshot(self):
        return {"goal": self.goal, "visit": asdict(self.visit)}

    def restore(self, state):
        self.goal, self.visit, self.reward = state["goal"], Visit(**state["visit"]), None

    def _answer(self, name, action="", **fields):
        return self.wording.text(name, action=action, **self._shown(), **fields)

    def _shown(self):
        """Return the fields of the texts for the customer's current page."""
        page, instruction = page_of(self.visit, shop()), self.goal["instruction"]
        return {
            "page": self.show(page, instruction),
            "observation": as_webshop(page, self.visit, instruction, shop()),
            "available_actions": available_actions(page),
        }

    def _next_call(self):
        store, visit = shop(), self.visit
        if visit.asin:
            choice = None if visit.subpage else self._choice(store.get(visit.asin))
            missing = [value for option, value in (choice or {}).items() if visit.chosen.get(option) != value]
            return _click(BACK if choice is None else missing[0] if missing else BUY)
        if visit.keywords is None:
            return ToolCall.of("search_action", keywords=self._keywords())
        for place, asin in enumerate(visit.found):
            if self._choice(store.get(asin)) is not None:
                page = place // PAGE_SIZE
                return _click(asin if page == visit.number else NEXT if page > visit.number else PREVIOUS)
        return _click(BACK)

    def _keywords(self):
        """Return the instruction's words if a search for them finds a match, or else the target's title."""
        store, goal = shop(), self.goal
        words = content_words(" ".join((goal["kind"], *goal["attributes"], *goal["options"].values())))
        keywords = " ".join(words)
        if any(self._choice(store.get(asin)) is not None for asin in store.search(keywords)):
            return keywords
        return store.get(goal["asin"]).title

    def _choice(self, product):
        """Return the options with which this product earns the whole reward, or None."""
        choice = {}
        for wanted in self.goal["options"].values():
            fitting = (
                (option, value)
                for option, values in product.options.items()
                for value in values
                if option not in choice and same(wanted, value)
            )
            choice.update([found] if (found := next(fitting, None)) else [])
        target = shop().get(self.goal["asin"])
        return choice if grade(product, choice, self.goal, target).score == 1.0 else None


def _click(value):
    return ToolCall.of("click_action", value=value)
