"""Gymnasium's action spaces as arguments of a tool: their types, and the conversion to actions."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from pydantic import Field
from typing_extensions import TypedDict

from agentrl_env.errors import DefinitionError

MAX_NUMBERS = 256
"""Maximum number of numbers in an action."""
_ACTION = "action"
_THE_ACTION = Field(description="The action to take.")


def action_fields(space: Space[Any], names: Mapping[str, int], env_id: str) -> dict[str, Any]:
    """Return the types of the tool's arguments by name: the keys of a dict space, otherwise ``action``.

    Args:
        space: The action space.
        names: Names of the actions of a discrete space. Empty for numbers.
        env_id: Id of the environment, for errors.

    Raises DefinitionError for a space without a JSON form.
    """
    if names:
        if not isinstance(space, Discrete):
            raise DefinitionError(
                f"{env_id!r} has the action space {space}; only Discrete can have named actions"
            )
        wrong = [name for name, value in names.items() if not space.contains(np.int64(value))]
        if wrong:
            raise DefinitionError(f"the action {wrong[0]!r} of {env_id!r} is not in {space}")
        return {_ACTION: Annotated[Literal[tuple(names)], _THE_ACTION]}
    try:
        if isinstance(space, Dict) and _flat(space):
            return {
                name: Annotated[_annotation(part), Field(description=f"The field {name!r} of the action.")]
                for name, part in space.spaces.items()
            }
        return {_ACTION: Annotated[_annotation(space), _THE_ACTION]}
    except _NoJson as error:
        raise DefinitionError(
            f"the action space of {env_id!r} has no JSON form: {error}; wrap the environment "
            "(gymnasium.wrappers.TransformAction) and register the wrapper"
        ) from error


def decode(space: Space[Any], arguments: Mapping[str, Any], names: Mapping[str, int]) -> Any:
    """Return the action of valid arguments. The caller must check that it is in the space."""
    if names:
        return np.int64(names[arguments[_ACTION]])
    flat = isinstance(space, Dict) and _flat(space)
    return _decode(space, arguments if flat else arguments[_ACTION])


class _NoJson(Exception):
    pass


def _flat(space: Dict) -> bool:
    """Return True if the keys of a dict space can be the names of arguments."""
    return all(
        isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) and name != "self"
        for name in space.spaces
    )


def _annotation(space: Space[Any]) -> Any:
    """Return the type whose JSON Schema describes a space. Raises _NoJson."""
    match space:
        case Discrete():
            return _integer(int(space.start), int(space.start + space.n) - 1)
        case MultiDiscrete():
            return _array(space.start, space.start + space.nvec - 1, _integer)
        case MultiBinary():
            return _array(np.zeros(space.shape, int), np.ones(space.shape, int), _integer)
        case Box():
            whole = np.issubdtype(space.dtype, np.integer)
            return _array(space.low, space.high, _integer if whole else _real)
        case Text():
            letters = "".join(sorted(space.character_set))
            limits = Field(
                min_length=space.min_length, max_length=space.max_length, description=f"Of: {letters}"
            )
            return Annotated[str, limits]
        case Dict():
            if wrong := [name for name in space.spaces if not isinstance(name, str)]:
                raise _NoJson(f"the key {wrong[0]!r} is not a string")
            make: Any = TypedDict
            return make("Fields", {name: _annotation(part) for name, part in space.spaces.items()})
        case Tuple():
            return tuple[tuple(_annotation(part) for part in space.spaces)]  # type: ignore[misc]
        case Sequence() if not space.stack:
            return list[_annotation(space.feature_space)]  # type: ignore[misc]
    raise _NoJson(
        f"{space} is none of Discrete, MultiDiscrete, MultiBinary, Box, Text, Dict, Tuple, Sequence"
    )


def _decode(space: Space[Any], value: Any) -> Any:
    match space:
        case Discrete():
            return np.int64(value)
        case Dict():
            return {name: _decode(part, value[name]) for name, part in space.spaces.items()}
        case Tuple():
            return tuple(_decode(part, item) for part, item in zip(space.spaces, value, strict=True))
        case Sequence():
            return tuple(_decode(space.feature_space, item) for item in value)
        case Text():
            return value
    return np.asarray(value, dtype=space.dtype)


def _array(low: np.ndarray[Any, Any], high: np.ndarray[Any, Any], number: Callable[..., Any]) -> Any:
    """Return the type of nested lists of numbers between two arrays."""
    low, high = np.asarray(low), np.asarray(high)
    if low.size > MAX_NUMBERS:
        raise _NoJson(f"an action has {low.size:,} numbers")
    if low.ndim == 0:
        return number(low.item(), high.item())
    size = len(low)
    if (low == low[:1]).all() and (high == high[:1]).all() and size:
        item = _array(low[0], high[0], number)
        return Annotated[list[item], Field(min_length=size, max_length=size)]  # type: ignore[valid-type]
    return tuple[tuple(_array(low[i], high[i], number) for i in range(size))]  # type: ignore[misc]


def _integer(low: int, high: int) -> Any:
    return Annotated[int, Field(ge=low, le=high)]


def _real(low: float, high: float) -> Any:
    bounds: dict[str, Any] = {}
    if np.isfinite(low):
        bounds["ge"] = low
    if np.isfinite(high):
        bounds["le"] = high
    return Annotated[float, Field(**bounds)] if bounds else float
