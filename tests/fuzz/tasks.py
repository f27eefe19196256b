"""A task that has every capability and never fails, so that every 5xx is the server's fault."""

from __future__ import annotations

from typing import Any

from agentrl_env import Done, Environment, ToolCall, ToolError, tool


class Fuzzed(Environment):
    """Accept any value."""

    max_turns = 50
    blocking = False

    def reset(self, sample, rng):
        self.count = 0
        return "ready"

    @classmethod
    def samples(cls, split):
        return [{"n": n} for n in range(5)]

    @tool
    def take(self, anything: Any = None, more: dict[str, Any] | None = None):
        """Take a value."""
        self.count += 1
        return f"{self.count}: {anything!r}"[:200]

    @tool
    def refuse(self, text: str, number: int = 0):
        """Raise a tool error."""
        raise ToolError(f"no: {text} {number}")

    @tool
    def end(self):
        """End."""
        return Done("over", reward=1.0)

    def expert(self, rng):
        return ToolCall.of("take")

    def snapshot(self):
        return self.count

    def restore(self, state):
        self.count = state
