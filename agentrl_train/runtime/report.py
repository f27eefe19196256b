"""``report.html``: a run on one self-contained page, whatever of the run folder is there."""

from __future__ import annotations

from pathlib import Path


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    Raises ``RunFolderError`` if the folder does not exist or cannot be written.
    """
    raise NotImplementedError
