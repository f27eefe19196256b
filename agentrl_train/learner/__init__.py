"""Step 7 of 9: ``Batch`` -> gradient -> optimizer step.

``learner.py`` updates the model, and ``logprobs.py`` computes log-probabilities. ``sharding.py`` distributes
parameters and work over ranks, and ``sequence_parallel.py`` distributes long rows. ``lora.py`` trains
adapters. ``state.py`` saves, loads and offloads the optimizer state.
"""

from agentrl_train.learner.learner import Learner, lr_fraction
from agentrl_train.learner.logprobs import sampled_logprobs, select_sampled
from agentrl_train.learner.sharding import Place
from agentrl_train.learner.state import Snapshot

__all__ = [
    "Learner",
    "Place",
    "Snapshot",
    "lr_fraction",
    "sampled_logprobs",
    "select_sampled",
]
