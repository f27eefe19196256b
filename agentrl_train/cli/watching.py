"""``agentrl-train watch``: serves the live page until it is stopped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agentrl_env.hosting.serve import print_now, run_until_stopped
from agentrl_train.errors import ConfigError
from agentrl_train.watch.app import WatchServer

MOST_RUNS = 2


def watch(folders: Sequence[Path], *, host: str, port: int, token_file: Path | None) -> None:
    """Serve the page of one run, or of two to compare, until SIGINT or SIGTERM.

    Raises:
        ConfigError: there are too many folders, or the token cannot be read.
        RunFolderError: a path is not a run folder.
        ServeError: the address is not available, or needs a token.
    """
    if len(folders) > MOST_RUNS:
        raise ConfigError(
            f"watch compares at most {MOST_RUNS} runs, not {len(folders)}; agentrl-train sweep compares many"
        )
    server = WatchServer(folders, host=host, port=port, token=_token(token_file))
    for folder in folders:
        if not folder.exists():
            print_now(f"{folder} does not exist yet; the page fills when the run starts")
    run_until_stopped(server, print_now)


def _token(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("AGENTRL_TOKEN") or None
    try:
        token = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token cannot be read from {path}: {error}") from error
    if not token:
        raise ConfigError(f"{path} is empty: write a token into it")
    return token
