"""Step 7 of 9: ``Batch`` -> gradient -> optimizer step.

``learner.py`` makes the update; ``scoring.py`` gives the log-probabilities that it needs; ``sharding.py``
spreads parameters and work over ranks, ``ulysses.py`` long rows; ``storage.py`` saves and loads.
"""

from agentrl_train.learner.learner import Learner, lr_fraction
from agentrl_train.learner.scoring import sampled_logprobs, select_sampled
from agentrl_train.learner.storage import Snapshot

__all__ = ["Learner", "Snapshot", "lr_fraction", "sampled_logprobs", "select_sampled"]
