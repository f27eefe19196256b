"""The reward of a purchase: WebShop's score (Yao et al. 2022, section 2.3), or the product of its factors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .catalogue import Product
from .store import content_words

SAME_KIND = 0.2
"""An article of another category counts as the same kind above this share of common title words."""


@dataclass(frozen=True)
class Reward:
    """Factors of the reward, each between 0 and 1, and WebShop's score."""

    kind: float
    attributes: float
    options: float
    price: float
    score: float

    @property
    def product(self) -> float:
        """The product of the factors, which is 0 for an article above the price limit."""
        return self.kind * self.attributes * self.options * self.price

    def metrics(self) -> dict[str, float]:
        """Return the factors and the score by name."""
        return {name: getattr(self, name) for name in ("kind", "attributes", "options", "price", "score")}


def grade(bought: Product, chosen: Mapping[str, str], goal: Mapping[str, Any], target: Product) -> Reward:
    """Return the reward of buying a product with these options.

    score = kind * (attributes met + options met + price met) / (attributes + options + 1), where ``kind`` is
    1, 0.5, 0.1 or 0 by the similarity of the article to the target.

    Args:
        bought: The bought product.
        chosen: Name of an option -> chosen value.
        goal: The sample's data: ``attributes``, ``options`` and ``price_upper`` (None means no limit).
        target: The product for which the goal was generated. Another product can be as good.
    """
    wanted = [str(value) for value in goal["options"].values()]
    attributes = sum(has_attribute(bought, attribute) for attribute in goal["attributes"])
    options = sum(any(same(value, given) for given in chosen.values()) for value in wanted)
    limit = goal["price_upper"]
    price = float(limit is None or bought.price <= limit)
    kind = same_kind(bought, target)
    parts = len(goal["attributes"]) + len(wanted) + 1
    return Reward(
        kind=kind,
        attributes=_share(attributes, len(goal["attributes"])),
        options=_share(options, len(wanted)),
        price=price,
        score=kind * (attributes + options + price) / parts,
    )


def same_kind(bought: Product, target: Product) -> float:
    """Return the similarity of an article's kind to the target's kind: 1, 0.5, 0.1 or 0.

    The titles are compared by their content words without the words of the target's attributes. The paper
    uses nouns from a parser instead.
    """
    described = {word for attribute in target.attributes for word in content_words(attribute)}
    desired = set(content_words(target.title)) - described
    shared = len(desired & set(content_words(bought.title))) / len(desired) if desired else SAME_KIND
    if bought.query == target.query or _same_category(bought.category, target.category) or shared > SAME_KIND:
        return 1.0
    return 0.5 if shared >= 0.1 else 0.1 if shared > 0 else 0.0


def has_attribute(product: Product, attribute: str) -> bool:
    """Return True if the product has an attribute, or names it in its title, features or description."""
    if any(same(attribute, own) for own in product.attributes):
        return True
    text = " ".join((product.title, *product.features, product.description))
    return attribute.lower() in text.lower()


def same(wanted: str, given: str) -> bool:
    """Return True if two phrases are equal, or one is the other with more words: "navy" is "navy blue".

    Different numbers or abbreviations do not match: "large" is not "x-large", and "pack of 1" not "pack of
    12".
    """
    one, other = (set(re.findall(r"[^\W_]+", text.lower())) for text in (wanted, given))
    if not one or not other or not (one <= other or other <= one):
        return False
    return all(len(word) > 2 and word.isalpha() for word in one ^ other)


def _same_category(bought: str, target: str) -> bool:
    """Return True if two paths of departments share two parts."""
    return len(_parts(bought) & _parts(target)) >= 2


def _parts(category: str) -> set[str]:
    return {part.strip().lower() for part in category.split("›")} - {""}


def _share(met: int, wanted: int) -> float:
    return met / wanted if wanted else 1.0
