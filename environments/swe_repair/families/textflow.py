"""Wrapping and aligning of text."""

from ..library import Family

WORDS = '''
"""Words of a text."""


def words(text):
    """Return the words of a text."""
    return [word for word in text.replace("-", "- ").split() if word]  #: hyphens
    return text.split()  #: !hyphens


def $cut(word, width):
    """Cut a word that is too long into pieces, each but the last with a mark at its end."""  #: mark
    """Cut a word that is too long into pieces."""  #: !mark
    pieces = []
    while len(word) > width:
        pieces.append(word[: width - 1] + "$sign")  #: mark
        word = word[width - 1 :]  #: mark
        pieces.append(word[:width])  #: !mark
        word = word[width:]  #: !mark
    return [*pieces, word]


def pad(line, width, side):
    """Fill a line up with blanks on its right, left, or both sides."""
    missing = max(0, width - len(line))
    if side == "left":
        return line + " " * missing
    if side == "right":
        return " " * missing + line
    before = missing // 2  #: !odd
    before = (missing + 1) // 2  #: odd
    return " " * before + line + " " * (missing - before)
'''
FLOW = '''
"""Lines of a text."""

from .words import $cut, pad, words


class $Flow:
    """Sets text in lines of a width."""

    def __init__(self, width, indent=0):
        if width - indent < 4:
            raise ValueError("the lines are too short")
        self.width = width
        self.indent = indent

    def $lines(self, text):
        """Return the lines of a paragraph."""
        found, line, left = [], "", self._room(0)
        for word in words(text):
            for piece in $cut(word, self.width - self.indent):
                gap = 1 if line and not line.endswith("-") else 0  #: hyphens
                gap = 1 if line else 0  #: !hyphens
                if line and len(line) + gap + len(piece) > left:
                    found.append(line)
                    line, left, gap = "", self._room(len(found)), 0
                line += " " * gap + piece
        if line:
            found.append(line)
        return [" " * (self.width - self._room(i)) + line for i, line in enumerate(found)]

    def _room(self, number):
        """Return how long a line may be; the first is indented."""  #: !hang
        """Return how long a line may be; all but the first are indented."""  #: hang
        return self.width - self.indent if number == 0 else self.width  #: !hang
        return self.width - self.indent if number > 0 else self.width  #: hang

    def $paragraphs(self, text):
        """Return the lines of all paragraphs, with an empty line between two."""
        found = []
        for part in text.split("\\n\\n"):
            lines = self.$lines(part)
            if found and lines:
                found.append("")
            found.extend(lines)
        return found[:$most]  #: most
        return found  #: !most

    def $aligned(self, text, side):
        """Return the lines filled up with blanks to the width."""
        if side not in ("left", "right", "center"):
            raise ValueError("the side is left, right or center")
        return [pad(line.strip(), self.width, side) for line in self.$lines(text)]

    def $justified(self, text):
        """Return lines of full width; the last stays as it is."""
        lines = self.$lines(text)
        return [self._spread(line) for line in lines[:-1]] + lines[-1:]

    def _spread(self, line):
        start = len(line) - len(line.lstrip())
        parts = line.split()
        if len(parts) == 1:
            return line
        missing = self.width - start - sum(len(part) for part in parts)
        each, more = divmod(missing, len(parts) - 1)
        spread = parts[0]
        for number, part in enumerate(parts[1:]):
            wide = number < more  #: early
            wide = number >= len(parts) - 1 - more  #: !early
            spread += " " * (each + (1 if wide else 0)) + part
        return " " * start + spread

    def longest(self, text):
        """Return number and length of the longest line; the first of equal ones; numbers start at 1."""
        sizes = [len(line.rstrip()) for line in self.$lines(text)]
        best = max(range(len(sizes)), key=lambda i: (sizes[i], -i))
        return [best + 1, sizes[best]]
'''
LETTERS = (
    "a",
    "on",
    "sun",
    "tree",
    "river",
    "garden",
    "evening",
    "mountains",
    "well-known",
    "up-to-date",
    "extraordinary",
)


def case(rng, on, n):
    def text(count=0):
        return " ".join(rng.choice(LETTERS) for _ in range(count or rng.randint(5, 12)))

    width, indent = rng.randint(8, 20), rng.choice((0, 0, 1, 2, 3, 4))
    new = f"f = {n['Flow']}({width}, indent={indent})\n"
    kind = rng.choice(
        (
            "lines",
            "lines",
            "paragraphs",
            "aligned",
            "justified",
            "justified",
            "longest",
            "cut",
            "small",
            "pad",
        )
    )
    if kind == "lines":
        return "wrapping a paragraph", f"{new}f.{n['lines']}({text()!r})"
    if kind == "paragraphs":
        parts = rng.choice(("\n\n", "\n\n", "\n", "\n\n\n\n")).join(text(rng.randint(2, 4)) for _ in range(3))
        return "wrapping several paragraphs", f"{new}f.{n['paragraphs']}({parts!r})"
    if kind == "aligned":
        side = rng.choice(("left", "right", "center", "center", "middle"))
        return f"aligning {side}", f"{new}f.{n['aligned']}({text()!r}, {side!r})"
    if kind == "justified":
        return "justifying lines", f"{new}f.{n['justified']}({text()!r})"
    if kind == "longest":
        return "looking for the longest line", f"{new}f.longest({text()!r})"
    if kind == "cut":
        return (
            "cutting a long word",
            f"{n['cut']}({rng.choice(LETTERS[5:]) * rng.randint(1, 2)!r}, {rng.randint(3, 9)})",
        )
    if kind == "pad":
        return (
            "padding with blanks",
            f"pad({rng.choice(LETTERS)!r}, {rng.randint(3, 12)}, {rng.choice(('left', 'right', 'center'))!r})",
        )
    return (
        "lines are short",
        f"{n['Flow']}({rng.randint(3, 6)}, indent={rng.randint(0, 2)}).{n['lines']}({text(3)!r})",
    )


FAMILY = Family(
    name="textflow",
    summary="Wraps, aligns and justifies text.",
    options=("hyphens", "mark", "odd", "hang", "most", "early"),
    names={
        "pkg": ("textflow", "wrapper", "typeset"),
        "Flow": ("Flow", "Wrapper", "Setter"),
        "cut": ("cut", "pieces"),
        "lines": ("lines", "wrap"),
        "paragraphs": ("paragraphs", "pages"),
        "aligned": ("aligned", "align"),
        "justified": ("justified", "justify"),
        "sign": ("~", "=", "+"),
        "most": (5, 6, 7),
    },
    modules={"words": WORDS, "flow": FLOW},
    rules="""
- Words are separated by blanks; runs of blanks count as one.
- A word may also be broken after each of its hyphens, which stays at the end of the line.  #: hyphens
- A word is not broken at its hyphens.  #: !hyphens
- A line has as many words as fit into the width.
- Words longer than the width less the indent are cut to that length; each piece but the last ends with $sign, which counts.  #: mark
- Words longer than the width less the indent are cut to that length.  #: !mark
- The first line is indented.  #: !hang
- All lines but the first are indented.  #: hang
- A width that leaves fewer than 4 characters beside the indent raises ValueError.
- Paragraphs are separated by an empty line, and are so in the result; empty ones are left out.
- At most $most lines of paragraphs are returned.  #: most
- A centered line has the odd blank on its right.  #: !odd
- A centered line has the odd blank on its left.  #: odd
- Aligned lines lose their indent. Unknown sides raise ValueError.
- Justified lines have their blanks spread evenly; the gaps further left get one more where needed.  #: early
- Justified lines have their blanks spread evenly; the gaps further right get one more where needed.  #: !early
- The last line is not justified, nor a line with one word.
""",
    case=case,
)
