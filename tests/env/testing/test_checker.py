"""Each broken environment must be caught by the check that is there for it."""

import asyncio
import itertools
import random
import threading
from typing import ClassVar

import pytest

from agentrl_env import (
    Done,
    EnvClient,
    Environment,
    Message,
    Reply,
    ToolCall,
    ToolError,
    tool,
)
from agentrl_env.errors import DefinitionError, ServerUnreachable, TargetError, UnknownTask
from agentrl_env.session.pool import SessionPool
from agentrl_env.testing import Verdict, check_environment, run_checks
from agentrl_env.testing import context as probe
from agentrl_env.testing.checks import CHECKS
from agentrl_env.types import SessionStatus, TaskInfo, ToolSpec


class Guess(Environment):
    """Guess a secret number between 1 and 20."""

    max_turns = 8
    blocking = False

    def reset(self, sample, rng):
        self.secret = int(rng.integers(1, 21))
        return "I picked a number between 1 and 20. Use guess()."

    @tool
    def guess(self, n: int):
        """Guess the number.

        Args:
            n: A whole number between 1 and 20.
        """
        if n == self.secret:
            return Done("Correct!", reward=1.0)
        return "higher" if n < self.secret else "lower"

    def expert(self, rng):
        return ToolCall.of("guess", n=self.secret)

    def snapshot(self):
        return self.secret

    def restore(self, state):
        self.secret = state


def report_on(environment, deadline=20.0, **options):
    (report,) = run_checks(environment.local, deadline=deadline, **options)
    return report


def verdicts(report):
    return {result.name: str(result.verdict) for result in report.results}


def failing(environment, **options):
    """Return {check: evidence} of the failures."""
    return {result.name: result.evidence for result in report_on(environment, **options).failures}


def test_a_good_environment_passes_every_check():
    report = check_environment(Guess)
    assert report.ok
    assert verdicts(report) == {check.__name__: "pass" for check in CHECKS}
    assert report["oracle"].evidence == "The expert solves 20 of 20 episodes."
    assert report.summary() == f"guess: {len(CHECKS)} passed"


def test_a_good_environment_of_async_and_blocking_methods_passes_too():
    class Slow(Guess):
        blocking = True

        @tool
        async def hint(self):
            """Say whether the number is even."""
            return "even" if self.secret % 2 == 0 else "odd"

    assert report_on(Slow).ok


def test_an_ignored_seed_is_caught_by_seed_replay():
    class Unseeded(Guess):
        def reset(self, sample, rng):
            self.secret = random.randint(1, 20)
            return "I picked a number between 1 and 20."

    evidence = failing(Unseeded)["seed_replay"]
    assert "Draw every random choice from the rng" in evidence
    assert "guess(n=" in evidence


def test_a_seed_without_effect_is_a_warning():
    class Constant(Guess):
        def reset(self, sample, rng):
            self.secret = 7
            return "I picked a number between 1 and 20."

    report = report_on(Constant)
    assert report.ok
    assert report["seed_effect"].verdict is Verdict.WARN


def test_the_seed_of_a_data_set_need_not_have_an_effect():
    class Listed(Guess):
        @classmethod
        def samples(cls, split):
            return [{"n": n} for n in (range(1, 11) if split == "train" else range(11, 21))]

        def reset(self, sample, rng):
            self.secret = sample.data["n"]
            return "I picked a number between 1 and 20."

    report = report_on(Listed)
    assert report.ok
    assert report["seed_effect"].verdict is Verdict.SKIP
    assert "none in both among 20 different ones" in report["samples"].evidence


def test_state_on_the_class_is_caught_by_isolation_alone():
    class Shared(Guess):
        def reset(self, sample, rng):
            type(self).secret = int(rng.integers(1, 21))
            return "I picked a number between 1 and 20."

        @tool
        def guess(self, n: int):
            """Guess the number."""
            if n == type(self).secret:
                return Done("Correct!", reward=1.0)
            return "higher" if n < type(self).secret else "lower"

    found = failing(Shared)
    assert found.keys() == {"isolation"}
    assert "Keep the state of an episode on self" in found["isolation"]


def test_state_that_outlives_a_session_is_caught_by_order():
    class Remembers(Guess):
        seen: ClassVar[set[int]] = set()

        def reset(self, sample, rng):
            opening = super().reset(sample, rng)
            again = sample.index in self.seen or len(self.seen) > 2
            self.seen.add(sample.index)
            return f"{opening} (once more)" if again else opening

    assert "order" in failing(Remembers, checks=only("order"))
    Remembers.seen.clear()
    assert "order" not in failing(Guess, checks=only("order"))


def test_a_crash_on_odd_arguments_is_caught_by_fuzz():
    class Fragile(Guess):
        @tool
        def look(self, where: str, deep: bool = False):
            """Look somewhere."""
            return f"You see {where.split()[0]}."

    found = failing(Fragile)
    assert "IndexError" in found["fuzz"]
    assert "look(where=" in found["fuzz"]


def test_a_crash_on_an_integer_that_no_float_holds_is_caught_by_fuzz():
    class Overflow(Guess):
        @tool
        def root(self, n: int):
            """Take a square root."""
            return str(abs(n) ** 0.5)

    assert "OverflowError" in failing(Overflow)["fuzz"]


def test_a_crash_on_ordinary_calls_is_caught_by_random_play():
    class Crashing(Guess):
        @tool
        def divide(self, n: int):
            """Divide by zero."""
            return str(n // 0)

    assert "ZeroDivisionError" in failing(Crashing)["random_play"]


def test_a_reset_that_crashes_fails_with_its_reason():
    class Broken(Guess):
        def reset(self, sample, rng):
            raise FileNotFoundError("no data file here")

    found = failing(Broken)
    assert "no data file here" in found["samples"]
    assert "reset() of sample train/0" in found["samples"]


def test_a_silent_reset_is_caught_by_samples():
    class Silent(Guess):
        def reset(self, sample, rng):
            super().reset(sample, rng)
            return []

    assert "opens without a word" in failing(Silent)["samples"]


def test_a_turn_limit_beyond_all_bounds_is_caught_by_limits():
    class Endless(Guess):
        max_turns = 10**9

    assert "never ends" in failing(Endless, checks=only("limits"))["limits"]


def test_a_tool_that_hangs_ends_its_check_and_skips_the_rest():
    never = threading.Event()

    class Hanging(Guess):
        blocking = True

        @tool
        def guess(self, n: int):
            """Wait for ever."""
            never.wait()

    report = report_on(Hanging, deadline=1.0, checks=only("random_play", "fuzz"))
    never.set()
    assert report["random_play"].verdict is Verdict.FAIL
    assert "--deadline); it was at: turn " in report["random_play"].evidence
    assert report["fuzz"].verdict is Verdict.SKIP
    assert "random_play came to no end" in report["fuzz"].evidence


def test_an_async_tool_that_hangs_ends_its_check():
    class Hanging(Guess):
        @tool
        async def guess(self, n: int):
            """Wait for ever."""
            await asyncio.Event().wait()

    evidence = failing(Hanging, deadline=0.3, checks=only("random_play"))["random_play"]
    assert "No end within 0.3 s" in evidence


def test_code_that_blocks_the_event_loop_is_named_as_such():
    blocked = threading.Event()

    class Blocking(Guess):
        blocking = False

        @tool
        def guess(self, n: int):
            """Block the loop."""
            blocked.wait()
            return "done"

    try:
        evidence = failing(Blocking, deadline=0.2, checks=only("random_play"))["random_play"]
    finally:
        blocked.set()
    assert "blocks the event loop" in evidence


def test_a_tool_over_its_own_deadline_is_caught_by_random_play():
    class Late(Guess):
        @tool(timeout=0.02)
        async def wait(self):
            """Wait for ever."""
            await asyncio.Event().wait()

    assert "still running after 0.02 s" in failing(Late)["random_play"]


def test_a_reward_that_is_no_number_is_caught():
    class NotANumber(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            return Reply("hm", reward=float("nan"))

    assert "reward must be a finite number" in failing(NotANumber)["random_play"]


def test_an_answer_of_the_wrong_type_is_caught():
    class Numbers(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            return 7

    assert "guess() returned int" in failing(Numbers)["random_play"]


def test_samples_shared_by_train_and_test_are_caught():
    class Leaky(Guess):
        @classmethod
        def samples(cls, split):
            return [{"n": n} for n in (range(10) if split == "train" else range(9, 20))]

    assert "train/9 and test/0 are the same problem" in failing(Leaky)["samples"]


def test_an_expert_that_never_wins_is_caught_by_oracle():
    class Clueless(Guess):
        def expert(self, rng):
            return ToolCall.of("guess", n=0)

    assert "solves 0 of 20" in failing(Clueless)["oracle"]


def test_an_expert_that_often_slips_is_good_enough():
    class Noisy(Guess):
        max_turns = 1

        def expert(self, rng):
            return ToolCall.of("guess", n=self.secret if rng.random() < 0.5 else 0)

    report = report_on(Noisy)
    assert report["oracle"].verdict is Verdict.PASS


def test_an_expert_with_an_invalid_call_is_caught_by_oracle():
    class Typo(Guess):
        def expert(self, rng):
            return ToolCall.of("gues", n=self.secret)

    assert "The expert's own call is invalid: gues(n=" in failing(Typo)["oracle"]


def test_an_expert_that_breaks_is_caught_by_oracle():
    class Breaks(Guess):
        def expert(self, rng):
            raise KeyError("map")

    found = failing(Breaks)
    assert "KeyError" in found["oracle"]


def test_without_an_expert_the_oracle_check_is_skipped():
    report = report_on(Guess, checks=only("oracle"))
    assert report["oracle"].verdict is Verdict.PASS

    def connect():
        return EnvClient.local(Guess, oracle=False)

    (report,) = run_checks(connect, checks=only("oracle"))
    assert report["oracle"].verdict is Verdict.SKIP


@pytest.mark.parametrize(("room", "verdict"), [(1, Verdict.SKIP), (3, Verdict.PASS)])
def test_a_server_with_little_room_is_checked_in_what_there_is(monkeypatch, room, verdict):
    monkeypatch.setattr(probe, "WAIT", 0.0)
    (report,) = run_checks(lambda: EnvClient.local(Guess, max_sessions=room), deadline=20.0)
    assert report.ok, report.text()
    assert report["isolation"].verdict is verdict


def test_missing_descriptions_are_a_warning():
    class Terse(Guess):
        @tool
        def guess(self, n: int):
            return "higher"

    report = report_on(Terse, checks=only("schema"))
    assert report["schema"].verdict is Verdict.WARN
    assert "guess(), guess(n)" in report["schema"].evidence


def test_a_task_that_chance_always_solves_is_a_warning():
    class Gift(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            return Done("Correct!", reward=1.0)

    report = report_on(Gift, checks=only("random_play"))
    assert report["random_play"].verdict is Verdict.WARN


def test_a_pattern_that_nothing_fits_is_a_warning():
    from typing import Annotated

    from pydantic import Field

    def look_up(self, key: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]):
        """Look up a hash."""
        return "nothing"

    look_up.__annotations__["key"] = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    keyed = type("Keyed", (Guess,), {"guess": None, "look_up": tool(look_up)})
    report = report_on(keyed, checks=only("random_play"))
    assert report["random_play"].verdict is Verdict.WARN
    assert "examples" in report["random_play"].evidence


def test_refusals_by_tool_error_are_no_failure():
    class Strict(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            if not 1 <= n <= 20:
                raise ToolError("Only 1 to 20.")
            return super().guess(n)

    assert report_on(Strict).ok


class FaultyServer(SessionPool):
    """A pool with one rule of the protocol broken, as a foreign server might."""

    def __init__(self, **faults):
        super().__init__([Guess], oracle=True)
        self.faults = faults

    async def tasks(self):
        infos = await super().tasks()
        return tuple(self.faults.get("describe", lambda info: info)(info) for info in infos)

    async def step(self, session_id, seq, message):
        if self.faults.get("forgets_seq"):
            seq = None
        if "answer" in self.faults:
            return self.faults["answer"](await super().step(session_id, seq, message))
        return await super().step(session_id, seq, message)

    async def close_session(self, session_id):
        if not self.faults.get("never_closes"):
            await super().close_session(session_id)


def only(*names):
    return tuple(check for check in CHECKS if check.__name__ in names)


def faults_found(**faults):
    (report,) = run_checks(lambda: EnvClient(FaultyServer(**faults)), deadline=20.0)
    return {result.name: result.evidence for result in report.failures}


def test_the_faulty_server_without_a_fault_passes():
    assert faults_found() == {}


def test_steps_that_are_played_twice_are_caught_by_retry():
    found = faults_found(forgets_seq=True)
    assert "seq 1, sent twice at once, had two answers" in found["retry"]


def test_sessions_that_stay_open_are_caught_by_close():
    assert "still takes steps" in faults_found(never_closes=True)["close"]


def with_schema(schema, name="guess"):
    def describe(info: TaskInfo) -> TaskInfo:
        function = info.tools[0].function.model_copy(update={"parameters": schema, "name": name})
        return info.model_copy(update={"tools": (ToolSpec(function=function),)})

    return describe


def test_an_invalid_schema_is_caught_by_schema():
    bad = with_schema({"type": "object", "properties": {"n": {"type": "whole number"}}})
    assert "no valid JSON Schema" in faults_found(describe=bad)["schema"]


def test_a_schema_that_is_no_object_is_caught_by_schema():
    assert 'of type "object"' in faults_found(describe=with_schema({"type": "array"}))["schema"]


def test_a_tool_name_that_model_apis_refuse_is_caught_by_schema():
    odd = with_schema({"type": "object"}, name="guess it!")
    assert "its name must be" in faults_found(describe=odd)["schema"]


def test_a_missing_train_split_is_caught_by_samples():
    def describe(info):
        return info.model_copy(update={"splits": {}})

    assert "no split named 'train'" in faults_found(describe=describe)["samples"]


@pytest.mark.parametrize(
    ("change", "evidence"),
    [
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"metrics": {"speed": float("nan")}}, "speed is nan"),
        ({"terminated": True, "status": SessionStatus.RUNNING}, "terminated is True"),
        ({"truncated": True, "status": SessionStatus.RUNNING}, "truncated, and still running"),
        ({"truncated": False, "status": SessionStatus.TRUNCATED_TURNS}, "truncated is False"),
    ],
)
def test_results_that_contradict_themselves_are_caught_by_results(change, evidence):
    changed = faults_found(answer=lambda result: result.model_copy(update=change))
    assert evidence in changed["results"]


def test_a_call_without_an_answer_is_caught():
    changed = faults_found(answer=lambda result: result.model_copy(update={"messages": ()}))
    assert "got answers to []" in changed["random_play"]


def test_an_answer_to_another_call_is_caught():
    def answer(result):
        stray = Message(role="tool", tool_call_id="another", content="higher")
        return result.model_copy(update={"messages": (stray,)})

    assert "another" in faults_found(answer=answer)["random_play"]


def test_an_episode_that_goes_on_past_its_limit_is_caught_by_limits():
    def describe(info):
        return info.model_copy(update={"max_turns": 5})

    assert "still runs after max_turns = 5" in faults_found(describe=describe)["limits"]


def test_an_episode_cut_before_its_limit_is_caught_by_limits():
    def describe(info):
        return info.model_copy(update={"max_turns": 12})

    assert "cut after 8 turns" in faults_found(describe=describe)["limits"]


def test_a_server_that_goes_away_ends_the_checks():
    steps = itertools.count()

    def answer(result):
        if next(steps) > 20:
            raise ServerUnreachable("no server answers")
        return result

    (report,) = run_checks(lambda: EnvClient(FaultyServer(answer=answer)), deadline=20.0)
    assert [result.name for result in report.failures] == ["random_play"]
    assert report["fuzz"].verdict is Verdict.SKIP


def test_check_environment_says_in_a_test_what_failed():
    class Clueless(Guess):
        def expert(self, rng):
            return ToolCall.of("guess", n=0)

    with pytest.raises(AssertionError, match="oracle: The expert solves 0 of 20"):
        check_environment(Clueless)


def test_a_class_that_a_model_can_do_nothing_with_is_refused():
    class Empty(Environment):
        def reset(self, sample, rng):
            return "Hello"

    with pytest.raises((TargetError, DefinitionError), match="no tools"):
        check_environment(Empty)


def test_an_unknown_task_is_refused():
    with pytest.raises(UnknownTask, match="guess"):
        run_checks(Guess.local, task="chess")


def test_a_task_of_plain_talk_is_checked_without_tools():
    class Echo(Environment):
        """Say the word."""

        max_turns = 4
        blocking = False

        def reset(self, sample, rng):
            self.word = str(rng.choice(["red", "blue", "green", "open", "box"]))
            return f"Say {self.word}."

        def respond(self, text):
            return Done("Yes.", reward=1.0) if text == self.word else "No, say it."

        def expert(self, rng):
            return self.word

    report = report_on(Echo)
    assert report.ok, report.text()
    assert report["schema"].verdict is Verdict.WARN
