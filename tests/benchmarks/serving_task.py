"""The trivial task of the serving benchmark. It echoes text and never ends."""

from __future__ import annotations

from agentrl_env import Environment, tool


class Echo(Environment):
    """Echo text in a plain method, so that each call runs on a thread."""

    max_turns = 10**9

    def reset(self, sample, rng):
        return "say something"

    @tool
    def echo(self, text: str):
        """Say it back."""
        return text


class EchoInline(Echo):
    """Echo text on the event loop."""

    blocking = False
