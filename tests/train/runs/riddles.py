"""A task with privileged information in its samples: the rewarded letter."""

from agentrl_env import Done, Environment, Reply, tool


class Riddles(Environment):
    """Say anything, twice; a hidden letter is rewarded at the end."""

    max_turns = 2
    blocking = False

    @classmethod
    def samples(cls, split):  # type: ignore[no-untyped-def]
        return [{"privileged": {"letter": letter}} for letter in "aeiou"]

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.letter, self.said = sample.data["privileged"]["letter"], ""
        return "Speak."

    @tool
    def stop(self) -> Done:
        """Say nothing."""
        return Done("Thanks.", reward=0.0)

    def respond(self, text: str) -> Reply | Done:
        """Reward the letter by its share of both texts."""
        first, self.said = not self.said, self.said + text + " "
        reward = self.said.count(self.letter) / len(self.said)
        return Reply("Go on.") if first else Done("Thanks.", reward=reward)
