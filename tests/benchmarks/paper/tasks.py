"""Small tasks for a policy that starts from random weights: an action is the first character of a message.

Any character is an action, so that the random policy acts validly; its code modulo the number of actions is
the action. A sample of a task is always the same problem: what differs is how reward is given.
"""

from __future__ import annotations

from agentrl_env import Done, Environment, tool

ACTIONS = 4


class Choice(Environment):
    """Say a character; its code modulo 4 is an action."""

    blocking = False
    max_turns = 1
    right = (1,)
    """The right action of each turn."""
    sign = "a"
    """Letter that the opening is written in; many of them, so that a policy of random weights notices."""

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.hits = 0
        self.turn = 0
        return self.sign * 48

    @tool
    def q(self) -> Done:
        """."""
        return Done("", reward=0.0)

    def respond(self, text: str) -> str | Done:
        """Take an action, and go on to the next turn."""
        self.hits += ord(text[:1] or "\0") % ACTIONS == self.right[self.turn]
        self.turn += 1
        if self.turn < len(self.right):
            return str(self.turn)
        return Done("", reward=self.reward())

    def reward(self) -> float:
        """Return the reward of the episode, which ends."""
        return float(self.hits == len(self.right))


class Quiet(Choice):
    """One choice, rewarded by 1."""


class Loud(Choice):
    """Another choice, rewarded by 100."""

    right = (2,)
    sign = "Z"

    def reward(self) -> float:
        """Return 100 for the right action."""
        return 100.0 * super().reward()


class Pair(Choice):
    """Two choices, rewarded by 1 if both are right."""

    max_turns = 2
    right = (1, 2)


class Lock(Choice):
    """A combination lock: three choices, rewarded by 1 if all of them are right."""

    max_turns = 3
    right = (1, 2, 3)
