"""A task with three levels. Every reply without a tool call succeeds."""

from agentrl_env import Done, Environment, tool


class Levels(Environment):
    """Say anything; its length is rewarded."""

    splits = ("train", "train-2", "train-3", "test")
    max_turns = 1
    blocking = False

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        return "Speak."

    @tool
    def stop(self) -> Done:
        """Say nothing."""
        return Done("thanks", reward=1.0)

    def respond(self, text: str) -> Done:
        """Succeed."""
        return Done("thanks", reward=1.0 + len(text) / 100)
