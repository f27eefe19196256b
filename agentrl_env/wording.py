"""The texts of a task that the model reads, which a file can replace."""

from __future__ import annotations

import json
from pathlib import Path
from string import Formatter
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl_env.errors import DefinitionError, explain
from agentrl_env.types import Message, ToolSpec

NO_TOOL_CALL = "no_tool_call"
"""Name of the text that is the answer to an assistant turn without a tool call."""
_SHARED = {NO_TOOL_CALL: "Call one of the tools: {tools}."}
"""Texts of every task."""
_NOTES = ("description", "title")
"""Keywords of a JSON Schema that do not affect validation."""
_MAPS = ("properties", "patternProperties", "$defs", "dependentSchemas")
"""Keywords of a JSON Schema that contain schemas by name."""


class _File(BaseModel):
    model_config = ConfigDict(frozen=True)

    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] | None = None
    texts: dict[str, str] = {}


class Wording:
    """The texts of a task, as templates with ``{fields}``, which a file can replace.

    The file is a JSON object with these optional keys:

    - ``messages``: messages before the opening of every episode, such as a system prompt and an example.
    - ``tools``: the tools in OpenAI format, with other descriptions. Names and types must not differ.
    - ``texts``: templates by name. Write ``{{`` and ``}}`` for braces.

    Every task has the text ``no_tool_call``, which ``Environment.respond`` returns.

    Example::

        class Guess(Environment):
            wording = Wording(os.environ.get("GUESS_WORDING"), opening="It is below {top}.", wrong="{hint}")

            def reset(self, sample, rng):
                return self.wording.opening(top=20)

    Raises DefinitionError if the file cannot be read, or has a text or field that the task does not have.

    Args:
        path: The file. None or "" uses the task's texts.
        texts: The task's own templates by name. In a tuple, the names of more fields that a file can use
            follow the template.
    """

    def __init__(self, path: str | None = None, /, **texts: str | tuple[str, ...]) -> None:
        self._path = path or ""
        self._file = _read(Path(path)) if path else _File()
        own = {**_SHARED, **texts}
        if unknown := sorted(self._file.texts.keys() - own):
            raise self._unfit(f"it has a text {unknown[0]!r}; the texts of the task are {', '.join(own)}")
        self._texts: dict[str, str] = {}
        for name, text in own.items():
            template, *more = text if isinstance(text, tuple) else (text,)
            self._texts[name] = self._replacement(name, template, {*_fields(template), *more})

    def text(self, name: str, /, **fields: Any) -> str:
        """Return a text with values for its fields."""
        return self._texts[name].format(**fields)

    def opening(self, /, **fields: Any) -> list[Message]:
        """Return the opening of an episode: the messages of the file and the text ``opening``."""
        return [*self._file.messages, Message(role="user", content=self.text("opening", **fields))]

    def tools(self, own: tuple[ToolSpec, ...]) -> tuple[ToolSpec, ...]:
        """Return the tools of the file, or the task's ``own`` if the file has none.

        Raises DefinitionError unless both have the same names and arguments.
        """
        if self._file.tools is None:
            return own
        wanted = {spec.function.name: spec.function.parameters for spec in own}
        names = [spec.function.name for spec in self._file.tools]
        for name in names:
            if name not in wanted:
                raise self._unfit(f"it has a tool {name!r}; the tools of the task are {', '.join(wanted)}")
            if names.count(name) > 1:
                raise self._unfit(f"it has the tool {name!r} twice")
        if missing := [name for name in wanted if name not in names]:
            raise self._unfit(f"it lacks the tool {missing[0]!r} of the task")
        for spec in self._file.tools:
            name = spec.function.name
            if problem := _difference(spec.function.parameters, wanted[name]):
                raise self._unfit(f"its tool {name!r} {problem}")
        return self._file.tools

    def _replacement(self, name: str, own: str, known: set[str]) -> str:
        template = self._file.texts.get(name, own)
        try:
            used = _fields(template)
        except ValueError as error:
            advice = "write {{ and }} for braces"
            raise self._unfit(f"its text {name!r} is not a template: {error}; {advice}") from None
        listed = ", ".join(f"{{{field}}}" for field in sorted(known))
        if unknown := sorted(used - known):
            fields = f"the fields are {listed}" if known else "the text has no fields"
            raise self._unfit(f"its text {name!r} has an unknown field {{{unknown[0]}}}; {fields}")
        if name == "opening" and known and not used:
            raise self._unfit(
                f"its text 'opening' has no field, so that all problems look alike; use {listed}"
            )
        return template

    def _unfit(self, problem: str) -> DefinitionError:
        return DefinitionError(f"the wording file {self._path} does not fit the task: {problem}")


def _read(path: Path) -> _File:
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _File.model_validate_json(text, extra="forbid")
    except OSError as error:
        raise DefinitionError(f"cannot read the wording file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DefinitionError(f"the wording file {path} is not UTF-8 text") from error
    except ValidationError as error:
        raise DefinitionError(f"the wording file {path} is invalid: {explain(error)}") from error


def _fields(template: str) -> set[str]:
    """Return the names of a template's fields. Raises ValueError unless all fields are plain names."""
    names = set()
    for _, name, form, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name.isidentifier() or form or conversion:
            raise ValueError(f"{{{name}}} is not a plain field")
        names.add(name)
    return names


def _difference(given: dict[str, Any], own: dict[str, Any]) -> str:
    """Return how a tool's arguments differ from the task's, ignoring descriptions, or "" if they agree."""
    given, own = _without_descriptions(given), _without_descriptions(own)
    arguments, expected = given.get("properties", {}), own.get("properties", {})
    for name in expected:
        if name not in arguments:
            return f"lacks the argument {name!r}"
    for name, schema in arguments.items():
        if name not in expected:
            return f"has an argument {name!r}, which the task does not take"
        if schema != expected[name]:
            wanted = json.dumps(expected[name])
            return f"has the argument {name!r} with {json.dumps(schema)}; the task takes {wanted}"
    return "" if given == own else f"takes {json.dumps(given)}; the tool of the task takes {json.dumps(own)}"


def _without_descriptions(schema: Any) -> Any:
    """Return a JSON Schema without descriptions and with sorted lists of required names."""
    if isinstance(schema, list):
        return [_without_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            plain[key] = {name: _without_descriptions(part) for name, part in value.items()}
        elif key == "required" and isinstance(value, list):
            plain[key] = sorted(value, key=str)
        elif key not in _NOTES:
            plain[key] = _without_descriptions(value)
    return plain
