"""Mistakes of authors that no single call reveals. One check reports each mistake once, with its place."""

import asyncio
import itertools
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentrl_env import Done, EnvClient, Environment, Reply, ToolCall, tool
from agentrl_env.errors import UnknownSample
from agentrl_env.hosting.loader import load_target
from agentrl_env.testing import Verdict, check_environment, checker, context, run_checks
from agentrl_env.testing.checks import CHECKS
from agentrl_env.testing.fresh_process import CannotRead, read_in_process
from tests.env.testing.test_checker import Guess, failing, only, report_on, verdicts
from tests.env.thread_server import server_on_thread

ENVIRONMENT = '''
import os
import random
from agentrl_env import Environment, tool

{extra}

class Listed(Environment):
    """Repeat the word."""

    max_turns = 3

    @classmethod
    def samples(cls, split):
        {samples}

    def reset(self, sample, rng):
        return f"Repeat {{sample.data}}."

    @tool
    def repeat(self, word: str):
        """Repeat a word."""
        return "thanks"
'''
UNSTABLE = {
    "random numbers": 'return [{"n": random.randint(0, 10**9)} for _ in range(8)]',
    "the process": 'return [{"n": os.getpid(), "split": split}]',
    "the order of a set": 'return [{"w": f"{split} {w}"} for w in {"a", "b", "c", "d", "e", "f", "g"}]',
    "the hash of a string": 'return [{"n": hash(split) % 1000003}]',
    "its length": 'return [{"n": n, "split": split} for n in range(1 + os.getpid() % 1000 * 9)]',
}


def named(cases: dict, quick: tuple) -> list:
    """Return named test cases. All but the quick cases are marked slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=() if name in quick else pytest.mark.slow,
        )
        for name, case in cases.items()
    ]


def listed(folder: Path, samples: str, extra: str = "") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "environment.py").write_text(ENVIRONMENT.format(samples=samples, extra=extra))
    return str(folder)


@pytest.mark.parametrize("samples", named(UNSTABLE, quick=("the order of a set", "its length")))
def test_data_set_that_differs_between_processes_fails(tmp_path, samples):
    task = load_target(listed(tmp_path / "unstable", samples))
    (report,) = run_checks(task.local, checks=only("data_set"))
    assert report["data_set"].verdict is Verdict.FAIL, report["data_set"]
    assert "is not the same in two processes" in report["data_set"].evidence
    assert "A group would mix problems" in report["data_set"].evidence


HASHED = {
    "the order of a set in an opening": ("', '.join({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})", "word"),
    "a draw from a set": ("str(rng.choice(list({f'w{n}' for n in range(50)})))", "word"),
    "the hash of a text in a reward": ("'Hello.'", "Reply(word, reward=hash(word) % 1000003)"),
    "the process": ("f'{os.getpid()}'", "word"),
}


@pytest.mark.parametrize(("opening", "answer"), named(HASHED, quick=("a draw from a set", "the process")))
def test_episode_that_differs_between_processes_fails(tmp_path, opening, answer):
    (tmp_path / "hashed").mkdir()
    source = f"""
import os
from agentrl_env import Environment, Reply, tool

class Hashed(Environment):
    \"\"\"Repeat.\"\"\"
    max_turns = 3
    def reset(self, sample, rng):
        return {opening}
    @tool
    def repeat(self, word: str):
        \"\"\"Repeat.\"\"\"
        return {answer}
"""
    (tmp_path / "hashed" / "environment.py").write_text(source)
    task = load_target(str(tmp_path / "hashed"))
    (report,) = run_checks(task.local, checks=only("seed_replay", "processes"))
    assert [result.name for result in report.failures] == ["processes"]
    assert "played in another process, differs in " in report["processes"].evidence
    assert "sort sets before rng draws from them" in report["processes"].evidence


@pytest.mark.slow
def test_differing_episodes_of_a_differing_data_set_are_reported_only_for_the_data_set(tmp_path):
    task = load_target(listed(tmp_path / "unstable", UNSTABLE["the hash of a string"]))
    (report,) = run_checks(task.local, checks=only("data_set", "processes"))
    assert [result.name for result in report.failures] == ["data_set"]
    assert report["processes"].evidence == "Not run, for the reason that data_set reports."


def test_episodes_of_a_class_inside_a_function_are_not_compared():
    class Inner(Guess):
        pass

    report = report_on(Inner, checks=only("processes"))
    assert report["processes"].evidence == "Not compared: no other process can import the class."


def test_data_set_that_is_the_same_in_every_process_passes(tmp_path):
    extra = "from .words import WORDS\nprint('imported')"
    folder = listed(tmp_path / "stable", 'return [{"w": f"{split} {w}"} for w in sorted(WORDS)]', extra)
    (tmp_path / "stable" / "words.py").write_text('WORDS = {"a", "b", "c"}\n')
    (report,) = run_checks(load_target(folder).local, checks=only("data_set"))
    assert report["data_set"].verdict is Verdict.PASS, report["data_set"]
    assert report["data_set"].evidence == "6 samples were the same in two processes."


def test_data_set_is_compared_next_to_a_file_with_the_name_of_a_standard_module(tmp_path, monkeypatch):
    task = load_target(listed(tmp_path / "stable", 'return [{"w": split}]'))
    (tmp_path / "random.py").write_text("raise ImportError('not the random of Python')")
    monkeypatch.chdir(tmp_path)
    (report,) = run_checks(task.local, checks=only("data_set"))
    assert report["data_set"].evidence == "2 samples were the same in two processes."


def test_data_set_of_a_class_inside_a_function_is_read_twice():
    class Unstable(Guess):
        calls = itertools.count()

        @classmethod
        def samples(cls, split):
            return [{"n": next(cls.calls)}]

    report = report_on(Unstable, checks=only("data_set"))
    assert "from two calls of samples()" in report["data_set"].evidence
    assert report["data_set"].verdict is Verdict.FAIL


@pytest.mark.extended
@pytest.mark.slow
def test_process_that_cannot_read_the_data_set_warns(tmp_path):
    extra = 'assert "PYTHONHASHSEED" not in os.environ, "no second process, please"'
    task = load_target(listed(tmp_path / "single", 'return [{"split": split}]', extra))
    (report,) = run_checks(task.local, checks=only("data_set"))
    assert report["data_set"].verdict is Verdict.WARN
    assert "no second process, please" in report["data_set"].evidence


@pytest.mark.parametrize(
    "command",
    [
        ["script.py"],
        pytest.param(["-m", "script"], marks=pytest.mark.slow),
        pytest.param(["-c", "import script"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_script_that_checks_its_own_class_ends(tmp_path, command):
    source = ENVIRONMENT.format(samples='return [{"split": split}]', extra="import agentrl_env.testing")
    source += "\nprint(agentrl_env.testing.check_environment(Listed)['data_set'])\n"
    (tmp_path / "script.py").write_text(source)
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "samples were the same" in done.stdout or "Not compared" in done.stdout, done.stderr


@pytest.mark.slow
def test_data_set_that_differs_between_the_workers_of_a_server_fails(tmp_path):
    folder = listed(tmp_path / "unstable", 'return [{"n": os.getpid(), "split": split}]')
    command = [sys.executable, "-m", "agentrl_env", "serve", folder, "--port", "0", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[3]
            (report,) = run_checks(lambda: EnvClient.connect(url), checks=only("data_set"))
        finally:
            server.terminate()
    assert "is not the same in two sessions" in report["data_set"].evidence


def test_server_with_one_session_cannot_compare_data_sets(tmp_path, monkeypatch):
    monkeypatch.setattr(context, "WAIT", 0.0)
    folder = listed(tmp_path / "stable", 'return [{"split": split}]')
    with server_on_thread(folder, max_sessions=1) as url:
        (report,) = run_checks(lambda: EnvClient.connect(url), checks=only("data_set"))
    assert report["data_set"].verdict is Verdict.SKIP, report["data_set"]


def test_split_without_samples_is_refused_with_one_sentence(tmp_path):
    task = load_target(listed(tmp_path / "empty", "return []"))
    (report,) = run_checks(task.local)
    sentence = "split 'train' has no samples; samples('train') must return some"
    assert [result.name for result in report.failures] == ["samples"]
    assert sentence in report["samples"].evidence
    assert report["random_play"].evidence == "Not run, for the reason that samples reports."

    async def opened(**choice):
        async with task.local() as client:
            await client.open("listed", **choice)

    for choice in ({}, {"index": 0}):
        with pytest.raises(UnknownSample, match="split 'train' has no samples; samples"):
            asyncio.run(opened(**choice))


@pytest.mark.extended
@pytest.mark.slow
def test_split_without_test_samples_leaves_the_other_checks(tmp_path):
    folder = listed(tmp_path / "half", 'return [{"n": 1}] if split == "train" else []')
    (report,) = run_checks(load_target(folder).local)
    assert [result.name for result in report.failures] == ["samples"]
    assert "split 'test' has no samples" in report["samples"].evidence
    assert report["random_play"].verdict is Verdict.PASS


def test_sample_that_is_not_json_fails_samples(tmp_path):
    task = load_target(listed(tmp_path / "tagged", 'return [{"tags": {1, 2}, "split": split}]'))
    (report,) = run_checks(task.local, checks=only("samples"))
    assert [result.name for result in report.failures] == ["samples"]
    assert "cannot be sent as JSON" in report["samples"].evidence


class Sleepy(Guess):
    """Guess a secret number between 1 and 20."""

    max_turns = 2

    @tool
    async def guess(self, n: int):
        """Guess the number."""
        nap()
        return "higher"

    expert = Environment.expert


def nap():
    time.sleep(0.3)


def test_blocking_code_in_an_async_tool_fails_with_its_line():
    report = report_on(Sleepy, checks=only("random_play", "event_loop"))
    evidence = report["event_loop"].evidence
    assert report["event_loop"].verdict is Verdict.FAIL
    line = nap.__code__.co_firstlineno + 1
    assert (
        f"Sleepy.guess() blocks the event loop at {Path(__file__).relative_to(Path.cwd())}:{line}" in evidence
    )
    assert "Write def instead of async def" in evidence
    assert report["random_play"].verdict is Verdict.PASS


def test_deadline_of_a_blocked_event_loop_names_the_line():
    release = threading.Event()

    class Stuck(Guess):
        @tool
        async def guess(self, n: int):
            """Guess the number."""
            release.wait(60)
            return "higher"

    try:
        report = report_on(Stuck, deadline=0.5, checks=only("random_play", "fuzz", "event_loop"))
    finally:
        release.set()
    assert "Not finished within 0.5 s" in report["random_play"].evidence
    assert "Stuck.guess() blocks the event loop at tests/" in report["random_play"].evidence
    assert report["fuzz"].verdict is Verdict.SKIP
    assert report["event_loop"].verdict is Verdict.WARN


def test_blocking_code_in_a_separate_task_is_found():
    class Background(Guess):
        max_turns = 2

        @tool
        async def guess(self, n: int):
            """Guess the number."""

            async def work():
                nap()

            await asyncio.create_task(work())
            return "higher"

    evidence = report_on(Background, checks=only("random_play", "event_loop"))["event_loop"].evidence
    assert "work() blocks the event loop at" in evidence


def test_blocking_startup_and_shutdown_are_named_with_their_lines():
    class Opens(Guess):
        @classmethod
        async def startup(cls):
            nap()

        @classmethod
        async def shutdown(cls):
            nap()

    result = report_on(Opens, checks=only("event_loop"))["event_loop"]
    assert result.verdict is Verdict.WARN
    line = nap.__code__.co_firstlineno + 1
    assert f"Opens.startup() blocks the event loop at tests/env/testing/test_author_mistakes.py:{line}; " in (
        result.evidence
    )
    assert "Opens.shutdown() blocks the event loop at" in result.evidence


def test_state_that_no_other_server_can_restore_warns():
    class Locked(Guess):
        """Guess a secret number between 1 and 20."""

        def snapshot(self):
            return {"secret": self.secret, "key": len}

        def restore(self, state):
            self.secret = state["secret"]

    report = report_on(Locked, checks=only("fork"))
    assert report["fork"].verdict is Verdict.WARN
    assert "sessions have no failover (serve --resume): snapshot() of task 'locked' holds a " in (
        report["fork"].evidence
    )
    assert f"({Path(__file__).relative_to(Path.cwd())}:" in report["fork"].evidence


def test_state_that_is_too_large_for_another_server_warns():
    class Stuffed(Guess):
        def snapshot(self):
            return {"secret": self.secret, "pad": "x" * 1_100_000}

        def restore(self, state):
            self.secret = state["secret"]

    evidence = report_on(Stuffed, checks=only("fork"))["fork"].evidence
    assert "bytes; at most 1,048,576 are kept" in evidence


def test_code_that_waits_properly_passes_the_event_loop_check():
    class Waits(Guess):
        blocking = True
        max_turns = 1
        expert = Environment.expert

        @tool
        async def guess(self, n: int):
            """Guess the number."""
            await asyncio.sleep(0.15)
            return "higher"

        @tool
        def look(self):
            """Look around."""
            time.sleep(0.15)
            return "nothing"

    report = report_on(Waits, checks=only("random_play", "event_loop"))
    assert report["event_loop"].verdict is Verdict.PASS, report["event_loop"]


def test_raising_close_fails_only_close():
    class Leaks(Guess):
        def close(self):
            raise ConnectionError("the database is gone")

    found = failing(Leaks)
    assert found.keys() == {"close"}
    assert "close() raised ConnectionError: the database is gone" in found["close"]


@pytest.mark.extended
@pytest.mark.slow
def test_async_close_that_raises_at_the_end_of_an_episode_fails_close():
    class Leaks(Guess):
        async def close(self):
            if self.done:
                raise KeyError("handle")

        def reset(self, sample, rng):
            self.done = False
            return super().reset(sample, rng)

        @tool
        def guess(self, n: int):
            """Guess the number."""
            self.done = True
            return Done("Over.")

    assert "close() raised KeyError: 'handle'" in failing(Leaks)["close"]


@pytest.mark.slow
def test_shutdown_that_raises_fails_shutdown_with_its_line(tmp_path):
    extra = "import sqlite3"
    folder = Path(listed(tmp_path / "leaks", 'return [{"split": split}]', extra))
    source = (folder / "environment.py").read_text()
    source += "\n    @classmethod\n    def shutdown(cls):\n        cls.db.close()\n"
    (folder / "environment.py").write_text(source)
    line = source.count("\n")
    (report,) = run_checks(load_target(str(folder)).local)
    assert [result.name for result in report.failures] == ["shutdown"]
    assert "shutdown() raised AttributeError: " in report["shutdown"].evidence
    assert f"environment.py:{line}, in shutdown)" in report["shutdown"].evidence


def test_shutdown_that_does_not_end_warns(monkeypatch):
    released = threading.Event()

    class Hangs(Guess):
        @classmethod
        def shutdown(cls):
            released.wait(60)

    monkeypatch.setattr(checker, "CLOSE_TIMEOUT", 0.5)
    try:
        report = report_on(Hangs, checks=only("schema", "shutdown"))
    finally:
        released.set()
    assert report["shutdown"].verdict is Verdict.WARN
    assert report["shutdown"].evidence == "shutdown() did not end: No result within 0.5 s."


def test_output_without_bound_warns_and_is_cut():
    class Chatty(Guess):
        max_turns = 2

        @tool
        def log(self):
            """Print the log."""
            return "x" * 2_000_000

    report = report_on(Chatty, checks=only("random_play", "output"))
    assert report.ok, report.text()
    assert report["output"].verdict is Verdict.WARN
    assert "log() was answered with 1,000,0" in report["output"].evidence


def test_broken_reset_prints_its_reason_once():
    class Broken(Guess):
        def reset(self, sample, rng):
            raise FileNotFoundError(f"no data file for {sample.index}")

    report = report_on(Broken)
    assert [result.name for result in report.failures] == ["samples"]
    assert sum("no data file" in result.evidence for result in report.results) == 1
    others = {name for name, verdict in verdicts(report).items() if verdict == "skip"}
    run = {"schema", "hooks", "samples", "data_set", "event_loop", "shutdown"}
    assert others >= {check.__name__ for check in CHECKS} - run
    assert report["order"].evidence == "Not run, for the reason that samples reports."


def test_checks_with_only_failing_episodes_are_not_run():
    class Crashing(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            raise ZeroDivisionError(f"{n} by zero")

    report = report_on(Crashing)
    not_run = {
        "retry",
        "expert",
        "processes",
        "seed_replay",
        "seed_effect",
        "order",
        "isolation",
        "fork",
        "knowledge",
        "results",
    }
    assert {name for name, verdict in verdicts(report).items() if verdict == "skip"} == not_run
    assert sum("ZeroDivisionError" in result.evidence for result in report.results) == 1
    assert report["fuzz"].evidence == "The same failure as in random_play."
    assert report["seed_replay"].evidence == "Not run, for the reason that random_play reports."


def test_second_reason_is_reported_in_addition_to_the_first():
    class Twice(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            raise ZeroDivisionError("by zero")

        def expert(self, rng):
            raise KeyError("map")

    found = failing(Twice)
    assert "ZeroDivisionError" in found["random_play"]
    assert "KeyError" in found["oracle"]


def test_failing_expert_is_reported_only_by_oracle():
    class Breaks(Guess):
        def expert(self, rng):
            raise KeyError("map")

    assert failing(Breaks).keys() == {"oracle"}


def test_failing_score_is_reported_once():
    class Unscored(Guess):
        def score(self):
            raise LookupError("no score")

    report = report_on(Unscored)
    assert sum("no score" in result.evidence for result in report.results) == 1


def test_error_inside_a_check_is_a_result():
    async def wrong(context):
        """Is it wrong?"""
        raise LookupError("a bug")

    (report,) = run_checks(Guess.local, checks=(wrong, *only("schema")))
    assert "the check itself failed: LookupError: a bug" in report["wrong"].evidence
    assert report["schema"].verdict is Verdict.PASS


@pytest.mark.extended
@pytest.mark.slow
def test_environment_with_startup_and_data_set_passes():
    report = check_environment(Stored)
    assert report["data_set"].verdict is Verdict.PASS


class Stored(Guess):
    """Guess a secret number between 1 and 20."""

    @classmethod
    def startup(cls):
        cls.database = sqlite3.connect(":memory:", check_same_thread=False)
        cls.database.execute("create table numbers (n)")
        cls.database.executemany("insert into numbers values (?)", [(n,) for n in range(20)])

    @classmethod
    def shutdown(cls):
        cls.database.close()

    @classmethod
    def samples(cls, split):
        rows = cls.database.execute("select n from numbers order by n").fetchall()
        return [{"n": n} for (n,) in rows if n % 2 == (split == "test")]

    def reset(self, sample, rng):
        self.secret = sample.data["n"] + 1
        return "I picked a number between 1 and 20."

    def expert(self, rng):
        return ToolCall.of("guess", n=self.secret)


def test_reply_with_long_parts_counts_as_output():
    class Parts(Guess):
        max_turns = 2

        @tool
        def guess(self, n: int):
            """Guess the number."""
            return Reply("y" * 300_000)

    assert "300,000 characters" in report_on(Parts, checks=only("random_play", "output"))["output"].evidence


def test_process_that_does_not_answer_in_time_is_named_with_the_remedy():
    with pytest.raises(CannotRead, match=r"did not answer within 0 s.* use a longer deadline"):
        read_in_process("environments/shop", {"test": [0]}, hash_seed=0, timeout=0)
