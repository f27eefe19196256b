"""ArCHer (arXiv 2402.19446): twin critics of turns, by temporal differences with target networks.

Pure functions of numpy arrays, float64. ``values`` are V(s) of the states before U turns, ``actions`` Q(s, a)
of the turns, [U, 2] each, one column for each twin. A turn is an action; its tokens share its advantage.
"""

from __future__ import annotations

import numpy as np

from agentrl_train.advantage import Values


def twin_targets(
    rewards: Values, values: Values, actions: Values, *, gamma: float, bootstrap: Values | float = 0.0
) -> tuple[Values, Values]:
    """Return what V and Q are to become, [U, 2] each, from those of the target networks.

    ``V(s_u) -> Q'(s_u, a_u)`` for an action of the policy, and ``Q(s_u, a_u) -> r_u + gamma V'(s_(u+1))``.

    Args:
        rewards: rewards of the turns, [U].
        values: V' of the target networks.
        actions: Q' of the target networks.
        gamma: discount of a turn.
        bootstrap: V' of the state after the last turn; 0 where the episode terminated.
    """
    after = np.concatenate([values[1:], np.broadcast_to(bootstrap, (min(1, len(values)), 2))])
    return actions.copy(), rewards[:, None] + gamma * after


def twin_advantages(values: Values, actions: Values) -> Values:
    """Return ``min(Q1, Q2) - min(V1, V2)`` of each turn, [U]."""
    found: Values = actions.min(-1) - values.min(-1)
    return found
