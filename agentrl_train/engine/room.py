"""Whether a completion fits behind its context."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_train.errors import EngineError
from agentrl_train.types import SamplingParams


def require_room(token_ids: Sequence[int], sampling: SamplingParams, *, max_context: int) -> None:
    """Refuse a context that is empty, or behind which ``max_new_tokens`` have no room.

    Raises:
        EngineError: it cannot be completed.
    """
    if not token_ids or len(token_ids) + sampling.max_new_tokens > max_context:
        raise EngineError(
            f"a context of {len(token_ids)} tokens leaves no room for {sampling.max_new_tokens} new ones "
            f"in {max_context}: raise engine.max_context or lower engine.max_new_tokens"
        )
