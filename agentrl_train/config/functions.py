"""Settings that select a function: its name, or a table with its name and its parameters.

``region = "clip"`` and ``region = {name = "clip", low = 0.1}`` select a function of the trainer. Each
function has a model of its parameters. ``"mine.py:function"``, or a table with that name and keyword
arguments, selects a user's function. In Python, the function itself can be given instead of its name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
)
from pydantic_core import CoreSchema, core_schema

from agentrl_env.author_code import describe, search_working_directory
from agentrl_env.errors import AUTHOR_ERRORS
from agentrl_train.config.paths import FUNCTION, target
from agentrl_train.config.section import Table
from agentrl_train.errors import ConfigError

_PACKAGE = str(Path(__file__).parents[1])
OWN = "file.py:function"
"""Tag of a user's function among the choices."""


class Function(Table):
    """A function and its parameters. Each choice with its own parameters is a subclass."""

    name: Any

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the keyword arguments of the function."""
        return {key: value for key, value in self if key != "name"}

    def among(self, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        """Return the chosen function with its parameters."""
        function = functions[self.name]
        return partial(function, **self.parameters) if self.parameters else function

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> Any:
        """Return only the name if there are no parameters."""
        table = handler(self)
        return table["name"] if len(table) == 1 else table


class Own(Function):
    """A user's function, and its keyword arguments."""

    model_config = ConfigDict(extra="allow")

    name: str | Callable[..., Any]
    """``file.py:function``, ``module:function``, or the function itself."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            return value
        if not FUNCTION.fullmatch(value):
            raise ValueError(f"{value!r} is not a function such as 'mine.py:function' or 'module:function'")
        return target(value, info.context["base"]) if info.context else value

    @property
    def spelled(self) -> str:
        """Return the name of the function as it is written in a file."""
        if isinstance(self.name, str):
            return self.name
        whole = self.name.func if isinstance(self.name, partial) else self.name
        kind = whole if hasattr(whole, "__qualname__") else type(whole)
        return f"{kind.__module__}:{kind.__qualname__}"

    @property
    def title(self) -> str:
        """Return the name of the function without its module."""
        return self.spelled.rpartition(":")[2].rpartition(".")[2]

    @property
    def called(self) -> Callable[..., Any]:
        """Return the function with its parameters; raises ``ConfigError`` if it cannot be imported."""
        function = imported(self.name) if isinstance(self.name, str) else self.name
        return partial(function, **self.parameters) if self.parameters else function

    def among(self, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        """Return the function with its parameters; raises ``ConfigError`` if it cannot be imported."""
        return self.called

    @field_serializer("name")
    def _spell(self, value: Any) -> str:
        return self.spelled


class Choice:
    """Annotation of a union of functions. The name in a value selects one, or a default if it is missing."""

    def __init__(self, default: str | None = None) -> None:
        self._default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices: dict[Any, CoreSchema] = {}
        for model in get_args(source):
            schema = handler.generate_schema(model)
            choices |= dict.fromkeys(names(model), schema)
        return core_schema.no_info_before_validator_function(
            self._table, core_schema.tagged_union_schema(choices, discriminator=_tag)
        )

    def _table(self, value: Any) -> Any:
        if isinstance(value, Mapping) and "name" not in value and self._default is not None:
            return {"name": self._default, **value}
        return as_table(value)


def as_table(value: Any) -> Any:
    """Return the table for a value that is only the name of a function, or the switch ``true``."""
    if isinstance(value, str) or callable(value):
        return {"name": value}
    return {} if value is True else value


def names(model: type[Function]) -> tuple[str, ...]:
    """Return the names that select a function of this model."""
    return (OWN,) if issubclass(model, Own) else get_args(model.model_fields["name"].annotation)


def _tag(value: Any) -> Any:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return OWN if callable(name) or (isinstance(name, str) and ":" in name) else name


OwnFunction = Annotated[Own, BeforeValidator(as_table)]


def with_choice(former: Any, value: Any) -> Any:
    """Merge the value of a key with its former value. A table with the same name keeps the parameters."""
    former = as_table(former)
    if not isinstance(value, dict) or not isinstance(former, dict):
        return value
    return former | value if value.get("name", former.get("name")) == former.get("name") else value


def imported(name: str) -> Any:
    """Return the function that ``file.py:function`` or ``module:function`` names.

    Modules of the working directory are found, as for tasks.

    Raises:
        ConfigError: the function cannot be imported.
    """
    source, _, function = name.rpartition(":")
    try:
        module = _module(Path(source)) if source.endswith(".py") else _import(source)
    except AUTHOR_ERRORS as error:
        raise ConfigError(f"the function {name} cannot be imported: {described(error)}") from error
    try:
        return attrgetter(function)(module)
    except AttributeError as error:
        here = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = get_close_matches(function, here, n=1)
        choice = f"did you mean {near[0]}?" if near else f"it has {', '.join(here) or 'no function'}"
        raise ConfigError(f"{source} has no function {function!r}; {choice}") from error


def described(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Describe an error with the file and line in the user's code that raised it, or of the function."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        step = step.tb_next
    return describe(error.with_traceback(step), function)


def _import(name: str) -> Any:
    search_working_directory()
    return importlib.import_module(name)


def _module(path: Path) -> Any:
    """Return the module of a file, which is imported once."""
    key = f"agentrl_algorithm_{path.resolve()}"
    if key not in sys.modules:
        spec = spec_from_file_location(key, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = module_from_spec(spec)
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]
