"""Reads AgentBench's question files, leniently; grades answers."""

from __future__ import annotations

import json
import os

from agentrl_env.errors import DefinitionError

from .sparql import IDENTIFIER, NS


def read_questions(path: str | os.PathLike[str]) -> list[dict]:
    """Return the records of a file: a JSON list, an object of lists, or one JSON object on each line.

    A record keeps the fields that the task uses, cleaned, and ``needs``: what must be given before it can
    be played. Records keep their positions.

    Raises DefinitionError where the file cannot be read.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
        try:
            content = json.loads(text)
        except ValueError:
            content = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DefinitionError(f"cannot read the questions of {os.fspath(path)}: {error}") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = [record for records in lists for record in records] if lists else [content]
    if not isinstance(content, list):
        raise DefinitionError(f"{os.fspath(path)} holds no list of questions")
    return [_clean(record if isinstance(record, dict) else {}) for record in content]


def _clean(record: dict) -> dict:
    entities = record.get("entities") or {}
    if not isinstance(entities, dict):
        entities = {str(entity): entity for entity in entities if isinstance(entity, str)}
    entities = {str(name): short(entity) for name, entity in entities.items() if isinstance(entity, str)}
    given = record.get("answer", record.get("answers")) or []
    answers = [_answer(one) for one in (given if isinstance(given, list) else [given])]
    actions = record.get("actions") or []
    question = str(record.get("question") or "")
    needs = ["a SPARQL endpoint that holds its facts"]
    needs += ["a question"] * (not question) + ["answers, to be graded"] * (not answers)
    bad = [entity for entity in entities.values() if not IDENTIFIER.fullmatch(entity)]
    needs += [f"identifiers instead of {', '.join(bad)}"] if bad else []
    return {
        "qid": str(record.get("qid", "")),
        "question": question,
        "entities": {name: entity for name, entity in entities.items() if entity not in bad},
        "actions": [str(action) for action in actions] if isinstance(actions, list) else [],
        "answer": answers,
        "needs": needs,
    }


def _answer(given) -> dict:
    if not isinstance(given, dict):
        given = {"answer_argument": given}
    return {"answer_argument": short(str(given.get("answer_argument", given.get("entity_name", ""))))}


def short(name: str) -> str:
    """Return an identifier without the namespace that it may have."""
    return name.strip().strip("<>").removeprefix(NS).removeprefix("ns:")


def grade(found: list[str], answer: list[dict]) -> tuple[bool, float]:
    """Return whether two sets of answers are equal, and the F1 score. Numbers compare as numbers."""
    predicted = {_plain(one) for one in found}
    gold = {_plain(one["answer_argument"]) for one in answer}
    right = len(predicted & gold)
    return predicted == gold, 2 * right / (len(predicted) + len(gold)) if right else 0.0


def _plain(value: str) -> str | float:
    try:
        return float(value)
    except ValueError:
        return value
