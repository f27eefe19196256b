"""Generated problems: tables of goods, people or places, and questions about them with gold SQL.

Level and number determine a problem. The gold SQL runs on SQLite, MariaDB and MySQL. A draw is repeated if
its answer is not unique, or if its change has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from agentrl_env import ToolError

from .grading import flat, same_contents
from .problems import Problem, Table
from .sqlite import SqliteDatabase

FIRST = {"train": 0, "validation": 1_000_000, "test": 2_000_000}
"""Number of the first problem of a split."""
COUNT = {"train": 10_000, "validation": 1_000, "test": 1_000}
ADJECTIVES = (
    "amber", "azure", "black", "brass", "broad", "coral", "cream", "dusty", "faded", "green",
    "ivory", "light", "misty", "plain", "proud", "quiet", "royal", "rusty", "sandy", "sharp",
    "short", "silver", "small", "solid", "steel", "stone", "sunny", "swift", "white", "young",
)  # fmt: skip
MAX_ANSWERS = 8


@dataclass(frozen=True, slots=True)
class Theme:
    """Words of a table: its nouns, the column of groups with its words, two whole numbers, and a decimal."""

    table: str
    row: str
    """One of its rows."""
    nouns: list[str]
    group: str
    groups: list[str]
    first: str
    second: str
    decimal: str


THEMES = [
    Theme(table, row, nouns.split(), group, groups.split(), first, second, decimal)
    for table, row, nouns, group, groups, first, second, decimal in (
        ("goods", "item", "lamp chair table shelf mirror clock carpet vase", "room",
         "kitchen hall office bedroom", "stock", "weight", "price"),
        ("boats", "boat", "ferry canoe yacht barge tugboat cutter", "harbour",
         "Malo Vigo Kiel Bergen", "capacity", "length", "speed"),
        ("plants", "plant", "fern rose tulip cactus orchid lily poppy", "garden",
         "north south east west", "height", "width", "price"),
        ("books", "book", "atlas novel diary almanac primer manual", "shelf",
         "history science travel poetry", "length", "weight", "cost"),
        ("players", "player", "falcon badger otter heron lynx marten", "team",
         "reds blues greens whites", "height", "weight", "rating"),
        ("towns", "town", "bridge haven field wood ford mill", "region",
         "coast hills plain marsh", "population", "size", "rainfall"),
    )
]  # fmt: skip
SOLD = THEMES[:4]
"""The themes with rows that people can order."""
EXTREMES = {
    **dict.fromkeys(("height", "width", "length", "weight"), ("greatest", "smallest")),
    **dict.fromkeys(("capacity", "size", "stock", "population"), ("largest", "smallest")),
}
"""Column -> the adjectives of its highest and its lowest value, unless these are "highest" and "lowest"."""
PEOPLE = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "June")


@dataclass(frozen=True, slots=True)
class Draw:
    """The values for templates: a theme, its rows, and random words and numbers."""

    theme: Theme
    rows: list[tuple[str, str, int, int, float | None]]
    rng: np.random.Generator

    def called(self, name: str) -> str:
        return f"{self.theme.row} called {name}"

    def name(self) -> str:
        return self.rows[int(self.rng.integers(len(self.rows)))][0]

    def new_name(self) -> str:
        known = {row[0] for row in self.rows}
        return next(name for name in iter(lambda: _name(self.theme, self.rng), None) if name not in known)

    def number(self) -> str:
        return self.theme.first if self.rng.random() < 0.5 else self.theme.second

    def column(self) -> str:
        return str(self.rng.choice([self.theme.first, self.theme.second, self.theme.decimal]))

    def group(self) -> str:
        return str(self.rng.choice(self.theme.groups))

    def bound(self) -> int:
        return int(self.rng.integers(25, 75))

    def row(self) -> tuple[str, str, int, int, float]:
        low, high = self.rng.integers(1, 100, size=2)
        return self.new_name(), self.group(), int(low), int(high), _decimal(self.rng)


Template = Callable[[Draw], tuple[str, str]]
"""Returns a question and its gold SQL."""


def lookup(d: Draw) -> tuple[str, str]:
    name, column = d.name(), str(d.rng.choice([d.theme.group, d.theme.first, d.theme.second]))
    return (
        f"What is the {column} of the {d.called(name)}?",
        f"SELECT {column} FROM {d.theme.table} WHERE name = '{name}'",
    )


def update(d: Draw) -> tuple[str, str]:
    name, column, value = d.name(), d.number(), int(d.rng.integers(100, 200))
    return (
        f"Set the {column} of the {d.called(name)} to {value}.",
        f"UPDATE {d.theme.table} SET {column} = {value} WHERE name = '{name}'",
    )


def insert(d: Draw) -> tuple[str, str]:
    t, (name, group, first, second, decimal) = d.theme, d.row()
    return (
        f"Add {_a(d.called(name))} with {t.group} {group}, {t.first} {first}, {t.second} {second} and "
        f"{t.decimal} {decimal}.",
        f"INSERT INTO {t.table} VALUES ('{name}', '{group}', {first}, {second}, {decimal})",
    )


def delete(d: Draw) -> tuple[str, str]:
    name = d.name()
    return f"Delete the {d.called(name)}.", f"DELETE FROM {d.theme.table} WHERE name = '{name}'"


def count(d: Draw) -> tuple[str, str]:
    column, bound, t = d.number(), d.bound(), d.theme
    return (
        f"How many of the {t.table} have a {column} above {bound}?",
        f"SELECT COUNT(*) FROM {t.table} WHERE {column} > {bound}",
    )


def total(d: Draw) -> tuple[str, str]:
    column, group, t = d.number(), d.group(), d.theme
    return (
        f"What is the total {column} of the {t.table} whose {t.group} is {group}?",
        f"SELECT SUM({column}) FROM {t.table} WHERE {t.group} = '{group}'",
    )


def average(d: Draw) -> tuple[str, str]:
    t = d.theme
    column, bound, other = (t.decimal, d.bound(), d.number())
    return (
        f"What is the average {column} of the {t.table} with a {other} below {bound}? Round to two decimals. "
        f"Rows with no recorded {column} do not count.",
        f"SELECT ROUND(AVG({column}), 2) FROM {t.table} WHERE {other} < {bound}",
    )


def highest(d: Draw) -> tuple[str, str]:
    column, t = d.column(), d.theme
    function = "MAX" if d.rng.random() < 0.5 else "MIN"
    return (
        f"Which of the {t.table} has the {_best(column, function)} {column}? Give its name.",
        f"SELECT name FROM {t.table} WHERE {column} = (SELECT {function}({column}) FROM {t.table})",
    )


def listed(d: Draw) -> tuple[str, str]:
    column, bound, group, t = d.number(), d.bound(), d.group(), d.theme
    return (
        f"Which of the {t.table} whose {t.group} is {group} have a {column} below {bound}? Give all names.",
        f"SELECT name FROM {t.table} WHERE {t.group} = '{group}' AND {column} < {bound}",
    )


def missing(d: Draw) -> tuple[str, str]:
    t = d.theme
    return (
        f"Which of the {t.table} have no recorded {t.decimal}? Give all names.",
        f"SELECT name FROM {t.table} WHERE {t.decimal} IS NULL",
    )


def update_where(d: Draw) -> tuple[str, str]:
    column, group, by, t = d.number(), d.group(), int(d.rng.integers(2, 30)), d.theme
    return (
        f"Raise the {column} of all {t.table} whose {t.group} is {group} by {by}.",
        f"UPDATE {t.table} SET {column} = {column} + {by} WHERE {t.group} = '{group}'",
    )


def delete_where(d: Draw) -> tuple[str, str]:
    column, bound, group, t = d.number(), d.bound(), d.group(), d.theme
    return (
        f"Delete all {t.table} whose {t.group} is {group} and whose {column} is above {bound}.",
        f"DELETE FROM {t.table} WHERE {t.group} = '{group}' AND {column} > {bound}",
    )


def spent(d: Draw) -> tuple[str, str]:
    person, column, t = str(d.rng.choice(PEOPLE)), d.number(), d.theme
    return (
        f"What is the sum of amount times {column} over all of {person}'s orders?",
        f"SELECT SUM(o.amount * t.{column}) FROM orders o JOIN {t.table} t ON t.name = o.item "
        f"WHERE o.customer = '{person}'",
    )


def best_group(d: Draw) -> tuple[str, str]:
    t = d.theme
    grouped = f"SELECT SUM(o.amount) AS s, t.{t.group} AS g FROM orders o JOIN {t.table} t ON t.name = o.item"
    grouped += f" GROUP BY t.{t.group}"
    return (
        f"Which {t.group} has the largest total amount of ordered {t.table}?",
        f"SELECT g FROM ({grouped}) x WHERE s = (SELECT MAX(s) FROM ({grouped}) y)",
    )


def top_in_order(d: Draw) -> tuple[str, str]:
    column, t, n = d.column(), d.theme, int(d.rng.integers(3, 5))
    return (
        f"Give the names of the {n} {t.table} with the {_best(column)} {column}, the {_best(column)} first.",
        f"SELECT name FROM {t.table} ORDER BY {column} DESC LIMIT {n}",
    )


def never_ordered(d: Draw) -> tuple[str, str]:
    t, group = d.theme, d.group()
    return (
        f"Which {t.table} whose {t.group} is {group} were never ordered? Give all names.",
        f"SELECT name FROM {t.table} t WHERE {t.group} = '{group}' AND NOT EXISTS "
        "(SELECT 1 FROM orders o WHERE o.item = t.name)",
    )


def share(d: Draw) -> tuple[str, str]:
    column, t, bound = d.number(), d.theme, d.bound()
    return (
        f"What percentage of the orders is for {t.table} with a {column} above {bound}? Round to two "
        "decimals.",
        f"SELECT ROUND(100.0 * SUM(CASE WHEN t.{column} > {bound} THEN 1 ELSE 0 END) / COUNT(*), 2) "
        f"FROM orders o JOIN {t.table} t ON t.name = o.item",
    )


def above_average(d: Draw) -> tuple[str, str]:
    column, group, t = d.number(), d.group(), d.theme
    return (
        f"How many {t.table} have a {column} above the average {column} of those whose {t.group} is {group}?",
        f"SELECT COUNT(*) FROM {t.table} WHERE {column} > "
        f"(SELECT AVG({column}) FROM {t.table} WHERE {t.group} = '{group}')",
    )


def update_ordered(d: Draw) -> tuple[str, str]:
    person, column, t = str(d.rng.choice(PEOPLE)), d.number(), d.theme
    return (
        f"Set the {column} of everything that {person} ordered to 0.",
        f"UPDATE {t.table} SET {column} = 0 WHERE name IN "
        f"(SELECT item FROM orders WHERE customer = '{person}')",
    )


def delete_orders(d: Draw) -> tuple[str, str]:
    t, group, least = d.theme, d.group(), int(d.rng.integers(2, 6))
    return (
        f"Delete all orders with an amount below {least} for {t.table} whose {t.group} is {group}.",
        f"DELETE FROM orders WHERE amount < {least} AND item IN "
        f"(SELECT name FROM {t.table} WHERE {t.group} = '{group}')",
    )


def insert_orders(d: Draw) -> tuple[str, str]:
    t, person, group, n = d.theme, str(d.rng.choice(PEOPLE)), d.group(), int(d.rng.integers(1, 9))
    return (
        f"Add one order by {person}, with amount {n}, for each of the {t.table} whose {t.group} is {group}.",
        f"INSERT INTO orders SELECT '{person}', name, {n} FROM {t.table} WHERE {t.group} = '{group}'",
    )


TEMPLATES: dict[int, tuple[Template, ...]] = {
    1: (lookup, lookup, lookup, update, insert, delete),
    2: (count, total, average, highest, listed, missing, update_where, delete_where),
    3: (
        spent, best_group, top_in_order, never_ordered, share, above_average, update_ordered, delete_orders,
        insert_orders,
    ),
}  # fmt: skip
NUM_ROWS = {1: (6, 10), 2: (12, 20), 3: (15, 25)}
LISTS = frozenset({listed, missing, top_in_order, never_ordered})
"""Templates with several answers; all others have one."""


def numbers(split: str) -> range:
    """Return the numbers of the problems of a split."""
    return range(FIRST[split], FIRST[split] + COUNT[split])


def generate(level: int, number: int) -> Problem:
    """Return the problem of a level and a number."""
    rng = np.random.default_rng([level, number])
    while True:
        templates = TEMPLATES[level]
        template = templates[int(rng.integers(len(templates)))]
        problem = _draw(level, template, rng)
        if _sound(problem, single=template not in LISTS):
            return problem


def _draw(level: int, template: Template, rng: np.random.Generator) -> Problem:
    themes = SOLD if level == 3 else THEMES
    theme = themes[int(rng.integers(len(themes)))]
    size = int(rng.integers(*NUM_ROWS[level]))
    names = sorted({_name(theme, rng) for _ in range(size)})
    rng.shuffle(names)
    values = [rng.permutation(99)[: len(names)] + 1 for _ in range(2)]
    rows = [
        (name, str(rng.choice(theme.groups)), int(a), int(b), _decimal(rng))
        for name, a, b in zip(names, *values, strict=True)
    ]
    if level > 1:
        rows = [(*row[:4], None if rng.random() < 0.15 else row[4]) for row in rows]
    columns = [("name", "TEXT"), (theme.group, "TEXT"), (theme.first, "INTEGER"), (theme.second, "INTEGER")]
    tables = [Table(theme.table, [*columns, (theme.decimal, "DOUBLE")], rows)]
    if level == 3:
        orders = [
            (str(rng.choice(PEOPLE)), names[int(rng.integers(len(names)))], int(rng.integers(1, 9)))
            for _ in range(int(rng.integers(20, 40)))
        ]
        tables.append(
            Table("orders", [("customer", "TEXT"), ("item", "TEXT"), ("amount", "INTEGER")], orders)
        )
    question, gold = template(Draw(theme, rows, rng))
    return Problem(
        question=question,
        tables=tables,
        gold=gold,
        writes=not gold.startswith("SELECT"),
        ordered=template is top_in_order,
    )


def _sound(problem: Problem, *, single: bool) -> bool:
    """Return True if a problem's answer exists and is unique, or its change has an effect."""
    database = SqliteDatabase(problem.tables)
    try:
        rows, contents = database.trial(problem.gold or "")
        if problem.writes:
            return not same_contents(contents, database.contents())
        answers = flat(rows)
        if problem.ordered and _tied(problem.gold or "", problem.tables[0].name, database):
            return False
        right = len(answers) == 1 if single else 1 <= len(answers) <= MAX_ANSWERS
        return right and None not in answers
    except ToolError:
        return False
    finally:
        database.close()


def _tied(gold: str, table: str, database: SqliteDatabase) -> bool:
    """Return True if rows of an ordered answer have equal numbers, or no number."""
    words = gold.split()
    column, limit = words[words.index("BY") + 1], int(words[-1])
    sql = f"SELECT {column} FROM {table} ORDER BY {column} DESC LIMIT {limit + 1}"
    top = flat(database.trial(sql)[0])
    return None in top or len(set(top)) < len(top)


def _best(column: str, function: str = "MAX") -> str:
    """Return the adjective of the highest value of a column, or of the lowest one."""
    most, least = EXTREMES.get(column, ("highest", "lowest"))
    return most if function == "MAX" else least


def _a(noun: str) -> str:
    """Return a noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _name(theme: Theme, rng: np.random.Generator) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(theme.nouns)}"


def _decimal(rng: np.random.Generator) -> float:
    return int(rng.integers(100, 10_000)) / 100
