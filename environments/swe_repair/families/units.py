"""Quantities with units."""

from ..library import Family

TABLE = '''
"""Units and their sizes."""

SIZES = {
    "mm": ("length", 1),
    "cm": ("length", 10),
    "m": ("length", 1000),
    "km": ("length", 1000000),
    "g": ("mass", 1),
    "kg": ("mass", 1000),
    "s": ("time", 1),
    "min": ("time", 60),
    "h": ("time", 3600),
}


class Unfit(ValueError):
    """Units do not fit."""


def size(unit):
    """Return kind and size of a unit."""
    if unit not in SIZES:
        raise Unfit(f"{unit!r} is no unit")
    return SIZES[unit]


def read(text):
    """Return the amount and the unit of parts such as "2 km 5 m", in the unit of the last part."""  #: !first
    """Return the amount and the unit of parts such as "2 km 5 m", in the unit of the first part."""  #: first
    text = text.lower()  #: fold
    words = text.replace("_", " ").split()
    if not words or len(words) % 2:
        raise Unfit("an amount and a unit are expected")
    pairs = [(int(words[i]), words[i + 1]) for i in range(0, len(words), 2)]
    unit = pairs[-1][1]  #: !first
    unit = pairs[0][1]  #: first
    base = sum(amount * size(name)[1] for amount, name in pairs)
    if len({size(name)[0] for _, name in pairs}) > 1:
        raise Unfit("the units are of different kinds")
    return divided(base, size(unit)[1]), unit


def divided(number, by):
    """Return a quotient, rounded down."""  #: !nearest
    """Return a quotient, rounded to the nearest, halves up."""  #: nearest
    return number // by  #: !nearest
    return (2 * number + by) // (2 * by)  #: nearest
'''
QUANTITY = '''
"""Quantities."""

from .table import SIZES, Unfit, divided, read, size


class $Quantity:
    """A whole number of a unit."""

    def __init__(self, amount, unit):
        size(unit)
        if amount < 0:  #: positive
            raise Unfit("an amount is not negative")  #: positive
        self.amount = amount
        self.unit = unit

    def base(self):
        """Return the amount in the smallest unit."""
        return self.amount * size(self.unit)[1]

    def to(self, unit):
        """Return the quantity in another unit."""
        self._same(unit)
        return $Quantity(divided(self.base(), size(unit)[1]), unit)

    def _same(self, unit):
        if size(unit)[0] != size(self.unit)[0]:
            raise Unfit(f"{self.unit} is no {unit}")

    def $plus(self, other, times=1):
        """Return the sum with a multiple of another, in the smaller unit."""  #: !own
        """Return the sum with a multiple of another, in the first one's unit."""  #: own
        self._same(other.unit)
        unit = min(self.unit, other.unit, key=lambda name: size(name)[1])  #: !own
        unit = self.unit  #: own
        total = self.base() + times * other.base()
        return $Quantity(divided(total, size(unit)[1]), unit)

    def $compare(self, other):
        """Return -1, 0 or 1: which of two is larger."""
        self._same(other.unit)
        return (self.base() > other.base()) - (self.base() < other.base())

    def best(self):
        """Return the quantity in the largest unit that keeps it exact."""
        kind, _ = size(self.unit)
        units = [name for name, (what, _) in SIZES.items() if what == kind]
        exact = [name for name in units if self.base() % size(name)[1] == 0]
        unit = max(exact, key=lambda name: size(name)[1])
        return self.to(unit)

    def $text(self):
        """Return the quantity in several units, the largest first, such as "1 h 5 min"."""
        kind, _ = size(self.unit)
        left, parts = abs(self.base()), []
        units = [(length, name) for name, (what, length) in SIZES.items() if what == kind]
        for length, name in sorted(units, reverse=True):
            count, left = divmod(left, length)
            if count > 0:
                parts.append(f"{count} {name}")
        parts = parts[:$most]  #: most
        sign = "-" if self.amount < 0 else ""
        return sign + " ".join(parts) if parts else f"0 {self.unit}"

    def split(self, count):
        """Return equal parts; what is left over goes to the first, one each."""
        if count < 1:
            raise Unfit("there is at least one part")
        each, more = divmod(self.amount, count)
        return [each + 1 if place < more else each for place in range(count)]


def $parse(text):
    """Return the quantity of a text."""
    return $Quantity(*read(text))


def $summed(texts):
    """Return the text of the sum of quantities."""
    first, *others = [$parse(text) for text in texts]
    for other in others:
        first = first.$plus(other)
    return first.$text()


def $ranked(texts):
    """Return texts by what they say, the smallest first; equal ones as they came."""  #: !down
    """Return texts by what they say, the largest first; equal ones as they came."""  #: down
    return sorted(texts, key=lambda text: $parse(text).base())  #: !down
    return sorted(texts, key=lambda text: -$parse(text).base())  #: down
'''


def case(rng, on, n):
    kinds = {"length": ("mm", "cm", "m", "km"), "mass": ("g", "kg"), "time": ("s", "min", "h")}
    kind = rng.choice(("length", "length", "time", "time", "mass"))
    units = kinds[kind]

    def made(low=0):
        unit = rng.choice(units)
        return f"{n['Quantity']}({rng.choice((rng.randint(low, 30), rng.randint(40, 5000)))}, {unit!r})"

    def text():
        one, two = rng.choice(units), rng.choice(units)
        start = (
            f"{rng.randint(1, 90)} {one}"
            if rng.random() < 0.5
            else f"{rng.randint(1, 9)}_{two} {rng.randint(1, 2500)} {one}"
        )
        return start.upper() if rng.random() < 0.07 else start

    what = rng.choice(
        (
            "to",
            "plus",
            "plus",
            "compare",
            "best",
            "text",
            "text",
            "split",
            "parse",
            "parse",
            "summed",
            "ranked",
            "bad",
        )
    )
    if what == "to":
        return "converting", f"q = {made()}.to({rng.choice(units)!r})\n[q.amount, q.unit]"
    if what == "plus":
        times = f", times={rng.choice((-1, 2, 3))}" if rng.random() < 0.5 else ""
        return "adding quantities", f"q = {made()}.{n['plus']}({made()}{times})\n[q.amount, q.unit]"
    if what == "compare":
        unit, other = units[0], units[1]
        pair = f"{n['Quantity']}({rng.randint(1, 3) * {'length': 10, 'mass': 1000, 'time': 60}[kind]}, {unit!r}), {n['Quantity']}({rng.randint(1, 3)}, {other!r})"
        return (
            "comparing",
            f"a, b = {pair}\n[a.{n['compare']}(b), b.{n['compare']}(a), a.{n['compare']}({made()})]",
        )
    if what == "best":
        return (
            "looking for the best unit",
            f"q = {n['Quantity']}({rng.randint(0, 12) * rng.choice((1, 10, 60, 1000))}, {units[0]!r}).best()\n[q.amount, q.unit]",
        )
    if what == "text":
        return "writing a quantity", f"{made(-9)}.{n['text']}()"
    if what == "split":
        return "splitting a quantity", f"{made()}.split({rng.randint(0, 6)})"
    if what == "parse":
        return "reading a quantity", f"q = {n['parse']}({text()!r})\n[q.amount, q.unit]"
    if what == "summed":
        return "adding texts", f"{n['summed']}({[text() for _ in range(rng.randint(1, 3))]})"
    if what == "ranked":
        same = rng.choice((["60 s", "1 min"], ["1000 g", "1 kg"], ["10 mm", "1 cm"]))
        return (
            "sorting texts",
            f"{n['ranked']}({[text() for _ in range(rng.randint(2, 4))] if rng.random() < 0.7 else [*same, same[0].replace(' ', '_')]})",
        )
    bad = rng.choice(("5", "", "3 m 4 kg", "2 x", "1 h 5", "7 KM"))
    return "a text is unusual", f"q = {n['parse']}({bad!r})\n[q.amount, q.unit]"


FAMILY = Family(
    name="units",
    summary="Quantities in whole numbers of units.",
    options=("fold", "first", "nearest", "positive", "own", "down", "most"),
    names={
        "pkg": ("measures", "quantity", "unitbox"),
        "Quantity": ("Quantity", "Measure", "Amount"),
        "plus": ("plus", "add"),
        "compare": ("compare", "versus"),
        "text": ("text", "written"),
        "parse": ("parse", "from_text"),
        "summed": ("summed", "sum_of"),
        "ranked": ("ranked", "in_order"),
        "most": (1, 2),
    },
    modules={"table": TABLE, "quantity": QUANTITY},
    rules="""
- Units are mm, cm, m, km; g, kg; s, min, h. Others, and kinds that do not fit together, raise Unfit.
- Texts have pairs of a whole number and a unit, with blanks or _ between them, and say their sum.
- A text is in the unit of its last pair.  #: !first
- A text is in the unit of its first pair.  #: first
- Units in texts may be in upper case.  #: fold
- Units in texts are in lower case, else Unfit is raised.  #: !fold
- Amounts that do not divide are rounded down.  #: !nearest
- Amounts that do not divide are rounded to the nearest whole number, halves up.  #: nearest
- Negative amounts raise Unfit.  #: positive
- Sums are in the smaller of the two units.  #: !own
- Sums are in the unit of the first quantity.  #: own
- $compare gives 1 if the first is larger, 0 if both are the same, else -1.
- best uses the largest unit in which the amount is a whole number.
- $text uses all units of which there is at least one, the largest first; 0 keeps its unit; - stands before all.
- $text has at most $most units, and drops what is smaller.  #: most
- split gives equal parts; what is left over goes to the first ones, one each. Fewer than one part raise Unfit.
- $ranked sorts by size, the smallest first.  #: !down
- $ranked sorts by size, the largest first.  #: down
- Texts of equal size stay in their order.
""",
    case=case,
)
