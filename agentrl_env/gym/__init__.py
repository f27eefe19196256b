"""Gymnasium environments over a client: ``GymEnv`` and ``GymVectorEnv``.

This module itself does not import Gymnasium. ``agentrl_env`` calls ``register_env`` when it is imported,
so ``gymnasium.make("agentrl_env:agentrl/Env-v0")`` works whichever of the two packages comes first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ENV_ID = "agentrl/Env-v0"


def register_env() -> None:
    """Register ``ENV_ID`` with Gymnasium, now or as soon as Gymnasium is imported.

    ``gymnasium.make("agentrl_env:...")`` imports ``agentrl_env`` to trigger the registration, which
    does nothing if it was imported before Gymnasium. Gymnasium has no plugin mechanism for this case,
    so an import hook covers it.
    """
    if "gymnasium" in sys.modules:
        _register(sys.modules["gymnasium"])
    else:
        sys.meta_path.insert(0, _RegisterOnImport())


def _register(gymnasium: ModuleType) -> None:
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(
            ENV_ID,
            entry_point="agentrl_env.gym.env:GymEnv",
            vector_entry_point="agentrl_env.gym.vector:GymVectorEnv",
        )


class _RegisterOnImport(MetaPathFinder):
    """Import hook that registers ``ENV_ID`` once Gymnasium has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
