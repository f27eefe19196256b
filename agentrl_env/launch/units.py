"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_size(size: int | str) -> int:
    """Return the bytes that ``size`` means: a number, or text such as "64m", "1.5 GiB" or "2gb".

    Units are powers of 1024, whatever their case.

    Raises:
        ValueError: it means nothing.
    """
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", size.strip().lower(), flags=re.ASCII)
    if found is None:
        raise ValueError(f"{size!r} is no size; write bytes, or a number with k, m, g or t, as in '512m'")
    return int(float(found[1]) * (1 << _UNITS[found[2]]))
