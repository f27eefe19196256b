"""Finds what episodes changed of the state that a process shares: attributes of the class and its module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from agentrl_env.author_code import place
from agentrl_env.environment import Environment
from agentrl_env.errors import StateError
from agentrl_env.session.state_codec import encode


class SharedState:
    """A record of a class's shared values, to be compared with what they are later.

    Args:
        environment: The class, after its ``startup``.
    """

    def __init__(self, environment: type[Environment]) -> None:
        self._environment = environment
        self._before = {where: _content(value) for where, value in _shared(environment)}

    def changed(self) -> list[str]:
        """Return a name and a place for each value that has changed, such as ``Guess.seen (task.py:9)``."""
        now = {where: _content(value) for where, value in _shared(self._environment)}
        changed = [where for where, content in now.items() if content != self._before.get(where, b"")]
        return [_text(owner, name) for owner, name in changed]


def _shared(environment: type[Environment]) -> Iterator[tuple[tuple[type | ModuleType, str], Any]]:
    """Yield the values of an author's classes and their modules that are no code."""
    bases = environment.__mro__[: environment.__mro__.index(Environment)]
    owners: list[type | ModuleType] = [*bases]
    owners += dict.fromkeys(sys.modules[base.__module__] for base in bases if base.__module__ in sys.modules)
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if not name.startswith(("__", "_abc_")) and not callable(value) and not hasattr(value, "__get__"):
                yield (owner, name), value


def _content(value: Any) -> bytes | None:
    """Return what is compared of a value; None where it cannot be."""
    try:
        return encode(value)
    except (StateError, ValueError):  # not plain data, too large, or not a finite number
        return None


def _text(owner: type | ModuleType, name: str) -> str:
    where = place(owner, name) if isinstance(owner, type) else ""
    own = owner.__name__.rpartition(".")[2]
    return f"{own}.{name} has changed{where and f' ({where})'}"
