"""TOML: read files, apply ``a.b=c`` overrides, write plain values, describe validation errors."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from agentrl_train.errors import ConfigError

Table = dict[str, Any]

RENAMED = {
    "run.minutes": "run.run_timeout_s",
    "run.quiet_seconds": "run.idle_report_timeout_s",
    "engine.vllm.start_seconds": "engine.vllm.start_timeout_s",
    "engine.vllm.silent_seconds": "engine.vllm.heartbeat_timeout_s",
    "placement.ray_seconds": "placement.ray_timeout_s",
    "rollout.episode_seconds": "rollout.episode_timeout_s",
    "rollout.environment_patience_seconds": "rollout.environment_wait_timeout_s",
    "train.rank_seconds": "train.rank_timeout_s",
    "train.step_seconds": "train.step_timeout_s",
    "checkpoint.seconds": "checkpoint.write_timeout_s",
}
"""Former key -> current key; using a former key is an error that names the current one."""
MOVED = {"advantage": "algorithm"}
"""Former section -> the one that has its keys now."""


def read_toml(path: Path) -> Table:
    """Return the content of a file; raises ``ConfigError`` if it does not exist or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a TOML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def apply_override(table: Table, override: str) -> None:
    """Set one value from ``section.key=value``; a value that is not TOML is a plain string.

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
    """Set the values of ``changes`` in a table; tables are merged, everything else is replaced."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(table.get(key), dict):
            merge(table[key], value)
        else:
            table[key] = deepcopy(value)


def flat(table: Mapping[str, Any], prefix: str = "") -> Table:
    """Return the values of a table by dotted name."""
    found: Table = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def dump_toml(table: Mapping[str, Any]) -> str:
    """Return tables of plain values as TOML; a list of tables becomes an array of tables."""
    parts = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            parts.append(f"[{_key(name)}]\n{_assignments(value)}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            parts.extend(f"[[{_key(name)}]]\n{_assignments(item)}" for item in value)
        else:
            parts.insert(0, f"{_key(name)} = {literal(value)}\n")
    return "\n".join(parts)


def _assignments(table: Mapping[str, Any]) -> str:
    return "".join(f"{_key(name)} = {literal(value)}\n" for name, value in table.items())


def _key(name: str) -> str:
    bare = name.replace("_", "").replace("-", "")
    return name if bare.isalnum() and bare.isascii() else _string(name)


def literal(value: Any) -> str:
    """Return a value as a TOML literal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {literal(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(literal(item) for item in value) + "]"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def problems(table: Table, model: type[BaseModel]) -> list[str]:
    """Return the validation errors of a table, one sentence each."""
    errors = _errors(table, model)
    rest = deepcopy(table)
    for error in errors:
        _remove(rest, error["loc"])
    # An invalid value keeps pydantic from checking constraints between the other values.
    between = [error for error in _errors(rest, model) if error["type"] == "value_error"]
    sentences = [line for error in [*errors, *between] for line in _sentences(error, model)]
    return list(dict.fromkeys(sentences))


def _errors(table: Table, model: type[BaseModel]) -> Sequence[Any]:
    try:
        model.model_validate(table)
    except ValidationError as error:
        return error.errors()
    return ()


def _remove(table: Any, location: Sequence[str | int]) -> None:
    """Remove a value from its section, if it exists; whole sections stay."""
    for part in location[:-1]:
        table = table[part]
    if len(location) > 1 and isinstance(table, dict):
        table.pop(location[-1], None)


def _sentences(problem: Mapping[str, Any], model: type[BaseModel]) -> Iterator[str]:
    location: Sequence[str | int] = problem["loc"]
    name = ".".join(str(part) for part in location)
    kind = problem["type"]
    if kind == "extra_forbidden":
        yield _unknown_key(location, model)
    elif kind == "missing":
        needed = [key for key, field in _fields(location, model).items() if field.is_required()]
        yield f"{name} is missing" + (f"; it needs {', '.join(needed)}" if needed else "")
    elif kind == "value_error":
        for line in str(problem["ctx"]["error"]).splitlines():
            yield f"{name}: {line}" if name else line
    else:
        message = problem["msg"].removeprefix("Input ")
        yield f"{name} = {problem['input']!r} {message}"


def _unknown_key(location: Sequence[str | int], model: type[BaseModel]) -> str:
    name, key = ".".join(str(part) for part in location), str(location[-1])
    if name in RENAMED:
        unit = ", in seconds" if name == "run.minutes" else ""
        return f"unknown key {name}: it was renamed to {RENAMED[name]}{unit}"
    if name in MOVED:
        return f"unknown section {name}: its keys are in {MOVED[name]} now"
    valid = list(_fields(location[:-1], model))
    if near := get_close_matches(key, valid, n=1, cutoff=0.6):
        return f"unknown key {name}; did you mean {near[0]}?"
    for section in model.model_fields:
        if key in _fields([section], model):
            return f"unknown key {name}; did you mean {section}.{key}?"
    return f"unknown key {name}; valid here: {', '.join(valid)}"


def _fields(location: Sequence[str | int], model: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of the section at ``location``; empty for a plain value."""
    here: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        field = here.model_fields.get(part)
        here = next((kind for kind in _classes(field.annotation if field else None)), None)
        if here is None:
            return {}
    return dict(here.model_fields)


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _classes(part)
