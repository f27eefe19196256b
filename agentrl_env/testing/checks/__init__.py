"""The conformance checks: what "a valid environment" means, one small function each.

Every check takes a ``Probe`` and returns an ``Outcome``; its docstring's first line is the question
it asks. ``agentrl_env.testing.checker`` runs them in the order of ``CHECKS``, each under a deadline.
"""

from agentrl_env.testing.checks.behaviour import (
    fuzz,
    isolation,
    oracle,
    order,
    random_play,
    seed_effect,
    seed_replay,
)
from agentrl_env.testing.checks.description import samples, schema
from agentrl_env.testing.checks.forking import fork
from agentrl_env.testing.checks.protocol import close, limits, results, retry

CHECKS = (
    schema, samples, random_play, limits, retry, close, seed_replay, seed_effect, order, isolation,
    fork, fuzz, oracle, results,
)  # fmt: skip
