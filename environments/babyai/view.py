"""The agent's view as text. Places are counted from the agent, ahead and to its sides."""

from __future__ import annotations

from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

HEADINGS = ("east", "south", "west", "north")
DOOR_STATES = ("open", "closed", "locked")
THINGS = {"door", "key", "ball", "box"}
PASSABLE = {"empty", "floor", "goal"}


def describe(task, observation, info) -> str:
    """Render an observation of MiniGrid; has the form of ``GymnasiumTask.render``.

    Args:
        task: Anything whose ``env`` is the environment.
        observation: Its observation, with ``image``, ``direction`` and ``mission``.
        info: Not used.
    """
    seen = Sight(observation["image"])
    carried = task.env.unwrapped.carrying
    hands = f"carry a {carried.color} {carried.type}" if carried else "carry nothing"
    lines = [
        f"Mission: {observation['mission']}",
        f"You face {HEADINGS[int(observation['direction'])]} and {hands}.",
        f"Ahead: {seen.line(0, 1)}. Left: {seen.line(-1, 0)}. Right: {seen.line(1, 0)}.",
    ]
    things = seen.things()
    lines += ["You see:", *things] if things else ["You see no things."]
    return "\n".join(lines)


class Sight:
    """The cells in view. The agent is in the middle of the last row of the image and looks up in it.

    Args:
        image: Types, colours and states of the cells, of shape (columns, rows, 3).
    """

    def __init__(self, image) -> None:
        self.image = image
        self.columns, self.rows = image.shape[:2]

    def cell(self, right: int, ahead: int) -> tuple[str, str]:
        """Return the type of a cell, and its name."""
        column, row = self.columns // 2 + right, self.rows - 1 - ahead
        if not (0 <= column < self.columns and 0 <= row < self.rows):
            return "unseen", "unseen"
        kind, color, state = map(int, self.image[column, row])
        what = IDX_TO_OBJECT[kind]
        words = [DOOR_STATES[state]] if what == "door" else []
        return what, " ".join([*words, *[IDX_TO_COLOR[color]] * (what in THINGS), what])

    def line(self, right: int, ahead: int) -> str:
        """Return the number of free cells in a straight line from the agent, and the thing at their end."""
        free = 0
        while True:
            distance = free + 1
            what, name = self.cell(right * distance, ahead * distance)
            if what not in PASSABLE:
                break
            free += 1
        cells = f"{free} free cell{'s' * (free != 1)}"
        article = "an" if name.startswith("open") else "a"
        return cells if what == "unseen" else f"{cells}, then {article} {name}"

    def places(self) -> list[tuple[int, int]]:
        """Return the places of the things in view, as cells to the right and ahead, the nearest first."""
        columns, rows = range(-(self.columns // 2), self.columns // 2 + 1), range(self.rows)
        cells = [(right, ahead) for ahead in rows for right in columns if (right, ahead) != (0, 0)]
        found = [cell for cell in cells if self.cell(*cell)[0] in THINGS]
        return sorted(found, key=lambda cell: (abs(cell[0]) + cell[1], self._line_of(cell)))

    def place_of(self, column: int, row: int) -> tuple[int, int]:
        """Return the place of a cell of the image."""
        return int(column) - self.columns // 2, self.rows - 1 - int(row)

    def things(self) -> list[str]:
        """Return the things in view, the nearest first."""
        return list(map(self._line_of, self.places()))

    def _line_of(self, cell: tuple[int, int]) -> str:
        return f"- {self.cell(*cell)[1]}: {place(*cell)}"


def place(right: int, ahead: int) -> str:
    """Return a place in words, such as "2 ahead, 1 left"."""
    side = f"{abs(right)} {'right' if right > 0 else 'left'}"
    return ", ".join([f"{ahead} ahead"] * bool(ahead) + [side] * bool(right))
