"""The configuration of a run: one TOML file, one section a step, nothing unknown accepted.

``load_config(path, overrides)`` reads the file, applies ``--set section.key=value`` overrides, checks
everything and names all problems in one ``ConfigError``. What a run reads (model, environments) is relative
to the configuration file; what it writes (``run.folder``) is relative to the working directory. A loaded
configuration holds absolute paths, so ``to_toml()`` in a run folder can be loaded from anywhere.

Nothing here imports torch.
"""

from agentrl_train.runtime.config.loading import load_config
from agentrl_train.runtime.config.sections import (
    AdvantageSection,
    EngineSection,
    EnvironmentSection,
    RolloutSection,
    RunConfig,
    TrainSection,
)

__all__ = [
    "AdvantageSection",
    "EngineSection",
    "EnvironmentSection",
    "RolloutSection",
    "RunConfig",
    "TrainSection",
    "load_config",
]
