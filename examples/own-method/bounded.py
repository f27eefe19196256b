"""A custom method: the median of the siblings as the baseline, and a bound that leaks."""

import numpy as np
import torch

from agentrl_train.advantage import Siblings
from agentrl_train.loss import Tokens


def median(siblings: Siblings) -> float:
    """Return the median of the siblings' returns, which a single lucky episode does not change."""
    return float(np.median(siblings.returns))


def leaky_clip(ratios: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip the ratio, and keep a tenth of the gradient outside the range."""
    clipped = ratios.clamp(0.8, 1.25)
    leaky = clipped + 0.1 * (ratios - clipped)
    return -leaky * tokens.advantages, clipped != ratios
