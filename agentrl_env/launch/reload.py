"""Restarts a server whenever the Python files of its tasks change, for authors."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from agentrl_env.author_code import search_working_directory
from agentrl_env.errors import AgentRLError, TargetError
from agentrl_env.launch.installed import installed_task
from agentrl_env.launch.process import ServerHandle

POLL_S = 0.3


def serve_and_reload(server: ServerHandle, targets: Iterable[str]) -> None:
    """Run a server until SIGINT or SIGTERM, and restart it when a file changes.

    A server that cannot start waits for a change.

    Args:
        server: a server that prints its own errors, such as ``ServerProcess`` with ``forward_output``.
        targets: the tasks. All Python files in their folders are watched.

    Raises TargetError for a target without a folder.
    """
    folders = {_folder(target) for target in targets}
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    try:
        while True:
            seen = _modification_times(folders)
            try:
                server.start()
                print(f"serving at {server.url}; restarts when a Python file changes", flush=True)
            except AgentRLError as error:
                print(f"{error}; waiting for a file to change", file=sys.stderr, flush=True)
            print(f"{_wait_for_change(server, folders, seen)} changed, restarting", flush=True)
            server.stop()
    except KeyboardInterrupt:
        return
    finally:
        server.stop()


def _wait_for_change(server: ServerHandle, folders: Iterable[Path], seen: dict[str, int]) -> str:
    """Return a file that was changed, added or removed."""
    ran = server.running
    while (now := _modification_times(folders)) == seen:
        if ran and not server.running:
            ran = False
            reason = f"the server ended: {server.end_reason()}"
            print(f"{reason}; waiting for a file to change", file=sys.stderr, flush=True)
        time.sleep(POLL_S)
    return os.path.relpath(sorted(now.items() ^ seen.items())[0][0])


def _modification_times(folders: Iterable[Path]) -> dict[str, int]:
    """Return the last modification time of every Python file outside hidden folders."""
    found = {}
    for top in folders:
        for folder, inner, files in os.walk(top):
            inner[:] = [name for name in inner if not name.startswith((".", "__pycache__"))]
            for name in files:
                file = os.path.join(folder, name)
                if name.endswith(".py") and os.path.exists(file):  # an editor might be replacing it
                    found[file] = os.stat(file).st_mtime_ns
    return found


def _folder(target: str) -> Path:
    if (task := installed_task(target)) is not None:
        target = task.target
    place = target.rpartition(":")[0] or target
    path = Path(place)
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".py":
        return path.resolve().parent
    search_working_directory()  # as the loader does
    try:
        module = find_spec(place)
    except (ImportError, ValueError):
        module = None
    if module is None or module.origin is None:
        raise TargetError(f"{target}: no such folder, file or module")
    return Path(module.origin).parent
