"""Matrices of whole numbers."""

from ..library import Family

SHAPES = '''
"""Reading rows and moving them."""


def checked(rows):
    """Return a copy of rows of one length."""
    rows = [list(row) for row in rows]
    if not rows or not rows[0]:
        raise ValueError("a matrix has at least one number")
    width = max(len(row) for row in rows)
    for row in rows:
        if len(row) < width:
            raise ValueError("the rows have different lengths")  #: !fill
            row.extend([$filler] * (width - len(row)))  #: fill
    return rows


def $turn(rows, times):
    """Turn by a quarter, clockwise."""  #: clockwise
    """Turn by a quarter, counterclockwise."""  #: !clockwise
    for _ in range(times % 4):
        rows = [list(column) for column in zip(*rows[::-1])]  #: clockwise
        rows = [list(column) for column in zip(*rows)][::-1]  #: !clockwise
    return rows


def shift(row, by):
    """Move the numbers of a row to the right."""
    by = by % len(row)  #: wrap
    by = max(-len(row), min(by, len(row)))  #: !wrap
    if by < 0:  #: !wrap
        return row[-by:] + [0] * -by  #: !wrap
    return row[-by:] + row[:-by] if by else list(row)  #: wrap
    return [0] * by + row[: len(row) - by]  #: !wrap
'''
MATRIX = '''
"""The matrix."""

from .shapes import checked, $turn, shift

FIRST = 1  #: ones
FIRST = 0  #: !ones


class $Matrix:
    """Rows of whole numbers, which are not changed."""

    def __init__(self, rows):
        self.rows = checked(rows)
        self.height = len(self.rows)
        self.width = len(self.rows[0])

    def $at(self, row, column):
        """Return a number by its row and column."""
        row, column = row - FIRST, column - FIRST
        if not 0 <= row < self.height or not 0 <= column < self.width:
            raise IndexError("there is no such place")
        return self.rows[row][column]

    def plus(self, other, times=1):
        """Return the sum with a multiple of another matrix of the same shape."""
        if (self.height, self.width) != (other.height, other.width):
            raise ValueError("the shapes differ")
        pairs = zip(self.rows, other.rows)
        return $Matrix([[a + times * b for a, b in zip(left, right)] for left, right in pairs])

    def times(self, other):
        """Return the product with another matrix."""
        if self.width != other.height:
            raise ValueError("the shapes do not fit")
        columns = list(zip(*other.rows))
        return $Matrix([[sum(a * b for a, b in zip(row, column)) for column in columns] for row in self.rows])

    def $turned(self, times=1):
        """Return the matrix turned by quarters."""
        return $Matrix($turn(self.rows, times))

    def shifted(self, by, row=None):
        """Return the matrix with one row, or all, moved to the right."""
        chosen = range(self.height) if row is None else [row - FIRST]
        rows = [shift(line, by) if i in chosen else line for i, line in enumerate(self.rows)]
        return $Matrix(rows)

    def part(self, top, left, bottom, right):
        """Return the rows and columns from the first to the last one that is named."""
        rows = self.rows[top - FIRST : bottom - FIRST + 1]
        return $Matrix([row[left - FIRST : right - FIRST + 1] for row in rows])

    def $around(self, row, column):
        """Return the sum of the numbers next to a place."""
        row, column = row - FIRST, column - FIRST
        total = 0
        for i in range(max(0, row - 1), min(self.height, row + 2)):
            for j in range(max(0, column - 1), min(self.width, column + 2)):
                if (i, j) == (row, column):
                    continue
                if abs(i - row) + abs(j - column) > 1:  #: cross
                    continue  #: cross
                total += self.rows[i][j]
        return total

    def diagonal(self):
        """Return the numbers from the upper left on."""  #: !anti
        """Return the numbers from the upper right on."""  #: anti
        size = min(self.height, self.width)
        return [self.rows[i][i] for i in range(size)]  #: !anti
        return [self.rows[i][self.width - 1 - i] for i in range(size)]  #: anti

    def largest(self):
        """Return value, row and column of the largest number; of equal ones the first, by rows."""
        places = [(i, j) for i in range(self.height) for j in range(self.width)]
        row, column = max(places, key=lambda place: (self.rows[place[0]][place[1]], -place[0], -place[1]))
        return [self.rows[row][column], row + FIRST, column + FIRST]
'''


def case(rng, on, n):
    def rows(height=None, width=None):
        height, width = height or rng.randint(1, 4), width or rng.randint(1, 4)
        return [[rng.randint(-3, 9) for _ in range(width)] for _ in range(height)]

    first = 1 if "ones" in on else 0
    grid = rows(rng.randint(2, 4), rng.randint(2, 4))
    high, wide = len(grid), len(grid[0])
    m, new = f"m = {n['Matrix']}({grid})\n", n["Matrix"]
    row, column = rng.randint(0, high - 1) + first, rng.randint(0, wide - 1) + first
    kind = rng.choice(
        ("at", "plus", "times", "turn", "shift", "part", "around", "diagonal", "largest", "ragged")
    )
    if kind == "at":
        row, column = row + rng.choice((-1, 0, 0, 1)), column + rng.choice((-1, 0, 0, 1))
        return "reading a number", f"{m}m.{n['at']}({row}, {column})"
    if kind == "plus":
        other = rows(high, wide) if rng.random() < 0.8 else rows()
        return "adding matrices", f"{m}m.plus({new}({other}), {rng.randint(-2, 3)}).rows"
    if kind == "times":
        other = rows(wide) if rng.random() < 0.8 else rows()
        return "multiplying matrices", f"{m}m.times({new}({other})).rows"
    if kind == "turn":
        return "turning a matrix", f"{m}m.{n['turned']}({rng.randint(-2, 5)}).rows"
    if kind == "shift":
        where = f", row={row}" if rng.random() < 0.6 else ""
        return "moving rows", f"{m}m.shifted({rng.randint(-5, 6)}{where}).rows"
    if kind == "part":
        end = rng.randint(row, high - 1 + first), rng.randint(column, wide - 1 + first)
        return "taking a part", f"{m}m.part({row}, {column}, {end[0]}, {end[1]}).rows"
    if kind == "around":
        return "adding up neighbours", f"{m}m.{n['around']}({row}, {column})"
    if kind == "diagonal":
        return "taking the diagonal", f"{m}m.diagonal()"
    if kind == "largest":
        return "looking for the largest number", f"{m}m.largest()"
    ragged = rng.choice(([], [[]], [row[: rng.randint(0, wide)] for row in grid]))
    return "rows are incomplete", f"{new}({ragged}).rows"


FAMILY = Family(
    name="matrix",
    summary="Matrices of whole numbers.",
    options=("fill", "clockwise", "wrap", "ones", "cross", "anti"),
    names={
        "pkg": ("matrices", "grids", "tables"),
        "Matrix": ("Matrix", "Grid", "Table"),
        "turn": ("turn", "rotate"),
        "turned": ("turned", "rotated"),
        "at": ("at", "number", "get"),
        "around": ("around", "neighbours", "nearby"),
        "filler": (1, 2, 7),
    },
    modules={"shapes": SHAPES, "matrix": MATRIX},
    rules="""
- A matrix has at least one number, else ValueError is raised.
- Rows that are shorter than the longest are filled up with $filler.  #: fill
- Rows of different lengths raise ValueError.  #: !fill
- Rows and columns are counted from 1.  #: ones
- Rows and columns are counted from 0.  #: !ones
- Places outside raise IndexError in $at. Matrices whose shapes do not fit raise ValueError.
- $turned turns clockwise by quarters, a negative number the other way.  #: clockwise
- $turned turns counterclockwise by quarters, a negative number the other way.  #: !clockwise
- shifted moves to the right, a negative number to the left; what leaves the row comes in again.  #: wrap
- shifted moves to the right, a negative number to the left; zeros come in.  #: !wrap
- part includes the last row and column that are named.
- $around adds the four neighbours that exist, not the place itself.  #: cross
- $around adds the eight neighbours that exist, not the place itself.  #: !cross
- The diagonal begins at the upper left and ends at the last row or column.  #: !anti
- The diagonal begins at the upper right and ends at the last row or column.  #: anti
- largest returns value, row, column; of equal numbers the one in the first row, then in the first column.
""",
    case=case,
)
