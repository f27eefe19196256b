"""Unchanged problems of AgentBench's ``dbbench/*.jsonl``. Unusable problems are listed with the reason."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl_env import ToolError
from agentrl_env.errors import DefinitionError

from .grading import flat, table_hash
from .problems import Problem, Table
from .sqlite import SqliteDatabase

WRITE = re.compile(r"\s*(INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)
HASH = re.compile(r"[0-9a-f]{32}")
SUFFIXES = (".json", ".jsonl")
MAX_DEPTH = 50
"""Maximum nesting of a record."""


class Unusable(ValueError):
    """A record that cannot become a problem. The text has the reason."""


def files(data: str, taken: Collection[str]) -> dict[str, Path]:
    """Return split -> file for a file or a folder. Names that are ``taken`` get the prefix ``official-``.

    Raises DefinitionError if there is no file.
    """
    path = Path(data)
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    paths = [file for file in inside if file.is_file() and (file == path or file.suffix in SUFFIXES)]
    if data and not paths:
        raise DefinitionError(f"DBBENCH_DATA={data} is neither a data file nor a folder with data files")
    found: dict[str, Path] = {}
    for file in paths if data else ():
        name = f"official-{file.stem}" if file.stem in taken else file.stem
        found[name if name not in found else file.name] = file
    return found


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the usable records of a file, and a sentence for each unusable record.

    The file has a JSON object on each line, or is one list, one record, or one object of lists.
    """
    usable: list[dict[str, Any]] = []
    unusable: list[str] = []
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        return [], [f"{path.name} cannot be read: {error.strerror or error}"]
    for place, record in _records(text):
        try:
            if isinstance(record, ValueError):
                raise Unusable(f"it is not JSON: {record}")
            record = _storable(record)
            problem(record)
        except Unusable as error:
            unusable.append(f"{path.name}, {place}: {error}")
        else:
            usable.append(record)
    return usable, unusable


def problem(record: Any) -> Problem:
    """Return the problem of a record. Raises Unusable."""
    if not isinstance(record, dict):
        raise Unusable("it is no JSON object")
    question = _text(record, "description") or _text(record, "question")
    if not question:
        raise Unusable("it has no description")
    tables = record.get("table")
    tables = [_table(table) for table in (tables if isinstance(tables, list) and tables else [tables])]
    if len({table.name.lower() for table in tables}) < len(tables):
        raise Unusable("two of its tables have one name")
    label, sql = _label(record), _sql(record)
    kinds = " ".join(map(str, flat(record.get("type") or ""))).upper()
    changes = [v.strip().rstrip("; ") for v in label or [] if isinstance(v, str) and WRITE.match(v)]
    written = "; ".join(changes) or (sql if sql and WRITE.match(sql) else None)
    writes = any(kind in kinds for kind in ("INSERT", "UPDATE", "DELETE")) or (not kinds and bool(written))
    hashed = HASH.search(str(record.get("answer_md5") or "").lower())
    found = Problem(
        question=question,
        evidence=_text(record, "evidence"),
        notes=_text(record, "add_description"),
        tables=tables,
        writes=writes,
        gold=(written or sql) if writes else sql,
        label=None if writes else label,
        table_hash=hashed[0] if hashed and writes and len(tables) == 1 else None,
        as_set=True,
    )
    return _verified(found)


def right_table(found: Problem, contents: dict[str, list[tuple[Any, ...]]]) -> bool:
    """Return True if the only table of a problem has AgentBench's hash, which treats None as that word."""
    rows = contents[found.tables[0].name]
    named = [tuple("None" if value is None else value for value in row) for row in rows]
    return found.table_hash is not None and found.table_hash in (table_hash(rows), table_hash(named))


def _records(text: str) -> list[tuple[str, Any]]:
    whole, broken = None, None
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        broken = ValueError(str(error))
    if isinstance(whole, dict) and not whole.keys() & {"description", "question", "table"}:
        lists = [value for value in whole.values() if isinstance(value, list)]
        whole = [record for listed in lists for record in listed] if lists else whole
    if isinstance(whole, list):
        return [(f"record {i}", record) for i, record in enumerate(whole, 1)]
    if whole is not None:
        return [("record 1" if "\n" in text.strip() else "line 1", whole)]
    if broken and text.lstrip().startswith("["):
        return [("the whole file", broken)]
    records: list[tuple[str, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append((f"line {number}", json.loads(line)))
            except (ValueError, RecursionError) as error:
                records.append((f"line {number}", ValueError(str(error))))
    return records


def _storable(value: Any, depth: int = 0) -> Any:
    """Return a value that a sample and a database can store. NaN becomes None, and lone surrogates "?"."""
    if depth > MAX_DEPTH:
        raise Unusable("it is nested too deeply")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, list):
        return [_storable(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_storable(key): _storable(item, depth + 1) for key, item in value.items()}
    return value


def _table(table: Any) -> Table:
    info = table.get("table_info") if isinstance(table, dict) else None
    columns, rows = (info.get("columns"), info.get("rows") or []) if isinstance(info, dict) else (None, [])
    if not (isinstance(columns, list) and columns and isinstance(rows, list)):
        raise Unusable("it has no table.table_info with columns and rows")
    names: list[str] = []
    for i, column in enumerate(columns):
        column = column[0] if isinstance(column, list) and column else column
        name = str((column.get("name") or "") if isinstance(column, dict) else column).replace("\0", "")
        taken = {n.lower() for n in names}
        base, copy = name, 1
        while name.lower() in taken:
            copy += 1
            name = f"{base or i + 1}_{copy}"
        names.append(name)
    filled = []
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            row = [row.get(name) for name in names]
        while isinstance(row, list) and len(row) > len(names) and row[-1] in (None, ""):
            row = row[:-1]
        if not isinstance(row, list) or len(row) > len(names):
            raise Unusable(f"row {number} of its table does not fit its {len(names)} columns")
        filled.append((*map(_cell, row), *[None] * (len(names) - len(row))))
    name = str(table.get("table_name") or table.get("name") or "table").replace("\0", "")
    return Table(name, [(column, "TEXT") for column in names], filled)


def _cell(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    return value.strip() if isinstance(value, str) else ""


def _label(record: dict[str, Any]) -> list[Any] | None:
    """Return the values of the label. A label without values, unlike a value of None, has no information."""
    label = record.get("label")
    label = record.get("answer") if label is None else label
    if label in (None, "", []) or isinstance(label, dict):
        return None
    return [json.dumps(v) if isinstance(v, dict) else v for v in flat(label)]


def _sql(record: dict[str, Any]) -> str | None:
    """Return the SQL of ``{"query"}``, which is text in some records."""
    sql = record.get("sql")
    if isinstance(sql, str) and sql.lstrip().startswith("{"):
        for parsed in (json.loads, ast.literal_eval):
            with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                sql = parsed(sql)
                break
    sql = sql.get("query") if isinstance(sql, dict) else sql
    return sql if isinstance(sql, str) and sql.strip() else None


def _verified(found: Problem) -> Problem:
    """Return a problem that can be graded. Drop gold SQL that fails if the grading does not need it."""
    try:
        database = SqliteDatabase(found.tables)
    except Exception as error:
        raise Unusable(f"its table cannot be created: {error}") from error
    try:
        if found.gold:
            before, after = database.contents(), database.trial(found.gold)[1]
            if found.table_hash and after == before and not right_table(found, before):
                found = replace(found, gold=None)  # it does nothing here, and something in MySQL
        reason = "it has no gold SQL" if found.writes else "it has neither a label nor gold SQL"
    except ToolError as error:
        reason = f"its gold SQL fails: {error}"
        found = replace(found, gold=None)
    finally:
        database.close()
    if found.gold is None and found.label is None and found.table_hash is None:
        raise Unusable(f"{reason}, and nothing else tells what is right")
    return found
