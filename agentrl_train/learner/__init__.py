"""Step 7 of 9: ``Batch`` -> gradient -> optimizer step.

``learner.py`` makes the update; ``scoring.py`` gives the log-probabilities that it needs; ``sharding.py``
spreads parameters and work over ranks, ``ulysses.py`` long rows; ``lora.py`` trains adapters, ``offload.py``
keeps the optimizer elsewhere; ``storage.py`` saves and loads.
"""

from agentrl_train.learner.learner import Learner
from agentrl_train.learner.lora import Lora, adapter_base, merge_adapter
from agentrl_train.learner.schedule import lr_fraction
from agentrl_train.learner.scoring import sampled_logprobs, select_sampled
from agentrl_train.learner.storage import Snapshot

__all__ = [
    "Learner",
    "Lora",
    "Snapshot",
    "adapter_base",
    "lr_fraction",
    "merge_adapter",
    "sampled_logprobs",
    "select_sampled",
]
