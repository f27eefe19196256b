"""Functions that settings name: ``file.py:function``, ``module:function``, or a function of a module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from agentrl_train.errors import ConfigError

_GIVEN: dict[str, Any] = {}
"""Functions given as objects, by target: those of a notebook or a closure cannot be imported."""


def target_of(function: Callable[..., Any]) -> str:
    """Return the target of a function given as an object, which ``imported`` finds in this process."""
    target = f"{function.__module__}:{getattr(function, '__name__', type(function).__name__)}"
    _GIVEN[target] = function
    return target


def function(module: Any, name: str) -> Any:
    """Return a function of a module by name, or the one that ``file.py:function`` names."""
    return imported(name) if ":" in name else getattr(module, name)


def imported(target: str) -> Any:
    """Return the function that ``file.py:function`` or ``module:function`` names; raises ``ConfigError``."""
    if target in _GIVEN:
        return _GIVEN[target]
    source, _, name = target.rpartition(":")
    try:
        module = _module(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        return getattr(module, name)
    except Exception as error:  # the code of a user raises anything
        raise ConfigError(f"the function {target} cannot be imported: {error}") from error


def _module(path: Path) -> Any:
    """Return the module of a file, which is imported once."""
    key = f"agentrl_algorithm_{path.resolve()}"
    if key not in sys.modules:
        spec = spec_from_file_location(key, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = module_from_spec(spec)
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]
