"""Asynchronous multi-turn, multi-task reinforcement learning for agents that call tools.

``Trainer`` runs everything. The steps of the data path can also be used in your own loop: ``actor`` and
``chat`` (4), ``advantage`` (5), ``batch`` (6), ``learner`` and ``loss`` (7), ``weights`` (8), ``engine`` (9).
Steps 1 to 3 are in ``agentrl_env``.

The names in ``__all__`` are imported on first use, so that ``import agentrl_train`` loads no PyTorch.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING


def _limit_waiting_of_idle_threads() -> None:
    """Let idle OpenMP threads wait actively for some 30 µs and then sleep.

    PyTorch reads the settings when it is imported. Threads that sleep at once wake up too late for the next
    operation, which makes an evaluation of a language model 1.7 times as slow. Threads that wait actively for
    milliseconds, as by default, take the processor from the other parts of a run. Only GNU OpenMP knows the
    first setting. With others, idle threads sleep at once.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


_limit_waiting_of_idle_threads()

_MODULES = {
    "Actor": "agentrl_train.actor",
    "AlgorithmSection": "agentrl_train.config",
    "Batch": "agentrl_train.types",
    "ChatFormat": "agentrl_train.chat",
    "Completion": "agentrl_train.types",
    "Engine": "agentrl_train.types",
    "EngineSection": "agentrl_train.config",
    "Episode": "agentrl_train.types",
    "Evaluation": "agentrl_train.training.evaluation",
    "Evaluations": "agentrl_train.training.evaluation",
    "Learner": "agentrl_train.learner",
    "Publisher": "agentrl_train.weights",
    "RolloutSection": "agentrl_train.config",
    "RunConfig": "agentrl_train.config",
    "SamplingParams": "agentrl_train.types",
    "Sampling": "agentrl_train.types",
    "Step": "agentrl_train.types",
    "TokenSequence": "agentrl_train.types",
    "TorchEngine": "agentrl_train.engine.torch",
    "TrainSection": "agentrl_train.config",
    "TrainError": "agentrl_train.errors",
    "Trainer": "agentrl_train.training.trainer",
    "Trajectory": "agentrl_train.types",
    "TrajectoryGroup": "agentrl_train.types",
    "advantages": "agentrl_train.advantage",
    "load_config": "agentrl_train.config",
    "load_policy": "agentrl_train.models.loading",
    "pack": "agentrl_train.batch",
    "policy_loss": "agentrl_train.loss",
    "save_policy": "agentrl_train.models.loading",
    "sequences": "agentrl_train.batch",
}
"""The module of each public name."""

__all__ = sorted(_MODULES)

if TYPE_CHECKING:
    from agentrl_train.actor import Actor as Actor
    from agentrl_train.advantage import advantages as advantages
    from agentrl_train.batch import pack as pack
    from agentrl_train.batch import sequences as sequences
    from agentrl_train.chat import ChatFormat as ChatFormat
    from agentrl_train.config import AlgorithmSection as AlgorithmSection
    from agentrl_train.config import EngineSection as EngineSection
    from agentrl_train.config import RolloutSection as RolloutSection
    from agentrl_train.config import RunConfig as RunConfig
    from agentrl_train.config import TrainSection as TrainSection
    from agentrl_train.config import load_config as load_config
    from agentrl_train.engine.torch import TorchEngine as TorchEngine
    from agentrl_train.errors import TrainError as TrainError
    from agentrl_train.learner import Learner as Learner
    from agentrl_train.loss import policy_loss as policy_loss
    from agentrl_train.models.loading import load_policy as load_policy
    from agentrl_train.models.loading import save_policy as save_policy
    from agentrl_train.training.evaluation import Evaluation as Evaluation
    from agentrl_train.training.evaluation import Evaluations as Evaluations
    from agentrl_train.training.trainer import Trainer as Trainer
    from agentrl_train.types import Batch as Batch
    from agentrl_train.types import Completion as Completion
    from agentrl_train.types import Engine as Engine
    from agentrl_train.types import Episode as Episode
    from agentrl_train.types import Sampling as Sampling
    from agentrl_train.types import SamplingParams as SamplingParams
    from agentrl_train.types import Step as Step
    from agentrl_train.types import TokenSequence as TokenSequence
    from agentrl_train.types import Trajectory as Trajectory
    from agentrl_train.types import TrajectoryGroup as TrajectoryGroup
    from agentrl_train.weights import Publisher as Publisher
else:

    def __getattr__(name: str) -> object:
        """Import a public name on first use (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
