"""``python -m tests.train.engine.breaking`` runs a torch engine process with failing forward passes."""

from __future__ import annotations

import asyncio
import json
import sys

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.scheduler import Scheduler
from agentrl_train.placement.serving import main


def broken(_replica: Scheduler) -> None:
    raise RuntimeError("a cable was pulled")


if __name__ == "__main__":
    Scheduler.step = broken  # type: ignore[method-assign]
    asyncio.run(main(int(sys.argv[1]), ServingOptions(**json.loads(sys.argv[2]))))
