"""Ends a process together with its parent."""

from __future__ import annotations

import os
import signal
import time


def stop_at_end_of_input(drain: float, unreachable: bool) -> None:
    """Stop when standard input closes: by SIGTERM, then by SIGKILL.

    Args:
        drain: seconds that open sessions get.
        unreachable: no client can continue the open sessions, so that they are not waited for.
    """
    while os.read(0, 4096):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
    if unreachable:
        time.sleep(0.1)  # two signals at once would be delivered as one
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(drain + 10.0)
    signal_own_group(signal.SIGKILL)


def signal_own_group(number: signal.Signals) -> None:
    """Signal this process and its children, where it leads a process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), number)
