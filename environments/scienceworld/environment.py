"""ScienceWorld: an experiment in a text world, on the simulator of the package ``scienceworld``."""

from __future__ import annotations

from agentrl_env import Done, Environment, Message, Reply, ToolCall, ToolError, tool

from .simulator import Simulators
from .variations import NAMES, problems

MAX_ACTIONS = 300
"""Actions of an episode. A sample can have fewer."""
LEVELS = (1, 2, 3)
LONGEST_ACTION = 200
MEASURE = "\nMeasure before you answer. An answer fails without these steps: {}."
UNKNOWN = "No known action matches that input."
"""The simulator's answer to an invalid action."""


class Scienceworld(Environment):
    """Do an experiment of elementary science in a text world: find, measure, mix, grow and tell."""

    splits = tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NAMES)
    max_turns = MAX_ACTIONS
    tool_timeout = reset_timeout = 600.0  # the gold paths of many sessions are computed one after the other
    simulators = Simulators()
    simulator = None

    @classmethod
    def startup(cls):
        cls.simulators.give_back(cls.simulators.open())

    @classmethod
    def shutdown(cls):
        cls.simulators.close()

    @classmethod
    def samples(cls, split):
        """Return the variations of "train" (level 1), "validation-2", "test-3" and so on."""
        name, _, level = split.partition("-")
        return problems(name, int(level or 1))

    def reset(self, sample, rng):
        self.data = dict(sample.data)
        seen = self._begin()
        actions = "\n".join(str(one) for one in self.simulator.call("getPossibleActions"))
        rule = MEASURE.format(", ".join(self.measurements)) if self.measurements else ""
        return f"{self.simulator.call('getTaskDescription')}{rule}\n\n{seen.text}\n\nACTIONS:\n{actions}"

    @tool
    def take_action(self, action: str):
        """Take an action.

        Args:
            action: One of the ACTIONS, with things in the place of OBJ, such as "focus on thermometer".
        """
        action = action.strip()
        if len(action) > LONGEST_ACTION or not action.isprintable():
            raise ToolError(f"An action is one line of at most {LONGEST_ACTION} characters.")
        self.taken.append(action)
        seen = self._step(action)
        known = not seen.text.startswith(UNKNOWN)
        self.invalid += not known
        # A score below zero means a fatal mistake, which forfeits all points.
        reward, self.points = max(seen.score, 0.0) - self.points, max(seen.score, 0.0)
        if seen.completed or seen.score < 0:
            return Done(seen.text, reward=reward)
        if len(self.taken) >= self.limit:
            return Done(
                f"{seen.text}\n\nThe {self.limit} actions are used up.", reward=reward, truncated=True
            )
        return Reply(seen.text, reward=reward, metrics={"invalid_calls": float(not known)})

    def close(self):
        if self.simulator is not None:
            self.simulators.give_back(self.simulator)

    def score(self):
        return {
            "success": float(self.points >= 1.0),
            "actions": float(len(self.taken)),
            "invalid_actions": float(self.invalid),
        }

    def snapshot(self):
        return {"data": self.data, "taken": self.taken}

    def restore(self, state):
        self.data = state["data"]
        self._begin()
        for action in state["taken"]:
            self.take_action(action)

    def expert(self, rng):
        """Follow the simulator's gold path from the first action that has not been taken yet."""
        gold = self.simulators.gold_path(*self._problem())
        position = 0
        for action in self.taken:
            position += position < len(gold) and gold[position] == action
        action = gold[position] if position < len(gold) else "wait1"
        return Message.assistant(None, ToolCall.of("take_action", action=action))

    def _step(self, action):
        """Take an action. An answer without the measurements is a fatal mistake."""
        seen = self.simulator.step(action)
        if not self.measurements or not seen.completed or seen.score < 0:
            return seen
        reached = self.simulator.reached()
        missing = ", ".join(name for name in self.measurements if name not in reached)
        if not missing:
            return seen
        return seen._replace(text=f"{seen.text}\n\nThe answer fails without: {missing}.", score=-1.0)

    def _begin(self):
        if self.simulator is None:
            self.simulator = self.simulators.open()
        self.taken, self.invalid, self.points = [], 0, 0.0
        self.limit = self.data.get("actions", MAX_ACTIONS)
        self.measurements = self.data.get("measurements", [])
        return self.simulator.load(*self._problem())

    def _problem(self):
        return self.data["task"], self.data["variation"], self.data["simplifications"]
