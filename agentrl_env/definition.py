"""Checks the definition of an Environment class: settings, methods, and methods that are never called.

``base`` is ``Environment``, which imports this module.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable
from functools import cached_property
from types import CodeType
from typing import Any, TypeVar

from agentrl_env.author_code import place
from agentrl_env.errors import DefinitionError
from agentrl_env.tools import is_seconds, is_tool, toolset
from agentrl_env.wording import Wording

T = TypeVar("T")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (
        lambda value: isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) is not None,
        "text of letters, digits, '_', '-' or '.'",
    ),
    "splits": (
        lambda value: isinstance(value, tuple | list) and all(isinstance(v, str) and v for v in value),
        'a tuple of names, such as ("train", "test")',
    ),
    "max_turns": (_is_count, "a whole number of at least 1"),
    "max_output_chars": (_is_count, "a whole number of at least 1"),
    "max_seconds": (lambda value: value is None or is_seconds(value), "seconds above 0, or None"),
    "tool_timeout": (is_seconds, "seconds above 0"),
    "reset_timeout": (is_seconds, "seconds above 0"),
    "blocking": (lambda value: isinstance(value, bool), "True or False"),
    "wording": (lambda value: isinstance(value, Wording), "a Wording"),
}
"""The class attributes that configure a task, each with a check of its value and a description."""
_SHARED = frozenset(_SETTINGS) - {"name", "splits"}
"""Settings with which a session could be expected to differ from the class."""
_HOOKS = (
    "reset", "respond", "answer_message", "session_tools",
    "close", "score", "expert", "snapshot", "restore", "samples", "startup", "shutdown",
    "description",
)  # fmt: skip
"""The methods that a task overrides."""
_FOREIGN_HOOKS = {
    "oracle": "expert", "teardown": "close", "tear_down": "close", "cleanup": "close", "clean_up": "close",
    "setup": "startup", "set_up": "startup", "get_samples": "samples", "load_samples": "samples",
    "get_dataset": "samples", "load_dataset": "samples", "get_state": "snapshot", "set_state": "restore",
}  # fmt: skip
"""Names of hooks in other libraries."""


_FOREIGN_PARAMETERS = {"reset": ("seed", "options")}
"""Parameters of methods with the same name in other libraries, where they have another meaning."""


def check_class(environment: Any, *, base: type[T]) -> type[T]:
    """Return an Environment class if it is complete. Raises DefinitionError.

    These checks cannot run when the class is defined, because it can be a base of other classes and its
    annotations can name later classes.
    """
    if not isinstance(environment, type) or not issubclass(environment, base):
        what = environment.__name__ if isinstance(environment, type) else f"{environment!r:.80}"
        hint = "; pass the class, not an instance" if isinstance(environment, base) else ""
        raise DefinitionError(f"{what} is not a class that derives from Environment{hint}")
    own = environment.__name__
    if missing := sorted(getattr(environment, "__abstractmethods__", ())):
        wanted = ", ".join(_signature_text(base, name) for name in missing)
        similar = difflib.get_close_matches(missing[0], vars(environment), n=1, cutoff=0.7)
        hint = f"; {own} has {similar[0]!r}, is that it?" if similar else ""
        raise DefinitionError(f"{own} has no {wanted}{hint}", environment, similar[0] if similar else "")
    if not _takes(environment, 0):
        raise DefinitionError(
            f"{own}.__init__() is called without arguments; set up the episode in reset()",
            environment,
            "__init__",
        )
    has, lacks = "snapshot", "restore"
    if _overrides(environment, has, base) != _overrides(environment, lacks, base):
        if not _overrides(environment, has, base):
            has, lacks = lacks, has
        raise DefinitionError(
            f"{own} has {has}() and no {lacks}(): sessions can fork only with both", environment, has
        )
    toolset(environment)  # type: ignore[arg-type]  # mypy: type[object] is not hashable
    return environment


def check_attribute(environment: type, attribute: str, value: Any, *, base: type) -> None:
    """Raise DefinitionError if an attribute of an Environment class contradicts ``base``."""
    what = f"{environment.__name__}.{attribute}"
    original = vars(base).get(attribute)
    if is_tool(value):
        if original is not None or attribute in _SETTINGS:
            raise DefinitionError(
                f"{what} is a tool, but Environment has an attribute of this name; rename it, "
                f"and keep the name for models with @tool(name={attribute!r})",
                value,
            )
    elif attribute in _SETTINGS:
        valid, wanted = _SETTINGS[attribute]
        if not valid(value):
            raise DefinitionError(f"{what} is {value!r:.80}; it must be {wanted}", environment, attribute)
    elif attribute.startswith("_"):
        return
    elif original is not None:
        _check_method(environment, attribute, value, base)
    elif inspect.isfunction(_plain(value)):
        _check_helper(environment, attribute, value, base)
        if any(is_tool(vars(parent).get(attribute)) for parent in environment.__mro__[1:]):
            raise DefinitionError(
                f"{what} overrides a tool without @tool: add @tool; {attribute} = None removes the tool",
                value,
            )
    elif not hasattr(value, "__get__"):
        similar = difflib.get_close_matches(attribute, set(_SETTINGS) - {"name"}, n=1, cutoff=0.85)
        if similar:
            raise DefinitionError(
                f"{what} is not a setting; did you mean {similar[0]!r}?", environment, attribute
            )


def check_instance(environment: Any) -> None:
    """Raise DefinitionError if an instance has its own value of a setting, which would have no effect."""
    if own := sorted(_SHARED.intersection(vars(environment))):
        name, kind = own[0], type(environment).__name__
        advice = f"write {name} = ... in {kind}"
        if name in ("max_turns", "max_seconds"):
            advice += "; end a session earlier with Done(..., truncated=True)"
        raise DefinitionError(f"self.{name} is set, but sessions share the settings of their class: {advice}")


def _check_helper(environment: type, name: str, value: Any, base: type) -> None:
    """Raise DefinitionError for an uncalled method with a name that is similar to a hook's name.

    Methods that the task calls, that a base class has, or that are defined next to the hook are helpers.
    ``check_class`` reports a missing ``reset``.
    """
    hooks = [hook for hook in _HOOKS if hook not in vars(environment) and abs(len(hook) - len(name)) <= 2]
    similar = difflib.get_close_matches(name, hooks, n=1, cutoff=0.8)
    parents = environment.__mro__[1 : environment.__mro__.index(base)]
    if not similar or (similar[0] == "reset" and not _overrides(environment, "reset", base)):
        return
    own = [_plain(method) for owner in (environment, *parents) for method in vars(owner).values()]
    called = any(_mentions(method.__code__, name) for method in own if inspect.isfunction(method))
    if not called and not any(name in vars(parent) for parent in parents):
        raise DefinitionError(
            f"{environment.__name__}.{name} is never called; "
            f"did you mean {_signature_text(base, similar[0])}? Rename a helper, or call it _{name}",
            value,
        )


def uncalled_methods(environment: type, *, base: type) -> list[str]:
    """Return a sentence for each uncalled method with the name of another library's hook.

    A method is a helper, and not reported, if the task also defines the hook, if the code of the task's
    modules mentions the method, or if a base class from a library has it too.
    """
    parents = [parent for parent in environment.__mro__ if parent not in base.__mro__]
    own = [parent for parent in parents if issubclass(parent, base)]
    modules = [sys.modules[parent.__module__] for parent in own if parent.__module__ in sys.modules]
    values = [value for module in modules for value in vars(module).values()]
    classes = [value for value in values if isinstance(value, type)]
    values += [value for owner in (*parents, *classes) if owner is not base for value in vars(owner).values()]
    code = [part for value in values if (part := _code(value)) is not None]
    found = []
    for name, hook in _FOREIGN_HOOKS.items():
        owners = [parent for parent in parents if name in vars(parent)]
        if not owners or _overrides(environment, hook, base) or any(_mentions(part, name) for part in code):
            continue
        value = vars(owners[0])[name]
        if set(owners) <= set(own) and inspect.isfunction(_plain(value)) and not is_tool(value):
            what, where = f"{owners[0].__name__}.{name}", place(value)
            advice = f"the hook is {_signature_text(base, hook)}"
            found.append(f"{what} is never called; {advice}{where and f' ({where})'}")
    return found


def _code(value: Any) -> CodeType | None:
    """Return the code of a function or method, unwrapping decorators, or None for other values."""
    if isinstance(value, property | cached_property):
        value = value.fget if isinstance(value, property) else value.func
    value = getattr(_plain(value), "__wrapped__", _plain(value))
    return value.__code__ if inspect.isfunction(value) else None


def _mentions(code: CodeType, name: str) -> bool:
    """Return True if code, or a function inside it, uses the name as a name or as a text."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return name in code.co_names or name in code.co_consts or any(_mentions(part, name) for part in inner)


def _check_method(environment: type, name: str, value: Any, base: type) -> None:
    """Raise DefinitionError unless a method can be called like the Environment method that it overrides."""
    what, original = f"{environment.__name__}.{name}", vars(base)[name]
    of_class = isinstance(original, classmethod)
    if not callable(getattr(value, "__func__", value)):
        raise DefinitionError(
            f"{what} is a {type(value).__name__}, but Environment has a method of this name; rename it",
            environment,
            name,
        )
    if isinstance(value, classmethod) and not of_class:
        raise DefinitionError(f"{what} is a classmethod; the state of an episode belongs on self", value)
    parameters = list(inspect.signature(getattr(original, "__func__", original)).parameters.values())
    given = sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if of_class or isinstance(value, staticmethod) or not hasattr(type(value), "__get__"):
        given -= 1  # cls, or self
    if not _takes(getattr(environment, name), given):
        advice = f"write {_signature_text(base, name)}"
        if of_class and inspect.isfunction(value):
            advice = f"put @classmethod above it, and {advice}"
        raise DefinitionError(f"{what} is called with other arguments; {advice}", value)
    expected = [p.name for p in parameters if p.default is p.empty][-given:] if given else []
    if mistaken := _mistaken_parameter(getattr(environment, name), name, expected):
        passed = f"is called with ({', '.join(expected)}) in this order"
        advice = f"write {_signature_text(base, name)}"
        raise DefinitionError(f"{what} has a parameter {mistaken!r}, but {passed}; {advice}", value)
    if of_class and name not in ("startup", "shutdown") and inspect.iscoroutinefunction(_plain(value)):
        raise DefinitionError(f"{what} cannot be async; write a plain classmethod", value)
    if not of_class and (inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value)):
        raise DefinitionError(f"{what} yields; return the value instead", value)


def _mistaken_parameter(function: Callable[..., Any], name: str, expected: list[str]) -> str | None:
    """Return the first parameter that gets a different argument than its name suggests, or None."""
    try:
        own = list(inspect.signature(function).parameters)[: len(expected)]
    except ValueError:  # a builtin without a signature
        return None
    mistaken = (p for p, wanted in zip(own, expected, strict=False) if p != wanted)
    return next((p for p in mistaken if p in (*expected, *_FOREIGN_PARAMETERS.get(name, ()))), None)


def _plain(value: Any) -> Any:
    return getattr(value, "__func__", value)


def _takes(function: Callable[..., Any], given: int) -> bool:
    """Return True if a function can be called with this number of arguments."""
    try:
        inspect.signature(function).bind(*[None] * given)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _overrides(environment: type, method: str, base: type) -> bool:
    return inspect.getattr_static(environment, method) is not vars(base)[method]


def _signature_text(base: type, name: str) -> str:
    function = _plain(vars(base)[name])
    return f"{name}({', '.join(inspect.signature(function).parameters)})"
