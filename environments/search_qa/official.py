"""Reads a folder of JSON files with pages and questions into an index on disk, once.

The first record of a file determines whether it has pages or questions. Questions have the format of
HotpotQA, 2WikiMultihopQA, MuSiQue, Natural Questions (open) or FlashRAG. Pages have a title and a text. If a
folder has no pages, the context of its questions is used.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agentrl_env.dataset import derived_file

from .index import Index

logger = logging.getLogger("agentrl_env")

STORE = "search_qa.sqlite"
ABOUT = 100
"""Number of characters of a page in a search result."""


class DataError(ValueError):
    """The folder has no questions or no pages, or a file cannot be read."""


class StoredQuestions:
    """The questions of a file, in an index."""

    def __init__(self, index: Index, split: str) -> None:
        self.index, self.split, self.size = index, split, index.splits()[split]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.index.question(self.split, number)


def open_folder(folder: str | os.PathLike[str]) -> Index:
    """Return the index of a folder, ``search_qa.sqlite``. It is written if it is missing or outdated.

    Raises DataError.
    """

    def write(path: Path) -> None:
        files = question_files(folder)
        index = Index.build(_pages(Path(folder), files), str(path))
        for split, file in files.items():
            index.add_questions(split, _usable(file, _question))
        index.close()

    return Index(str(derived_file(Path(folder) / STORE, sources=_files(Path(folder)), write=write)))


def question_files(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Return split -> file for files with questions. The split is the file's name. Raises DataError."""
    found = {
        file.name.removesuffix(file.suffix): file for file in _files(Path(folder)) if _has(file, _question)
    }
    if not found:
        raise DataError(
            f'{folder} has no questions: a file *.jsonl or *.json with a "question" and an "answer" in each '
            "record is expected"
        )
    return found


def _pages(folder: Path, questions: dict[str, Path]) -> Iterator[tuple[str, str, str]]:
    """Yield title, first words and text of every page."""
    sources = [file for file in _files(folder) if file not in questions.values() and _has(file, _page)]
    titles: set[str] = set()
    for file in sources:
        for title, text in _usable(file, _page):
            yield title, _about(text), text
    for file in questions.values() if not sources else ():
        for title, text in (page for record in _records(file) for page in _contexts(record)):
            if title.lower() not in titles:
                titles.add(title.lower())
                yield title, _about(text), text
    if not sources and not titles:
        raise DataError(
            f'{folder} has no pages: a file *.jsonl with a "title" and a "text" in each record is expected'
        )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json*") if path.suffix in (".json", ".jsonl"))


def _has(file: Path, read) -> bool:
    """Return True if the first record of a file can be read in this way."""
    record = next(_records(file), None)
    return record is not None and read(record) is not None


def _usable(file: Path, read) -> Iterator[Any]:
    """Yield the records of a file that can be read in this way. The log counts the others."""
    skipped = 0
    for record in _records(file):
        if (found := read(record)) is None:
            skipped += 1
        else:
            yield found
    if skipped:
        logger.warning("%s: %d records were left out, which lack a title, a text or an answer", file, skipped)


def _records(file: Path) -> Iterator[Any]:
    try:
        if file.suffix == ".json":
            records = msgspec.json.decode(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
            yield from records if isinstance(records, list) else [records]
            return
        with open(file, encoding="utf-8-sig", errors="replace") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007 - the error names it
                if line.strip():
                    yield json.loads(line)
    except (ValueError, RecursionError) as error:
        place = f", line {number}" if file.suffix == ".jsonl" else ""
        raise DataError(f"{file}{place} is no JSON: {error}") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _question(record: Any) -> dict[str, Any] | None:
    if not isinstance(record, dict) or not isinstance(record.get("question"), str):
        return None
    given = [record.get(key) for key in ("answer", "answers", "golden_answers", "answer_aliases")]
    answers = [text for one in given for text in (one if isinstance(one, list) else [one])]
    answers = [text.strip() for text in map(_text, answers) if text.strip()]
    question = _text(record["question"]).strip()
    if not (answers and question):
        return None
    titles = dict.fromkeys(_supporting(record.get("supporting_facts")))
    steps = [[title, title] for title in titles]
    return {"question": question, "answer": answers, "steps": steps}


def _page(record: Any) -> tuple[str, str] | None:
    """Return title and text of a record. Without a title, the first line of its contents is the title."""
    if not isinstance(record, dict):
        return None
    title, text = _text(record.get("title")).strip(), _text(record.get("text") or record.get("contents"))
    if not title:
        title, _, text = text.partition("\n")
        title = title.strip().strip('"')
    return (title, text.strip()) if title and text.strip() else None


def _contexts(record: Any) -> Iterator[tuple[str, str]]:
    """Yield the pages that come with a question."""
    if not isinstance(record, dict):
        return
    given = record.get("context") or record.get("paragraphs") or []
    if isinstance(given, dict):
        given = list(zip(_list(given.get("title")), _list(given.get("sentences")), strict=False))
    for one in given if isinstance(given, list) else ():
        if isinstance(one, dict):
            pair = one.get("title"), one.get("text") or one.get("paragraph_text")
        else:
            pair = tuple(one) if isinstance(one, list | tuple) and len(one) == 2 else ("", "")
        title, text = _text(pair[0]).strip(), _text(pair[1]).strip()
        if title and text:
            yield title, text


def _supporting(given: Any) -> list[str]:
    """Return the titles of HotpotQA's supporting facts, in either of their two forms."""
    if isinstance(given, dict):
        titles = _list(given.get("title"))
    else:
        titles = [one[0] for one in _list(given) if isinstance(one, list) and one]
    return [text for title in titles if (text := _text(title))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    """Return a value as text. Sentences of a list are joined, and lone surrogates become question marks."""
    if isinstance(value, list):
        value = "".join(f"{part}" if f"{part}"[:1].isspace() else f" {part}" for part in value).strip()
    text = value if isinstance(value, str) else str(value) if isinstance(value, int | float) else ""
    return text.encode("utf-8", "replace").decode()


def _about(text: str) -> str:
    return " ".join(text[:ABOUT].split()) + "..." * (len(text) > ABOUT)
