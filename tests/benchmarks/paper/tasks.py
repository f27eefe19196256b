"""Small tasks for a policy with random initial weights. An action is the first character of a message.

Any character is valid, so that a random policy can act. The action is the character's code modulo the number
of actions. All samples of a task are the same problem. The tasks differ in how they give reward.
"""

from __future__ import annotations

from itertools import product
from typing import ClassVar

from agentrl_env import Done, Environment, Reply, ToolError, tool

ACTIONS = 4


class Choice(Environment):
    """Say a character; its code modulo 4 is an action."""

    blocking = False
    max_turns = 1
    right = (1,)
    """The right action of each turn."""
    sign = "a"
    """Letter that fills the opening. It is repeated, so that a policy with random weights notices it."""

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
        """Return the reward at the end of the episode."""
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


class Four(Choice):
    """A combination lock: four choices, rewarded by 1 if all of them are right."""

    max_turns = 4
    right = (1, 2, 3, 0)
    counted = slice(0, 4)
    """Turns whose actions decide."""

    def respond(self, text: str) -> str | Done:
        """Take an action, which counts in some of the turns."""
        counts = self.turn in range(*self.counted.indices(len(self.right)))
        return super().respond(text if counts else chr(self.right[self.turn]))


class Front(Four):
    """A combination lock decided by the first two choices."""

    counted = slice(0, 2)


class Back(Four):
    """A combination lock decided by the last two choices."""

    counted = slice(2, 4)


class Doors(Choice):
    """Three doors in a row. A wrong action changes nothing and repeats the observation."""

    max_turns = 8
    right = (1, 2, 3)
    signs = "BTz"
    """Letter of each door, repeated because a policy with random weights overlooks a single letter."""

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.turn = 0
        return self.observation()

    def respond(self, text: str) -> str | Done:
        """Open the next door, or stay."""
        if ord(text[:1] or "\0") % ACTIONS == self.right[self.turn]:
            self.turn += 1
        else:
            self.turn = self.after_mistake()
        return Done("", reward=1.0) if self.turn == len(self.right) else self.observation()

    def observation(self) -> str:
        """Return the observation before a door."""
        return self.signs[self.turn] * 24

    def after_mistake(self) -> int:
        """Return the door after a wrong action."""
        return self.turn


class Stairs(Doors):
    """Three doors in a row. A wrong action leads back to the first door."""

    max_turns = 16

    def after_mistake(self) -> int:
        """Return the first door."""
        return 0


class Paid(Choice):
    """Four choices. Each right choice is rewarded in its turn, and the episode succeeds if all are right."""

    max_turns = 4
    right = (1, 2, 3, 0)
    signs = "aBTz"
    """Letter of each turn, repeated in the observation."""

    def respond(self, text: str) -> Reply | Done:
        """Take an action and return its reward."""
        reward = float(ord(text[:1] or "\0") % ACTIONS == self.right[self.turn]) / len(self.right)
        self.turn += 1
        if self.turn < len(self.right):
            return Reply(self.signs[self.turn] * 24, reward=reward)
        return Done("", reward=reward)


class Delay(Choice):
    """Six turns. Only the first decides the reward, and a critic can know the right action."""

    max_turns = 6
    right = (1, 0, 0, 0, 0, 0)

    @classmethod
    def samples(cls, split: str) -> list[dict[str, object]]:
        """Return samples with privileged information for a critic."""
        return [{"privileged": {"right": "aeimquy"}}] * 100

    def respond(self, text: str) -> str | Done:
        """Take an action, and go on to the next turn."""
        if self.turn == 0:
            self.hits = ord(text[:1] or "\0") % ACTIONS == self.right[0]
        self.turn += 1
        return str(self.turn) if self.turn < len(self.right) else Done("", reward=float(self.hits))


class Noisy(Choice):
    """Two choices. One episode in five gets the opposite reward."""

    max_turns = 2
    right = (1, 2)

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.lie = rng.random() < 0.2
        return super().reset(sample, rng)

    def reward(self) -> float:
        """Return a reward that is sometimes wrong."""
        return float((super().reward() == 1.0) != self.lie)

    def score(self) -> dict[str, float]:
        """Return the true success of the episode."""
        return {"success": super().reward()}


class Words(Choice):
    """Two words of one or two letters. A message can be longer than its word, and its last letters count."""

    max_turns = 2
    words: ClassVar[dict[str, tuple[int, ...]]] = {"a": (1,), "T": (2, 3)}
    """Correct letters by the sign that the opening repeats."""

    @classmethod
    def samples(cls, split: str) -> list[dict[str, object]]:
        """Return every pair of words equally often."""
        return [{"signs": signs} for signs in product(cls.words, repeat=2)] * 32

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.signs = [str(sign) for sign in sample.data["signs"]]
        self.found: list[bool] = []
        self.turn = 0
        return self.signs[0] * 24

    def respond(self, text: str) -> str | Done:
        """Take a word and request the next."""
        right = self.words[self.signs[self.turn]]
        said = text[-len(right) :].rjust(len(right), "\0")
        self.found += [ord(letter) % ACTIONS == code for letter, code in zip(said, right, strict=True)]
        self.turn += 1
        if self.turn < len(self.signs):
            return self.signs[self.turn] * 24
        return Done("", reward=sum(self.found) / len(self.found))

    def score(self) -> dict[str, float]:
        """Return the success: 1 if all letters were right."""
        return {"success": float(self.turn == len(self.signs) and all(self.found))}


ROOMS = ("attic", "cellar", "garage", "hall", "kitchen", "study")
WORDS = ("amber", "bronze", "coral", "denim", "ebony", "fawn", "gold", "hazel")
WORDS += ("ivory", "jade", "khaki", "lemon", "mint", "navy", "ocher", "plum")
"""Words that a page may name."""
FILLER = ("hum", "dust", "lamp", "rug")


class Rooms(Environment):
    """Submit the words of one to three rooms; the page of a room is long and names a wrong word, too."""

    blocking = False
    max_turns = 16

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.rooms = [str(room) for room in rng.permutation(ROOMS)[: rng.integers(1, 4)]]
        self.right, self.wrong = {}, {}
        self.pages = {}
        words = iter(rng.permutation(WORDS))
        for room in self.rooms:
            self.right[room], self.wrong[room] = str(next(words)), str(next(words))
            named = [f"lock {self.right[room]}", f"door {self.wrong[room]}"]
            begin, middle, end = (" ".join(rng.choice(FILLER, 5)) for _ in range(3))
            first, second = (named[i] for i in rng.permutation(2))
            self.pages[room] = f"{begin} {first} {middle} {second} {end}"
        return " ".join(self.rooms)

    @tool
    def read(self, room: str) -> str:
        """Read the page of a room.

        Args:
            room: Name of the room.
        """
        if room not in self.pages:
            raise ToolError("no such room")
        return self.pages[room]

    @tool
    def submit(self, code: str) -> Done:
        """Submit the words of all rooms, in the order of the rooms.

        Args:
            code: The words.
        """
        return Done("", reward=float(code.split() == [self.right[room] for room in self.rooms]))
