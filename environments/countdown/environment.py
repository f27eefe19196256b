"""Countdown: reach a target from numbers with + - * /, each number used once at most."""

from __future__ import annotations

from collections import Counter

from agentrl_env import Done, Environment, Message, ToolCall, ToolError, tool

from .arithmetic import NotAnExpression, evaluate
from .problems import LEVELS, NUM_SAMPLES, Problems, solve


class Countdown(Environment):
    """Reach a target number by an expression of the given numbers."""

    splits = tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NUM_SAMPLES)
    max_turns = 10

    @classmethod
    def samples(cls, split):
        """Return the problems of "train", "validation" or "test" (level 1), or of "train-2", "test-3" ..."""
        name, _, level = split.partition("-")
        return Problems(name, int(level or 1))

    def reset(self, sample, rng):
        self.numbers, self.target = list(sample.data["numbers"]), sample.data["target"]
        shown = ", ".join(map(str, self.numbers))
        return (
            f"Reach {self.target} from {shown} with + - * / and parentheses. Each number can be used once. "
            "calculate() shows the value of an expression; answer() gives the final one."
        )

    @tool
    def calculate(self, expression: str):
        """See the value of an expression of the given numbers.

        Args:
            expression: Such as "(7 + 3) * 2".
        """
        return f"{expression.strip()} = {self._value(expression)}"

    @tool
    def answer(self, expression: str):
        """Give the expression that reaches the target. This ends the task.

        Args:
            expression: Such as "(7 + 3) * 2".
        """
        value = self._value(expression)
        note = "Correct." if value == self.target else f"That is {value}, not {self.target}."
        return Done(note, reward=float(value == self.target))

    def expert(self, rng):
        """Answer with an expression that a search through all pairs of numbers finds."""
        found = solve(tuple(self.numbers), self.target)
        if found is None:
            raise ToolError("No expression of these numbers reaches the target by whole positive steps.")
        return Message.assistant(None, ToolCall.of("answer", expression=found))

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)

    def _value(self, expression):
        """Return the exact value of an expression that uses the given numbers. Raises ToolError."""
        try:
            value, used = evaluate(expression)
        except NotAnExpression as error:
            raise ToolError(f"This is not a valid expression: {error}.") from error
        extra = Counter(used) - Counter(self.numbers)
        if extra:
            wrong = ", ".join(map(str, extra))
            raise ToolError(f"{wrong} cannot be used (again): the numbers are {self.numbers}, each once.")
        return value
