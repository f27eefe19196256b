"""Imports of commands: without garbage collections, and quiet if interrupted."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import large packages without garbage collections, and exempt their objects from later collections.

    Each collection, including the last one at the exit of the process, would traverse all functions and
    classes of the imported modules. For FastAPI, collections take a third of the import time, also when
    PyTorch and transformers are imported too.

    Ctrl-C exits with status 130, without a traceback.
    """
    gc.disable()
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.freeze()
        gc.enable()
