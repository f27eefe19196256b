"""pytest for the sandboxes: the modules of the installed pytest as an archive that Python imports from."""

from __future__ import annotations

import functools
import importlib.util
import io
import threading
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from agentrl_env.errors import SandboxFailed
from agentrl_env.sandbox import HOME, Sandbox

ARCHIVE = f"{HOME}/.pytest.zip"
ENV = {"PYTHONPATH": ARCHIVE, "PYTHONDONTWRITEBYTECODE": "1"}
"""Environment variables with which commands find pytest."""
PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
LEFT_OUT = ("pygments/lexers/", "pygments/styles/", "pygments/formatters/")
"""Folders with hundreds of modules, of which pytest loads only ``LOADED``."""
LOADED = ("__init__.py", "_mapping.py", "python.py", "diff.py", "terminal.py", "default.py")
_lock = threading.Lock()


def _wanted(path: str) -> bool:
    if path.startswith(LEFT_OUT):
        return path.rpartition("/")[2] in LOADED
    return path.endswith(".py") and not path.startswith("..")


@functools.cache
def _archive() -> bytes:
    """Return the modules, with what this Python has compiled, which others do not use."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for name in PACKAGES:
            try:
                files = [file for file in distribution(name).files or [] if _wanted(file.as_posix())]
            except PackageNotFoundError as error:
                message = f"{name} is not installed; pip install '.[swe-repair]' installs it"
                raise SandboxFailed(message) from error
            for file in files:
                source = str(file.locate())
                packed.write(source, file.as_posix())
                compiled = Path(importlib.util.cache_from_source(source))
                if compiled.exists():
                    packed.write(compiled, f"{file.as_posix()}c")
    return made.getvalue()


def archive() -> bytes:
    """Return the archive, which is created once in a process. Raises SandboxFailed."""
    with _lock:
        return _archive()


def install(box: Sandbox) -> None:
    """Put pytest into a sandbox. Commands find it with ``ENV``. Raises like ``Sandbox.write``."""
    box.write(ARCHIVE, archive())
