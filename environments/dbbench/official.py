"""Problems of AgentBench's ``dbbench/*.jsonl``, read as they are; the unusable are named with the reason."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl_env import ToolError

from .grading import flat, table_hash
from .problems import Problem, Table
from .sqlite import SqliteDatabase

WRITE = re.compile(r"\s*(INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)
HASH = re.compile(r"[0-9a-f]{32}")


class Unusable(ValueError):
    """A record that cannot become a problem; the text says why."""


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the usable records of a file, and a sentence for each that is not.

    The file has a JSON object on each line, or is one JSON list.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    usable, unusable = [], []
    for place, record in _records(text):
        try:
            if isinstance(record, ValueError):
                raise Unusable(f"it is not JSON: {record}")
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
    tables = [_table(table) for table in (tables if isinstance(tables, list) else [tables])]
    if len({table.name.lower() for table in tables}) < len(tables):
        raise Unusable("two of its tables have one name")
    if added := _text(record, "add_description"):
        question = f"{question}\n{added}"
    label, sql = _label(record), _sql(record)
    kinds = " ".join(map(str, flat(record.get("type") or ""))).upper()
    written = next((str(v) for v in [*(label or []), sql] if isinstance(v, str) and WRITE.match(v)), None)
    writes = any(kind in kinds for kind in ("INSERT", "UPDATE", "DELETE")) or (not kinds and bool(written))
    hashed = HASH.search(str(record.get("answer_md5") or "").lower())
    found = Problem(
        question=question,
        tables=tables,
        writes=writes,
        gold=(written or sql) if writes else sql,
        label=None if writes else label,
        table_hash=hashed[0] if hashed and writes and len(tables) == 1 else None,
        as_set=True,
    )
    return _verified(found)


def right_table(found: Problem, contents: dict[str, list[tuple[Any, ...]]]) -> bool:
    """Return whether the one table of a problem has AgentBench's hash."""
    return found.table_hash is not None and table_hash(contents[found.tables[0].name]) == found.table_hash


def _records(text: str) -> list[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        try:
            return [(f"record {i}", record) for i, record in enumerate(json.loads(text), 1)]
        except ValueError as error:
            return [("the whole file", error)]
    records: list[tuple[str, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append((f"line {number}", json.loads(line)))
            except (ValueError, RecursionError) as error:
                records.append((f"line {number}", ValueError(str(error))))
    return records


def _table(table: Any) -> Table:
    info = table.get("table_info") if isinstance(table, dict) else None
    columns, rows = (info.get("columns"), info.get("rows")) if isinstance(info, dict) else (None, None)
    if not (isinstance(columns, list) and columns and isinstance(rows, list)):
        raise Unusable("it has no table.table_info with columns and rows")
    names: list[str] = []
    for i, column in enumerate(columns):
        name = str(column.get("name", "") if isinstance(column, dict) else column).replace("\0", "")
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
        if not isinstance(row, list) or len(row) > len(names):
            raise Unusable(f"row {number} of its table does not fit its {len(names)} columns")
        filled.append((*map(_cell, row), *[None] * (len(names) - len(row))))
    name = str(table.get("table_name") or table.get("name") or "table").replace("\0", "")
    return Table(name, [(column, "TEXT") for column in names], filled)


def _cell(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    return value.strip() if isinstance(value, str) else ""


def _label(record: dict[str, Any]) -> list[Any] | None:
    label = record.get("label", record.get("answer"))
    if label is None or isinstance(label, dict):
        return None
    return [json.dumps(v) if isinstance(v, dict) else v for v in flat(label)]


def _sql(record: dict[str, Any]) -> str | None:
    sql = record.get("sql")
    sql = sql.get("query") if isinstance(sql, dict) else sql
    return sql if isinstance(sql, str) and sql.strip() else None


def _verified(found: Problem) -> Problem:
    """Return a problem that can be graded: drop gold SQL that fails, if something else decides."""
    try:
        database = SqliteDatabase(found.tables)
    except Exception as error:
        raise Unusable(f"its table cannot be created: {error}") from error
    try:
        if found.gold:
            database.trial(found.gold)
        reason = "it has no gold SQL" if found.writes else "it has neither a label nor gold SQL"
    except ToolError as error:
        reason = f"its gold SQL fails: {error}"
        found = replace(found, gold=None)
    finally:
        database.close()
    if found.gold is None and found.label is None and found.table_hash is None:
        raise Unusable(f"{reason}, and nothing else tells what is right")
    return found
