"""Follows a run from outside its event loop, for ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_train.training.evaluation import Evaluations
    from agentrl_train.types import Step


class Observer:
    """Interface of objects that follow a run. This base class does nothing.

    The run waits for each method to return. Admitted groups continue to play meanwhile.
    """

    silent = False
    """Show no progress in the terminal."""

    def started(self, run: Any) -> None:
        """Receive the ``Run`` before its first step."""

    async def trained(self, step: Step) -> Mapping[str, float]:
        """Return additional metrics of a trained step before it is logged."""
        return {}

    async def evaluated(self, evaluations: Evaluations) -> None:
        """Receive a held-out evaluation once it is recorded."""

    async def finished(self, step: Step) -> None:
        """Receive a step once it is logged, saved and evaluated as configured. The next step waits."""
