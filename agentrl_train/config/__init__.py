"""The configuration of a run: one TOML file with one section per step. Unknown keys are errors.

``load_config(path, overrides)`` reads the file, applies ``--set section.key=value`` overrides, validates it
and reports all problems in one ``ConfigError``. Input paths (model, environments) are relative to the
configuration file, and the output path (``run.folder``) is relative to the working directory. A loaded
configuration holds absolute paths, so the ``to_toml()`` in a run folder can be loaded from anywhere.

This package does not import torch.
"""

from agentrl_train.config.algorithm import AlgorithmSection, DistillTable, ReplayTable
from agentrl_train.config.loading import gateway_config, load_config
from agentrl_train.config.reward import RewardSection
from agentrl_train.config.rollout import RolloutSection, SubAgentSection
from agentrl_train.config.run_config import RunConfig
from agentrl_train.config.sections import (
    EngineSection,
    EnvironmentSection,
    LoraSection,
    ModelSection,
    TrainSection,
)

__all__ = [
    "AlgorithmSection",
    "DistillTable",
    "EngineSection",
    "EnvironmentSection",
    "LoraSection",
    "ModelSection",
    "ReplayTable",
    "RewardSection",
    "RolloutSection",
    "RunConfig",
    "SubAgentSection",
    "TrainSection",
    "gateway_config",
    "load_config",
]
