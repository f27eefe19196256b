"""Latency of opening a sandbox, running a command and closing it, compared with bare bubblewrap.

Bare means one ``bwrap`` per command with a read-only ``/usr`` and a tmpfs, but without overlay, limits and
persistent files. Measurements alternate, so that other load affects both.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from agentrl_env.errors import SandboxUnavailable
from agentrl_env.sandbox import open_sandbox

BY_HAND = [
    *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
    *("--", "/bin/bash", "-c", "true"),
]


def timed(function: Callable[[], object]) -> float:
    """Return the milliseconds of one call."""
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1000


def bubblewrap(rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round by operation."""
    times: dict[str, list[float]] = {name: [] for name in ("open", "run", "write", "by hand", "close")}
    for _ in range(rounds):
        begin = time.perf_counter()
        box = open_sandbox("bubblewrap")
        times["open"].append((time.perf_counter() - begin) * 1000)
        for _ in range(5):
            times["run"].append(timed(lambda: box.run("true")))  # noqa: B023
            times["by hand"].append(timed(lambda: subprocess.run(BY_HAND, check=True)))
        times["write"].append(timed(lambda: box.write("x", "y")))  # noqa: B023
        times["close"].append(timed(box.close))
    return times


def run(*, quick: bool) -> None:
    """Print the table."""
    console = Console(width=110)
    try:
        times = bubblewrap(5 if quick else 40)
    except SandboxUnavailable as error:
        console.print(f"not measured: {error}")
        return
    table = Table(title="a sandbox, milliseconds")
    for heading in ("what", "median", "p99", "count"):
        table.add_column(heading, justify="right")
    for name, figures in times.items():
        p99 = sorted(figures)[int(0.99 * (len(figures) - 1))]
        table.add_row(name, f"{statistics.median(figures):.1f}", f"{p99:.1f}", str(len(figures)))
    console.print(table)
    ratio = statistics.median(times["by hand"]) / statistics.median(times["run"])
    console.print(f"a command in an open sandbox takes 1/{ratio:.1f} of the time of bwrap by hand")
