"""Unchanged problems of AgentBench's ``os_interaction``. Unusable problems are listed with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from agentrl_env.errors import DefinitionError

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
"""A path directly below /usr, which a sandbox cannot write. It is moved to /usr/local."""
IMAGES = {"ubuntu": ["bash", "echo tmp > /file.txt; echo tmp > /root/file.txt"]}
"""Additional content of AgentBench's local images, as a script."""
Load = Callable[[str], str]


class Unusable(ValueError):
    """A record that cannot become a problem. The text has the reason."""


def files(data: str, taken: Collection[str] = ()) -> dict[str, Path]:
    """Return split -> file: of one file, of a folder, or of a folder of AgentBench with ``data`` in it.

    Names that are ``taken`` get the prefix ``official-``. Raises DefinitionError if there is no file.
    """
    root = Path(data)
    if root.is_file():
        root, paths = root.parent, [root]
    else:
        root = root / "data" if (root / "data").is_dir() else root
        paths = sorted(path for path in root.rglob("*.json*") if path.suffix in (".json", ".jsonl"))
    paths = [path for path in paths if path.is_file()] if data else []
    if data and not paths:
        raise DefinitionError(
            f"OS_INTERACTION_DATA={data} is neither a data file nor a folder with data files"
        )
    found: dict[str, Path] = {}
    for path in paths:
        name = "-".join(path.relative_to(root).with_suffix("").parts)
        name = f"official-{name}" if name in taken else name
        found[name if name not in found else f"{name}{path.suffix}"] = path
    return found


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the problems of a file as fields of ``Problem``, and a sentence for each unusable record."""
    usable, unusable = [], []
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        records = _lines(text) if path.suffix == ".jsonl" else json.loads(text)
    except OSError as error:
        return [], [f"{path.name} cannot be read: {error.strerror or error}"]
    except (ValueError, RecursionError) as error:
        return [], [f"{path.name} is not JSON: {error}"]
    for number, record in enumerate(records if isinstance(records, list) else [records], 1):
        try:
            usable.append(problem(record, lambda name: _script_file(path, name)))
        except Unusable as error:
            unusable.append(f"{path.name}, record {number}: {error}")
    return usable, unusable


def _lines(text: str) -> list[Any]:
    """Return the record of each line. Lines that are not JSON have no record."""
    records: list[Any] = []
    for line in filter(str.strip, text.split("\n")):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            records.append(line)
    return records


def problem(record: Any, load: Load) -> dict[str, Any]:
    """Return a record as fields of ``Problem``. Raises Unusable."""
    if not isinstance(record, dict):
        raise Unusable("it is no JSON object")
    question = record.get("description")
    if not (isinstance(question, str) and question.strip()):
        raise Unusable("it has no description")
    create = record.get("create")
    create = create if isinstance(create, dict) else {}  # malformed records have their checks here
    evaluation = record.get("evaluation")
    evaluation = evaluation if isinstance(evaluation, dict) else {}
    start = _scripts(record.get("start", create.get("start")), load)
    image = IMAGES.get(str(create.get("local")))
    found: dict[str, Any] = {
        "question": READ_ONLY.sub("/usr/local/", _clean(question.strip())),
        "init": ([image] if image else []) + _scripts(create.get("init"), load),
        "start": "\n".join(code for _, code in start) or None,
        "gold": _single(_scripts(evaluation.get("example", record.get("example")), load)),
        "official": True,
    }
    match, check = evaluation.get("match"), evaluation.get("check", record.get("check"))
    if isinstance(match, dict):
        answer, found["pattern"] = match.get("answer"), match.get("regex")
        found["answer"] = None if answer is None else _answer(answer)
    elif match is not None:
        found["answer"] = _answer(match)
    elif check is not None and check != []:
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


def _answer(value: Any) -> str:
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(value, (str, int, float)) or not (text := _clean(str(value))).strip():
        raise Unusable(f"its match is neither text nor a number: {str(value)[:80]!r}")
    return text


def _clean(text: str) -> str:
    """Return text that can be sent, with lone surrogates replaced by "?"."""
    return text.encode("utf-8", "replace").decode()


def _scripts(value: Any, load: Load) -> list[list[str]]:
    """Return the scripts of a list, or of a single one."""
    found = [_script(item, load) for item in (value if isinstance(value, list) else [value])]
    return [script for script in found if script]


def _single(scripts: list[list[str]]) -> list[str] | None:
    """Return scripts that run one after another as a single script."""
    if len(scripts) > 1 and any(language != "bash" for language, _ in scripts):
        raise Unusable("its example has several scripts, which are not all bash")
    return [scripts[0][0], "\n".join(code for _, code in scripts)] if scripts else None


def _script(value: Any, load: Load) -> list[str] | None:
    """Return language and code of a script: text, ``{"code"}`` or ``{"file"}``."""
    if value is None or value in ("", {}):
        return None
    if isinstance(value, str):
        return ["bash", READ_ONLY.sub("/usr/local/", _clean(value))]
    if not isinstance(value, dict):
        raise Unusable(f"a script is neither text nor an object: {str(value)[:80]}")
    name = value.get("file")
    code = load(name) if isinstance(name, str) else value.get("code")
    if not isinstance(code, str):
        raise Unusable("a script has neither code nor a file")
    guessed = "python" if isinstance(name, str) and name.endswith(".py") else ""
    spoken = str(value.get("language") or guessed).lower().strip()
    if spoken not in LANGUAGES:
        raise Unusable(f"a script is in {spoken}; bash and python are known")
    return [LANGUAGES[spoken], READ_ONLY.sub("/usr/local/", _clean(code))]


def _script_file(path: Path, name: str) -> str:
    """Return a script that a data file names, from its folder ``scripts``."""
    roots = []
    for parent in (path.parent, *list(path.parents)[1:4]):
        scripts = parent / "scripts"
        if scripts.is_dir():
            below = sorted(folder for folder in scripts.iterdir() if folder.is_dir())
            roots += [scripts / path.stem, scripts / path.parent.name, scripts, *below]
    for root in (*roots, path.parent):
        try:
            file = (root / name).resolve()
            if file.is_relative_to(root.resolve()) and file.is_file():
                return file.read_text(errors="replace")
        except (OSError, ValueError, RuntimeError) as error:
            raise Unusable(f"its script {name[:80]!r} cannot be read: {error}"[:200]) from error
    raise Unusable(f"its script {name} is not in the folder scripts")
