"""Imports without garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import large packages without garbage collections, and exempt their objects from later collections.

    Each collection, including the last one at the exit of the process, would traverse all functions and
    classes of the imported modules. For FastAPI, collections take a third of the import time, also when
    PyTorch and transformers are imported too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
