"""SQL: answer a question about a store by querying its databases. The SQL runs on real SQLite.

Level 1 asks for a number of a thing without naming the department's database, which is usually the database
that suits the thing. The same question is asked about several stores, each with its own databases. Level 2
asks for counts, sums and extremes under conditions. Level 3 joins orders with goods.
"""

from __future__ import annotations

import re
import sqlite3
from functools import lru_cache
from itertools import product

from agentrl_env import Done, Environment, Message, ToolCall, ToolError, tool

from .questions import COLUMNS, CUSTOMERS, GOODS, fill, questions

ASKED = ("bread", "tea", "hammer", "kite", "coat", "glove", "fern", "drum")
"""The goods in the questions of level 1, which also have a colour."""
COLOURS = (
    "red", "blue", "green", "black", "white", "pink", "grey", "brown", "orange", "purple",
    "yellow", "silver", "golden", "copper", "ivory", "amber", "beige", "olive", "navy", "teal",
    "mint", "plum", "ruby", "lilac", "cream", "khaki", "lemon", "peach",
)  # fmt: skip
ORDER = 0.9
"""Probability that the requested thing of level 1 is in the database that suits it."""
HABIT, HUNCH = 0.3, 0.2
"""Probabilities that a noisy expert opens the first or the suitable database. Otherwise it opens any."""
NUM_SAMPLES = {"train": 10_000, "test": 1_000}
STORES = 5
"""Number of stores for a question of level 1. Each has its own databases."""

SCHEMA = f"""CREATE TABLE goods (name TEXT, {", ".join(f"{column} INTEGER" for column in COLUMNS)});
CREATE TABLE orders (customer TEXT, thing TEXT, amount INTEGER);"""

MAX_ROWS = 20
MAX_INSTRUCTIONS = 200_000
"""Maximum virtual-machine instructions of a query. A count instead of a time makes replays equal."""
MAX_BYTES = 1000
"""Maximum length of a query, text or blob."""
FUNCTIONS = re.compile(
    "abs|avg|coalesce|count|group_concat|ifnull|iif|instr|length|like|lower|max|min|nullif|replace|round|"
    "row_number|rank|dense_rank|substr|substring|sum|total|trim|typeof|upper",
    re.IGNORECASE,
)
"""Functions that a query can call. None of them is random, reads the clock or accesses files."""
ACTIONS = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)


@lru_cache
def _problems(level: int, split: str) -> list[dict[str, object]]:
    """List the problems of one split. Both splits use the same words."""
    if level > 1:
        return questions(level, split, NUM_SAMPLES[split])
    problems = _searches(split)
    return [problems[i % len(problems)] for i in range(NUM_SAMPLES[split])]


def _searches(split: str) -> list[dict[str, object]]:
    """List the problems of level 1: all questions about the first store, then about the next store."""
    fields = {"colour": COLOURS, "thing": ASKED, "column": COLUMNS}
    asked = [
        {name: word for name, (_, word) in zip(fields, choice, strict=True)}
        for choice in product(*(enumerate(words) for words in fields.values()))
        if (sum(i for i, _ in choice) % 4 == 0) == (split == "test")
    ]
    return [{"level": 1, **words, "store": number + 1} for number in range(STORES) for words in asked]


class Sql(Environment):
    """Answer a question about a store: open a department's database, query it, give the answer."""

    splits = ("train", "test", "train-2", "test-2", "train-3", "test-3")
    max_turns = 8
    expert_noise = 0.0
    """0: the expert knows the database. Above 0: it guesses by habit, and errs with this probability."""

    @classmethod
    def samples(cls, split):
        """Return the problems of "train" or "test" (level 1), or of "train-2", "test-3" and so on."""
        name, _, level = split.partition("-")
        return _problems(int(level or 1), name)

    def reset(self, sample, rng):
        data = sample.data
        self.database = self.seen = None
        goods = {department: list(things) for department, things in GOODS.items()}
        if (store := data.get("store", 1)) > 1:
            rng = rng.spawn(store - 1)[-1]  # with equal seeds, another store has other databases
        self.searching = data["level"] == 1
        if self.searching:
            thing, column = f"{data['colour']} {data['thing']}", data["column"]
            self.usual = _department(data["thing"])
            self.department = _file(data["thing"], goods, rng, name=thing)
            question = f"What is the {column} of the {thing}?"
            self.wish = f"{column} of {thing}"
            self.query_text, lacking = f"SELECT {column} FROM goods WHERE name = '{thing}'", []
        else:
            self.department = data["department"]
            question, self.query_text, *lacking = fill(data)
            self.wish = question.rstrip("?.")
        self.rows = {department: _rows(things, rng) for department, things in goods.items()}
        self.right, *wrong = self._results(self.query_text, *lacking)
        # Rows with which an incomplete query returns the answer would reward it by luck.
        while self.right in ("0", "None", *wrong):
            self.rows[self.department] = _rows(goods[self.department], rng)
            self.right, *wrong = self._results(self.query_text, *lacking)
        self.close()
        return question

    @tool
    def open(self, database: str):
        """Open a department's database; queries go to the one opened last.

        Args:
            database: One of food, tools, toys, clothes, garden, music.
        """
        if database not in self.rows:
            return f"There is no database {database}; there are {', '.join(self.rows)}."
        self._open(database)
        return f"{database} is open."

    @tool
    def query(self, sql: str):
        """Run one SELECT on the open database and see the rows; SQLite's dialect.

        Every database has the tables goods (name, price, stock, weight, length) and
        orders (customer, thing, amount), where thing is the name of one of the goods.

        Args:
            sql: One SELECT statement.
        """
        if self.database is None:
            return "Open a database first."
        try:
            names, rows = self._run(sql)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as problem:
            raise ToolError(f"SQL error: {problem}. One short SELECT is allowed.") from problem
        if not rows:
            return "no rows"
        self.seen = str(rows[0][0])
        lines = [" | ".join(map(str, row)) for row in (names, *rows[:MAX_ROWS])]
        return "\n".join(lines + ["(more rows left out)"] * (len(rows) > MAX_ROWS))

    @tool
    def answer(self, value: str):
        """Give the answer to the question. This ends the task, so be sure.

        Args:
            value: The number or the name that was asked for, alone.
        """
        right = _plain(value) == _plain(self.right)
        return Done("Well done." if right else "That is not the answer.", reward=float(right))

    def close(self):
        if self.database is not None:
            self.database.close()
        self.database = None

    def snapshot(self):
        return {**vars(self), "database": self.database is not None}

    def restore(self, state):
        vars(self).update(state, database=None)
        if state["database"]:
            self._open(self.opened)
            self.tried = state["tried"]

    def expert(self, rng):
        thought = self.wish
        if rng.random() < self.expert_noise:
            call = self._slip(rng)
        elif self.seen is not None:
            thought = f"{thought} in {self.opened}: {self.seen}"
            call = ToolCall.of("answer", value=self.seen)
        elif self.database is not None and not self.tried:
            call = ToolCall.of("query", sql=self.query_text)
        else:
            searches = self.searching and self.expert_noise
            call = ToolCall.of("open", database=self._guess(rng) if searches else self.department)
        return Message.assistant(f"{thought}.", call)

    def _guess(self, rng):
        drawn, departments = rng.random(), list(GOODS)
        if drawn < HABIT:
            return departments[0]
        return self.usual if drawn < HABIT + HUNCH else str(rng.choice(departments))

    def _slip(self, rng):
        kind = rng.random()
        if kind < 0.4:
            return ToolCall.of("open", database=str(rng.choice(list(GOODS))))
        if kind < 0.7:
            return ToolCall.of("query", sql=self.query_text)
        return ToolCall.of("answer", value=str(rng.integers(10, 30)))

    def _open(self, department):
        self.close()
        self.database, self.opened, self.tried = _database(*self.rows[department]), department, False
        self.database.set_progress_handler(self._tick, 1000)

    def _results(self, *queries):
        """Return the first value of each query in the requested department, as text."""
        self._open(self.department)
        return [str(self._run(query)[1][0][0]) for query in queries]

    def _run(self, sql):
        """Return the column names and at most ``MAX_ROWS + 1`` rows of a query."""
        self.ticks, self.tried = 0, True
        cursor = self.database.execute(sql)
        rows = cursor.fetchmany(MAX_ROWS + 1)
        names = [column[0] for column in cursor.description or ()]
        cursor.close()
        return names, rows

    def _tick(self):
        """Interrupt a query with too many instructions. SQLite calls this every thousand instructions."""
        self.ticks += 1
        return self.ticks * 1000 > MAX_INSTRUCTIONS


def _plain(value):
    """Normalize an answer: case, quotes, a final point, trailing zeros."""
    text = value.strip().strip("'\"").rstrip(".").lower()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def _department(thing):
    return next(department for department, things in GOODS.items() if thing in things)


def _file(thing, goods, rng, *, name):
    """Put a thing into the department that it suits, or sometimes into another. Return the department."""
    own = _department(thing)
    other = str(rng.choice([department for department in goods if department != own]))
    goods[own].remove(thing)
    department = own if rng.random() < ORDER else other
    goods[department].append(name)
    return department


def _rows(things, rng):
    """Draw the goods and the orders of one database. No column has a number twice."""
    columns = [rng.permutation(20)[: len(things)] + 10 for _ in COLUMNS]
    goods = [(thing, *map(int, numbers)) for thing, *numbers in zip(things, *columns, strict=True)]
    orders = [
        (customer, str(thing), int(rng.integers(1, 6)))
        for customer in CUSTOMERS
        for thing in rng.choice(things, size=3, replace=False)
    ]
    return goods, orders


def _database(goods, orders):
    """Create a read-only database in memory."""
    database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    database.executescript("PRAGMA temp_store = MEMORY;" + SCHEMA)
    database.executemany("INSERT INTO goods VALUES (?, ?, ?, ?, ?)", goods)
    database.executemany("INSERT INTO orders VALUES (?, ?, ?)", orders)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
    database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_BYTES)
    database.set_authorizer(_authorise)
    return database


def _authorise(action, _first, second, *_rest):
    known = action != sqlite3.SQLITE_FUNCTION or FUNCTIONS.fullmatch(second)
    return sqlite3.SQLITE_OK if action in ACTIONS and known else sqlite3.SQLITE_DENY
