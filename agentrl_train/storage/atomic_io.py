"""Atomic file writes, files of lines, and errors for full or read-only disks."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl_train.errors import RunFolderError

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DISK_FULL_TEXTS = (
    "No space left",
    "os error 28",
    "os error 122",
    "os error 27",
    "file write failed",
    "unexpected pos",  # torch.save after a partial write
)


@contextmanager
def run_folder_errors(folder: Path, *, option: str = "run.folder") -> Iterator[None]:
    """Convert disk errors into a ``RunFolderError`` that explains how to fix them.

    Args:
        folder: the folder that is written.
        option: setting or argument that chooses another folder.
    """
    try:
        yield
    except RunFolderError:
        raise
    except Exception as error:
        if is_disk_full(error):
            then = "continue with --resume" if option == "run.folder" else "try again"
            raise RunFolderError(f"The disk of {folder} is full; free some space, then {then}.") from error
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise RunFolderError(
                f"{folder} cannot be written ({reason}); fix it or choose another {option}."
            ) from error
        raise


def is_disk_full(error: BaseException) -> bool:
    """Return True if an error or one of its causes means that the disk is full."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            return True
        if any(text in str(cause) for text in DISK_FULL_TEXTS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically. Readers see the old or the new content, even after a crash."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_lines(path: Path, lines: Iterable[str], *, sync: bool = False) -> None:
    """Append lines to a file. If its last line is truncated, as by a full disk, they start after it.

    Args:
        path: the file.
        lines: without their ends.
        sync: return only when the lines are on the disk.
    """
    with open(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        truncated = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write(("\n" * bool(truncated) + "".join(f"{line}\n" for line in lines)).encode())
        file.flush()
        if sync:
            os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Flush the content of a file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    sync_file(folder)
