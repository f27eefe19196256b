"""Critics: models that estimate values for the policy, and advantages from their estimates.

``trainer.py`` trains a critic of any kind. Each kind is a strategy in one file: ``values.py`` for values of
states (PPO), ``archer.py`` for twin critics of turns, and ``sweet.py`` for a critic with privileged
information.
"""
