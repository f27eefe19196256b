"""A task that a random policy learns within a few steps."""

from agentrl_env import Done, Environment, tool


class Vowels(Environment):
    """Say anything; vowels are rewarded."""

    max_turns = 1
    blocking = False

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        return "Speak."

    @tool
    def stop(self) -> Done:
        """Say nothing."""
        return Done("thanks", reward=0.0)

    def respond(self, text: str) -> Done:
        """Reward the text by its share of vowels."""
        return Done("thanks", reward=sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text)))
