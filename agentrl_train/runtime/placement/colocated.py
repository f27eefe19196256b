"""Learner and engine on the same devices, in turns.

::

    rollouts ------------> sleep -> check, learn -> wake -> publish -> rollouts
    engine has the GPU     learner has the GPU      engine has the GPU
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl_train.types import Sleeper, Trace

TRACK = "trainer/steps"


@contextmanager
def learners_turn(engine: Sleeper, *, release: Callable[[], None], trace: Trace) -> Iterator[None]:
    """Let the engine sleep during the block.

    Args:
        engine: wakes at the end of the block; after an error it sleeps on, for the run ends.
        release: gives back what the learner keeps and does not use.
        trace: of the run.

    Raises:
        EngineError: the engine did not fall asleep or wake up.
    """
    with trace.span(TRACK, "sleep"):
        engine.sleep()
    yield
    with trace.span(TRACK, "wake"):
        release()
        engine.wake()
