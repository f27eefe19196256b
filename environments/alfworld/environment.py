"""ALFWorld: a household task in a text world, on ALFWorld's own engine, with AgentBench's one tool.

Games are generated from the package's domain, grammar and floor plans. ``ALFWORLD_DATA``, the folder of
ALFWorld's download, adds its games as ``official-train``, ``official-valid_seen`` and
``official-valid_unseen``; with ``ALFWORLD_GAMES`` as well, a file of AgentBench that lists some of them, as
``official``.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

from agentrl_env import Done, Environment, Message, Reply, ToolCall, Wording, tool
from agentrl_env.errors import DefinitionError

from .workers import Engine

LEVELS = (1, 2, 3)
NUM_GAMES = {"train": 20_000, "validation": 1_000, "test": 1_000}
OFFICIAL = ("train", "valid_seen", "valid_unseen")
MAX_ACTIONS = 20


def _splits() -> tuple[str, ...]:
    levels = [f"-{level}" if level > 1 else "" for level in LEVELS]
    names = [name + level for level in levels for name in NUM_GAMES]
    if data := os.environ.get("ALFWORLD_DATA"):
        names += [f"official-{name}" for name in OFFICIAL if (Path(data) / "json_2.1.1" / name).is_dir()]
        names += ["official"] if os.environ.get("ALFWORLD_GAMES") else []
    return tuple(names)


class Games:
    """The generated games of a split. Split, level and number determine a game."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_GAMES[self.split]

    def __getitem__(self, number: int) -> dict:
        return {"split": self.split, "level": self.level, "number": number}


class Alfworld(Environment):
    """Do a task in a household: find things, carry them, and use what is in the room."""

    splits = _splits()
    max_turns = MAX_ACTIONS
    wording = Wording(
        os.environ.get("ALFWORLD_WORDING"),
        opening="{observation}\nAVAILABLE ACTIONS: {actions}",
        reply="{observation}\nAVAILABLE ACTIONS: {actions}",
    )
    tool_timeout = reset_timeout = 300.0
    expert_noise = 0.0
    """Probability that the expert, who knows where things are, goes to a random place instead."""
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
        """Return the games of "train" (level 1), "test-3", "official-valid_seen" and so on."""
        name, _, rest = split.partition("-")
        return _official_games(rest) if name == "official" else Games(name, int(rest or 1))

    def reset(self, sample, rng):
        self.data, self.taken, self.invalid = dict(sample.data), [], 0
        seen = self._begin()
        observation = "\n".join(seen["text"].split("\n\n")[1:]).strip()  # the first paragraph is a banner
        return self.wording.opening(observation=observation, actions="\n".join(self.commands))

    @tool
    def take_action(self, action: str):
        """Take one of the available actions.

        Args:
            action: The action, exactly as in the list of AVAILABLE ACTIONS.
        """
        action = action.strip()
        if len(self.taken) == MAX_ACTIONS:
            return Done(f"The {MAX_ACTIONS} actions of the task are used up.")
        self.taken.append(action)
        admissible = action in self.commands
        if admissible:
            seen = self.player.call("step", action)
            self.plan = self.plan[1:] if self.plan and self.plan[0] == action else None
        else:
            self.invalid += 1
            seen = {"text": "Nothing happens.", "commands": self.commands, "won": False}
        if seen["won"]:
            return Done(seen["text"], reward=1.0)
        self.commands = seen["commands"]
        text = self.wording.text("reply", observation=seen["text"], actions="\n".join(self.commands))
        return Reply(text, metrics={"invalid_calls": float(not admissible)})

    def close(self):
        if self.player is not None:
            self.player.close()

    def score(self):
        return {"actions": float(len(self.taken)), "invalid_actions": float(self.invalid)}

    def snapshot(self):
        return {"data": self.data, "taken": self.taken}

    def restore(self, state):
        self.data, self.taken, self.invalid = state["data"], [], 0
        self._begin()
        for action in state["taken"]:
            self.take_action(action)

    def expert(self, rng):
        """Follow the planner's solution. After another action, the planner solves the rest."""
        if rng.random() < self.expert_noise:
            places = [command for command in self.commands if command.startswith("go to ")]
            action = str(rng.choice(places or self.commands))
            return Message.assistant(None, ToolCall.of("take_action", action=action))
        if self.plan is None:
            self.plan = self.player.call("plan")
        return Message.assistant(
            None, ToolCall.of("take_action", action=self.plan[0] if self.plan else "look")
        )

    def _begin(self):
        self.player = self.engine.open()
        if "game" in self.data:
            seen = self.player.call("load", str(_game_file(self.data["game"])))
        else:
            seen = self.player.call("generate", self.data["split"], self.data["level"], self.data["number"])
        self.plan, self.commands = seen["plan"], seen["commands"]
        return seen


def _data_folder() -> Path:
    data = os.environ.get("ALFWORLD_DATA")
    if not data:
        raise DefinitionError("games of ALFWorld need ALFWORLD_DATA, the folder that alfworld-download fills")
    return Path(data)


def _game_file(game: str) -> Path:
    """Return the path of a game under ALFWORLD_DATA."""
    root = _data_folder().resolve()
    path = (root / game).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        raise DefinitionError(f"there is no game {game!r} in {root}")
    return path


@cache
def _official_games(split: str) -> list[dict]:
    """List the games of a split of ALFWorld's download, or those that AgentBench's file names for ""."""
    if split:
        root = _data_folder()
        games = sorted((root / "json_2.1.1" / split).rglob("game.tw-pddl"))
        return [{"game": str(path.relative_to(root))} for path in games if _playable(path)]
    path = os.environ["ALFWORLD_GAMES"]
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DefinitionError(f"cannot read the list of games {path}: {error}") from error
    lists = list(content.values()) if isinstance(content, dict) else [content]
    games = [game for listed in lists for game in (listed if isinstance(listed, list) else [listed])]
    if not games or not all(isinstance(game, str) for game in games):
        raise DefinitionError(f"{path}: a list of paths of games, or an object of such lists, is expected")
    return [{"game": game} for game in games]


def _playable(path: Path) -> bool:
    """Return True if ALFWorld itself would play a game: no movable receptacles and no sliced things."""
    if "movable" in str(path) or "Sliced" in str(path):
        return False
    try:
        return bool(json.loads(path.read_text()).get("solvable"))
    except (OSError, ValueError):
        return False
