"""A visit to the shop: its pages, and the results of searches and clicks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agentrl_env import ToolError

from .catalogue import Product
from .store import Store

PAGE_SIZE = 10
MAX_KEYWORDS = 300
"""Maximum number of characters of a search that are used and shown on the page of results."""
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUBPAGES = ("Description", "Features", "Reviews")


@dataclass
class Visit:
    """The current page of a customer, and the choices so far."""

    keywords: str | None = None
    found: list[str] = field(default_factory=list)
    """Identifiers of the found products."""
    number: int = 0
    """Page of the results, from 0."""
    asin: str | None = None
    """Product of the open page."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Name of an option of this product -> chosen value."""
    subpage: str | None = None
    bought: bool = False


@dataclass(frozen=True)
class Page:
    """The customer's view, as text or as HTML."""

    title: str
    lines: tuple[str, ...] = ()
    has_search: bool = False
    navigation: tuple[str, ...] = ()
    offers: tuple[Product, ...] = ()
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    actions: tuple[str, ...] = ()

    def buttons(self) -> list[str]:
        """Return the names of all clickable parts."""
        values = [value for values in self.options.values() for value in values]
        return [*self.navigation, *(offer.asin for offer in self.offers), *values, *self.actions]


def page_of(visit: Visit, store: Store) -> Page:
    """Return the customer's current page."""
    product = store.get(visit.asin) if visit.asin else None
    if product is not None and visit.subpage:
        return Page(product.title, lines=_subpage(product, visit.subpage), navigation=(BACK, PREVIOUS))
    if product is not None:
        rating = "no rating" if product.rating is None else f"{product.rating:.1f} of 5 stars"
        return Page(
            product.title,
            lines=(f"Price: ${product.price:.2f}", f"Rating: {rating}"),
            navigation=(BACK, PREVIOUS),
            options=product.options,
            chosen=dict(visit.chosen),
            actions=(*SUBPAGES, BUY),
        )
    if visit.keywords is None:
        return Page("Search the shop.", has_search=True)
    pages = max(1, math.ceil(len(visit.found) / PAGE_SIZE))
    shown = visit.found[visit.number * PAGE_SIZE :][:PAGE_SIZE]
    turns = [PREVIOUS] if visit.number else []
    turns += [NEXT] if visit.number + 1 < pages else []
    return Page(
        f"Results for {visit.keywords!r}: page {visit.number + 1} of {pages}, {len(visit.found)} products.",
        navigation=(BACK, *turns),
        offers=tuple(offer for asin in shown if (offer := store.get(asin))),
    )


def search(visit: Visit, keywords: str, store: Store, *, ranked: bool) -> None:
    """Search the shop. Raises ToolError if the page has no search bar.

    Args:
        visit: The visit, which goes to the page of results.
        keywords: The words to search for.
        store: The products.
        ranked: True lists the best match first. False lists the products of a page by their identifiers.
    """
    if not page_of(visit, store).has_search:
        raise ToolError(f"This page has no search bar; click {BACK!r} first.")
    visit.keywords, visit.number = " ".join(keywords.split())[:MAX_KEYWORDS], 0
    visit.found = list(store.search(visit.keywords))
    if not ranked:
        pages = [visit.found[start:][:PAGE_SIZE] for start in range(0, len(visit.found), PAGE_SIZE)]
        visit.found = [asin for page in pages for asin in sorted(page)]


def click(visit: Visit, value: str, store: Store) -> None:
    """Click a button, a product or a value of an option. Raises ToolError if the page does not have it."""
    page = page_of(visit, store)
    names = {name.lower(): name for name in reversed(page.buttons())}
    names |= {name.lower(): name for name in page.actions}  # an option can have the value "buy now"
    wanted = " ".join(value.lower().split())
    if wanted not in names:
        raise ToolError(
            f"This page has no {value!r} to click; it has {', '.join(page.buttons()) or 'a search bar'}."
        )
    name = names[wanted]
    if name == BACK:
        vars(visit).update(vars(Visit()))
    elif name == PREVIOUS and visit.subpage:
        visit.subpage = None
    elif name == PREVIOUS and visit.asin:
        visit.asin, visit.chosen = None, {}
    elif name in (PREVIOUS, NEXT):
        visit.number += 1 if name == NEXT else -1
    elif visit.asin is None:
        visit.asin = name
    elif name in SUBPAGES:
        visit.subpage = name
    elif name == BUY:
        visit.bought = True
    else:
        option = next(option for option, values in page.options.items() if name in values)
        visit.chosen[option] = name


def as_text(page: Page, instruction: str) -> str:
    """Return a page as text. Clickable parts are in brackets, and chosen values have a star."""
    lines = [f"Instruction: {instruction}", "", page.title]
    if page.has_search:
        lines.append("This page has a search bar.")
    if page.navigation:
        lines.insert(1, " ".join(f"[{name}]" for name in page.navigation))
    lines += page.lines
    lines += [f"[{offer.asin}] {offer.title}, ${offer.price:.2f}" for offer in page.offers]
    for option, values in page.options.items():
        marks = (f"[{value}]" + "*" * (page.chosen.get(option) == value) for value in values)
        lines.append(f"{option}: {' '.join(marks)}")
    if page.actions:
        lines.append(" ".join(f"[{name}]" for name in page.actions))
    return "\n".join(lines)


def as_webshop(page: Page, visit: Visit, instruction: str, store: Store) -> str:
    """Return the page of a visit in the form of WebShop's text mode."""
    parts = ["Instruction:", instruction]
    product = store.get(visit.asin) if visit.asin else None
    if product is not None and visit.subpage:
        told = {"Description": (product.description,), "Features": product.features}
        parts += [*page.navigation, *filter(None, told.get(visit.subpage, ()))]
    elif product is not None:
        options = (text for option, values in product.options.items() for text in (option, *values))
        parts += [*page.navigation, *options, product.title, f"Price: ${product.price}", "Rating: N.A."]
        parts += page.actions
    elif page.has_search:
        parts = ["WebShop", *parts, "Search"]
    else:
        back, *turns = page.navigation
        parts += [back, f"Page {visit.number + 1} (Total results: {len(visit.found)})", *turns]
        parts += [text for offer in page.offers for text in (offer.asin, offer.title, f"${offer.price}")]
    return " [SEP] ".join(parts)


def available_actions(page: Page) -> str:
    """Return the possible actions on a page in WebShop's form."""
    values = [value for values in page.options.values() for value in values]
    buttons = [*page.navigation, *page.actions, *(offer.asin for offer in page.offers)]
    names = ["search"] if page.has_search else [name.lower() for name in buttons]
    return str({"has_search_bar": page.has_search, "clickables": list(dict.fromkeys([*names, *values]))})


def _subpage(product: Product, name: str) -> tuple[str, ...]:
    if name == "Description":
        return (product.description or "This product has no description.",)
    if name == "Features":
        return product.features or ("This product has no list of features.",)
    return (
        ("No customer has written a review.",)
        if product.rating is None
        else (f"{product.rating:.1f} of 5 stars.",)
    )
