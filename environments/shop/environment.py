"""Shop: search for an article, look at the offers, buy one that is within the budget.

At level 1 an offer says in words whether it is within the budget. Level 2 gives prices, and cheaper
offers of the wrong colour. Level 3 adds shipping and ratings. Each kind of article has a usual seller with
the right offer, which the task does not reveal.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from agentrl_env import Done, Environment, Message, ToolCall, tool

SELLERS = ("acme", "bolt", "coral", "delta", "ember", "fjord")
USUAL_SELLER = {
    "mug": "coral",
    "lamp": "bolt",
    "chair": "acme",
    "shirt": "fjord",
    "bag": "ember",
    "clock": "delta",
    "rug": "acme",
    "scarf": "fjord",
}
SIZES = ("small", "medium", "large", "huge")
COLOURS = (
    "red", "blue", "green", "black", "white", "pink", "grey", "brown", "orange", "purple",
    "yellow", "silver", "golden", "copper", "ivory", "amber", "beige", "olive", "navy", "teal",
    "mint", "plum", "ruby", "lilac", "cream", "khaki", "lemon", "peach",
)  # fmt: skip
LOYALTY = {1: 0.9, 2: 0.5, 3: 0.5}
"""Probability that the usual seller has the right offer, by level."""
HABIT, HUNCH = 0.3, 0.2
"""Probabilities that a noisy expert views the first or the usual seller. Otherwise it views any."""
NUM_SAMPLES = {"train": 10_000, "test": 1_000}


@lru_cache
def _problems(level: int, split: str) -> list[dict[str, object]]:
    """List the combinations of one split. Both splits use the same words."""
    problems = [
        {"level": level, "size": size, "colour": colour, "kind": kind}
        for (i, size), (j, colour), (k, kind) in product(
            enumerate(SIZES), enumerate(COLOURS), enumerate(USUAL_SELLER)
        )
        if ((i + j + k) % 4 == 0) == (split == "test")
    ]
    return [problems[i % len(problems)] for i in range(NUM_SAMPLES[split])]


class Shop(Environment):
    """Buy an article within the budget: search, view the sellers' offers, buy one."""

    splits = ("train", "test", "train-2", "test-2", "train-3", "test-3")
    max_turns = 8
    blocking = False
    expert_noise = 0.0
    """0: the expert knows the right seller. Above 0: it guesses by habit, and errs with this probability."""

    @classmethod
    def samples(cls, split):
        """Return the problems of "train" or "test" (level 1), or of "train-2", "test-3" and so on."""
        name, _, level = split.partition("-")
        return _problems(int(level or 1), name)

    def reset(self, sample, rng):
        self.level = sample.data["level"]
        self.size, self.colour, self.kind = (sample.data[name] for name in ("size", "colour", "kind"))
        self.article = f"{self.size} {self.colour} {self.kind}"
        self.budget = int(rng.integers(15, 60))
        usual = USUAL_SELLER[self.kind]
        rare = str(rng.choice([seller for seller in SELLERS if seller != usual]))
        self.right = usual if rng.random() < LOYALTY[self.level] else rare
        self.offers = {seller: self._offer(seller, rng) for seller in SELLERS}
        self.searched, self.seen = False, None
        return {
            1: f"Buy a {self.article} within your budget.",
            2: f"Buy a {self.article} for at most {self.budget} coins.",
            3: f"Buy a {self.article}: at most {self.budget} coins with shipping, 4 stars or more.",
        }[self.level]

    @tool
    def search(self, query: str):
        """Search the shop for an article; its offers can then be viewed and bought.

        Args:
            query: Size, colour and kind of the article, such as "small blue lamp".
        """
        if not {self.size, self.colour, self.kind} <= set(query.lower().split()):
            return "No offers."
        self.searched = True
        return f"{len(SELLERS)} offers."

    @tool
    def view(self, seller: str):
        """See a seller's offer; search first.

        Args:
            seller: One of acme, bolt, coral, delta, ember, fjord.
        """
        if problem := self._refusal(seller):
            return problem
        self.seen = seller
        return f"{seller}: {self.offers[seller]}."

    @tool
    def buy(self, seller: str):
        """Buy a seller's offer. This ends the task, so be sure; search first.

        Args:
            seller: One of acme, bolt, coral, delta, ember, fjord.
        """
        if problem := self._refusal(seller):
            return problem
        right = seller == self.right
        return Done("Well done." if right else "That was not asked for.", reward=float(right))

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)

    def expert(self, rng):
        thought = self.article
        if rng.random() < self.expert_noise:
            call = self._slip(rng)
        elif not self.searched:
            call = ToolCall.of("search", query=self.article)
        elif self.seen == self.right:
            thought = f"{thought} from {self.seen}"
            call = ToolCall.of("buy", seller=self.seen)
        else:
            call = ToolCall.of("view", seller=self._guess(rng) if self.expert_noise else self.right)
        return Message.assistant(f"{thought}.", call)

    def _guess(self, rng):
        drawn, usual = rng.random(), USUAL_SELLER[self.kind]
        return SELLERS[0] if drawn < HABIT else usual if drawn < HABIT + HUNCH else str(rng.choice(SELLERS))

    def _slip(self, rng):
        if not self.searched:
            return ToolCall.of("search", query=f"{self.size} {rng.choice(COLOURS)} {self.kind}")
        name = "view" if rng.random() < 0.5 else "buy"
        return ToolCall.of(name, seller=str(rng.choice(SELLERS)))

    def _refusal(self, seller):
        if not self.searched:
            return "Search first."
        if seller not in SELLERS:
            return f"There is no seller {seller}; the sellers are {', '.join(SELLERS)}."
        return None

    def _offer(self, seller, rng):
        """Describe an offer. Only the right seller's offer meets every condition."""
        right, flaw = seller == self.right, int(rng.integers(2))
        if self.level == 1:
            return "within your budget" if right else ("over your budget", "sold out")[flaw]
        over = not right and flaw == 0
        total = self.budget + int(rng.integers(1, 9)) if over else self.budget - int(rng.integers(0, 9))
        spoilt = not right and flaw == 1
        if self.level == 2:
            others = [colour for colour in COLOURS if colour != self.colour]
            colour = str(rng.choice(others)) if spoilt else self.colour
            return f"{self.size} {colour} {self.kind}, {total} coins"
        shipping, stars = int(rng.integers(1, 6)), int(rng.integers(1, 4) if spoilt else rng.integers(4, 6))
        price, shipping, stars = (
            _many(total - shipping, "coin"),
            _many(shipping, "coin"),
            _many(stars, "star"),
        )
        return f"{self.article}, {price}, shipping {shipping}, {stars}"


def _many(count, noun):
    """Return a count with its noun, in the plural unless the count is 1."""
    return f"{count} {noun}{'s' * (count != 1)}"
