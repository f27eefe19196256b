"""A second task that a random policy learns within a few steps."""

from agentrl_env import Done, Environment, tool


class Capitals(Environment):
    """Say anything; capital letters are rewarded."""

    max_turns = 1
    blocking = False

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        return "SHOUT, PLEASE!"

    @tool
    def stop(self) -> Done:
        """Say nothing."""
        return Done("thanks", reward=0.0)

    def respond(self, text: str) -> Done:
        """Reward the text by its share of capital letters."""
        return Done("thanks", reward=sum("A" <= letter <= "Z" for letter in text) / max(1, len(text)))
