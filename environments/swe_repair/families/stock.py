"""Stocks of goods."""

from ..library import Family

LOTS = '''
"""Lots of one kind of goods: amounts that came at one price."""


class Short(Exception):
    """There is not enough."""


def total(lots):
    """Return the amount in all lots."""
    return sum(amount for amount, _ in lots)


def take(lots, amount):
    """Take an amount from the oldest lots; return their cost and what is left."""  #: !newest
    """Take an amount from the newest lots; return their cost and what is left."""  #: newest
    if amount > total(lots):
        raise Short("there is not enough")
    cost, left = 0, []
    for size, price in lots:  #: !newest
    for size, price in reversed(lots):  #: newest
        used = min(size, amount)
        amount -= used
        cost += used * price
        if size > used:
            left.append((size - used, price))
    return cost, left  #: !newest
    return cost, left[::-1]  #: newest


def packs(amount, size):
    """Return how many packs hold an amount."""
    return -(-amount // size)


def discount(amount, price):
    """Return what an amount costs: $percent percent less from $many on, rounded down."""
    full = amount * price
    if amount >= $many:
        return full * (100 - $percent) // 100
    return full
'''
STORE = '''
"""The store."""

from .lots import Short, discount, packs, take, total


class $Store:
    """Goods, with their lots and reservations."""

    def __init__(self, minimum=$minimum):
        self.minimum = minimum
        self._lots = {}
        self._reserved = {}
        self.profit = 0

    def $receive(self, name, amount, price):
        """Put goods in."""
        if amount <= 0 or price < 0:
            raise ValueError("the amount is positive, the price not negative")
        lots = self._lots.setdefault(name, [])
        if lots and lots[-1][1] == price:  #: join
            lots[-1] = (lots[-1][0] + amount, price)  #: join
            return  #: join
        lots.append((amount, price))

    def free(self, name):
        """Return the amount that is not reserved."""
        held = sum(amount for (_, what), amount in self._reserved.items() if what == name)
        return total(self._lots.get(name, [])) - held

    def $reserve(self, who, name, amount):
        """Reserve goods; return the amount that is reserved for somebody."""
        amount = min(amount, self.free(name))  #: partial
        if amount > self.free(name):
            raise Short(name)
        key = (who, name)
        self._reserved[key] = self._reserved.get(key, 0) + amount
        return self._reserved[key]

    def release(self, who, name):
        """Give a reservation up; return its amount."""
        return self._reserved.pop((who, name), 0)

    def $sell(self, who, name, amount, price):
        """Sell goods, reserved ones first; return the cost of what was taken."""
        held = self._reserved.get((who, name), 0)
        if amount <= 0:
            raise ValueError("the amount is positive")
        if amount > held + self.free(name):
            raise Short(name)
        cost, left = take(self._lots[name], amount)
        self._lots[name] = left
        if held > amount:
            self._reserved[who, name] = held - amount
        else:
            self._reserved.pop((who, name), None)
        earned = discount(amount, price)  #: bulk
        earned = amount * price  #: !bulk
        self.profit += earned - cost
        return cost

    def value(self):
        """Return the cost of all goods that are there."""
        return sum(amount * price for lots in self._lots.values() for amount, price in lots)

    def $orders(self, size=$pack):
        """Return name and packs to order of what has fallen below the minimum, by name."""  #: !full
        """Return name and packs to order of what has fallen below twice the minimum, by name."""  #: full
        wanted = []
        for name in sorted(self._lots):
            goal = self.minimum  #: !full
            goal = 2 * self.minimum  #: full
            missing = goal - self.free(name)
            if missing > 0:
                wanted.append([name, packs(missing, size)])
        return wanted

    def report(self):
        """Return name, amount and free amount of all goods, by name."""
        lines = [[name, total(lots), self.free(name)] for name, lots in sorted(self._lots.items())]
        return [line for line in lines if line[1] > 0]  #: skip
        return lines  #: !skip

    def average(self, name):
        """Return the average cost of one piece, rounded to the nearest, halves up."""
        lots = self._lots.get(name, [])
        if total(lots) == 0:
            return 0
        cost = sum(amount * price for amount, price in lots)
        return (2 * cost + total(lots)) // (2 * total(lots))
'''


def case(rng, on, n):
    lines = [f"s = {n['Store']}({rng.choice(('', f'minimum={rng.randint(3, 12)}'))})"]
    for _ in range(rng.randint(3, 5)):
        lines.append(
            f"s.{n['receive']}({rng.choice(('nut', 'bolt'))!r}, {rng.randint(2, 9)}, {rng.choice((3, 3, 4, 7))})"
        )
    lines.insert(1, f"s.{n['receive']}('nut', {rng.randint(4, 9)}, {rng.randint(2, 4)})")
    reserve = f"s.{n['reserve']}('ann', 'nut', {rng.randint(1, 8)})"
    sell = f"s.{n['sell']}({rng.choice(('ann', 'bob'))!r}, 'nut', {rng.randint(1, 14)}, {rng.randint(4, 12)})"
    body = "\n".join(lines)
    kind = rng.choice(
        ("sell", "sell", "reserve", "orders", "report", "average", "discount", "bad", "value", "two")
    )
    if kind == "sell":
        return (
            "selling goods",
            f"{body}\n{rng.choice((reserve, 's.minimum'))}\n[{sell}, s.profit, s.report()]",
        )
    if kind == "two":
        return (
            "selling twice",
            f"{body}\n{reserve}\ns.{n['sell']}('ann', 'nut', 2, 9)\n[{sell}, s.profit, s.value(), s.free('nut')]",
        )
    if kind == "reserve":
        more = f"s.{n['reserve']}('bob', 'nut', {rng.randint(1, 20)})"
        return (
            "reserving goods",
            f"{body}\n{reserve}\n[{more}, s.free('nut'), s.release({rng.choice(('ann', 'bob'))!r}, 'nut'), s.free('nut')]",
        )
    if kind == "orders":
        size = rng.choice(("", f"size={rng.randint(1, 4)}"))
        return "asking what to order", f"{body}\n{reserve}\ns.{n['orders']}({size})"
    if kind == "report":
        return (
            "a kind of goods is sold out",
            f"s = {n['Store']}()\ns.{n['receive']}('nut', 2, {rng.randint(1, 9)})\ns.{n['receive']}('bolt', {rng.randint(1, 5)}, 1)\ns.{n['sell']}('ann', 'nut', {rng.randint(1, 2)}, 3)\n[s.report(), s.profit]",
        )
    if kind == "average":
        return (
            "asking for the average cost",
            f"{body}\n[s.average('nut'), s.average('bolt'), s.average('nail')]",
        )
    if kind == "discount":
        return (
            "computing a discount",
            f"[discount(a, {rng.randint(3, 40)}) for a in ({rng.randint(1, 6)}, {rng.randint(4, 9)}, {rng.randint(8, 14)})]",
        )
    if kind == "value":
        return "asking for the value", f"{body}\n{sell}\ns.value()"
    bad = rng.choice((
        f"s.{n['receive']}('nut', {rng.randint(-1, 1)}, {rng.randint(-1, 0)})",
        f"s.{n['sell']}('ann', 'nut', {rng.randint(-1, 1)}, 3)",
    ))  # fmt: skip
    return "something unusual is asked for", f"{body}\n{bad}\ns.report()"


FAMILY = Family(
    name="stock",
    summary="Stocks of goods, with costs and reservations.",
    options=("newest", "join", "partial", "bulk", "full", "skip"),
    names={
        "pkg": ("stock", "warehouse", "inventory"),
        "Store": ("Store", "Stock", "Warehouse"),
        "receive": ("receive", "put_in"),
        "reserve": ("reserve", "hold"),
        "sell": ("sell", "hand_out"),
        "orders": ("orders", "to_order"),
        "percent": (5, 10, 20),
        "many": (6, 8),
        "minimum": (5, 8),
        "pack": (3, 4),
    },
    modules={"lots": LOTS, "store": STORE},
    rules="""
- Goods come in lots of an amount, which is positive, at a price, which is not negative, else ValueError is raised.
- A lot at the price of the one before is added to it.  #: join
- The oldest lots are sold first.  #: !newest
- The newest lots are sold first.  #: newest
- Reserving more than is free raises Short.  #: !partial
- Reserving more than is free reserves what is free.  #: partial
- Reservations of the same person and goods add up; $reserve returns their sum. release returns what was given up.
- A person can sell what is reserved for them and what is free; more raises Short. Reserved goods are used first.
- $sell returns the cost of what was taken; profit has the sum of what was earned, less the costs.
- $many pieces or more are sold for $percent percent less, rounded down to whole cents.  #: bulk
- discount takes $percent percent off from $many pieces on, rounded down.
- Sales have no discount.  #: !bulk
- The minimum is $minimum unless given. A pack has $pack pieces unless given.
- Orders are for goods of which less than the minimum is free, in packs that fill up to the minimum.  #: !full
- Orders are for goods of which less than twice the minimum is free, in packs that fill up to that.  #: full
- The report leaves out goods that are sold out.  #: skip
- The average cost is rounded to the nearest whole number, halves up; 0 if there is nothing.
""",
    case=case,
)
