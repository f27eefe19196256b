"""Reads AgentBench's question files, leniently; grades answers."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from agentrl_env.errors import DefinitionError

from .sparql import IDENTIFIER, NS


def read_questions(path: str | os.PathLike[str]) -> list[dict]:
    """Return the records of a file: a JSON list, an object of records or of lists, or an object on each line.

    A record keeps the cleaned fields that the task uses, and ``needs``, the requirements for playing it.
    Records keep their positions, including the records of lines that are not JSON.

    Raises DefinitionError if the file cannot be read or has no records.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            text = file.read()
    except OSError as error:
        raise DefinitionError(f"cannot read the questions of {os.fspath(path)}: {error}") from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = [_line(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if isinstance(content, dict) and "question" not in content:
        values = content.values()
        content = [one for value in values for one in (value if isinstance(value, list) else [value])]
    content = content if isinstance(content, list) else [content]
    records = [_clean(record if isinstance(record, dict) else {}) for record in content]
    if text.strip() and not any(isinstance(record, dict) and "question" in record for record in content):
        raise DefinitionError(f"cannot read the questions of {os.fspath(path)}: it holds none")
    return records


def _line(number: int, line: str) -> Any:
    """Return the record of a line. If the line is not JSON, opening its record reports this."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return {"needs": f"JSON on line {number}: {error}"}


def _clean(record: dict) -> dict:
    entities = record.get("entities") or {}
    if not isinstance(entities, dict):
        listed = entities if isinstance(entities, list) else [entities]
        entities = {_text(entity): entity for entity in listed}
    entities = {" ".join(_text(name).split()): short(_text(entity)) for name, entity in entities.items()}
    given = record.get("answer")
    given = record.get("answers") if given is None else given
    answers = [_answer(one) for one in (given if isinstance(given, list) else [given])]
    answers = [answer for answer in answers if answer["answer_argument"]]
    actions = record.get("actions") or []
    question = _text(record.get("question"))
    needs = ["a SPARQL endpoint that holds its facts"]
    needs += [str(record["needs"])] if isinstance(record.get("needs"), str) else []
    needs += ["a question"] * (not question) + ["answers, to be graded"] * (not answers)
    bad = [entity for entity in entities.values() if not IDENTIFIER.fullmatch(entity)]
    needs += [f"identifiers instead of {', '.join(bad) or 'none'}"] if bad else []
    return {
        "qid": _text(record.get("qid")),
        "question": question,
        "entities": {name: entity for name, entity in entities.items() if entity not in bad},
        "actions": [_text(action) for action in actions] if isinstance(actions, list) else [],
        "answer": answers,
        "needs": needs,
    }


def _answer(given) -> dict:
    if not isinstance(given, dict):
        given = {"answer_argument": given}
    return {"answer_argument": short(_text(given.get("answer_argument", given.get("entity_name"))))}


def _text(value: Any) -> str:
    """Return text or a number as valid text, the first value of a list, and "" for other values."""
    value = value[0] if isinstance(value, list) and value else value
    text = str(value) if isinstance(value, str | int | float) else ""
    return text.encode("utf-8", "replace").decode()


def short(name: str) -> str:
    """Return an identifier or a number without its namespace or type."""
    name = re.sub(r'^"(.*)"$', r"\1", re.sub(r"\^\^[^^]*$", "", name.strip()).strip())
    name = name.strip("<>").removeprefix(NS).removeprefix("ns:")
    return re.sub(r"^/(\w+)/(\w+)$", r"\1.\2", name)


def grade(found: list[str], answer: list[dict]) -> tuple[bool, float]:
    """Return True if two sets of answers are equal, and the F1 score. Numbers are compared as numbers."""
    predicted = {_plain(one) for one in found}
    gold = {_plain(one["answer_argument"]) for one in answer}
    right = len(predicted & gold)
    return predicted == gold, 2 * right / (len(predicted) + len(gold)) if right else 0.0


def _plain(value: str) -> str | float:
    try:
        return float(value)
    except ValueError:
        return value
