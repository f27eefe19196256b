"""Imports that do not wait for the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import large packages without garbage collections, and exempt their objects from later ones.

    Each collection, including the last one when the process exits, would traverse all functions and classes
    of the imported modules. For FastAPI that is a third of the time of the import, with PyTorch and
    transformers too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
