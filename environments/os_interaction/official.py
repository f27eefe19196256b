"""Problems of AgentBench's ``os_interaction``, read as they are; the unusable are named with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

LANGUAGES = {
    "bash": "bash",
    "sh": "bash",
    "shell": "bash",
    "": "bash",
    "python": "python",
    "python3": "python",
}
READ_ONLY = re.compile(
    r"(?<![\w/.-])/usr/(?!(bin|sbin|lib\w*|local|share|include|src|games|etc)\b)(?=[\w.-])"
)
"""A path directly below /usr, where a sandbox has nothing writable; it is moved to /usr/local."""
Load = Callable[[str], str]


class Unusable(ValueError):
    """A record that cannot become a problem; the text says why."""


def files(data: str) -> dict[str, Path]:
    """Return split -> file: of one file, of a folder, or of a folder of AgentBench with ``data`` in it."""
    root = Path(data)
    if not data or root.is_file():
        return {root.stem: root} if data else {}
    root = root / "data" if (root / "data").is_dir() else root
    found = sorted(path for path in root.rglob("*.json") if path.is_file())
    return {"-".join(path.relative_to(root).with_suffix("").parts): path for path in found}


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the problems of a file as fields of ``Problem``, and a sentence for each unusable record."""
    usable, unusable = [], []
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig", errors="replace"))
    except (ValueError, RecursionError) as error:
        return [], [f"{path.name} is not JSON: {error}"]
    for number, record in enumerate(records if isinstance(records, list) else [records], 1):
        try:
            usable.append(problem(record, lambda name: _script_file(path, name)))
        except Unusable as error:
            unusable.append(f"{path.name}, record {number}: {error}")
    return usable, unusable


def problem(record: Any, load: Load) -> dict[str, Any]:
    """Return a record as fields of ``Problem``. Raises Unusable."""
    if not isinstance(record, dict):
        raise Unusable("it is no JSON object")
    question = record.get("description")
    if not (isinstance(question, str) and question.strip()):
        raise Unusable("it has no description")
    create = record.get("create")
    create = create if isinstance(create, dict) else {}  # dirty records have their checks here
    evaluation = record.get("evaluation")
    evaluation = evaluation if isinstance(evaluation, dict) else {}
    start = _script(record.get("start", create.get("start")), load)
    found: dict[str, Any] = {
        "question": READ_ONLY.sub("/usr/local/", question.strip()),
        "init": _script(create.get("init"), load),
        "start": start[1] if start else None,
        "gold": _script(evaluation.get("example", record.get("example")), load),
        "official": True,
    }
    match, check = evaluation.get("match"), evaluation.get("check", record.get("check"))
    if isinstance(match, dict):
        found["answer"], found["pattern"] = match.get("answer"), match.get("regex")
    elif match is not None:
        found["answer"] = str(match)
    elif check is not None:
        listed = check if isinstance(check, list) else [check]
        found["checks"] = [_script(item, load) for item in listed]
        if None in found["checks"] and found["gold"] is None:
            raise Unusable("its check compares with an example that it does not have")
    if found.get("pattern") is not None:
        try:
            re.compile(found["pattern"])
        except (re.error, TypeError) as error:
            raise Unusable(f"its match is no regular expression: {error}") from error
    if not any(found.get(key) is not None for key in ("answer", "pattern", "checks")):
        raise Unusable("it has neither a match nor a check")
    return found


def _script(value: Any, load: Load) -> list[str] | None:
    """Return language and code of a script: text, ``{"code"}`` or ``{"file"}``."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return ["bash", READ_ONLY.sub("/usr/local/", value)]
    if not isinstance(value, dict):
        raise Unusable(f"a script is neither text nor an object: {str(value)[:80]}")
    name = value.get("file")
    code = load(name) if isinstance(name, str) else value.get("code")
    if not isinstance(code, str):
        raise Unusable("a script has neither code nor a file")
    guessed = "python" if isinstance(name, str) and name.endswith(".py") else ""
    spoken = str(value.get("language") or guessed).lower()
    if spoken not in LANGUAGES:
        raise Unusable(f"a script is in {spoken}; bash and python are known")
    return [LANGUAGES[spoken], READ_ONLY.sub("/usr/local/", code)]


def _script_file(path: Path, name: str) -> str:
    """Return a script that a data file names, from the folder ``scripts`` that belongs to it."""
    roots = []
    for parent in (path.parent, *list(path.parents)[1:4]):
        scripts = parent / "scripts"
        if scripts.is_dir():
            below = sorted(folder for folder in scripts.iterdir() if folder.is_dir())
            roots += [scripts / path.stem, scripts / path.parent.name, scripts, *below]
    for root in (*roots, path.parent):
        file = (root / name).resolve()
        if file.is_relative_to(root.resolve()) and file.is_file():
            return file.read_text(errors="replace")
    raise Unusable(f"its script {name} is not in the folder scripts")
