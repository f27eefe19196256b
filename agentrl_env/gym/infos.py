"""The infos of many environments as Gymnasium's vector form: a dict of arrays with masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def stack_infos(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return for each key an array of shape ``[n]``, and under ``_key`` a mask of who has it.

    Who has not reads 0, False or None. Dicts become dicts of arrays. What Gymnasium's own
    ``VectorEnv._add_info`` cuts to the type of the first value (2.5 after an int) or cannot take
    (a string after an int) keeps its value here, in an array of a wider type or of objects.
    """
    stacked: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos for key in info):
        present = np.array([key in info for info in infos], dtype=np.bool_)
        values = [info.get(key) for info in infos]
        kinds = {type(value) for value, there in zip(values, present, strict=True) if there}
        if kinds == {dict}:
            stacked[key] = stack_infos([value or {} for value in values])
        else:
            stacked[key] = _array(values, present, kinds)
        stacked[f"_{key}"] = present
    return stacked


def _array(values: list[Any], present: npt.NDArray[np.bool_], kinds: set[type]) -> npt.NDArray[Any]:
    given = [value for value, there in zip(values, present, strict=True) if there]
    dtype: Any = object
    if kinds in ({bool}, {float}):
        dtype = kinds.pop()
    elif kinds == {int} and all(-(2**63) <= value < 2**63 for value in given):
        dtype = np.int64
    elif kinds == {int, float} and all(isinstance(value, float) or abs(value) <= 2**53 for value in given):
        dtype = np.float64
    array = np.full(len(values), None, dtype=object) if dtype is object else np.zeros(len(values), dtype)
    for i in np.flatnonzero(present):
        array[i] = values[i]
    return array
