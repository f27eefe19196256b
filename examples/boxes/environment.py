"""A task for a policy of a million parameters: it copies words, and unlearns the mistakes of its expert."""

from agentrl_env import Done, Environment, ToolCall, tool

COLORS = ["red", "green", "blue", "white", "black", "brown", "pink", "gray"]


class Boxes(Environment):
    """Open boxes in the order that is asked for."""

    name = "boxes"
    max_turns = 5
    expert_noise = 0.0
    """Probability that the expert opens any box."""

    def reset(self, sample, rng):
        self.left = [str(color) for color in rng.permutation(COLORS)[:4]]
        return f"Open these boxes in this order: {', '.join(self.left)}."

    @tool
    def open(self, color: str):
        """Open a box.

        Args:
            color: The color of the box.
        """
        if color != self.left[0]:
            return f"The {color} box stays shut."
        self.left.pop(0)
        return f"The {color} box is open." if self.left else Done("All are open.", reward=1.0)

    def expert(self, rng):
        slips = rng.random() < self.expert_noise
        return ToolCall.of("open", color=str(rng.choice(COLORS)) if slips else self.left[0])
