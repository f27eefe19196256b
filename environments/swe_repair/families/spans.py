"""Sets of spans of whole numbers."""

from ..library import Family

ALGEBRA = '''
"""Operations on lists of spans; a span is a pair of its start and its end."""


def checked(start, end):
    """Return a span with its ends in order."""  #: !strict
    """Return a span; raise ValueError if its end comes before its start."""  #: strict
    if start > end:
        raise ValueError("a span ends after it starts")  #: strict
        start, end = end, start  #: !strict
    return [start, end]


def size(span):
    """Return how many whole numbers a span has."""
    start, end = span
    return end - start + 1  #: closed
    return end - start  #: !closed


def $merge(spans):
    """Return the same numbers as spans that are apart, in order."""
    merged = []
    for start, end in sorted(spans):
        if size([start, end]) < $shortest:  #: short
            continue  #: short
        if merged and start <= merged[-1][1] + $near:  #: near
        if merged and start <= merged[-1][1]:  #: !near
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def common(left, right):
    """Return the spans of the numbers that are in both of two merged lists."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start <= end:  #: closed
        if start < end:  #: !closed
            found.append([start, end])
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found
'''
HOLDER = '''
"""The set of spans."""

from .algebra import checked, common, $merge, size


class $Holder:
    """Numbers, kept as spans."""

    def __init__(self, spans=()):
        self._spans = []
        for start, end in spans:
            self.$add(start, end)

    def $add(self, start, end):
        """Add the numbers of a span."""
        self._spans = $merge([*self._spans, checked(start, end)])

    def $remove(self, start, end):
        """Take the numbers of a span away."""
        start, end = checked(start, end)
        step = 1  #: closed
        step = 0  #: !closed
        kept = []
        for low, high in self._spans:
            if high < start or low > end:
                kept.append([low, high])
                continue
            if low < start:
                kept.append([low, start - step])
            if high > end:
                kept.append([end + step, high])
        self._spans = kept

    def __contains__(self, number):
        return any(start <= number <= end for start, end in self._spans)  #: closed
        return any(start <= number < end for start, end in self._spans)  #: !closed

    def spans(self):
        """Return the spans, the first first."""  #: !longest
        """Return the spans, the longest first and of equal ones the first first."""  #: longest
        return [list(span) for span in self._spans]  #: !longest
        return sorted(map(list, self._spans), key=lambda span: (-size(span), span[0]))  #: longest

    def total(self):
        """Return how many numbers there are."""
        return sum(size(span) for span in self._spans)

    def $gaps(self):
        """Return the spans of the numbers between the spans."""
        step = 1  #: closed
        step = 0  #: !closed
        pairs = zip(self._spans, self._spans[1:])
        return [[before[1] + step, after[0] - step] for before, after in pairs]

    def common(self, other):
        """Return the spans of the numbers that this set and another one have."""
        return common(self._spans, other._spans)

    def moved(self, by):
        """Return a set with every span moved."""
        moved = [[start + by, end + by] for start, end in self._spans]
        return $Holder([span for span in moved if span[0] >= 0])  #: floor
        return $Holder(moved)  #: !floor
'''


def case(rng, on, n):
    def pair():
        start = rng.randint(0, 18)
        end = start + rng.randint(0, 7)
        return (end, start) if rng.random() < 0.08 else (start, end)

    spans = sorted(pair() for _ in range(rng.randint(2, 4)))
    code = f"s = {n['Holder']}({spans})\n"
    kind = rng.choice(("listing", "total", "remove", "contains", "gaps", "common", "moved", "touch"))
    if kind == "listing":
        return "listing spans after adding one", f"{code}s.{n['add']}{pair()}\ns.spans()"
    if kind == "total":
        return "counting the numbers", f"{code}s.total()"
    if kind == "remove":
        return "a part is taken away", f"{code}s.{n['remove']}{pair()}\n[s.spans(), s.total()]"
    if kind == "contains":
        return "asking which numbers are in", f"{code}[k for k in range(30) if k in s]"
    if kind == "gaps":
        return "asking for the gaps", f"{code}s.{n['gaps']}()"
    if kind == "common":
        others = [pair() for _ in range(2)]
        return "comparing two sets", f"{code}s.common({n['Holder']}({others}))"
    if kind == "moved":
        return "moving all spans", f"{code}s.moved({rng.randint(-9, 6)}).spans()"
    start, apart = rng.randint(0, 9), rng.randint(0, 3)
    touching = [(start, start + 3), (start + 3 + apart, start + 8)]
    return "adding spans that are near one another", f"{n['Holder']}({touching}).spans()"


FAMILY = Family(
    name="spans",
    summary="Sets of whole numbers, kept as spans.",
    options=("closed", "strict", "near", "short", "longest", "floor"),
    names={
        "pkg": ("spans", "ranges", "stretches"),
        "Holder": ("SpanSet", "Spans", "Coverage"),
        "merge": ("merge", "join", "unite"),
        "add": ("add", "insert", "include"),
        "remove": ("remove", "cut", "exclude"),
        "gaps": ("gaps", "holes"),
        "near": (1, 2),
        "shortest": (2, 3),
    },
    modules={"algebra": ALGEBRA, "holder": HOLDER},
    rules="""
- A span is a start and an end; the end is one of its numbers.  #: closed
- A span is a start and an end; the end is not one of its numbers.  #: !closed
- A span whose end comes before its start raises ValueError.  #: strict
- A span whose end comes before its start is turned around.  #: !strict
- Spans that overlap, or share an end, become one.  #: !near
- Spans become one if they overlap or the next start is at most $near after the end.  #: near
- Spans with fewer than $shortest numbers are dropped before spans are joined.  #: short
- Listed are the spans in order of their starts.  #: !longest
- Listed are the longest spans first, of equal ones the one that starts first.  #: longest
- Gaps are listed in the same form as spans, between each span and the next.
- Spans that a move brings below zero, if only in part, are dropped.  #: floor
- Taking away leaves what lies before and after. What is common is listed in order.
""",
    case=case,
)
