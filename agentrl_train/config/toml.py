"""TOML: read files, apply ``a.b=c`` overrides, write plain values, describe validation errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from agentrl_train.config.former import REMOVED, RENAMED
from agentrl_train.config.functions import Function, as_table, names, with_choice
from agentrl_train.errors import ConfigError

Table = dict[str, Any]


def read_toml(path: Path) -> Table:
    """Return the content of a file; raises ``ConfigError`` if it does not exist or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a TOML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def apply_override(table: Table, override: str) -> None:
    """Set one value from ``section.key=value``. A value that is not TOML is a plain string.

    Elements of an array of tables are indexed: ``environments.0.url=...``. Raises ``ConfigError``.
    """
    key, equals, text = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise ConfigError(f"--set {override} is not of the form section.key=value.")
    set_value(table, key.strip(), _value(text.strip()), given=f"--set {override}")


def set_value(table: Table, key: str, value: Any, *, given: str) -> None:
    """Set the value of a dotted key. Raises ``ConfigError``, which names the setting as ``given``."""
    *sections, last = key.split(".")
    here: Any = table
    for part in sections:
        here = _descend(here, part, given)
    _assign(here, last, value, given)


def _descend(here: Any, part: str, given: str) -> Any:
    if isinstance(here, dict):
        if part in here:
            here[part] = as_table(here[part])  # the table of a name or of true
        return here.setdefault(part, {})
    if isinstance(here, list) and part.isdecimal() and int(part) < len(here):
        return here[int(part)]
    raise ConfigError(f"{given}: there is no {part!r} to set a value in.")


def _assign(here: Any, part: str, value: Any, given: str) -> None:
    if isinstance(here, dict):
        here[part] = value
    elif isinstance(here, list) and part.isdecimal() and int(part) < len(here):
        here[int(part)] = value
    else:
        raise ConfigError(f"{given}: there is no {part!r} to set.")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def merge(table: Table, changes: Mapping[str, Any]) -> None:
    """Set the values of ``changes`` in a table of sections.

    Tables inside a section are also merged, unless they select another function.
    """
    for section, values in changes.items():
        here = table.get(section)
        if isinstance(values, Mapping) and isinstance(here, dict):
            here |= {key: with_choice(here.get(key), deepcopy(value)) for key, value in values.items()}
        else:
            table[section] = deepcopy(values)


def flat(table: Mapping[str, Any], prefix: str = "") -> Table:
    """Return the values of a table by dotted name."""
    found: Table = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def dumps(table: Mapping[str, Any]) -> str:
    """Return a table as TOML."""
    import tomli_w  # part of the extra [train]; commands print their help without it

    return tomli_w.dumps(table)


def literal(value: Any) -> str:
    """Return a value as a TOML literal in one line."""
    if isinstance(value, Mapping):
        pairs = (f"{dumps({key: 0})[:-5]} = {literal(one)}" for key, one in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    return dumps({"x": value})[4:-1]


def problems(table: Table, model: type[BaseModel], *, context: Mapping[str, Any] | None = None) -> list[str]:
    """Return the validation errors of a table, one sentence each."""
    errors = _errors(table, model, context)
    rest = deepcopy(table)
    for error in errors:
        _remove(rest, _place(error, table))
    # An invalid value keeps pydantic from checking constraints between the other values.
    between = [error for error in _errors(rest, model, context) if error["type"] == "value_error"]
    sentences = [
        *(line for error in errors for line in _sentences(error, _place(error, table), model)),
        *(line for error in between for line in _sentences(error, _place(error, rest), model)),
    ]
    return list(dict.fromkeys(sentences))


def _errors(table: Table, model: type[BaseModel], context: Any) -> Sequence[Any]:
    try:
        model.model_validate(table, context=context)
    except ValidationError as error:
        return error.errors()
    return ()


def _place(error: Mapping[str, Any], table: Any) -> list[str | int]:
    """Return the location of an error in a table, without the tags of chosen functions."""
    found: list[str | int] = []
    for part in error["loc"]:
        inside = part in table if isinstance(table, Mapping) else isinstance(table, list | tuple)
        if inside:
            table = table[part]
            found.append(part)
    return [*found, error["loc"][-1]] if error["type"] == "missing" else found


def _remove(table: Any, place: Sequence[str | int]) -> None:
    """Remove a value from its section, if it exists. Whole sections stay."""
    for part in place[:-1]:
        table = table[part]
    if len(place) > 1 and isinstance(table, dict):
        table.pop(place[-1], None)


def _sentences(
    problem: Mapping[str, Any], place: Sequence[str | int], model: type[BaseModel]
) -> Iterator[str]:
    location: Sequence[str | int] = problem["loc"]
    name = ".".join(map(str, place))
    kind = problem["type"]
    if kind == "extra_forbidden":
        yield from _unknown_key(name, location, problem["input"], model)
    elif kind == "missing":
        needed = [key for key, field in _fields(location, model).items() if field.is_required()]
        yield f"{name} is missing" + (f"; it needs {', '.join(needed)}" if needed else "")
    elif kind == "value_error":
        for line in str(problem["ctx"]["error"]).splitlines():
            yield f"{name}: {line}" if name else line
    elif kind == "union_tag_invalid":
        tags = [tag.strip("'") for tag in problem["ctx"]["expected_tags"].split(", ")]
        known, own = [tag for tag in tags if ":" not in tag], any(":" in tag for tag in tags)
        hint = ", and no function such as 'mine.py:function'" * own
        yield f"{name} = {problem['ctx']['tag']!r} is none of {', '.join(known)}{hint}"
    elif kind == "union_tag_not_found":
        yield f"{name} = {problem['input']!r} should be a name, or a table with a name and its parameters"
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        key = next(iter(_fields(location, model)), "KEY")
        yield f"{name} = {problem['input']!r} should be a table: set one of its keys, such as {name}.{key}"
    elif kind == "tuple_type":
        yield f"{name} = {problem['input']!r} should be a list"
    else:
        message = problem["msg"].removeprefix("Input ").removeprefix("String ")
        yield f"{name} = {problem['input']!r} {message}"


def _unknown_key(
    name: str, location: Sequence[str | int], value: Any, model: type[BaseModel]
) -> Iterator[str]:
    """Yield the new spelling of a renamed key, or a similar key. Yield each key of a former section."""
    key = re.sub(r"\.\d+\.", ".", name)
    if key in RENAMED:
        yield f"unknown key {name}: it was renamed to {RENAMED[key]}"
    elif key in REMOVED:
        yield f"unknown key {name}: it was removed, because {REMOVED[key]}"
    elif former := [key for key in flat({name: value}) if key in RENAMED or key in REMOVED]:
        for key in former:
            yield from _unknown_key(key, key.split("."), None, model)
    else:
        yield _near(name, location, model)


def _near(name: str, location: Sequence[str | int], model: type[BaseModel]) -> str:
    """Return the sentence about a key that never existed."""
    key, valid = str(location[-1]), list(_fields(location[:-1], model))
    if near := get_close_matches(key, valid, n=1, cutoff=0.6):
        return f"unknown key {name}; did you mean {near[0]}?"
    for section in model.model_fields if len(location) == 2 else ():
        if key in _fields([section], model):
            return f"unknown key {name}; did you mean {section}.{key}?"
    return f"unknown key {name}; valid here: {', '.join(valid)}"


def _fields(location: Sequence[str | int], model: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of the section or function at ``location``. Empty for a plain value."""
    here = [model]
    for part in location:
        if isinstance(part, int):
            continue
        chosen: list[type[BaseModel]] = [
            kind for kind in here if issubclass(kind, Function) and part in names(kind)
        ]
        fields = [kind.model_fields[part] for kind in here if part in kind.model_fields]
        here = chosen or [kind for field in fields for kind in classes(field.annotation)]
    return dict(here[0].model_fields) if here else {}


def classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from classes(part)
