"""The command ``agentrl-train fetch``."""

from __future__ import annotations

from rich.console import Console

from agentrl_train.config.paths import fetch_hint, model_folder


def fetch_model(name: str) -> int:
    """Download a known model and print its folder and the command that uses it."""
    folder = model_folder(name)
    if fetch_hint(name):
        from agentrl_train.models.fetching import fetch  # imports torch

        folder = fetch(name)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"model: {folder}")
    console.print(f"next: agentrl-train init {name} TASK")
    return 0
