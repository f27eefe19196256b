"""A task for a planner that enters a code and workers that search for it."""

from agentrl_env import Done, Environment, tool

PLACES = ("desk", "shelf", "drawer", "sofa")
CODES = ("red", "blue", "green", "white")


class Vault(Environment):
    """Find the code of the vault and enter it."""

    max_turns = 6
    blocking = False

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.place = PLACES[int(rng.integers(len(PLACES)))]
        self.code = CODES[int(rng.integers(len(CODES)))]
        return f"The code is in the {self.place}."

    @tool
    def look(self, place: str) -> str:
        """Look."""
        return self.code if place == self.place else "nothing"

    @tool
    def enter(self, code: str) -> Done:
        """Enter."""
        return Done("open" if code == self.code else "closed", reward=float(code == self.code))
