"""What ``reset(seed=, options=)`` of many environments asks for, read for each of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

Seeds: TypeAlias = SupportsIndex | Iterable[SupportsIndex | None] | None


def seeds_of_each(seed: Seeds, n: int) -> list[int | None]:
    """Return one seed for each of ``n``: of an int, ``seed + i``; None goes on with a stream.

    Raises:
        ValueError: there is not one for each.
    """
    if seed is None:
        return [None] * n
    if isinstance(seed, SupportsIndex) and not isinstance(seed, np.ndarray):
        return [operator.index(seed) + i for i in range(n)]
    seeds = [None if each is None else operator.index(each) for each in seed]
    if len(seeds) != n:
        raise ValueError(f"Give one seed for each of {n} environments, not {len(seeds)}.")
    return seeds


def whom_to_reset(mask: Any, n: int) -> list[int]:
    """Return the indices where ``mask`` is True; all where it is None.

    Raises:
        TypeError: it is no numpy array of bool.
        ValueError: its shape is not ``(n,)``, or it is True nowhere.
    """
    if mask is None:
        return list(range(n))
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"options['reset_mask'] must be a numpy array of bool, not {mask!r}.")
    if mask.shape != (n,):
        raise ValueError(f"options['reset_mask'] must have the shape ({n},), not {mask.shape}.")
    if not mask.any():
        raise ValueError("options['reset_mask'] must be True somewhere.")
    indices: npt.NDArray[np.intp] = np.flatnonzero(mask)
    return [int(i) for i in indices]


def options_of_each(options: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """Return the options of each of ``n``: a value is for all, a list (tuple, array) has one for each.

    Raises:
        ValueError: a list has not one for each.
    """
    columns = {}
    for key, value in options.items():
        each = value if isinstance(value, list | tuple | np.ndarray) else [value] * n
        if len(each) != n:
            raise ValueError(
                f"options[{key!r}] must be one value, or one for each of {n} environments, not {len(each)}."
            )
        columns[key] = each
    return [{key: each[i] for key, each in columns.items()} for i in range(n)]
