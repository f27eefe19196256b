"""Commands with one settings model instead of a parameter for each option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, get_type_hints


def settings_as_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each field of its last parameter, a settings model.

    The model is a frozen dataclass or pydantic model. Its fields are annotated like the parameters of a
    Typer command. The options of its own fields come before the options of inherited fields.

    Example::

        @dataclass(frozen=True, kw_only=True)
        class ServeSettings:
            port: Annotated[int, typer.Option(min=0, help="The port to bind.")] = 8000

        @settings_as_options
        def serve(context: typer.Context, settings: ServeSettings) -> None: ...
    """
    *others, last = inspect.signature(command, eval_str=True).parameters.values()
    model, hints = last.annotation, get_type_hints(last.annotation, include_extras=True)
    fields = inspect.signature(model).parameters
    names = [name for owner in model.__mro__ for name in inspect.get_annotations(owner) if name in fields]
    options = [fields[name].replace(annotation=hints[name]) for name in dict.fromkeys(names)]

    @wraps(command)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in fields}
        command(**values, **{last.name: model(**given)})

    keyword_only = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in (*others, *options)]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return run
