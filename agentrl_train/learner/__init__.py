"""Step 7 of 9: ``Batch`` -> gradient -> optimizer step.

``learner.py`` makes the update; ``scoring.py`` gives the log-probabilities that it needs; ``sharding.py``
spreads parameters and work over ranks; ``ulysses.py`` spreads long rows over them.
"""

from agentrl_train.learner.learner import Learner, lr_fraction
from agentrl_train.learner.scoring import sampled_logprobs, select_sampled

__all__ = ["Learner", "lr_fraction", "sampled_logprobs", "select_sampled"]
