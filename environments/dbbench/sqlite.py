"""SQLite in memory: one isolated database for each episode."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence

from agentrl_env import ToolError

from .problems import Contents, Problem, Rows, Table

MAX_INSTRUCTIONS = 300_000
"""Maximum virtual-machine instructions of a statement. A count instead of a time makes replays equal."""
MAX_BYTES = 2000
"""Maximum length of a value, unless a table has longer values."""
MAX_SQL = 20_000
"""Maximum length of a statement."""
MAX_PAGES = 2048
"""Maximum size of a database, in pages of 4 KiB."""
TICK = 1000
FUNCTIONS = re.compile(
    "abs|avg|char|coalesce|count|cume_dist|dense_rank|first_value|group_concat|hex|ifnull|iif|instr|"
    "lag|last_value|lead|length|like|lower|ltrim|max|min|nth_value|ntile|nullif|percent_rank|quote|rank|"
    "replace|round|row_number|rtrim|sign|substr|substring|sum|total|trim|typeof|unicode|upper",
    re.IGNORECASE,
)
"""Functions that a statement can call. None of them is random, reads the clock or accesses files.

printf and format are excluded, because a single call can take minutes in one instruction.
"""
READS = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
WRITES = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})
PRAGMAS = frozenset({"table_info", "table_xinfo", "table_list"})


class SqliteDatabase:
    """A database in memory. Statements can only read and change the rows of its tables."""

    dialect = "SQLite"

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        self._known = {table.name.lower() for table in tables}
        self._ticks = 0
        self._database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._database.executescript(f"PRAGMA temp_store = MEMORY; PRAGMA max_page_count = {MAX_PAGES};")
        longest = MAX_BYTES
        for table in tables:
            columns = ", ".join(f"{quoted(name)} {_type(kind)}" for name, kind in table.columns)
            self._database.execute(f"CREATE TABLE {quoted(table.name)} ({columns})")
            marks = ", ".join("?" * len(table.columns))
            self._database.executemany(f"INSERT INTO {quoted(table.name)} VALUES ({marks})", table.rows)
            longest = max([longest, *(2 * len(str(value).encode()) for row in table.rows for value in row)])
        self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
        self._database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, max(longest, MAX_SQL))
        self._database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        self._database.set_progress_handler(self._tick, TICK)
        self._database.set_authorizer(self._authorize)

    def run(self, sql: str, limit: int) -> tuple[list[str], Rows, int]:
        """Run a statement. Return its columns' names, at most ``limit`` rows, and the number of changed rows.

        Raises ToolError if it fails. Its changes are then undone.
        """
        try:
            return self._run(sql, limit)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            raise ToolError(f"SQL error: {error}") from error

    def trial(self, sql: str) -> tuple[Rows, Contents]:
        """Run SQL of the task itself, return its rows and the tables after it, and undo it.

        Raises ToolError if it fails.
        """
        self._database.set_authorizer(None)
        try:
            self._database.execute("BEGIN")
            rows: Rows = []
            for statement in split(sql):
                rows = self.run(statement, -1)[1]
            return rows, self.contents()
        finally:
            self._database.execute("ROLLBACK")
            self._database.set_authorizer(self._authorize)

    def contents(self) -> Contents:
        """Return the rows of every table."""
        self._ticks = -10 * MAX_INSTRUCTIONS // TICK
        return {
            table.name: self._database.execute(f"SELECT * FROM {quoted(table.name)}").fetchall()
            for table in self.tables
        }

    def close(self) -> None:
        """Discard the database."""
        self._database.close()

    def _run(self, sql: str, limit: int) -> tuple[list[str], Rows, int]:
        self._ticks = 0
        try:
            cursor = self._database.execute(sql)
        except sqlite3.OperationalError:
            if "\\'" not in sql:
                raise
            cursor = self._database.execute(sql.replace("\\'", "''"))  # as MySQL writes it
        try:
            rows = cursor.fetchall() if limit < 0 else cursor.fetchmany(limit)
            return [column[0] for column in cursor.description or ()], rows, cursor.rowcount
        finally:
            cursor.close()

    def _tick(self) -> bool:
        self._ticks += 1
        return self._ticks * TICK > MAX_INSTRUCTIONS

    def _authorize(self, action: int, first: str | None, second: str | None, *_: object) -> int:
        allowed = (
            (
                action in READS
                and (action != sqlite3.SQLITE_FUNCTION or bool(FUNCTIONS.fullmatch(second or "")))
            )
            or (action in WRITES and (first or "").lower() in self._known)
            or (action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in PRAGMAS)
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def solve(problem: Problem) -> tuple[Rows, Contents]:
    """Return the rows of a problem's gold SQL, and the tables after it, from a separate database."""
    database = SqliteDatabase(problem.tables)
    try:
        return database.trial(problem.gold or "")
    finally:
        database.close()


def quoted(name: str) -> str:
    """Return a name quoted for SQLite."""
    return '"' + name.replace('"', '""') + '"'


def split(sql: str) -> list[str]:
    """Return the statements of a script."""
    statements, begun = [], ""
    for part in re.split("(;)", sql):
        begun += part
        if part == ";" and sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return [s.strip() for s in [*statements, begun] if s.strip(" \t\r\n;")]


def _type(kind: str) -> str:
    """Return a column's type. Text ignores case, as in MySQL."""
    return "TEXT COLLATE NOCASE" if kind == "TEXT" else kind
