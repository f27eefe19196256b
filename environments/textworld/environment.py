"""TextWorld: a quest in a generated text world, on TextWorld's own generator, compiler and interpreter.

``TEXTWORLD_GAMES`` is a folder of games made by TextWorld. It adds them as ``official``, and the games of
each subfolder as ``official-NAME``.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from agentrl_env import Done, Environment, Message, Reply, ToolCall, tool
from agentrl_env.errors import DefinitionError

from .workers import Engine

MAX_ACTIONS = {1: 10, 2: 20, 3: 40}
"""Actions of an episode by level."""
OFFICIAL_ACTIONS = 100
NUM_GAMES = {"train": 20_000, "validation": 1_000, "test": 1_000}


def _folder() -> Path:
    folder = os.environ.get("TEXTWORLD_GAMES")
    if not folder or not Path(folder).is_dir():
        raise DefinitionError(
            "TEXTWORLD_GAMES must name a folder with games of TextWorld: NAME.json, NAME.z8"
        )
    return Path(folder).resolve()


def _game_file(game: str) -> Path:
    """Return the path of a game under TEXTWORLD_GAMES."""
    root = _folder()
    path = (root / game).resolve()
    if not path.is_relative_to(root) or path.suffix != ".json" or not path.is_file():
        raise DefinitionError(f"there is no game {game!r} in {root}")
    return path


@cache
def _official_games(name: str) -> list[dict]:
    """List the games of a subfolder of TEXTWORLD_GAMES, or those in the folder itself for ""."""
    root = _folder()
    paths = sorted((root / name).rglob("*.json") if name else root.glob("*.json"))
    return [{"game": str(path.relative_to(root))} for path in paths]


def _splits() -> tuple[str, ...]:
    names = [f"{name}-{level}" if level > 1 else name for level in MAX_ACTIONS for name in NUM_GAMES]
    if os.environ.get("TEXTWORLD_GAMES"):
        names += ["official"] * bool(_official_games(""))
        inner = sorted(path.name for path in _folder().iterdir() if path.is_dir())
        names += [f"official-{name}" for name in inner if _official_games(name)]
    return tuple(names)


class Games:
    """The generated games of a split. Split, level and number determine a game."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_GAMES[self.split]

    def __getitem__(self, number: int) -> dict:
        return {"split": self.split, "level": self.level, "number": number}


class Textworld(Environment):
    """Fulfil a quest in a text world: explore rooms, open and unlock things, and carry them."""

    splits = _splits()
    max_turns = OFFICIAL_ACTIONS
    tool_timeout = reset_timeout = 300.0
    engine = Engine()
    player = None

    @classmethod
    def startup(cls):
        cls.engine.open().close()

    @classmethod
    def shutdown(cls):
        cls.engine.close()

    @classmethod
    def samples(cls, split):
        """Return the games of "train" (level 1), "test-3", "official", "official-NAME" and so on."""
        name, _, rest = split.partition("-")
        return _official_games(rest) if name == "official" else Games(name, int(rest or 1))

    def reset(self, sample, rng):
        self.data = dict(sample.data)
        return self._show(self._begin())

    @tool
    def take_action(self, action: str):
        """Take one of the available actions.

        Args:
            action: The action, exactly as in the list of AVAILABLE ACTIONS.
        """
        action = action.strip()
        if len(self.taken) == self.limit:
            return Done(f"The {self.limit} actions of the quest are used up.")
        self.taken.append(action)
        admissible = action in self.seen["commands"]
        if admissible:
            self.seen = self.player.call("step", action)
        else:
            self.invalid += 1
            self.seen = {**self.seen, "text": "Nothing happens."}
        if self.seen["won"] or self.seen["lost"]:
            return Done(self.seen["text"], reward=float(self.seen["won"]))
        return Reply(self._show(self.seen), metrics={"invalid_calls": float(not admissible)})

    def close(self):
        if self.player is not None:
            self.player.close()

    def score(self):
        return {
            "actions": float(len(self.taken)),
            "invalid_actions": float(self.invalid),
            "points": self.seen["points"],
        }

    def snapshot(self):
        return {"data": self.data, "taken": self.taken}

    def restore(self, state):
        self.data = state["data"]
        self._begin()
        for action in state["taken"]:
            self.take_action(action)

    def expert(self, rng):
        """Follow the game's own winning policy, which exists for every state that can be won."""
        plan = self.player.call("plan")
        return Message.assistant(None, ToolCall.of("take_action", action=plan[0] if plan else "look"))

    def _begin(self):
        self.player, self.taken, self.invalid = self.engine.open(), [], 0
        if "game" in self.data:
            self.limit = OFFICIAL_ACTIONS
            self.seen = self.player.start("load", str(_game_file(self.data["game"])))
        else:
            level = self.data["level"]
            self.limit = MAX_ACTIONS[level]
            self.seen = self.player.start("generate", self.data["split"], level, self.data["number"])
        return self.seen

    def _show(self, seen):
        return f"{seen['text']}\nAVAILABLE ACTIONS: " + "\n".join(seen["commands"])
