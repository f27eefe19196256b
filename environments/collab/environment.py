"""Collab: write a function for a partner. The agent must ask for the details that the partner has in mind.

After ColBench's backend programming (Zhou et al. 2025). The partner is a program with rules, or the model
behind the OpenAI-compatible endpoint ``COLLAB_PARTNER_URL`` (with ``COLLAB_PARTNER_MODEL`` and
``COLLAB_PARTNER_KEY``).
"""

from __future__ import annotations

import json
import os

from agentrl_env import Done, Environment, Message, ToolCall, tool
from agentrl_env.sandbox import open_sandbox

from .partner import answer_by_model, answer_by_rules
from .specification import LEVELS, NUM_SAMPLES, Specification, Specifications

PARTNER = {
    name: os.environ.get(f"COLLAB_PARTNER_{name.upper()}", default)
    for name, default in {"url": "", "model": "default", "key": ""}.items()
}
"""The endpoint of the model that plays the partner. Without a URL the partner follows rules."""
LIMITS = {"memory": "128m", "disk": "16m", "pids": 16, "timeout": 10.0, "max_output": 1 << 19}
MAX_CODE = 20_000
TOLERANCE = 1e-6
RUNNER = """
import json, os, sys
results = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
cases = json.load(sys.stdin)
print("ready", file=results, flush=True)
from solution import {function}


def run(case):
    try:
        return {function}(case)
    except Exception:
        return None


json.dump([run(case) for case in cases], results)
results.flush()
os._exit(0)
"""
"""Runs a solution on the inputs of the tests. The expected results stay outside."""
EXPERT = {
    "duplicates": "Can the same id come more than once, and what happens then?",
    "missing": "What should happen when a value is missing?",
    "filter": "Which {things} should be included, and which not?",
    "value": "Should a {amount} be adjusted in some way?",
    "order": "How should the {things} be sorted?",
    "limit": "Is there a limit to how many I should use?",
    "output": "What should the function return?",
}


class Collab(Environment):
    """Write a Python function for a partner: ask for the details, then submit the code."""

    splits = tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NUM_SAMPLES)
    max_turns = 10

    @classmethod
    def samples(cls, split):
        """Return the problems of "train", "validation" or "test" (level 1), or of "train-2", "test-3" ..."""
        name, _, level = split.partition("-")
        return Specifications(name, int(level or 1))

    def reset(self, sample, rng):
        data = sample.data
        self.wanted = data.get("level"), data.get("domain"), data.get("choices", {})
        self.seed = int(rng.integers(1 << 31))
        self.dialogue, self.told, self.passed = [], [], 0.0
        return self._request(self._specification())

    @tool(timeout=240.0)
    def ask(self, question: str):
        """Ask your partner about what the function should do. The partner answers in words.

        Args:
            question: A question about one or two details, in plain English.
        """
        specification = self._specification()
        if PARTNER["url"]:
            reply = answer_by_model(specification, self.dialogue, question, PARTNER)
        else:
            reply, told = answer_by_rules(specification, question, self.told)
            self.told += [aspect for aspect in told if aspect not in self.told]
        self.dialogue.append((question, reply))
        return reply

    @tool
    def submit(self, code: str):
        """Hand in the code, which hidden tests grade. This ends the task, so ask for the details first.

        Args:
            code: Python code that defines the function.
        """
        specification = self._specification()
        cases = specification.cases(self.seed)
        given = _results(code, specification.domain.function, cases)
        expected = specification.expected(cases)
        right = [same(one, other) for one, other in zip(given, expected, strict=False)]
        self.passed = sum(right) / len(cases)
        done = len(given) == len(expected) and all(right)
        return Done("This is what I wanted." if done else "This is not what I wanted.", reward=float(done))

    def respond(self, text):
        """Take a turn of text as a question."""
        return self.ask(text)

    def score(self):
        aspects = self._specification().choices
        told = sum(aspect in self.told for aspect in aspects) / len(aspects)
        metrics = {"tests": self.passed, "questions": float(len(self.dialogue))}
        return metrics if PARTNER["url"] else {**metrics, "told": told}

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)

    def expert(self, rng):
        """Ask for each detail in turn, then submit the reference."""
        specification = self._specification()
        asked = [question for question, _ in self.dialogue]
        for aspect in specification.choices:
            question = EXPERT[aspect].format(**specification.domain._asdict())
            if aspect not in self.told and question not in asked:
                return Message.assistant(None, ToolCall.of("ask", question=question))
        return Message.assistant(None, ToolCall.of("submit", code=specification.reference()))

    def _specification(self):
        return Specification(*self.wanted)

    def _request(self, specification):
        domain = specification.domain
        none = ", or None" if "missing" in specification.choices else ""
        twice = ", not always unique" if "duplicates" in specification.choices else ""
        return (
            f"I need a Python function {domain.function}(records) for {domain.purpose}. Each record is a "
            f"dict that describes one of the {domain.things}: id (a whole number{twice}), {domain.label} "
            f"and {domain.group} (text), {domain.amount} (a whole number{none}) and {domain.number} (a "
            f"whole number). It should select the right {domain.things} and compute something from them. I "
            "know the details: ask me about them with ask(), one or two at a time, then hand in the code "
            f"with submit(). You have {self.max_turns} turns."
        )


def _results(code, function, cases):
    """Run a solution in its own sandbox. Return its results, or none for cases without a result.

    Raises RuntimeError if the runner stops before it loads the solution.
    """
    if len(code) > MAX_CODE or "\0" in code:
        return []
    code = code.encode("utf-8", "replace").decode()
    files = {"solution.py": code, "runner.py": RUNNER.format(function=function)}
    with open_sandbox(files=files, **LIMITS) as box:
        done = box.run("python3 runner.py", stdin=json.dumps(cases))
    begin, _, text = done.stdout.partition("\n")
    if begin != "ready":
        raise RuntimeError(f"the hidden tests did not start (status {done.code}): {done.stderr[-500:]}")
    try:
        results = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return results if isinstance(results, list) else []


def same(given, expected):
    """Return True if two results are equal. Numbers can differ by rounding, and booleans are not numbers."""
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        try:
            return given == expected or abs(given - expected) <= TOLERANCE
        except OverflowError:  # an integer beyond every float
            return False
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(same(given[key], expected[key]) for key in expected)
    return type(given) is type(expected) and given == expected
