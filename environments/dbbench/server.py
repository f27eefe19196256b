"""A MariaDB or MySQL server. Each episode has its own database and user, which are dropped at its end.

A process marks its databases with a lock that the server releases when the process dies. Databases and users
without a held lock are leftovers, and the next process drops them when it starts.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from agentrl_env import ToolError

from .problems import Contents, Rows, Table

logger = logging.getLogger("agentrl_env")
PREFIX = "agentrl_"
NAME = re.compile(rf"({PREFIX}[0-9a-f]{{8}})_[0-9a-f]{{8}}")
STATEMENT = re.compile(
    r"(SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|SHOW|DESCRIBE|DESC|EXPLAIN)\b", re.IGNORECASE
)
"""Allowed first words of a statement. Sessions, locks and transactions are reserved for the task."""
RARE = re.compile("[^\u0001-\uffff]")
"""Characters that are not allowed in names: emoji, and others beyond the first 65,536."""
SECONDS = 5.0
"""Maximum duration of a statement of the agent."""
MAX_CHANGED = 5000
"""Maximum number of rows that a statement can change. A larger change is undone."""
MAX_BYTES = 8_000_000
"""Maximum size of the tables. A statement that makes them larger is undone."""
MAX_RESULT = 1_000_000
"""Size of a result after which no more rows are read."""
MAX_SQL = 20_000
IDLE = 31_536_000
ACCESS_DENIED = 1045
LOST = {0, 2006, 2013, 2055}
"""Errors of a lost connection, which are failures of the server and not of the statement."""


class Server:
    """The connection of one process to a server, as a user who can create databases and users."""

    def __init__(self, url: str) -> None:
        try:
            import pymysql
        except ImportError:
            raise RuntimeError("DBBENCH_URL needs PyMySQL: pip install 'agentrl-kit[dbbench]'") from None
        self._pymysql = pymysql
        self._options = _options(url)
        self._mark = f"{PREFIX}{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._keeper = self._marked()
        self.sweep()

    def database(self, tables: Sequence[Table]) -> ServerDatabase:
        """Create a database with tables, and a user who can only read and change their rows."""
        with self._lock:
            try:
                self._keeper.ping(reconnect=False)
            except self._pymysql.Error:  # the server was restarted
                self._keeper.close()
                self._keeper = self._marked()
        return ServerDatabase(self, f"{self._mark}_{secrets.token_hex(4)}", tables)

    def connect(self, **options: Any) -> Any:
        """Open a connection, by default as the user of the URL."""
        return self._pymysql.connect(
            **{**self._options, "charset": "utf8mb4", "autocommit": True, "local_infile": False, **options}
        )

    def connect_as(self, name: str, password: str) -> Any:
        """Open a connection as an episode's user. Raises RuntimeError if the server denies it."""
        options = {"database": name, "autocommit": False, "read_timeout": 4 * SECONDS}
        try:
            return self.connect(user=name, password=password, **options)
        except self._pymysql.Error as error:
            if error.args[0] != ACCESS_DENIED:
                raise
            with self.administration() as cursor:
                cursor.execute("SELECT host FROM mysql.user WHERE user = ''")
                hosts = [host if isinstance(host, str) else host.decode() for (host,) in cursor.fetchall()]
            raise RuntimeError(denial(str(error.args[-1]), hosts)) from error

    @contextmanager
    def administration(self) -> Iterator[Any]:
        """Open a temporary cursor as the user of the URL."""
        connection = self.connect()
        try:
            with connection.cursor() as cursor:
                yield cursor
        finally:
            connection.close()

    def sweep(self) -> None:
        """Drop the databases and users of processes that have died."""
        with self.administration() as cursor:
            cursor.execute("SELECT schema_name FROM information_schema.schemata")
            names = {name for (name,) in cursor.fetchall()}
            cursor.execute("SELECT user FROM mysql.user")
            names |= {name if isinstance(name, str) else name.decode() for (name,) in cursor.fetchall()}
            for name in sorted(names):
                owner = NAME.fullmatch(name)
                if owner and owner[1] != self._mark:
                    cursor.execute("SELECT IS_FREE_LOCK(%s)", (owner[1],))
                    if cursor.fetchone()[0]:
                        drop(cursor, name)

    def close(self) -> None:
        """Drop the remaining databases of this process, and release its lock."""
        with self.administration() as cursor:
            cursor.execute("SELECT schema_name FROM information_schema.schemata")
            for (name,) in cursor.fetchall():
                if name.startswith(f"{self._mark}_"):
                    drop(cursor, name)
        self._keeper.close()

    def _marked(self) -> Any:
        connection = self.connect()
        with connection.cursor() as cursor:
            cursor.execute(f"SET SESSION wait_timeout = {IDLE}")
            cursor.execute("SELECT GET_LOCK(%s, 10)", (self._mark,))
            if cursor.fetchone()[0] != 1:
                raise RuntimeError("the server does not give this process its lock; start it again")
        return connection


class ServerDatabase:
    """A database of one episode on a server. See ``SqliteDatabase``."""

    def __init__(self, server: Server, name: str, tables: Sequence[Table]) -> None:
        self._server, self._name = server, name
        self._pymysql = server._pymysql
        self._originals = [table.name for table in tables]
        self.tables = named(tables)
        self._agent: Any = None
        password = secrets.token_hex(16)
        try:
            with server.administration() as cursor:
                cursor.execute("SELECT VERSION()")
                self.dialect = "MariaDB" if "maria" in str(cursor.fetchone()[0]).lower() else "MySQL"
                cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
                cursor.execute(f"CREATE USER {name}@'%%' IDENTIFIED BY %s", (password,))
                cursor.execute(f"USE {name}")
                for table in self.tables:
                    create(cursor, table)
                    cursor.execute(
                        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name}.{quoted(table.name)} TO {name}@'%'"
                    )
            self._agent = server.connect_as(name, password)
            with self._agent.cursor() as cursor:
                limit = f"max_statement_time = {SECONDS}"
                limit = limit if self.dialect == "MariaDB" else f"max_execution_time = {int(SECONDS * 1000)}"
                cursor.execute(f"SET SESSION {limit}, SESSION sql_mode = 'STRICT_ALL_TABLES'")
        except BaseException:
            self.close()
            raise

    def run(self, sql: str, limit: int) -> tuple[list[str], Rows, int]:
        """Run one statement as the agent's user. See ``SqliteDatabase.run``."""
        if not STATEMENT.match(sql.strip()) or re.search(r"/\*M?!", sql):
            raise ToolError("SQL error: one SELECT, INSERT, UPDATE or DELETE statement is allowed")
        if len(sql) > MAX_SQL:
            raise ToolError(f"SQL error: the statement is longer than {MAX_SQL} characters")
        try:
            with self._agent.cursor(self._pymysql.cursors.SSCursor) as cursor:
                changed = cursor.execute(sql.encode("utf-8", "replace"))
                names = [column[0] for column in cursor.description or ()]
                rows = _rows(cursor, limit) if names else []
            if not names and changed > MAX_CHANGED:
                self._agent.rollback()
                raise ToolError(f"SQL error: it changes more than {MAX_CHANGED} rows, and is undone")
            if not names and changed > 0:
                self._check_size()
            self._agent.commit()
        except (self._pymysql.Error, ValueError) as error:
            if not error.args or error.args[0] in LOST:
                raise
            self._agent.rollback()
            raise ToolError(f"SQL error: {error.args[-1]}") from error
        return names, rows, changed

    def contents(self) -> Contents:
        """Return the rows of every table after the agent's changes."""
        with self._server.administration() as cursor:
            cursor.execute(f"USE {self._name}")
            return self._contents(cursor)

    def close(self) -> None:
        """Drop the database and its user. If the server is dead, the next sweep drops them."""
        if self._agent is not None:
            self._agent.close() if self._agent.open else None
            self._agent = None
        try:
            with self._server.administration() as cursor:
                drop(cursor, self._name)
        except self._pymysql.Error as error:
            logger.warning("dbbench did not drop the database %s: %s", self._name, str(error))

    def _contents(self, cursor: Any) -> Contents:
        found: Contents = {}
        for original, table in zip(self._originals, self.tables, strict=True):
            cursor.execute(f"SELECT * FROM {quoted(table.name)}")
            found[original] = list(cursor.fetchall())
        return found

    def _check_size(self) -> None:
        """Undo a change that makes the tables too large."""
        size = 0
        with self._agent.cursor() as cursor:
            for table in self.tables:
                lengths = " + ".join(f"COALESCE(LENGTH({quoted(name)}), 0) + 8" for name, _ in table.columns)
                cursor.execute(f"SELECT COALESCE(SUM({lengths}), 0) FROM {quoted(table.name)}")
                size += int(cursor.fetchone()[0])
        if size > MAX_BYTES:
            self._agent.rollback()
            raise ToolError(f"SQL error: its tables are larger than {MAX_BYTES} bytes, and it is undone")


def create(cursor: Any, table: Table) -> None:
    """Create a table with its rows."""
    kinds = ", ".join(f"{quoted(name)} {kind}" for name, kind in table.columns)
    cursor.execute(f"CREATE TABLE {quoted(table.name)} ({kinds}) ENGINE = InnoDB")
    if table.rows:
        marks = ", ".join(["%s"] * len(table.columns))
        name = quoted(table.name).replace("%", "%%")
        cursor.executemany(f"INSERT INTO {name} VALUES ({marks})", table.rows)


def named(tables: Sequence[Table]) -> list[Table]:
    """Return tables with names of tables and columns that MySQL allows."""
    renamed = []
    for name, table in zip(allowed([table.name for table in tables], "table"), tables, strict=True):
        columns = allowed([column for column, _ in table.columns], "column")
        kinds = [kind for _, kind in table.columns]
        renamed.append(Table(name, list(zip(columns, kinds, strict=True)), table.rows))
    return renamed


def allowed(names: Sequence[str], kind: str) -> list[str]:
    """Return names that MySQL allows: short, not empty, and without trailing spaces or rare characters."""
    found: list[str] = []
    for number, name in enumerate(names, 1):
        name = RARE.sub("?", name).strip()[:60].strip() or f"{kind}_{number}"
        found.append(f"{name}_{number}" if name.lower() in {n.lower() for n in found} else name)
    return found


def _rows(cursor: Any, limit: int) -> Rows:
    rows: Rows = []
    size = 0
    while len(rows) < limit and size < MAX_RESULT and (row := cursor.fetchone()) is not None:
        rows.append(row)
        size += sum(len(str(value)) for value in row)
    return rows


def quoted(name: str) -> str:
    """Return a name quoted for MySQL."""
    return "`" + name.replace("`", "``") + "`"


def denial(reason: str, anonymous: Sequence[str]) -> str:
    """Return the error message of a denied connection.

    Args:
        reason: message of the server.
        anonymous: hosts of the server's anonymous users.
    """
    if not anonymous:
        return f"{reason}; DBBENCH_URL must reach a server that accepts password logins from this machine"
    drops = "; ".join(f"DROP USER ''@'{host}'" for host in anonymous)
    return f"{reason}: anonymous users take precedence over the users of episodes; run {drops}"


def drop(cursor: Any, name: str) -> None:
    """Drop the database and the user of an episode."""
    cursor.execute(f"DROP DATABASE IF EXISTS {name}")
    cursor.execute(f"DROP USER IF EXISTS {name}@'%'")


def _options(url: str) -> dict[str, Any]:
    """Return the connection options of a URL. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("mysql", "mariadb"):
        raise ValueError("DBBENCH_URL must be mysql://user:password@host:port, or end in ?unix_socket=PATH")
    options: dict[str, Any] = {
        "host": parts.hostname or "127.0.0.1",
        "port": parts.port or 3306,
        "user": unquote(parts.username or "root"),
        "password": unquote(parts.password or ""),
    }
    unknown = {name: value for name, value in parse_qsl(parts.query) if name != "unix_socket"}
    if unknown:
        raise ValueError(f"DBBENCH_URL has an unknown option: {', '.join(unknown)}")
    return {**options, **dict(parse_qsl(parts.query))}
