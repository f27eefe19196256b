"""Step 7 of 9: ``Batch`` -> gradient -> optimizer step.

``learner.py`` updates the model, ``critic.py`` a critic beside it; ``logprobs.py`` computes
log-probabilities; ``sharding.py`` distributes parameters and work over ranks, ``sequence_parallel.py`` long
rows; ``lora.py`` trains adapters; ``state.py`` saves, loads and offloads the optimizer state, ``stored.py``
reads weights from files.
"""

from agentrl_train.learner.critic import Critic, PrivilegedCritic, TwinCritic, ValueCritic
from agentrl_train.learner.learner import Learner, lr_fraction
from agentrl_train.learner.logprobs import sampled_logprobs, select_sampled
from agentrl_train.learner.lora import Lora, adapter_base, merge_adapter
from agentrl_train.learner.state import Snapshot
from agentrl_train.learner.stored import (
    StoredModel,
    auto_class,
    require_all_tensors,
    require_whole_weights,
    safetensors_files,
)

__all__ = [
    "Critic",
    "Learner",
    "Lora",
    "PrivilegedCritic",
    "Snapshot",
    "StoredModel",
    "TwinCritic",
    "ValueCritic",
    "adapter_base",
    "auto_class",
    "lr_fraction",
    "merge_adapter",
    "require_all_tensors",
    "require_whole_weights",
    "safetensors_files",
    "sampled_logprobs",
    "select_sampled",
]
