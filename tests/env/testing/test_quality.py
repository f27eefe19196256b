"""Task quality, for tasks with one fault each, real tasks, and a model behind a real HTTP server."""

import asyncio
import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from rich.console import Console

from agentrl_env import Done, EnvClient, Environment, Message, Reply, StepResult, ToolCall, tool
from agentrl_env.__main__ import main
from agentrl_env.client import benchmark
from agentrl_env.errors import ServeError, UnknownSample
from agentrl_env.evaluation import ChatModel, chat_model
from agentrl_env.hosting.loader import load_target
from agentrl_env.launch.process import ServerProcess
from agentrl_env.testing import load, run_quality
from agentrl_env.testing.context import Rollout, RolloutTurn
from agentrl_env.testing.load import hold_sessions, measure_load, tree_memory
from agentrl_env.testing.quality import Episode, score, score_groups
from agentrl_env.testing.quality_table import quality_table
from agentrl_env.testing.unskilled import UNSKILLED, options_in
from agentrl_env.types import SessionStatus, TaskSample
from tests.env.testing.test_checker import Guess
from tests.env.thread_server import server_on_thread

ENVIRONMENTS = Path(__file__).parents[3] / "environments"


def quality_of(environment, **options):
    (found,) = run_quality(environment.local, **{"samples": 12, "splits": ("train",), **options})
    return found


def policies(found, split="train"):
    return found.splits[split].policies


class Sums(Environment):
    """Add two numbers."""

    max_turns = 3
    blocking = False

    @classmethod
    def samples(cls, split):
        start = 0 if split == "train" else 500
        return [{"a": start + n, "b": 7 * n + 1000} for n in range(500)]

    def reset(self, sample, rng):
        self.total = sample.data["a"] + sample.data["b"]
        return f"What is {sample.data['a']} + {sample.data['b']}?"

    @tool
    def answer(self, total: int):
        """Answer."""
        return Done("Over.", reward=float(total == self.total))

    def expert(self, rng):
        return ToolCall.of("answer", total=self.total)


def test_task_that_takes_skill_has_no_findings():
    found = quality_of(Sums, splits=())
    assert found.findings == ()
    assert set(found.splits) == {"train", "test"}
    own = policies(found)
    assert set(own) == {*UNSKILLED, "expert"}
    assert (own["expert"].success, own["expert"].reward, own["expert"].turns) == (1.0, 1.0, 1.0)
    assert {own[name].success for name in UNSKILLED} == {0.0}
    assert own["random"].terminated == 1.0  # random calls find the action that ends an episode
    assert (own["nothing"].terminated, own["nothing"].turns) == (0.0, 3.0)
    assert (found.replayed, found.repeated) == (5, 5)
    assert (found.splits["train"].played, found.splits["train"].distinct) == (12, 12)


def test_reward_for_doing_nothing_is_found():
    class Free(Sums):
        def respond(self, text):
            return Reply("Take your time.", reward=0.5)

    found = quality_of(Free)
    assert policies(found)["nothing"].reward == 1.5
    sentence = "train: doing nothing earns a reward of 1.5 on average, and up to 1.5"
    assert sentence in found.findings
    assert any("empty turns earn 1.5 and the expert 1: " in text for text in found.findings)


def test_leak_that_random_calls_find_is_named_with_its_call():
    class Leaky(Sums):
        max_turns = 8

        @tool
        def debug(self, level: Literal["high", "low"]):
            """Print what the grader knows."""
            return Done("Thanks.", reward=1.0) if level == "high" else "nothing"

    found = quality_of(Leaky)
    (sentence,) = [text for text in found.findings if "random calls solve" in text]
    assert 'debug(level="high")' in sentence
    assert found.best_unskilled().best == 1.0


def test_repeated_call_with_more_reward_than_the_expert_is_found():
    class Farm(Sums):
        max_turns = 10

        @tool
        def praise(self):
            """Praise the user."""
            return Reply("Thank you.", reward=0.3)

    found = quality_of(Farm)
    (sentence,) = [text for text in found.findings if "repetitions of one call earn" in text]
    assert "earn 3 and the expert 1: " in sentence
    assert "... praise(), praise(), praise()" in sentence


class Shelves(Environment):
    """Name the thing that is on sale; the sample says at which place of the list it stands."""

    max_turns = 4
    blocking = False
    places = (0,)
    texts = "Which of these is on sale? {}"
    things = ("lamp", "rug", "vase", "clock", "stool", "shelf", "bench", "mirror")

    @classmethod
    def samples(cls, split):
        return [{"n": n, "place": cls.places[n % len(cls.places)]} for n in range(400)]

    def reset(self, sample, rng):
        listed = [str(thing) for thing in rng.permutation(self.things)]
        self.right = listed[sample.data["place"]]
        return self.texts.format("".join(f"\n- {thing}" for thing in listed))

    @tool
    def name_it(self, thing: str):
        """Name it."""
        return Done("Over.", reward=float(thing == self.right))

    def expert(self, rng):
        return ToolCall.of("name_it", thing=self.right)


class Corridor(Shelves):
    """Name the things, which stay listed, until the right one is named."""

    @tool
    def name_it(self, thing: str):
        """Name it."""
        return Done("Right.", reward=1.0) if thing == self.right else self.question

    def reset(self, sample, rng):
        self.question = super().reset(sample, rng)
        return self.question


class Oracle(Shelves):
    """Answer yes or no; the answer is mostly the same."""

    texts = "Is the third of these on sale?{}"

    def reset(self, sample, rng):
        question = super().reset(sample, rng)
        self.right = "no" if sample.data["n"] % 8 == 0 else "yes"
        return question


class Echo(Shelves):
    """Search for what the instruction asks for."""

    def reset(self, sample, rng):
        super().reset(sample, rng)
        self.right = f"the {self.right} number {sample.data['n']}"
        return f"A shop sells things.\nInstruction: {self.right}"


@pytest.mark.parametrize(
    ("environment", "solving"),
    [
        (Shelves, {"first", "listing", "habit"}),
        (type("Third", (Shelves,), {"places": (2,)}), {"habit"}),
        (type("Second", (Corridor,), {"places": (1, 2)}), {"listing"}),
        (type("Last", (Corridor,), {"places": (5, 6, 7, 4)}), set()),
        (Oracle, {"habit"}),
        (Echo, {"copy", "habit"}),
        (type("Mixed", (Shelves,), {"places": tuple(range(8))}), set()),
    ],
)
def test_policies_without_skill_solve_tasks_that_need_no_reading(environment, solving):
    found = quality_of(environment, samples=24)
    own = policies(found)
    solved = {name for name in UNSKILLED if own[name].success >= 0.75}
    assert solved == solving
    assert own["expert"].success == 1.0
    for name in solving:
        words, remedy = UNSKILLED[name]
        assert any(f"train: {words} solve" in text and remedy in text for text in found.findings)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("[Back to Search] [Next >]\n[B00X1] Lamp, $3", ["Back to Search", "Next >", "B00X1"]),
        ("Relations: [film.film.genre, film.film.director]", ["film.film.genre", "film.film.director"]),
        ("You see:\n- grey key: 5 ahead, 1 left\n- red ball: 2 ahead", ["grey key", "red ball"]),
        ('[3] button "Ok"', ["3", "Ok"]),
        ("name | price\nbread | 12", ["name", "price", "bread", "12"]),
        ("You are in the hall. Exits: north, south and west.", ["north", "south and west"]),
        ("one.txt\ntwo.txt", ["one.txt", "two.txt"]),
        ("You walk to the kitchen.", []),
    ],
)
def test_options_of_a_text_are_read_in_their_order(text, options):
    assert options_in(text) == options


def test_episode_that_differs_when_played_again_is_found():
    class Unseeded(Sums):
        @tool
        def answer(self, total: int):
            """Answer."""
            return str(random.random())

    found = quality_of(Unseeded)
    assert found.repeated == 0
    assert found.findings[0].startswith("5 of 5 episodes differ when they are played again: sample train/")


def test_samples_with_the_same_problem_are_found():
    class Few(Sums):
        @classmethod
        def samples(cls, split):
            return [{"a": n % 3, "b": 5} for n in range(100)]

    assert "train: only 3 of 12 samples differ, in data or expert episodes" in quality_of(Few).findings


def test_expert_failures_and_broken_episodes_are_counted_separately():
    class Fragile(Sums):
        @tool
        def answer(self, total: int):
            """Answer."""
            if self.total % 16:
                raise RuntimeError("odd")
            return Done("Over.", reward=0.0)

        def expert(self, rng):
            return ToolCall.of("answer", total=1)

    own = policies(quality_of(Fragile))["expert"]
    assert 0 < own.failed < own.episodes
    assert (own.success, own.reward) == (0.0, 0.0)
    assert own.failure.startswith("RuntimeError: odd (")


def test_tool_without_drawable_arguments_does_not_affect_the_others():
    class Odd(Sums):
        @tool
        def code(self, text: Literal["never"] = "never"):
            """Enter a code."""
            return "no"

    assert policies(quality_of(Odd, samples=4))["random"].failed == 0


class Stuck(Sums):
    """Add two numbers; the right answer to a sample of an even number is never heard."""

    tool_timeout = 3600.0

    @tool
    async def answer(self, total: int):
        """Answer."""
        if total == self.total and total % 16:
            await asyncio.Event().wait()
        return Done("Over.", reward=float(total == self.total))


class StuckThread(Stuck):
    """The same, with a thread that never returns."""

    blocking = True

    @tool
    def answer(self, total: int):
        """Answer."""
        if total == self.total and total % 16:
            threading.Event().wait()
        return Done("Over.", reward=float(total == self.total))


@pytest.mark.extended
@pytest.mark.parametrize("environment", [Stuck, pytest.param(StuckThread, marks=pytest.mark.slow)])
def test_episodes_that_never_end_are_cut_off_and_counted(environment, capsys):
    found = quality_of(environment, deadline=3.0)
    own, stuck = policies(found), sum(index % 2 == 0 for index in even_or_odd(12))
    assert 0 < stuck < 12
    assert (own["nothing"].episodes, own["nothing"].failed) == (12, 0)
    assert (own["expert"].episodes, own["expert"].failed, own["expert"].success) == (12, stuck, 1.0)
    assert own["expert"].failure == "cut off, as it had not ended at 2 times the deadline"
    split = found.splits["train"]
    assert (split.asked, split.played, split.distinct) == (12, 12 - stuck, 12 - stuck)
    assert not any("samples differ" in sentence for sentence in found.findings)
    Console(width=200).print(quality_table([found]))
    assert f"100% of {12 - stuck} 1.00" in capsys.readouterr().out


def test_episodes_that_never_end_are_not_played_again():
    class Silent(Sums):
        @tool
        async def answer(self, total: int):
            """Answer."""
            await asyncio.Event().wait()

    found = quality_of(Silent, samples=1, deadline=0.2)
    assert (found.replayed, found.repeated) == (0, 0)
    assert policies(found)["expert"].success is None


def test_replays_are_of_the_split_that_is_measured():
    class Held(Sums):
        splits = ("held-out",)

    found = quality_of(Held, splits=("held-out",))
    assert (found.replayed, found.repeated) == (5, 5)


def test_episode_that_cannot_be_opened_is_not_played_again():
    class Closed(Sums):
        def reset(self, sample, rng):
            raise RuntimeError("closed")

    found = quality_of(Closed, samples=2)
    assert (found.replayed, policies(found)["nothing"].failed) == (0, 2)


def test_unknown_split_is_refused():
    with pytest.raises(UnknownSample, match="task 'sums' has no split 'dev'; splits: train, test"):
        quality_of(Sums, splits=("dev",))


@pytest.mark.parametrize("name", ["household", "sql"])
def test_starter_task_is_worth_training_on(name):
    found = quality_of(load_target(str(ENVIRONMENTS / name)), splits=("test-2", "test-3"))
    for split in ("test-2", "test-3"):
        own = policies(found, split)
        assert (own["expert"].success, own["expert"].failed) == (1.0, 0)
        assert own["nothing"].best == 0.0
        assert own["random"].success < 0.2
    assert found.repeated == found.replayed == 5


def test_load_counts_sessions_and_steps(tmp_path):
    load = measure_load(f"{__file__}:Sums", sessions=8, seconds=0.5)
    assert (load.sessions, load.asked) == (8, 8)
    assert load.start_s > 0
    assert load.steps_per_s > 0
    assert load.episodes_per_s > 0
    assert load.mb_per_session is None or load.mb_per_session >= 0
    assert tree_memory(10**9) is None


class OpensOnce(Sums):
    """Add two numbers, in the first session only."""

    blocking = True
    opened: ClassVar[list] = []

    def reset(self, sample, rng):
        self.opened.append(self)
        if len(self.opened) > 1:
            threading.Event().wait()
        return super().reset(sample, rng)


def test_load_of_a_task_that_does_not_open_in_time_has_no_rates(monkeypatch):
    monkeypatch.setattr(benchmark, "STOP_S", 0.1)
    load = measure_load(f"{__file__}:OpensOnce", sessions=4, seconds=0.1, deadline=0.2)
    assert (load.sessions, load.asked, load.mb_per_session) == (0, 4, None)
    assert (load.episodes_per_s, load.steps_per_s) == (None, None)


def test_memory_of_opening_sessions_does_not_count_for_open_sessions():
    with ServerProcess(f"{__file__}:OpensOnce") as server:
        connect = EnvClient.connect(server.url)
        held, memory = asyncio.run(hold_sessions(connect, None, 4, server.pid, deadline=1.0))
        os.kill(server.pid, signal.SIGKILL)  # it would otherwise wait for the threads that open sessions
    assert held <= 1
    assert memory is None


def episode(reward, *, success=None, error=None, tokens=None):
    metrics = {} if success is None else {"success": float(success)}
    result = StepResult(
        session_id="s", seq=1, reward=reward, status=SessionStatus.COMPLETED, terminated=True, metrics=metrics
    )
    rollout = Rollout(sample=TaskSample(task="t"), opening=(Message(role="user", content="four"),))
    rollout.turns.append(RolloutTurn(action=Message.assistant("ten"), result=result))
    return Episode(rollout=rollout, error=error, tokens=tokens)


def test_score_excludes_failures():
    found = score([episode(1.0, tokens=4), episode(0.0, tokens=6), episode(0.0, error="it broke")])
    assert (found.episodes, found.failed, found.failure) == (3, 1, "it broke")
    assert (found.success, found.reward, found.best, found.tokens) == (0.5, 0.5, 1.0, 5.0)
    empty = score([Episode(error="no server")])
    assert (empty.success, empty.reward, empty.best, empty.failed) == (None, None, None, 1)


def test_groups_carry_a_signal_if_their_rewards_differ():
    broken = episode(0.0, error="it broke")
    groups = [
        [episode(1.0), episode(0.0), episode(0.0), episode(0.0)],
        [episode(0.0), episode(0.0), episode(0.0), broken],
        [episode(1.0), episode(1.0), episode(1.0), episode(1.0)],
        [episode(0.2), episode(0.4), broken, broken],
        [broken, broken, broken, broken],
    ]
    found = score_groups(groups)
    assert (found.groups, found.size) == (4, 4)
    assert found.pass_1 == pytest.approx((0.25 + 0 + 1 + 0) / 4)
    assert (found.pass_k, found.signal) == (0.5, 0.5)
    assert score_groups([]).signal is None


class Endpoint(BaseHTTPRequestHandler):
    """Chat completions with the right sum in every second episode of even samples, otherwise a wrong sum."""

    requests: list
    statuses: list
    attempts: Counter
    lock = threading.Lock()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.lock:
            self.requests.append((self.path, self.headers.get("authorization"), body))
            status = self.statuses.pop() if self.statuses else 200
            question = body["messages"][0]["content"]
            if status == 200:
                self.attempts[question] += 1
            right = self.attempts[question] % 2
        one, other = (int(word) for word in question.rstrip("?").split() if word.isdigit())
        total = one + other if right and one % 2 == 0 else -1
        call = ToolCall.of("answer", total=total).model_dump()
        message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
        answer = {"choices": [{"message": message}], "usage": {"completion_tokens": 11}}
        data = json.dumps(answer if status == 200 else {"error": {"message": "later"}}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextmanager
def endpoint(*statuses):
    """Serve chat completions, the first of them with these statuses. Yield the base URL and the requests."""
    state = {"requests": [], "statuses": list(statuses), "attempts": Counter()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Scripted", (Endpoint,), state))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", state["requests"]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_model_is_scored_in_groups(monkeypatch):
    monkeypatch.setattr(chat_model, "PAUSE_S", 0.0)
    with endpoint(429, 503) as (url, requests):
        found = quality_of(Sums, samples=6, model=ChatModel(url, "small", key="secret"))
    own, groups = policies(found)["model"], found.splits["train"].groups
    even = sum(index % 2 == 0 for index in even_or_odd(6)) / 6
    assert (own.episodes, own.failed, own.tokens) == (48, 0, 11.0)
    assert (groups.groups, groups.size) == (6, 8)
    assert groups.pass_1 == own.success == pytest.approx(even / 2)
    assert groups.pass_k == groups.signal == pytest.approx(even)
    assert len(requests) == 48 + 2
    path, authorization, body = requests[-1]
    assert (path, authorization, body["model"]) == ("/v1/chat/completions", "Bearer secret", "small")
    assert body["tools"][0]["function"]["name"] == "answer"
    assert body["messages"][0]["role"] == "user"


def even_or_odd(count):
    """Return the played indices of the 500 samples of Sums."""
    return random.Random(0).sample(range(500), count)


def test_failures_of_the_model_are_not_rewards_of_zero():
    with endpoint(*[401] * 16) as (url, _):
        found = quality_of(Sums, samples=2, model=ChatModel(url, "small"))
    own = policies(found)["model"]
    assert (own.episodes, own.failed, own.success) == (16, 16, None)
    assert found.splits["train"].groups.signal is None
    assert "/v1/chat/completions answered 401: " in own.failure
    assert any("16 of 16 episodes of model failed: ModelRefused" in text for text in found.findings)


def test_invalid_endpoint_is_named(monkeypatch):
    monkeypatch.setattr(chat_model, "PAUSE_S", 0.0)
    found = quality_of(Sums, samples=1, model=ChatModel("http://127.0.0.1:9/v1", "small"))
    assert "http://127.0.0.1:9/v1/chat/completions did not answer" in policies(found)["model"].failure


def test_table_has_a_row_for_each_task_and_split(capsys):
    with server_on_thread(Guess, oracle=True) as url:
        (guess,) = run_quality(lambda: EnvClient.connect(url), samples=3)
    with endpoint() as (url, _):
        sums = quality_of(Sums, samples=2, model=ChatModel(url, "small"))
    Console(width=200).print(quality_table([guess, sums]))
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith(" task"))
    assert header.split()[:10] == ["task", *UNSKILLED, "expert", "best"]
    assert "pass@1" in header
    assert "signal" in header
    assert [line.split()[0] for line in lines[4:] if line.strip()] == ["guess", "train", "test", "sums"]


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run ``check``. Return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["agentrl-env", "check", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


def test_command_measures_several_tasks_concurrently(cli, monkeypatch):
    monkeypatch.setattr(load, "measure_load", partial(measure_load, seconds=0.5))
    files = [ENVIRONMENTS / name for name in ("README.md", "household", "sql")]
    options = ["--quality", "--samples", 3, "--split", "test-2", "--hold", 4]
    code, out, err = cli(*files, *options)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith((" household", " sql"))]
    assert [row[0] for row in rows] == ["household", "sql"]
    assert all(row[-1] == "4/4" for row in rows)


def test_command_prints_quality_as_json(cli, monkeypatch):
    monkeypatch.setenv("ENDPOINT_KEY", "secret")
    with endpoint() as (url, requests):
        code, out, err = cli(
            f"{__file__}:Sums", "no_such_folder", "--quality", "--json", "--samples", 2, "--split", "train",
            "--hold", 0, "--model-url", url, "--model", "small", "--api-key-env", "ENDPOINT_KEY",
        )  # fmt: skip
    assert code == 1
    found = json.loads(out)
    assert found["ok"] is False
    assert [error["target"] for error in found["errors"]] == ["no_such_folder"]
    assert "error: no_such_folder: no such folder" in err
    (task,) = found["quality"]
    assert (task["task"], task["load"]) == ("sums", None)
    assert task["splits"]["train"]["groups"]["groups"] == 2
    assert requests[0][1] == "Bearer secret"


def test_command_keeps_the_figures_of_a_task_with_a_server_that_does_not_start(cli, monkeypatch):
    def fail(*arguments, **options):
        raise ServeError("it ended")

    monkeypatch.setattr(load, "measure_load", fail)
    code, out, _ = cli(f"{__file__}:Sums", "--quality", "--samples", 2, "--split", "train")
    assert code == 0
    assert "100% 1.00" in out
    assert "sums: its server could not be measured: ServeError: it ended." in out


def test_command_continues_from_the_figures_in_a_file(cli, tmp_path):
    file, target = tmp_path / "figures.jsonl", f"{__file__}:Sums"
    options = ["--quality", "--samples", 2, "--split", "train", "--hold", 0, "--resume", file]
    assert cli(target, *options)[0] == 0
    line = json.loads(file.read_text())
    assert line["target"] == target
    line["quality"][0]["splits"]["train"]["policies"]["random"]["success"] = 0.77
    file.write_text(json.dumps(line) + "\n")
    code, out, _ = cli(target, ENVIRONMENTS / "sql", *options)
    assert code == 0
    assert "77%" in out
    assert [json.loads(line)["target"] for line in file.read_text().splitlines()] == [
        target,
        str(ENVIRONMENTS / "sql"),
    ]
    file.write_text("{}")
    code, _, err = cli(target, *options)
    assert code == 1
    assert "holds no figures of this command" in err


def test_command_measures_a_server(cli):
    with server_on_thread(Guess, oracle=True) as url:
        code, out, _ = cli(url, "--quality", "--samples", 2, "--json")
    assert code == 0
    (task,) = json.loads(out)["quality"]
    assert set(task["splits"]["train"]["policies"]) == {*UNSKILLED, "expert"}
    assert task["load"] is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "small"], "--model-url and --model belong together"),
        (["--api-key-env", "X"], "--api-key-env needs --model-url and --model"),
        (["--model", "m", "--model-url", "u", "--api-key-env", "NO_KEY"], "NO_KEY is empty or not set"),
        (["--split", "dev"], "task 'sums' has no split 'dev'; splits: train, test"),
    ],
)
def test_command_explains_incompatible_options(cli, options, sentence):
    code, _, err = cli(f"{__file__}:Sums", "--quality", "--hold", 0, *options)
    assert code == 1
    assert sentence in err
    assert "Traceback" not in err
