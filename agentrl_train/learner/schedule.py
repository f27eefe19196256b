"""How the learning rate goes over a run."""

from __future__ import annotations


def lr_fraction(
    update: int,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    final_lr_fraction: float = 0.1,
    decay_fraction: float = 1.0,
) -> float:
    """Return which part of the learning rate update number ``update`` (from 0) uses.

    Rises to 1 over ``warmup_steps``, stays there, and falls linearly to ``final_lr_fraction`` at
    the last update, over the last ``decay_fraction`` of the updates after the warm-up. Without
    ``total_steps`` it does not fall.
    """
    if update < warmup_steps:
        return (update + 1) / warmup_steps
    if total_steps is None:
        return 1.0
    decay = max(1.0, decay_fraction * (total_steps - warmup_steps))
    done = min(1.0, max(0.0, (update + 1 - (total_steps - decay)) / decay))
    return 1.0 - done * (1.0 - final_lr_fraction)
