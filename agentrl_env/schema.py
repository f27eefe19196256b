"""Derives JSON Schemas from method signatures and docstrings, and validates arguments against them."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NotRequired, get_type_hints

from jsonschema import Draft202012Validator
from jsonschema import ValidationError as JsonSchemaError
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import SchemaError, from_json
from typing_extensions import TypedDict

from agentrl_env.errors import DefinitionError

_SUBSCHEMA_MAPS = ("properties", "$defs", "patternProperties")
_SUBSCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SUBSCHEMAS = ("items", "additionalProperties", "contains", "propertyNames")
_MAY_NOT_BE_FINITE = re.compile(r"NaN|Infinity|[eE]\+?0*\d{3}|\d{309}")
"""Matches JSON text that might contain a number that is NaN, infinite or too large for a float."""
MAX_ERRORS = 3
"""Maximum number of errors of one call that are shown to the model."""
_MAX_ECHO = 80
_BOOLEAN = re.compile(r"true|false")
_WHOLE_NUMBER = re.compile(r"\d\.0|\d[eE]")
"""Matches JSON text that might contain a whole number with a decimal point or an exponent."""
_DATE = "an ISO 8601 date such as '2024-02-29'"
_DATETIME = "an ISO 8601 date and time such as '2024-02-29T12:00:00Z'"
_TIME = "an ISO 8601 time such as '12:00:00'"
_DURATION = "an ISO 8601 duration such as 'PT1H30M'"
_FORMATS = {
    **dict.fromkeys(("date_type", "date_parsing", "date_from_datetime_parsing"), _DATE),
    **dict.fromkeys(("datetime_type", "datetime_parsing", "datetime_from_date_parsing"), _DATETIME),
    **dict.fromkeys(("time_type", "time_parsing"), _TIME),
    **dict.fromkeys(("time_delta_type", "time_delta_parsing"), _DURATION),
}
"""The expected format of an argument, by the type of the validation error."""


class ArgumentError(Exception):
    """The arguments from the model are invalid. The text is a line for the model."""


class Arguments:
    """The arguments of one tool: their JSON Schema and their parser."""

    def __init__(self, function: Callable[..., Any], owner: type) -> None:
        self._function = function
        self._where = f"{owner.__name__}.{function.__name__}"
        self.summary, described = parse_docstring(inspect.getdoc(function) or "")
        fields = self._fields(function, described, owner)
        self.unknown = tuple(name for name in described if name not in fields)
        """Names in the ``Args:`` section that are not parameters."""
        self._adapter = self._build(fields)
        self._numbered = False
        """True if a Literal or an Enum has numbers."""
        self._check_values()
        self._validate: Callable[..., dict[str, Any]] = self._adapter.validator.validate_json
        self.schema = _plain(self._json_schema(fields))
        self.schema.setdefault("properties", {})
        self._check_defaults(function)

    def parse(self, text: str) -> dict[str, Any]:
        """Return keyword arguments from the JSON text of a call. Raises ArgumentError.

        Validation is strict (``"7"`` is not an integer), so that it accepts exactly what the schema
        permits. As in JSON Schema, 1.0 is an integer. Blank text means no arguments. NaN and infinity are
        rejected everywhere, because they are not JSON.
        """
        try:
            arguments = self._validate(text if text.strip() else "{}", strict=True)
        except ValidationError as error:
            try:
                arguments = self._validate(_with_integers(text), strict=True)
            except ValidationError as remaining:
                raise ArgumentError(self._explain(remaining)) from None
            except ValueError:
                raise ArgumentError(self._explain(error)) from None
        check_finite(text)  # pydantic checks only parameters of type float
        if self._numbered and _BOOLEAN.search(text):
            self._check_booleans(text)
        return arguments

    def _check_booleans(self, text: str) -> None:
        """Raise ArgumentError for a boolean that was accepted as an equal number of a Literal or an Enum."""
        for error in Draft202012Validator(self.schema).iter_errors(from_json(text)):
            for leaf in _leaves(error):
                if isinstance(leaf.instance, bool) and leaf.validator in ("enum", "const"):
                    options = leaf.validator_value if leaf.validator == "enum" else [leaf.validator_value]
                    where = ".".join(map(str, leaf.absolute_path))
                    wanted = ", ".join(map(echo, options))
                    raise ArgumentError(
                        f"argument {echo(where)} should be one of {wanted}, got {echo(leaf.instance)}"
                    )

    def _fields(
        self, function: Callable[..., Any], described: Mapping[str, str], owner: type
    ) -> dict[str, Any]:
        """Return the annotation of each parameter except ``self``."""
        names = ((name, value) for base in reversed(owner.__mro__) for name, value in vars(base).items())
        nested = {name: value for name, value in names if isinstance(value, type)}
        try:
            hints = get_type_hints(function, localns=nested, include_extras=True)
        except (NameError, TypeError, AttributeError, SyntaxError) as error:
            advice = (
                f"; define it in the module or in {owner.__name__}" if isinstance(error, NameError) else ""
            )
            raise self._invalid(f"cannot resolve its annotations: {error}{advice}") from error
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or (parameters[0].name != "self" and parameters[0].name in hints):
            raise self._invalid("its first parameter must be self")
        fields: dict[str, Any] = {}
        for parameter in parameters[1:]:
            fields[parameter.name] = self._field(parameter, hints, described.get(parameter.name))
        return fields

    def _build(self, fields: dict[str, Any]) -> TypeAdapter[dict[str, Any]]:
        try:
            return TypeAdapter(_typed_dict(fields))
        except Exception as error:
            raise self._without_schema(fields, error) from error

    def _json_schema(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._adapter.json_schema()
        except PydanticUserError as error:
            raise self._without_schema(fields, error) from error

    def _check_values(self) -> None:
        """Raise DefinitionError for values that JSON cannot represent or that parsing does not validate."""
        for part in _parts(self._adapter.core_schema):
            if part.get("type") == "generator":
                raise self._invalid(
                    "the items of an Iterable are validated when the tool reads them, and a wrong item fails "
                    "the episode; annotate the parameter with list[...]"
                )
            for value in _options(part):
                if not isinstance(value, str | int | float | None):
                    raise self._invalid(
                        f"an argument can be {value!r:.80}, which JSON cannot express; write the plain "
                        "values in Literal[...], and use an Enum whose values are text or numbers"
                    )
                self._numbered |= isinstance(value, int | float)

    def _check_defaults(self, function: Callable[..., Any]) -> None:
        """Raise DefinitionError if the schema has a default value that a model could not pass."""
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
        for name, part in self.schema["properties"].items():
            if "default" not in part or name not in defaults:
                continue
            given: Any = defaults[name]
            problem = self._refusal(name, {name: given})
            if problem and self._refusal(name, json.dumps({name: part["default"]})):
                advice = f"annotate it with ... | None, or {problem}" if given is None else problem
                raise self._invalid(
                    f"the default {given!r:.80} of parameter {name!r} does not fit its annotation; {advice}"
                )

    def _refusal(self, name: str, arguments: str | dict[str, Any]) -> str:
        """Return the reason to reject an argument, or "". Other arguments can be missing."""
        validator = self._adapter.validator
        try:
            if isinstance(arguments, str):
                validator.validate_json(arguments, strict=True)
            else:
                validator.validate_python(arguments, strict=True)
        except ValidationError as error:
            own = (problem["msg"] for problem in error.errors(include_url=False) if problem["loc"][0] == name)
            return next(own, "").replace("Input should be", "give it")
        return ""

    def _without_schema(self, fields: Mapping[str, Any], error: Exception) -> DefinitionError:
        """Return an error for the first parameter whose type has no JSON Schema."""
        for name, annotation in fields.items():
            try:
                TypeAdapter(_typed_dict({name: annotation})).json_schema()
            except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
                return self._invalid(
                    f"no schema for its arguments: parameter {name!r} has a type that JSON cannot express; "
                    "use str, int, float, bool, list, dict, Literal, an Enum or a pydantic model"
                )
            except Exception as found:
                # The reason is in the outermost cause from pydantic and in the innermost from pydantic-core.
                reason = str(found).splitlines()[-1 if isinstance(found, SchemaError) else 0].strip(" .")
                return self._invalid(f"no schema for its arguments: parameter {name!r}: {reason}")
        return self._invalid(f"no schema for its arguments: {str(error).splitlines()[0]}")

    def _invalid(self, problem: str) -> DefinitionError:
        return DefinitionError(f"{self._where}: {problem}", self._function)

    def _field(self, parameter: inspect.Parameter, hints: Mapping[str, Any], description: str | None) -> Any:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise self._invalid(
                f"parameter {parameter.name!r} must be a plain named one, because a "
                "model passes arguments by name"
            )
        if parameter.name not in hints:
            raise self._invalid(f"parameter {parameter.name!r} needs a type annotation")
        if isinstance(parameter.default, FieldInfo):
            raise self._invalid(
                f"the Field() of parameter {parameter.name!r} belongs into its annotation: "
                f"{parameter.name}: Annotated[..., Field(...)] = default"
            )
        annotation = hints[parameter.name]
        if description:
            annotation = _describe(annotation, description)
        if parameter.default is parameter.empty:
            return annotation
        default = _json_default(parameter.default)
        return NotRequired[Annotated[annotation, Field(json_schema_extra=default)]]

    def _explain(self, error: ValidationError) -> str:
        problems = error.errors(include_url=False)
        lines = [self._line(problem) for problem in problems[:MAX_ERRORS]]
        if len(problems) > MAX_ERRORS:
            lines.append(f"and {len(problems) - MAX_ERRORS} more")
        return "; ".join(lines)

    def _line(self, problem: Any) -> str:
        where = ".".join(str(part) for part in problem["loc"])
        match problem["type"]:
            case "json_invalid":
                return f"arguments are not valid JSON: {problem['ctx']['error']}"
            case "string_unicode" if not where:
                return "arguments are not valid JSON: not valid Unicode"
            case "missing":
                return f"missing argument {where!r}"
            case "extra_forbidden" | "unexpected_keyword_argument":
                known = self._known_names(problem["loc"][:-1])
                return f"unknown argument {echo(where)}{known and f' (known: {known})'}"
            case "dataclass_type" | "dataclass_exact_type" | "model_type":
                return f"argument {echo(where)} should be a JSON object, got {echo(problem['input'])}"
            case "dict_type" if not where:
                return "arguments must be a JSON object"
        return f"argument {echo(where)}{_reason(problem)}, got {echo(problem['input'])}"

    def _known_names(self, path: Sequence[str | int]) -> str:
        """Return the names of the fields at a path of an error, or "" if a union makes them ambiguous."""
        node: Any = self.schema
        for part in (*path, None):
            options = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
            node = options[0] if len(options) == 1 else node
            if "$ref" in node:
                node = self.schema["$defs"][node["$ref"].rpartition("/")[2]]
            if part is not None:
                own = node.get("items" if isinstance(part, int) else "properties", {})
                inner = own if isinstance(part, int) else own.get(part, node.get("additionalProperties"))
                if not isinstance(inner, dict):
                    return ""
                node = inner
        return ", ".join(node.get("properties", {})) or ("" if path else "none")


def check_finite(text: str) -> None:
    """Raise ArgumentError if the arguments in a JSON text contain NaN or infinity."""
    if _MAY_NOT_BE_FINITE.search(text):
        for where, number in _not_finite(from_json(text)):
            raise ArgumentError(f"argument {echo(where)} should be a finite number, got {echo(number)}")


def echo(value: Any) -> str:
    """Return a short, printable ASCII form of a value from a model."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_ECHO else text[: _MAX_ECHO - 3] + "..."


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into its description and its ``Args:`` descriptions.

    The sections ``Returns:``, ``Raises:`` and ``Yields:`` are omitted.
    """
    body: list[str] = []
    described: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        header = re.match(r"(Args|Arguments|Returns|Raises|Yields):\s*$", line)
        entry = re.match(r"(\s+)(\w+)\s*(?:\([^)]*\))?:\s*(.*)$", line)
        if header:
            section, current = header.group(1), ""
        elif not section or line[:1].strip():
            section = ""
            body.append(line)
        elif section.startswith("Arg") and entry and (not current or len(entry.group(1)) <= indent):
            indent, current = len(entry.group(1)), entry.group(2)
            described[current] = entry.group(3)
        elif section.startswith("Arg") and current and line.strip():
            described[current] = f"{described[current]} {line.strip()}".strip()
    return "\n".join(body).strip(), described


def _reason(problem: Any) -> str:
    """Return the problem of an argument, as a phrase that follows its name."""
    if form := _FORMATS.get(problem["type"]):
        cause = problem.get("ctx", {}).get("error")
        return f" should be {form}" + (f" ({cause})" if cause else "")
    if wanted := re.match(r"[\w ]+? should (.+)", problem["msg"], re.DOTALL):
        return f" should {wanted[1]}"
    return f": {problem['msg'].removeprefix('Value error, ')}"


def _describe(annotation: Any, description: str) -> Any:
    # A description in the author's Field(...) takes precedence, because pydantic merges the outermost last.
    for extra in getattr(annotation, "__metadata__", ()):
        if getattr(extra, "description", None):
            return annotation
    return Annotated[annotation, Field(description=description)]


def _not_finite(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the place and value of each number that is NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _not_finite(item, f"{path}.{key}" if path else str(key))


def _typed_dict(fields: Mapping[str, Any]) -> Any:
    """Return a TypedDict. Unlike the fields of a model, its keys can have any name (``copy``, ``_x``)."""
    make: Any = TypedDict
    typed = make("Arguments", fields)
    typed.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False, regex_engine="python-re")
    return typed


def _with_integers(text: str) -> str:
    """Return a JSON text with whole numbers as integers. Raises ValueError if that changes nothing."""
    if not _WHOLE_NUMBER.search(text):
        raise ValueError("no whole number is written with a point or an exponent")

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item) for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(convert(from_json(text)))


def _parts(core_schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a pydantic-core schema and all schemas in it."""
    if isinstance(core_schema, list):
        for item in core_schema:
            yield from _parts(item)
    elif isinstance(core_schema, dict):
        yield core_schema
        for key, item in core_schema.items():
            if key != "metadata":
                yield from _parts(item)


def _options(core_schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values of a literal or an enum."""
    if core_schema.get("type") == "enum":
        return [member.value for member in core_schema["members"]]
    return core_schema["expected"] if core_schema.get("type") == "literal" else ()


def _leaves(error: JsonSchemaError) -> list[JsonSchemaError]:
    """Return the errors in the alternatives of a union, or else the error."""
    return [leaf for cause in error.context or () for leaf in _leaves(cause)] or [error]


def _json_default(value: Any) -> dict[str, Any]:
    if isinstance(value, float) and not math.isfinite(value):
        return {}
    try:
        return {"default": json.loads(TypeAdapter(type(value)).dump_json(value))}
    except (PydanticUserError, ValueError):
        return {}


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without generated titles, which are noise in a prompt."""
    schema = {key: value for key, value in schema.items() if key != "title"}
    for key, value in schema.items():
        if key in _SUBSCHEMA_MAPS:
            schema[key] = {name: _plain(sub) for name, sub in value.items()}
        elif key in _SUBSCHEMA_LISTS:
            schema[key] = [_plain(sub) for sub in value]
        elif key in _SUBSCHEMAS and isinstance(value, dict):
            schema[key] = _plain(value)
    return schema
