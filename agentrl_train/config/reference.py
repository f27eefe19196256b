"""Settings reference: every setting with default and description, as TOML (``agentrl-train settings``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentrl_train.config.functions import Function, Own, names
from agentrl_train.config.run_config import RunConfig
from agentrl_train.config.section import Section, Table
from agentrl_train.config.toml import classes, literal

REQUIRED: dict[str, Any] = {
    "run.name": "mine",
    "run.steps": 100,
    "model.path": "examples/quickstart/starter",
    "environments.serve": ["environments/shop"],
}
"""Example values of settings that have no default."""
EXAMPLES: dict[str, Any] = {
    "rank": 16,
    "alpha": 32,
    "buffer": 128,
    "port": 9100,
    "turns": [10, 20, 30],
    "run": "python agent.py",
    "name": "file.py:function",
}
"""Example values of parameters that have no default."""


def reference() -> str:
    """Return a configuration with every setting. Settings without a default value are comments.

    A setting that is a table or a function is followed by comments with its parameters.
    """
    return "\n".join(_section(RunConfig, "")).lstrip("\n") + "\n"


def keys(section: type[BaseModel] = RunConfig, name: str = "") -> Iterator[str]:
    """Yield the names of all settings. A table that is the value of a setting counts as one."""
    for key, field in section.model_fields.items():
        inner = _inner(field)
        yield from keys(inner, f"{name}{key}.") if inner else [f"{name}{key}"]


def _section(section: type[BaseModel], name: str) -> Iterator[str]:
    """Yield the lines of a section, then the lines of its subsections."""
    if name:
        heading = "[[environments]]" if name == "environments" else f"[{name}]"
        yield from ("", f"{heading:<44}# {_plain(section.__doc__)}")
    inner = {key: kind for key, field in section.model_fields.items() if (kind := _inner(field)) is not None}
    for key, field in section.model_fields.items():
        if key not in inner:
            yield from _setting(f"{name}.{key}", key, field)
    for key, kind in inner.items():
        yield from _section(kind, f"{name}.{key}".lstrip("."))


def _setting(full_name: str, key: str, field: FieldInfo) -> Iterator[str]:
    """Yield the line of a setting, and the lines of each table or function that it accepts."""
    default = field.get_default(call_default_factory=True)
    value = REQUIRED.get(full_name, _format(default))
    meaning = _plain(field.description)
    functions = [kind for kind in classes(field.annotation) if issubclass(kind, Function)]
    choices = [name for kind in functions if not issubclass(kind, Own) for name in names(kind)]
    if get_origin(field.annotation) is Literal:
        choices = list(get_args(field.annotation))
    if choices:
        own = [", or a user's function"] if any(issubclass(kind, Own) for kind in functions) else [""]
        meaning = f"{meaning} ({', '.join(choices)}{own[0]})".strip()
    yield _line(key, value, meaning, commented=value is None)
    for kind in classes(field.annotation):
        if (
            issubclass(kind, Table)
            and not issubclass(kind, Own)
            and len(kind.model_fields) > issubclass(kind, Function)
        ):
            yield from _parameters(key, kind)


def _parameters(key: str, kind: type[Table]) -> Iterator[str]:
    """Yield the commented line of a table, and a line for each of its parameters."""
    for name in names(kind) if issubclass(kind, Function) else [None]:
        if name is not None:
            yield _line(f"{key}.name", name, _plain(kind.__doc__), commented=True)
        for parameter, field in kind.model_fields.items():
            if name is not None and parameter == "name":
                continue
            default = field.get_default(call_default_factory=True)
            value = EXAMPLES.get(parameter) if field.is_required() else _format(default)
            meaning = _plain(field.description)
            if get_origin(field.annotation) is Literal:
                meaning = f"{meaning} ({', '.join(get_args(field.annotation))})"
            yield _line(f"{key}.{parameter}", value, meaning, commented=True)


def _line(key: str, value: Any, meaning: str, *, commented: bool) -> str:
    setting = f"{key} =" if value is None else f"{key} = {literal(value)}"
    return f"{'# ' * commented}{setting + '  ':<{44 - 2 * commented}}# {meaning}".rstrip(" #")


def _format(value: Any) -> Any:
    """Return a default as it is written in a file."""
    return value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else value


def _inner(field: FieldInfo) -> type[Section] | None:
    """Return the section that is the type of a field, or of its items; None for values and tables."""
    kinds = [kind for kind in classes(field.annotation) if not issubclass(kind, Table)]
    return kinds[0] if kinds and issubclass(kinds[0], Section) else None


def _plain(text: str | None) -> str:
    return " ".join((text or "").replace("``", "").split())
