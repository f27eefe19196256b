"""Settings reference: every setting with default and description, as TOML (``agentrl-train settings``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentrl_train.config.run_config import RunConfig
from agentrl_train.config.toml import literal

REQUIRED = {
    "run.name": "mine",
    "run.steps": 100,
    "model.path": "examples/quickstart/starter",
    "environments": ["environments/shop"],
    "train.lora.rank": 16,
    "train.lora.alpha": 32,
}
"""Example values of settings that have no default."""


def reference() -> str:
    """Return a configuration with every setting; settings without a value by default are comments."""
    return "\n".join(_section(RunConfig, "", off=False)).lstrip("\n") + "\n"


def _section(section: type[BaseModel], name: str, *, off: bool) -> Iterator[str]:
    """Yield the lines of a section, then those of its subsections."""
    inner = {key: kind for key, field in section.model_fields.items() if (kind := _model(field)) is not None}
    if name:
        yield ""
        heading = "[[environments]]" if name == "environments" else f"[{name}]"
        yield f"{'# ' * off}{heading:<{44 - 2 * off}}# {_plain(section.__doc__)}"
    for key, field in section.model_fields.items():
        if key not in inner:
            yield _line(f"{name}.{key}", key, field, off=off)
    for key, kind in inner.items():
        optional = type(None) in get_args(section.model_fields[key].annotation)
        yield from _section(kind, f"{name}.{key}".lstrip("."), off=off or optional)


def _line(full_name: str, key: str, field: FieldInfo, *, off: bool) -> str:
    default = field.get_default(call_default_factory=True)
    if full_name == "environments.serve":
        default = REQUIRED["environments"]
    value = REQUIRED.get(full_name, default)
    commented = off or value is None
    setting = f"{key} =" if value is None else f"{key} = {literal(value)}"
    description = _plain(field.description)
    if choices := _choices(field):
        description = f"{description} ({', '.join(choices)})".strip()
    return f"{'# ' * commented}{setting + '  ':<{44 - 2 * commented}}# {description}".rstrip(" #")


def _choices(field: FieldInfo) -> list[str]:
    return list(get_args(field.annotation)) if get_origin(field.annotation) is Literal else []


def _model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section type of a field, also of a list of sections; None for plain values."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _plain(text: str | None) -> str:
    return " ".join((text or "").replace("``", "").split())
