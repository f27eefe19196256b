"""Each faulty environment must fail the check that covers its fault."""

import asyncio
import itertools
import random
import threading
from collections import Counter
from typing import Annotated, ClassVar

import pytest
from pydantic import AfterValidator, Field

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
from agentrl_env.testing import Verdict, check_environment, context, run_checks
from agentrl_env.testing.checks import CHECKS
from agentrl_env.types import SessionStatus, TaskInfo, ToolSpec
from tests.env.intercepted_client import InterceptedClient

TRIED: list[int] = []


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


def guess_of_this_process():
    """Return a class that no other process can import, so that the checks start no process."""
    return type("Guess", (Guess,), {"__doc__": Guess.__doc__})


def report_on(environment, deadline=120.0, **options):
    (report,) = run_checks(environment.local, deadline=deadline, **options)
    return report


def verdicts(report):
    return {result.name: str(result.verdict) for result in report.results}


def failing(environment, **options):
    """Return {check: evidence} of the failures."""
    return {result.name: result.evidence for result in report_on(environment, **options).failures}


class Search(Guess):
    """Guess a secret number between 1 and 20; the expert halves the range that is left."""

    name = "guess"

    def reset(self, sample, rng):
        self.low, self.high = 1, 20
        return super().reset(sample, rng)

    @tool
    def guess(self, n: int):
        """Guess the number.

        Args:
            n: A whole number between 1 and 20.
        """
        if n < self.secret:
            self.low = max(self.low, n + 1)
        else:
            self.high = min(self.high, n - 1)
        return super().guess(n)

    def expert(self, rng):
        return ToolCall.of("guess", n=(self.low + self.high) // 2)

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)


def test_valid_environment_passes_every_check():
    report = check_environment(Search)
    assert report.ok
    assert verdicts(report) == {check.__name__: "pass" for check in CHECKS}
    assert report["oracle"].evidence == "The expert solves 20 of 20 episodes."
    assert report.summary() == f"guess: {len(CHECKS)} passed"


def test_valid_environment_with_async_and_blocking_tools_passes():
    class Slow(Guess):
        blocking = True

        @tool
        async def hint(self):
            """Say whether the number is even."""
            return "even" if self.secret % 2 == 0 else "odd"

    assert report_on(Slow).ok


def test_ignored_seed_fails_seed_replay():
    class Unseeded(Guess):
        def reset(self, sample, rng):
            self.secret = random.randint(1, 20)
            return "I picked a number between 1 and 20."

    evidence = failing(Unseeded)["seed_replay"]
    assert "Draw every random choice from the rng" in evidence
    assert "guess(n=" in evidence


def test_chance_in_the_answer_to_text_fails_seed_replay():
    class Moody(Guess):
        def respond(self, text):
            return f"My mood is {random.random()}."

    evidence = failing(Moody, checks=only("seed_replay"))["seed_replay"]
    assert "My mood is" in evidence
    assert "Draw every random choice from the rng" in evidence


def test_expert_passes_if_some_answers_do_not_follow_the_seed():
    calls = itertools.count()  # 0: with the expert, 1: without, 2 and later: compared with each other

    class Moody(Guess):
        @tool
        def guess(self, n: int):
            """Guess."""
            return "What?" if next(calls) in (1, 4) else super().guess(n)

    report = report_on(Moody, checks=only("expert"))
    assert report["expert"].evidence == "Not run, for the reason that seed_replay reports."


def test_seed_without_effect_warns():
    class Constant(Guess):
        def reset(self, sample, rng):
            self.secret = 7
            return "I picked a number between 1 and 20."

    report = report_on(Constant)
    assert report.ok
    assert report["seed_effect"].verdict is Verdict.WARN


def test_seed_effect_is_skipped_for_a_data_set():
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
    assert "no two splits share a problem among 20 different samples" in report["samples"].evidence


def test_state_on_the_class_fails_only_isolation():
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


def test_mutable_attribute_of_the_class_is_named_with_its_line():
    class Collects(Guess):
        """Guess a secret number between 1 and 20."""

        tried: ClassVar[list[int]] = []

        @tool
        def guess(self, n: int):
            """Guess the number."""
            self.tried.append(n)
            return f"You tried {self.tried}."

    found = failing(Collects, checks=only("random_play", "seed_replay"))
    evidence = found["seed_replay"]
    assert "Collects.tried has changed (tests/env/testing/test_checker.py:" in evidence
    assert "which all sessions share. Keep the state of an episode on self" in evidence
    assert "random choice" not in evidence


def test_list_of_the_module_is_named():
    class Collects(Guess):
        """Guess a secret number between 1 and 20."""

        @tool
        def guess(self, n: int):
            """Guess the number."""
            TRIED.append(n)
            return f"{len(TRIED)} tries."

    evidence = failing(Collects, checks=only("seed_replay"))["seed_replay"]
    assert "test_checker.TRIED has changed, which all sessions share." in evidence


def test_expert_that_uses_up_its_plan_fails_expert_with_its_line():
    class Plans(Guess):
        def reset(self, sample, rng):
            opening = super().reset(sample, rng)
            self.plan = list(range(1, 21))
            return opening

        def expert(self, rng):
            return ToolCall.of("guess", n=self.plan.pop(0))

        def snapshot(self):
            return vars(self)

        def restore(self, state):
            vars(self).update(state)

    found = failing(Plans)
    line = Plans.expert.__code__.co_firstlineno
    assert "turn 1: two calls of expert() gave guess(n=1), then guess(n=2)" in found["expert"]
    assert f"expert() changes the episode (tests/env/testing/test_checker.py:{line})" in found["expert"]
    assert "seed_replay" not in found


def test_expert_that_changes_the_episode_fails_expert():
    class Helps(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            return f"hints: {self.hints}"

        def reset(self, sample, rng):
            self.hints = 0
            return super().reset(sample, rng)

        def expert(self, rng):
            self.hints += 1
            return ToolCall.of("guess", n=7)

    found = failing(Helps, checks=only("random_play", "expert", "seed_replay", "order", "isolation"))
    assert found.keys() == {"expert"}
    assert "played again without asking the expert, differs in turn 1" in found["expert"]


def test_noisy_expert_that_draws_from_its_rng_passes():
    class Noisy(Guess):
        def expert(self, rng):
            return ToolCall.of("guess", n=self.secret if rng.random() < 0.7 else int(rng.integers(1, 21)))

    assert report_on(Noisy, checks=only("expert"))["expert"].verdict is Verdict.PASS


def test_expert_that_draws_from_elsewhere_fails():
    class Noisy(Guess):
        def expert(self, rng):
            return ToolCall.of("guess", n=random.randint(1, 10**6))

    assert "draws from its own rng" in failing(Noisy, checks=only("expert"))["expert"]


def test_state_that_outlives_a_session_fails_order():
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


def test_crash_on_odd_arguments_fails_fuzz():
    class Fragile(Guess):
        @tool
        def look(self, where: str, deep: bool = False):
            """Look somewhere."""
            return f"You see {where.split()[0]}."

    found = failing(Fragile)
    assert "IndexError" in found["fuzz"]
    assert "look(where=" in found["fuzz"]


def test_crash_on_integer_too_large_for_float_fails_fuzz():
    class Overflow(Guess):
        @tool
        def root(self, n: int):
            """Take a square root."""
            return str(abs(n) ** 0.5)

    assert "OverflowError" in failing(Overflow)["fuzz"]


def test_crash_on_valid_calls_fails_random_play():
    class Crashing(Guess):
        @tool
        def divide(self, n: int):
            """Divide by zero."""
            return str(n // 0)

    assert "ZeroDivisionError" in failing(Crashing)["random_play"]


def test_crash_in_reset_fails_with_its_reason():
    class Broken(Guess):
        def reset(self, sample, rng):
            raise FileNotFoundError("no data file here")

    found = failing(Broken)
    assert "no data file here" in found["samples"]
    assert "reset() of sample train/0" in found["samples"]


def test_reset_without_a_message_fails_samples():
    class Silent(Guess):
        def reset(self, sample, rng):
            super().reset(sample, rng)
            return []

    assert "opens without text" in failing(Silent)["samples"]


def test_excessive_max_turns_fails_limits():
    class Endless(Guess):
        max_turns = 10**9

    assert "never ends" in failing(Endless, checks=only("limits"))["limits"]


def test_hanging_tool_fails_its_check_and_skips_the_rest():
    never = threading.Event()

    class Hanging(Guess):
        blocking = True

        @tool
        def guess(self, n: int):
            """Wait forever."""
            never.wait()

    report = report_on(Hanging, deadline=1.0, checks=only("random_play", "fuzz"))
    never.set()
    assert report["random_play"].verdict is Verdict.FAIL
    assert "--deadline sets a longer time); waited for: turn " in report["random_play"].evidence
    assert report["fuzz"].verdict is Verdict.SKIP
    assert "random_play did not finish" in report["fuzz"].evidence


def test_hanging_async_tool_fails_its_check():
    class Hanging(Guess):
        @tool
        async def guess(self, n: int):
            """Wait forever."""
            await asyncio.Event().wait()

    evidence = failing(Hanging, deadline=0.3, checks=only("random_play"))["random_play"]
    assert "Not finished within 0.3 s" in evidence


def test_blocked_event_loop_is_reported():
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


def test_tool_timeout_fails_random_play():
    class Late(Guess):
        @tool(timeout=0.02)
        async def wait(self):
            """Wait forever."""
            await asyncio.Event().wait()

    assert "still running after 0.02 s" in failing(Late)["random_play"]


def test_nan_reward_fails_random_play():
    class NotANumber(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            return Reply("hm", reward=float("nan"))

    assert "reward must be a finite number" in failing(NotANumber)["random_play"]


def test_tool_result_of_wrong_type_fails_random_play():
    class Numbers(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            return 7

    assert "guess() returned int" in failing(Numbers)["random_play"]


def test_samples_shared_by_train_and_test_fail_samples():
    class Leaky(Guess):
        @classmethod
        def samples(cls, split):
            return [{"n": n} for n in (range(10) if split == "train" else range(9, 20))]

    assert "train/9 and test/0 are the same problem" in failing(Leaky)["samples"]


def test_expert_that_never_succeeds_fails_oracle():
    class Clueless(Guess):
        def expert(self, rng):
            return ToolCall.of("guess", n=0)

    assert "solves 0 of 20" in failing(Clueless)["oracle"]


def test_expert_that_solves_half_of_the_episodes_is_a_warning_of_oracle():
    class Noisy(Guess):
        max_turns = 1

        def expert(self, rng):
            return ToolCall.of("guess", n=self.secret if rng.random() < 0.5 else 0)

    report = report_on(Noisy, checks=only("oracle"))
    assert report.ok
    assert report["oracle"].verdict is Verdict.WARN
    assert "unless it errs on purpose, these might have no solution: sample t" in report["oracle"].evidence


def test_expert_that_moves_differently_after_equal_messages_is_a_warning():
    report = report_on(Guess, checks=only("knowledge"))
    assert report["knowledge"].verdict is Verdict.WARN
    assert report["knowledge"].evidence.startswith("After the same messages, the expert plays guess(n=")


def test_noise_of_an_expert_that_reads_the_messages_does_not_count_as_knowledge():
    class Noisy(Search):
        def expert(self, rng):
            return (
                super().expert(rng) if rng.random() < 0.7 else ToolCall.of("guess", n=int(rng.integers(20)))
            )

    assert report_on(Noisy, checks=only("knowledge"))["knowledge"].verdict is Verdict.PASS


class Phones(Environment):
    """Find the number of a person."""

    blocking = False
    looks = False

    def reset(self, sample, rng):
        self.owner = "person" + str(rng.integers(100, 1000))
        self.number, self.known = str(rng.integers(10_000, 100_000)), False
        return f"What is the number of {self.owner}?"

    @tool
    def look(self):
        """Read the note on the wall."""
        self.known = True
        return f"{self.owner} has the number {self.number}."

    @tool
    def answer(self, number: str):
        """Answer.

        Args:
            number: Five digits.
        """
        return Done("Thank you.", reward=float(number == self.number))

    def expert(self, rng):
        reads = self.looks and not self.known
        return ToolCall.of("look") if reads else ToolCall.of("answer", number=self.number)


def test_expert_that_uses_a_word_before_it_is_said_is_a_warning():
    report = report_on(Phones, checks=only("knowledge"))
    assert report["knowledge"].verdict is Verdict.WARN
    assert "before any message does. A policy cannot imitate that." in report["knowledge"].evidence


def test_expert_that_reads_first_passes_knowledge():
    class Reads(Phones):
        looks = True

    assert report_on(Reads, checks=only("knowledge"))["knowledge"].verdict is Verdict.PASS


class Even(Environment):
    """Send a word that the schema does not describe."""

    blocking = False

    def reset(self, sample, rng):
        return "Send a word."

    @tool
    def send(self, word: Annotated[str, AfterValidator(lambda word: ["no such word"].index(word))]):
        """Send a word."""
        return Done("Sent.", reward=1.0)


def test_task_that_accepts_no_call_fails():
    evidence = failing(Even, checks=only("random_play", "results"))["results"]
    assert evidence.startswith("No call of a tool was accepted in any episode; send(word=")
    assert "was answered with" in evidence


def test_tool_that_accepts_no_call_is_a_warning():
    class Both(Even):
        @tool
        def wait(self):
            """Wait."""
            return "Still here."

    report = report_on(Both, checks=only("random_play", "results"))
    assert verdicts(report) == {"random_play": "warn", "results": "pass"}
    assert "send accepted no call that fits its schema: send(word=" in report["random_play"].evidence


def test_tool_without_drawn_arguments_is_a_warning_and_others_are_checked():
    class Secret(Guess):
        @tool
        def unlock(self, code: Annotated[str, Field(pattern="^(?=a)b$")]):
            """Unlock."""

    report = report_on(Secret, checks=only("random_play", "seed_replay", "isolation"))
    assert verdicts(report) == {"random_play": "warn", "seed_replay": "pass", "isolation": "pass"}
    assert "Not called: No arguments of 'unlock' were found." in report["random_play"].evidence


def test_invalid_call_of_the_expert_fails_oracle():
    class Typo(Guess):
        def expert(self, rng):
            return ToolCall.of("gues", n=self.secret)

    assert "The expert's own call is invalid: gues(n=" in failing(Typo)["oracle"]


def test_crash_in_expert_fails_oracle():
    class Breaks(Guess):
        def expert(self, rng):
            raise KeyError("map")

    found = failing(Breaks)
    assert "KeyError" in found["oracle"]


def test_oracle_is_skipped_without_an_expert():
    report = report_on(Guess, checks=only("oracle"))
    assert report["oracle"].verdict is Verdict.PASS

    def connect():
        return EnvClient.local(Guess, oracle=False)

    (report,) = run_checks(connect, checks=only("oracle"))
    assert report["oracle"].verdict is Verdict.SKIP


@pytest.mark.parametrize(("room", "verdict"), [(1, Verdict.SKIP), (3, Verdict.PASS)])
def test_server_with_few_sessions_is_checked_within_its_capacity(monkeypatch, room, verdict):
    monkeypatch.setattr(context, "WAIT", 0.0)
    guess = guess_of_this_process()
    (report,) = run_checks(lambda: EnvClient.local(guess, max_sessions=room), deadline=120.0)
    assert report.ok, report.text()
    assert report["isolation"].verdict is verdict


def test_missing_descriptions_warn():
    class Terse(Guess):
        @tool
        def guess(self, n: int):
            return "higher"

    report = report_on(Terse, checks=only("schema"))
    assert report["schema"].verdict is Verdict.WARN
    assert "guess(), guess(n)" in report["schema"].evidence


def test_task_that_random_calls_always_solve_warns():
    class Gift(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            return Done("Correct!", reward=1.0)

    report = report_on(Gift, checks=only("random_play"))
    assert report["random_play"].verdict is Verdict.WARN


def test_pattern_that_cannot_be_sampled_warns():
    class Keyed(Guess):
        guess = None
        expert = Environment.expert

        @tool
        def look_up(self, key: Annotated[str, Field(pattern="^(?=a)b$")]):
            """Look up a key."""
            return "nothing"

    report = report_on(Keyed, checks=only("random_play", "results"))
    assert verdicts(report) == {"random_play": "warn", "results": "fail"}
    assert "examples" in report["random_play"].evidence
    assert report["results"].evidence == "No call of a tool was accepted in any episode."


def test_tool_errors_are_not_failures():
    class Strict(Guess):
        @tool
        def guess(self, n: int):
            """Guess the number."""
            if not 1 <= n <= 20:
                raise ToolError("Only 1 to 20.")
            return super().guess(n)

    assert report_on(Strict).ok


class Faulty(InterceptedClient):
    """A client with one protocol violation."""

    @classmethod
    def with_faults(cls, **faults):
        client = cls.local(guess_of_this_process())
        client.faults, client.turns, client.lock = faults, Counter(), asyncio.Lock()
        return client

    async def tasks(self):
        describe = self.faults.get("describe", lambda info: info)
        return {name: describe(info) for name, info in (await super().tasks()).items()}

    async def step(self, session, play, message):
        if self.faults.get("forgets_seq"):
            async with self.lock:
                session.turn = self.turns[session.session_id]
                self.turns[session.session_id] += 1
                return await play(message)
        result = await play(message)
        return self.faults["answer"](result) if "answer" in self.faults else result

    async def close_session(self, session, close):
        if not self.faults.get("never_closes"):
            await close()


def only(*names):
    return tuple(check for check in CHECKS if check.__name__ in names)


def faults_found(**faults):
    (report,) = run_checks(lambda: Faulty.with_faults(**faults), deadline=120.0)
    return {result.name: result.evidence for result in report.failures}


def test_client_without_a_fault_passes():
    assert faults_found() == {}


def test_repeated_step_played_twice_fails_retry():
    found = faults_found(forgets_seq=True)
    assert "seq 1, sent twice at once, had two results" in found["retry"]


def test_session_that_stays_open_fails_close():
    assert "still accepts steps" in faults_found(never_closes=True)["close"]


def with_schema(schema, name="guess"):
    def describe(info: TaskInfo) -> TaskInfo:
        function = info.tools[0].function.model_copy(update={"parameters": schema, "name": name})
        return info.model_copy(update={"tools": (ToolSpec(function=function),)})

    return describe


def test_invalid_json_schema_fails_schema():
    bad = with_schema({"type": "object", "properties": {"n": {"type": "whole number"}}})
    assert "not a valid JSON Schema" in faults_found(describe=bad)["schema"]


def test_schema_of_another_type_than_object_fails_schema():
    assert 'of type "object"' in faults_found(describe=with_schema({"type": "array"}))["schema"]


def test_invalid_tool_name_fails_schema():
    odd = with_schema({"type": "object"}, name="guess it!")
    assert "its name must be" in faults_found(describe=odd)["schema"]


def test_missing_train_split_fails_samples():
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
def test_inconsistent_result_fails_results(change, evidence):
    changed = faults_found(answer=lambda result: result.model_copy(update=change))
    assert evidence in changed["results"]


def test_call_without_an_answer_fails_random_play():
    changed = faults_found(answer=lambda result: result.model_copy(update={"messages": ()}))
    assert "got answers to []" in changed["random_play"]


def test_answer_to_another_call_fails_random_play():
    def answer(result):
        stray = Message(role="tool", tool_call_id="another", content="higher")
        return result.model_copy(update={"messages": (stray,)})

    assert "another" in faults_found(answer=answer)["random_play"]


def test_episode_past_its_turn_limit_fails_limits():
    def describe(info):
        return info.model_copy(update={"max_turns": 5})

    assert "still runs after max_turns = 5" in faults_found(describe=describe)["limits"]


def test_episode_truncated_before_its_turn_limit_fails_limits():
    def describe(info):
        return info.model_copy(update={"max_turns": 12})

    assert "truncated after 8 turns" in faults_found(describe=describe)["limits"]


def test_unreachable_server_skips_the_remaining_checks():
    steps = itertools.count()

    def answer(result):
        if next(steps) > 20:
            raise ServerUnreachable("no server answers")
        return result

    (report,) = run_checks(lambda: Faulty.with_faults(answer=answer), deadline=120.0)
    assert [result.name for result in report.failures] == ["random_play"]
    assert report["fuzz"].verdict is Verdict.SKIP


def test_check_environment_raises_assertion_error_with_evidence():
    class Clueless(Guess):
        def expert(self, rng):
            return ToolCall.of("guess", n=0)

    with pytest.raises(AssertionError, match="oracle: The expert solves 0 of 20"):
        check_environment(Clueless)


def test_class_without_tools_is_rejected():
    class Empty(Environment):
        def reset(self, sample, rng):
            return "Hello"

    with pytest.raises((TargetError, DefinitionError), match="no tools"):
        check_environment(Empty)


def test_unknown_task_is_rejected():
    with pytest.raises(UnknownTask, match="guess"):
        run_checks(Guess.local, task="chess")


def test_task_without_tools_passes():
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
    assert report["schema"].verdict is Verdict.PASS
