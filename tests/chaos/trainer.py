"""``python -m tests.chaos.trainer ENGINE run CONFIG ...`` is the command line with an engine that can fail.

``scripted`` is the engine without a model. ``torch`` is the regular engine. After SIGUSR1, its next forward
pass fails as if the device were lost.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from agentrl_train.__main__ import main
from agentrl_train.engine.scheduler import Scheduler
from agentrl_train.training import compose
from tests.chaos.scripted import ScriptedEngine


def scripted(*_: Any, **__: Any) -> ScriptedEngine:
    """Replace ``make_engine``."""
    return ScriptedEngine()


def break_on(number: signal.Signals) -> None:
    """Make the next forward pass after a signal fail."""
    broken: list[int] = []
    signal.signal(number, lambda *_: broken.append(1))
    whole = Scheduler._logits

    def forward(self: Scheduler, *args: Any, **options: Any) -> Any:
        if broken:
            broken.pop()
            raise RuntimeError("the device is lost")
        return whole(self, *args, **options)

    Scheduler._logits = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    engine = sys.argv.pop(1)
    break_on(signal.SIGUSR1)
    if engine == "scripted":
        compose.make_engine = scripted  # type: ignore[assignment]
    main()
