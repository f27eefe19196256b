"""Follows a run from outside of its event loop, for ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_train.training.evaluation import Evaluations
    from agentrl_train.types import Step


class Observer:
    """Seam: a follower of a run. This one does nothing.

    The run waits for each answer, while groups that are admitted continue to play.
    """

    silent = False
    """Show no progress in the terminal."""

    def started(self, run: Any) -> None:
        """Receive the ``Run`` before its first step."""

    async def trained(self, step: Step) -> Mapping[str, float]:
        """Return further metrics of a step that is trained and not logged yet."""
        return {}

    async def evaluated(self, evaluations: Evaluations) -> None:
        """Receive a held-out evaluation once it is recorded."""

    async def finished(self, step: Step) -> None:
        """Receive a step once it is logged, saved and evaluated as configured; the next one waits."""
