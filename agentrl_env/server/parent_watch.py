"""A process that must not outlive the one that started it."""

from __future__ import annotations

import os
import signal
import time


def stop_at_end_of_input(drain: float, unreachable: bool) -> None:
    """Stop once the parent is gone: in order, and by force where that takes too long.

    Args:
        drain: seconds that open sessions get.
        unreachable: nobody can go on with the open sessions, so they are not waited for.
    """
    while os.read(0, 4096):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
    if unreachable:
        time.sleep(0.1)  # or the two signals are taken for one
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(drain + 10.0)
    signal_own_group(signal.SIGKILL)


def signal_own_group(number: signal.Signals) -> None:
    """Signal this process and all it has started; only where it leads a group of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), number)
