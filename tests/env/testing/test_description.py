"""Findings of the checks on a task's description: tools, methods and splits."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from agentrl_env import Done, ToolCall, tool
from agentrl_env.environment import Environment
from agentrl_env.hosting.loader import load_target
from agentrl_env.testing import Verdict, run_checks
from agentrl_env.testing.checks import fuzz, hooks, samples, schema
from agentrl_env.testing.fuzz import fuzz_cases
from tests.env.test_author_mistakes import marked_line, task, write_task
from tests.env.testing.test_checker import Guess, report_on

SPLITS = {"train": range(5), "validation": range(5, 10), "test": range(10, 15)}


class Listed(Guess):
    """Guess a number of a list."""

    splits = ("train", "validation", "test")
    numbers: ClassVar[dict[str, Sequence[int]]] = SPLITS

    @classmethod
    def samples(cls, split):
        return [{"n": n} for n in cls.numbers[split]]

    def reset(self, sample, rng):
        self.secret = sample.data["n"]
        return "I picked a number."


@pytest.mark.parametrize("pair", [("train", "validation"), ("validation", "test"), ("train", "test")])
def test_problem_that_any_two_splits_share_fails_with_its_pair(pair):
    class Leaks(Listed):
        numbers: ClassVar = {**SPLITS, pair[1]: [*SPLITS[pair[1]], SPLITS[pair[0]][3]]}

    report = report_on(Leaks, checks=(samples,))
    one, other = pair
    assert report["samples"].evidence.startswith(f"The samples {one}/3 and {other}/5 are the same problem: ")


def test_three_splits_without_a_shared_problem_pass():
    evidence = report_on(Listed, checks=(samples,))["samples"].evidence
    assert evidence == (
        "train 5, validation 5, test 5; no two splits share a problem among 15 different samples compared."
    )


def test_missing_train_split_is_reported_with_its_remedy():
    class Levels(Listed):
        splits = ("easy", "test")
        numbers: ClassVar = {"easy": range(5), "test": range(5, 10)}

    evidence = report_on(Levels, checks=(samples,))["samples"].evidence
    assert evidence == (
        "There is no split named 'train' (splits: easy, test); name one of them so, which clients open by "
        "default."
    )


def evidence_of(check, folder, body, **tools):
    """Return the evidence of a warning about a task with this body. It must name the marked line."""
    source = task(body, **tools)
    (report,) = run_checks(load_target(write_task(folder, source)).local, checks=(check,))
    result = report[check.__name__]
    assert result.verdict is Verdict.WARN, result
    assert marked_line(source) in result.evidence
    return result.evidence


def test_missing_description_of_a_tool_names_its_line(tmp_path):
    body = "@tool  # here\ndef guess(self, n: int):\n    return 'no'\n"
    assert evidence_of(schema, tmp_path, body).startswith("No description: guess(), guess(n) (")


def test_description_of_an_unknown_parameter_is_named_with_its_line(tmp_path):
    doc = '"""Guess.\n\n    Args:\n        number: A number.\n    """'
    body = f"@tool  # here\ndef guess(self, n: int):\n    {doc}\n    return 'no'\n"
    told = evidence_of(schema, tmp_path, body)
    assert "The Args: section of guess() describes 'number', which is not a parameter (" in told


def test_text_only_task_has_no_warning_about_tools():
    class Echo(Environment):
        """Say yes."""

        def reset(self, sample, rng):
            return "Say yes."

        def respond(self, text):
            return Done("Thanks.", reward=float(text == "yes"))

    result = report_on(Echo, checks=(schema,))["schema"]
    assert (result.verdict, result.evidence) == (Verdict.PASS, "respond() answers text.")


UNCALLED = {
    "oracle": ("def oracle(self, rng): ...  # here\n", "expert(self, rng)"),
    "teardown": ("async def teardown(self): ...  # here\n", "close(self)"),
    "get_samples": ("@classmethod  # here\ndef get_samples(cls, split): ...\n", "samples(cls, split)"),
    "get_state": ("def get_state(self): ...  # here\n", "snapshot(self)"),
    "setup": ("def setup(self): ...  # here\n", "startup(cls)"),
}


@pytest.mark.parametrize("name", UNCALLED)
def test_hook_of_another_library_that_nothing_calls_warns(name, tmp_path):
    body, hook = UNCALLED[name]
    told = evidence_of(hooks, tmp_path, body)
    assert told.startswith(f"Guess.{name} is never called; the hook is {hook} (")


CALLED = {
    "by a tool": "def cleanup(self): ...\ndef score(self):\n    self.cleanup()\n    return {}\n",
    "by its name": "def get_state(self): ...\ndef score(self):\n    return getattr(self, 'get_state')()\n",
    "beside the hook": "def oracle(self): ...\ndef expert(self, rng):\n    return 'x'\n",
    "a tool": "@tool\ndef cleanup(self):\n    return 'clean'\n",
    "a property": "@property\ndef oracle(self): ...\n",
    "by a cached method": "import functools\ndef oracle(self): ...\n"
    "@functools.cache\ndef best(self):\n    return self.oracle()\n",
    "by a property": "def oracle(self): ...\n@property\ndef best(self):\n    return self.oracle()\n",
}


@pytest.mark.parametrize("body", CALLED.values(), ids=CALLED)
def test_helper_method_with_the_name_of_a_foreign_hook_passes(body, tmp_path):
    (report,) = run_checks(load_target(write_task(tmp_path, task(body))).local, checks=(hooks,))
    assert report["hooks"].verdict is Verdict.PASS, report["hooks"]


def test_method_that_the_module_calls_passes(tmp_path):
    source = task("def oracle(self): ...\n") + "def best(task):\n    return task.oracle()\n"
    (report,) = run_checks(load_target(write_task(tmp_path, source)).local, checks=(hooks,))
    assert report["hooks"].verdict is Verdict.PASS, report["hooks"]


def test_method_that_a_class_of_a_library_has_passes():
    class Library:
        def teardown(self):
            return None

    class Mixed(Guess, Library):
        def teardown(self):
            return super().teardown()

        @tool
        def look(self):
            """Look."""
            return str(ToolCall.of("look"))

    assert report_on(Mixed, checks=(hooks,))["hooks"].verdict is Verdict.PASS


class Takes(Guess):
    """Guess a secret number between 1 and 20."""

    @tool
    def take(self, data: dict, value: Any):
        """Take anything."""
        json.dumps([data, value], allow_nan=False)
        return "thanks"


def test_fuzz_has_nested_numbers_that_are_not_finite_and_they_reach_no_tool():
    cases = list(fuzz_cases(Takes.tool_specs(), np.random.default_rng(0)))
    nested = [case for case in cases if case.label == "take: data not finite"]
    assert len(nested) == 4
    assert all(case.invalid for case in nested)
    with Takes.session(index=0) as session:
        for case in nested[:3]:
            assert session.step(case.message).metrics["invalid_calls"] == 1.0
    assert report_on(Takes, checks=(fuzz,)).ok
