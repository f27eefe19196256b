"""``python -m tests.hostile.skewed SECONDS AFTER ...`` runs ``agentrl-env ...`` with a wrong clock.

The clock jumps by SECONDS, AFTER seconds after the start.
"""

from __future__ import annotations

import sys
import time


def skew(seconds: float, after: float) -> None:
    """Make ``time.time`` jump after a while. ``time.monotonic`` stays correct."""
    real, real_ns, begin = time.time, time.time_ns, time.monotonic()

    def jump() -> float:
        return seconds if time.monotonic() - begin >= after else 0.0

    time.time = lambda: real() + jump()
    time.time_ns = lambda: real_ns() + int(jump() * 1e9)


if __name__ == "__main__":
    skew(float(sys.argv[1]), float(sys.argv[2]))
    sys.argv = ["agentrl-env", *sys.argv[3:]]
    from agentrl_env.__main__ import app

    app()
