"""Asynchronous multi-turn, multi-task reinforcement learning for agents that call tools.

The steps of the data path, one module each: ``actor`` and ``chat`` (4), ``advantage`` (5), ``batch`` (6),
``learner`` and ``loss`` (7), ``weights`` (8), ``engine`` (9); ``runtime`` runs them. Steps 1 to 3 are in
``agentrl_env``.
"""

from agentrl_train.config import RunConfig, load_config
from agentrl_train.errors import TrainError

__all__ = ["RunConfig", "TrainError", "load_config"]
