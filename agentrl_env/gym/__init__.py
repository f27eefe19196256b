"""Gymnasium environments over a client: ``GymEnv`` and ``GymVectorEnv``."""
