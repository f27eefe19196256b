"""``agentrl-env eval`` and ``compare`` against real HTTP endpoints, servers and processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.__main__ import main
from agentrl_env.evaluation import (
    ChatModel,
    Completion,
    EvaluationError,
    EvaluationSettings,
    RunFile,
    chat_model,
    compare,
    evaluate,
    model_policy,
    read_run,
    runner,
    summarize,
    write_report,
)
from agentrl_env.evaluation.record import EpisodeRecord, EvaluationRun, TurnRecord
from agentrl_env.evaluation.report import report_html
from agentrl_env.launch.process import ServerProcess
from tests.env.evaluation.chat_server import ChatServer, Sums, completion, numbers, play_sums

TARGET = f"{Path(__file__).with_name('chat_server.py')}:Sums"
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(runner, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(chat_model, "PAUSE_S", 0.0)


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run a command in its own folder. Return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["agentrl-env", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def endpoint(url, model="small"):
    return ["--base-url", url, "--model", model]


def test_output_of_a_task_is_not_in_the_json_of_eval(cli):
    task = f"print('imported')\nfrom {Sums.__module__} import Sums as Base\n\nclass Sums(Base):\n"
    task += "    def reset(self, sample, rng):\n        print('opened', end=' ')\n"
    Path("environment.py").write_text(f"{task}        return super().reset(sample, rng)\n")
    with ChatServer(lambda body: play_sums(body, lambda a: True)) as server:
        _, out, err = cli("eval", "environment.py:Sums", *endpoint(server.url), "--samples", 2, "--json")
    assert json.loads(out)["success"]["value"] == 1.0
    assert "imported\n" in err
    assert "opened opened " in err


def test_model_is_evaluated_on_a_class(cli):
    with ChatServer(lambda body: play_sums(body, lambda a: a % 4 != 0)) as server:
        code, out, err = cli(
            "eval", TARGET, *endpoint(server.url), "--samples", 20, "--attempts", 2, "--json",
            "--price-input", 1.0, "--price-output", 10.0,
        )  # fmt: skip
    assert code == 0
    assert "40/40 episodes" in err
    found = json.loads(out)
    run = read_run("evals/sums-small")
    assert json.loads(Path("evals/sums-small/summary.json").read_text())["success"] == found["success"]
    right = sum(index % 4 != 0 for index in run.settings.indices) / 20
    assert found["success"]["value"] == pytest.approx(right)
    assert found["success"]["low"] < right < found["success"]["high"]
    assert found["pass_at"] == found["pass_hat"] == {"1": pytest.approx(right), "2": pytest.approx(right)}
    assert (found["episodes"], found["failed"], found["turns"]) == (40, 0, 2.0)
    assert found["ends"] == {"completed": 40}
    tokens = found["tokens"]
    assert (tokens["input"], tokens["output"], tokens["cached"]) == (1600, 400, 640)
    assert tokens["cost"] == pytest.approx((1600 * 1 + 400 * 10) / 1e6)
    assert 0 < found["model_latency"]["p50"] <= found["model_latency"]["p99"] <= found["model_latency"]["max"]
    assert found["environment_latency"]["p50"] > 0
    turn = run.counted[0].turns[0]
    assert turn.thought == "I must look <first>."
    assert (turn.model_s > 0, turn.environment_s > 0, turn.usage.output) == (True, True, 5)
    assert len(server.requests) == 80


def test_table_and_report_are_written(cli):
    with ChatServer(lambda body: play_sums(body, lambda a: a % 4 != 0)) as server:
        code, out, _ = cli("eval", TARGET, *endpoint(server.url), "--samples", 8, "-o", "here")
    assert code == 0
    assert "success (95 % interval)" in out
    assert out.endswith("report: here/report.html\n")
    page = Path("here/report.html").read_text()
    assert "I must look &lt;first&gt;." in page
    assert page.count("<summary>sample ") == 8


@pytest.mark.parametrize("served", ["server", pytest.param("controller", marks=pytest.mark.slow)])
def test_model_is_evaluated_on_a_server_by_url(cli, served):
    options = {"workers": 2} if served == "controller" else {}
    arguments = ["--workers", "2"] if options else []
    with (
        ServerProcess(TARGET, token="secret", max_sessions=4, arguments=arguments) as running,
        ChatServer(play_sums) as server,
    ):
        Path("token.txt").write_text("secret\n")
        code, out, err = cli(
            "eval", running.url, *endpoint(server.url), "--samples", 24, "--json",
            "--token-file", "token.txt", "--concurrency", 24,
        )  # fmt: skip
    assert (code, json.loads(out)["success"]["value"]) == (0, 1.0), err


def test_full_server_queues_episodes_and_none_fails(cli):
    with ServerProcess(TARGET, max_sessions=2) as running, ChatServer(play_sums) as server:
        code, out, _ = cli(
            "eval", running.url, *endpoint(server.url), "--samples", 30, "--concurrency", 30, "--json"
        )
    found = json.loads(out)
    assert (code, found["episodes"], found["failed"], found["repeated_episodes"]) == (0, 30, 0, 0)


def test_key_comes_from_a_variable_or_a_file(cli, monkeypatch):
    monkeypatch.setenv("ENDPOINT_KEY", "one")
    Path("key.txt").write_text("two\n")
    with ChatServer(play_sums) as server:
        command = ["eval", TARGET, *endpoint(server.url), "--samples", 1, "-o"]
        assert cli(*command, "a", "--api-key-env", "ENDPOINT_KEY")[0] == 0
        assert cli(*command, "b", "--api-key-file", "key.txt")[0] == 0
        assert cli(*command, "c", "--api-key-file", "key.txt", "--api-key-env", "ENDPOINT_KEY")[0] == 1
    assert server.keys == ["Bearer one"] * 2 + ["Bearer two"] * 2
    assert "one" not in Path("a/episodes.jsonl").read_text().splitlines()[0]


class Gate:
    """Plays correctly. After some episodes, holds every request until the gate is opened."""

    def __init__(self, episodes):
        self.episodes = episodes
        self.begun = Counter()
        self.open = threading.Event()
        self.lock = threading.Lock()

    def __call__(self, body):
        known = numbers(body)
        with self.lock:
            self.begun[known[0]] += len(known) == 1
            hold = len(self.begun) > self.episodes
        if hold:
            self.open.wait()
        return play_sums(body)


@pytest.mark.slow
def test_killed_evaluation_resumes_without_playing_an_episode_twice(tmp_path):
    gate = Gate(episodes=10)
    command = [sys.executable, "-m", "agentrl_env", "eval", TARGET, "--samples", "30", "--concurrency", "4"]
    command += ["-o", str(tmp_path / "run"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    episodes = tmp_path / "run/episodes.jsonl"
    with ChatServer(gate) as server:
        command += endpoint(server.url)
        first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while not episodes.exists() or episodes.read_bytes().count(b"\n") < 8:
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        first.wait()
        whole = episodes.read_bytes()
        finished = [json.loads(line)["index"] for line in whole.splitlines()[1:]]
        episodes.write_bytes(whole + b'{"index":39,"attempt":0,"tur')  # a line truncated by the kill
        gate.open.set()
        second = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["episodes"] == 30
    assert episodes.read_bytes().startswith(whole)  # lines are only appended
    lines = [json.loads(line) for line in episodes.read_text().splitlines()[1:]]
    played = Counter((line["index"], line["attempt"]) for line in lines)
    assert set(played.values()) == {1}
    assert len(played) == 30
    assert 7 <= len(finished) < 30
    assert {gate.begun[index] for index in finished} == {1}
    seeds = {line["index"]: line["seed"] for line in lines}
    assert len(set(seeds.values())) == 30


def test_two_processes_cannot_write_one_evaluation(tmp_path):
    settings = EvaluationSettings(task="sums", split="test", model="m", indices=(0, 1))
    with RunFile(tmp_path, settings), pytest.raises(EvaluationError, match="another process writes"):
        RunFile(tmp_path, settings)


def test_other_settings_are_not_mixed_into_an_evaluation(cli):
    with ChatServer(play_sums) as server:
        command = ["eval", TARGET, *endpoint(server.url), "--samples", 3, "-o", "here"]
        assert cli(*command)[0] == 0
        code, _, err = cli(*command, "--temperature", 0.5, "--attempts", 2)
    assert code == 1
    assert "has an evaluation with other settings (attempts, temperature)" in err
    with ChatServer(play_sums) as moved:
        assert cli("eval", TARGET, *endpoint(moved.url), "--samples", 3, "-o", "here")[0] == 0
        assert moved.requests == []


def test_evaluation_without_a_finished_episode_can_start_again_with_other_settings(cli):
    command = ["eval", TARGET, "-o", "here"]
    assert cli(*command, *endpoint("127.0.0.1:9/v1"), "--samples", 2)[0] == 1
    with ChatServer(play_sums) as server:
        assert cli(*command, *endpoint(server.url), "--samples", 3)[0] == 0
    assert len(read_run("here").counted) == 3


def test_evaluation_never_replaces_the_report_of_a_training_run(cli):
    Path("run").mkdir()
    for name in ("summary.json", "report.html"):
        Path("run", name).write_text("of a run")
    with ChatServer(play_sums) as server:
        code, _, err = cli("eval", TARGET, *endpoint(server.url), "--samples", 2, "-o", "run")
    assert code == 1
    assert "run has a summary.json of something else; choose another --output" in err
    assert Path("run/report.html").read_text() == Path("run/summary.json").read_text() == "of a run"
    assert not Path("run/episodes.jsonl").exists()


def test_finished_evaluation_makes_no_further_requests(cli):
    with ChatServer(play_sums) as server:
        command = ["eval", TARGET, *endpoint(server.url), "--samples", 5, "--json"]
        first, asked = cli(*command), len(server.requests)
        second = cli(*command)
        assert len(server.requests) == asked == 10
    assert first[1] == second[1]


def test_damaged_line_is_named(cli, tmp_path):
    settings = EvaluationSettings(task="sums", split="test", model="m", indices=(0,))
    RunFile(tmp_path, settings).close()
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write("no json\n")
    with pytest.raises(EvaluationError, match=r"episodes.jsonl:2 is damaged"):
        read_run(tmp_path)
    with pytest.raises(EvaluationError, match="has no evaluation"):
        read_run(tmp_path / "nowhere")


def test_failures_of_the_endpoint_are_counted_separately_and_retried(cli):
    broken = {"now": True}

    def reply(body):
        odd = numbers(body)[0] % 2
        return (500, {}) if odd and broken["now"] else play_sums(body)

    with ChatServer(reply) as server:
        command = ["eval", TARGET, *endpoint(server.url), "--samples", 12, "--json", "--retries", 1]
        code, out, err = cli(*command)
        found, run = json.loads(out), read_run("evals/sums-small")
        odd = sum(index % 2 for index in run.settings.indices)
        assert code == 1
        assert f"{odd} of 12 episodes failed and have no result" in err
        assert (found["episodes"], found["failed"]) == (12 - odd, odd)
        assert found["success"]["value"] == found["reward"]["value"] == 1.0
        assert sum(found["failures"].values()) == odd
        assert all(reason.startswith("model: http") for reason in found["failures"])
        assert {e.tries for e in run.episodes.values() if e.failed} == {2}
        assert 'class="warn">failed' in Path("evals/sums-small/report.html").read_text()
        broken["now"], before = False, len(server.requests)
        code, out, _ = cli(*command)
        assert len(server.requests) == before + 2 * odd
    found = json.loads(out)
    assert (code, found["episodes"], found["failed"], found["success"]["value"]) == (0, 12, 0, 1.0)


class Fragile(Sums):
    """Breaks if an even number is looked up."""

    name = "fragile"

    def score(self):
        if self.a % 2 == 0:
            raise RuntimeError("the grader is broken")
        return {}


def test_failures_of_the_environment_are_not_rewards_of_zero(cli):
    with ChatServer(play_sums) as server:
        code, out, _ = cli(
            "eval", f"{__file__}:Fragile", *endpoint(server.url), "--samples", 10, "--json", "--retries", 0
        )
    found, run = json.loads(out), read_run("evals/fragile-small")
    even = sum(index % 2 == 0 for index in run.settings.indices)
    assert code == 1
    assert (found["failed"], found["episodes"]) == (even, 10 - even)
    assert found["success"]["value"] == 1.0
    (reason,) = found["failures"]
    assert reason.startswith("environment: RuntimeError: the grader is broken")


def failed_episode(index: int, turns: int, error: str) -> EpisodeRecord:
    turn = TurnRecord(action=Message.assistant("x"))
    return EpisodeRecord(
        index=index,
        attempt=0,
        turns=(turn,) * turns,
        end="failed",
        failed="model",
        error=error,
        seconds=1.0,
        started="",
    )


def test_summary_counts_failures_by_reason_and_by_the_turns_that_were_lost():
    lost = [failed_episode(n, turns, "http 500") for n, turns in enumerate([0, 9, 12, 15, 2])]
    lost.append(failed_episode(5, 1, "no answer"))
    settings = EvaluationSettings(task="sums", split="test", model="small", indices=tuple(range(6)))
    found = summarize(EvaluationRun(settings=settings, episodes={one.key: one for one in lost}))
    assert found.failures == {"model: http 500": 5, "model: no answer": 1}
    assert found.failed_after == {
        "model: http 500": {"0": 1, "2–3": 1, "8–15": 3},
        "model: no answer": {"1": 1},
    }
    page = report_html(EvaluationRun(settings=settings), found)
    assert "1 of 0 turns, 1 of 2–3 turns, 3 of 8–15 turns" in page


def test_wrong_key_stops_the_evaluation_immediately(cli):
    with ChatServer(lambda body: (401, {"text": "wrong key"})) as server:
        code, _, err = cli("eval", TARGET, *endpoint(server.url), "--samples", 30, "--concurrency", 2)
    assert code == 1
    assert "answered 401" in err
    assert "wrong key" in err
    assert len(server.requests) <= 2


def test_endpoint_that_died_stops_the_evaluation_after_some_episodes(cli):
    command = ["eval", TARGET, *endpoint("http://127.0.0.1:9/v1"), "--samples", 40, "--concurrency", 4]
    code, _, err = cli(*command, "--retries", 0)
    assert code == 1
    assert "20 episodes of sums failed in a row, the last with: http://127.0.0.1:9/v1" in err
    assert "the same command to continue" in err


def test_conversation_that_exceeds_the_context_ends_without_a_failure(cli):
    def reply(body):
        full = len(numbers(body)) > 1
        return (400, {"text": "maximum context length is 10 tokens"}) if full else play_sums(body)

    with ChatServer(reply) as server:
        code, out, _ = cli("eval", TARGET, *endpoint(server.url), "--samples", 3, "--json")
    found = json.loads(out)
    assert (code, found["ends"], found["failed"]) == (0, {"truncated_context": 3}, 0)
    assert found["success"]["value"] == 0.0


def test_request_that_exceeds_the_context_from_the_start_is_a_failure(cli):
    text = "'max_tokens' is too large: 8192. This model's maximum context length is 8192 tokens"
    with ChatServer(lambda body: (400, {"text": text})) as server:
        code, out, _ = cli("eval", TARGET, *endpoint(server.url), "--samples", 3, "--json", "--retries", 0)
    found = json.loads(out)
    assert (code, found["episodes"], found["failed"], found["success"]) == (1, 0, 3, None)
    (reason,) = found["failures"]
    assert "lower max_tokens, or raise the context" in reason


@pytest.mark.parametrize("limit", ["max_tool_calls=128", "max_message_chars=5000", "max_body_bytes=5000"])
def test_message_over_a_limit_of_the_server_ends_only_its_episode(cli, limit):
    def reply(body):
        known = numbers(body)
        if known[0] % 2 and len(known) > 1:
            return completion(*[ToolCall.of("look", call_id=f"c{n}") for n in range(200)])
        return play_sums(body)

    arguments = ["--caller-limit", limit]
    with ServerProcess(TARGET, arguments=arguments) as running, ChatServer(reply) as server:
        command = ["eval", running.url, *endpoint(server.url), "--samples", 10, "--json"]
        code, out, err = cli(*command)
        again, _, _ = cli("eval", running.url, "--replay", "evals/sums-small", "-o", "again")
    found, run = json.loads(out), read_run("evals/sums-small")
    odd = sum(index % 2 for index in run.settings.indices)
    assert (code, found["failed"]) == (0, 0), err
    assert found["ends"] == {"completed": 10 - odd, "rejected_message": odd}
    assert found["success"]["value"] == pytest.approx(1 - odd / 10)
    lost = next(episode for episode in run.counted if episode.index % 2)
    assert (len(lost.turns), lost.turns[1].invalid_calls) == (2, 200)
    assert "limit" in lost.turns[1].info["rejected"] or "at most" in lost.turns[1].info["rejected"]
    assert (again, summarize(read_run("again")).ends) == (0, found["ends"])


def test_sample_that_is_given_twice_is_played_once(cli):
    with ChatServer(play_sums) as server:
        options = ["--index", 0, "--index", 3, "--index", 0, "--json"]
        code, out, _ = cli("eval", TARGET, *endpoint(server.url), *options)
    found = json.loads(out)
    assert (code, found["samples"], found["planned"], found["episodes"]) == (0, 2, 2, 2)
    assert len(server.requests) == 4


def test_credentials_are_in_no_file_and_no_output(cli, monkeypatch):
    monkeypatch.setenv("AZURE_KEY", "HEADERSECRET")
    Path("key.txt").write_text("sk-SECRET-KEY\n")

    def reply(body):
        text = "sk-SECRET-KEY, HEADERSECRET, PASSW0RD and QUERYSECRET are invalid"
        return (400, {"text": text}) if numbers(body)[0] % 2 else play_sums(body)

    with ChatServer(reply) as server:
        url = server.url.replace("//", "//bob:PASSW0RD@") + "?key=QUERYSECRET"
        _, out, err = cli(
            "eval", TARGET, *endpoint(url), "--samples", 10, "-o", "here", "--retries", 0,
            "--api-key-file", "key.txt", "--header", "api-key: $AZURE_KEY", "--json",
        )  # fmt: skip
    written = [path.read_text() for path in Path("here").iterdir()]
    assert len(written) == 3
    assert "?key=***" in written[0] + written[1] + written[2]
    for secret in ("SECRET", "PASSW0RD", "bob"):
        assert not [text for text in (out, err, *written) if secret in text]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--api-key-file", "lines.txt"], "--api-key-file lines.txt: the key has a line break"),
        (["--api-key-env", "LATIN_KEY"], "--api-key-env LATIN_KEY: the key has a line break or another char"),
        (["--header", "api-key: $LATIN_KEY"], "--header api-key: the value has a line break or another char"),
        (["--header", "api-key sk-SECRET"], "--header: give NAME: VALUE"),
        (["--header", "api key: sk-SECRET"], "--header 'api key': this is not the name of a header"),
    ],
)
def test_key_that_cannot_be_sent_is_rejected_by_its_option_and_not_shown(cli, monkeypatch, options, sentence):
    monkeypatch.setenv("LATIN_KEY", "sk-SECRET\u00e9")
    Path("lines.txt").write_text("sk-SECRET\nsecond\n")
    code, out, err = cli("eval", TARGET, *endpoint("http://127.0.0.1:9/v1"), *options)
    assert code == 1
    assert sentence in err
    assert "SECRET" not in out + err
    assert not Path("evals").exists()


def test_dollar_sign_in_the_value_of_a_variable_is_sent(cli, monkeypatch):
    monkeypatch.setenv("AZURE_KEY", "a$b")
    with ChatServer(play_sums) as server:
        command = ["eval", TARGET, *endpoint(server.url), "--samples", 1]
        assert cli(*command, "--header", "api-key: $AZURE_KEY")[0] == 0
    assert {headers["api-key"] for _, headers in server.sent} == {"a$b"}


@pytest.mark.parametrize("value", ["nan", "inf", "-5", "0"])
@pytest.mark.parametrize("option", ["--model-timeout", "--step-timeout", "--requests-per-minute"])
def test_duration_or_rate_must_be_a_positive_number(cli, option, value):
    code, _, err = cli("eval", TARGET, *endpoint("http://127.0.0.1:9/v1"), option, value)
    assert (code, f"Invalid value for '{option}': " in err) == (2, True)


@pytest.mark.parametrize("option", ["--temperature", "--price-input", "--price-output"])
def test_number_that_is_not_finite_is_rejected(cli, option):
    code, _, err = cli("eval", TARGET, *endpoint("http://127.0.0.1:9/v1"), option, "inf")
    assert (code, f"Invalid value for '{option}': inf is not a finite number" in err) == (2, True)


@pytest.mark.parametrize("value", ["NaN", '{"a": [Infinity]}', "1e999", '"\\ud83d"'])
def test_field_that_json_cannot_express_is_rejected(cli, value):
    code, _, err = cli("eval", TARGET, *endpoint("http://127.0.0.1:9/v1"), "--body", f"x={value}")
    assert code == 1
    assert "error: --body x: " in err
    assert "cannot be sent as JSON" in err


def test_redirect_stops_the_evaluation_with_the_url_to_use(cli):
    with ChatServer(lambda body: (308, {"location": "/v2/chat/completions"})) as server:
        code, _, err = cli("eval", TARGET, *endpoint(server.url), "--samples", 3)
    assert code == 1
    assert f"use {server.url.removesuffix('1')}2 as the URL" in err


class Shelf(Sums):
    """Samples with numbers as names."""

    @classmethod
    def samples(cls, split):
        return {name: {"a": int(name), "b": 0} for name in ("2", "0", "1")}


def test_index_selects_a_sample_by_its_name_before_its_number(cli):
    with ChatServer(play_sums) as server:
        cli("eval", f"{__file__}:Shelf", *endpoint(server.url), "--index", 2, "--index", 0, "-o", "a")
    run = read_run("a")
    openings = {episode.index: str(episode.opening[-1].content) for episode in run.counted}
    assert openings == {name: f"Add the second number to {name}." for name in ("2", "0")}


def test_seed_decides_the_samples_and_is_sent_on_request(cli):
    with ChatServer(play_sums) as server:
        command = ["eval", TARGET, *endpoint(server.url), "--samples", 6, "--attempts", 2, "--json"]
        cli(*command, "-o", "a", "--send-seed")
        cli(*command, "-o", "b", "--send-seed")
        cli(*command, "-o", "c", "--seed", 1)
        cli("eval", TARGET, *endpoint(server.url), "--index", 7, "--index", 3, "-o", "d")
    runs = [read_run(name).settings for name in "abcd"]
    assert runs[0] == runs[1]
    assert set(runs[0].indices) != set(runs[2].indices)
    assert runs[3].indices == (7, 3)
    seeds = Counter(body.get("seed") for body in server.requests)
    sent = {seed: count for seed, count in seeds.items() if seed is not None}
    assert set(sent.values()) == {4}  # two turns in two runs
    assert len(sent) == 12
    assert seeds[None] == 24 + 4


def test_body_and_temperature_are_sent(cli):
    with ChatServer(play_sums) as server:
        command = ["eval", TARGET, *endpoint(server.url), "--samples", 1, "--temperature", 0]
        assert cli(*command, "--body", "max_tokens=64", "--body", "reasoning_effort=low")[0] == 0
        code, _, err = cli(*command, "--body", "oops")
    request = server.requests[0]
    assert (request["temperature"], request["max_tokens"], request["reasoning_effort"]) == (0, 64, "low")
    assert (code, "give KEY=JSON" in err) == (1, True)


def test_headers_are_sent_with_variables_of_the_environment(cli, monkeypatch):
    monkeypatch.setenv("AZURE_KEY", "secret")
    with ChatServer(play_sums) as server:
        command = ["eval", TARGET, *endpoint(server.url), "--samples", 2]
        assert cli(*command, "--header", "api-key: $AZURE_KEY", "--header", "x-team: rl")[0] == 0
        code, _, err = cli(*command, "--header", "api-key: $AZURE_KEZ")
    assert (code, "there is no variable $AZURE_KEZ" in err) == (1, True)
    assert {(headers["api-key"], headers["x-team"]) for _, headers in server.sent} == {("secret", "rl")}


def test_thoughts_of_a_turn_with_calls_are_sent_back(cli):
    with ChatServer(play_sums) as server:
        assert cli("eval", TARGET, *endpoint(server.url), "--samples", 3)[0] == 0
    later = [body["messages"][1] for body in server.requests if len(body["messages"]) > 1]
    assert [message["reasoning_content"] for message in later] == ["I must look <first>."] * 3


def test_call_cut_by_the_token_limit_counts_as_a_turn(cli):
    def reply(body):
        if len(body["messages"]) > 1:
            return play_sums(body)
        function = {"name": "look", "arguments": '{"reason": "bec'}
        cut = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
        return {"choices": [{"message": cut, "finish_reason": "length"}]}

    with ChatServer(reply) as server:
        assert cli("eval", TARGET, *endpoint(server.url), "--samples", 2)[0] == 0
    second = next(body for body in server.requests if len(body["messages"]) > 1)
    assert json.loads(second["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {}


def test_terminal_without_utf8_shows_the_table(tmp_path):
    with ChatServer(play_sums) as server:
        command = [sys.executable, "-m", "agentrl_env", "eval", TARGET, "--samples", "2"]
        command += endpoint(server.url)
        environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, check=True)
    assert b"success" in done.stdout
    assert b"Traceback" not in done.stderr


def test_recorded_messages_are_graded_again_without_a_model(cli):
    with ChatServer(lambda body: play_sums(body, lambda a: a % 2 == 0)) as server:
        cli("eval", TARGET, *endpoint(server.url), "--samples", 10, "--attempts", 2, "-o", "first")
        asked = len(server.requests)
    code, out, _ = cli("eval", TARGET, "--replay", "first", "-o", "again", "--json")
    first, again = read_run("first"), read_run("again")
    assert (code, len(server.requests)) == (0, asked)
    assert again.settings.model == "replay of small"
    assert json.loads(out)["success"] == summarize(first).model_dump()["success"]
    assert [e.success for e in again.counted] == [e.success for e in first.counted]
    assert [t.model_s for t in again.counted[0].turns] == [t.model_s for t in first.counted[0].turns]


def test_two_models_are_compared_on_the_same_samples(cli):
    def reply(body):
        strong = body["model"] == "strong"
        return play_sums(body, lambda a: a % 4 != 0 if strong else a % 2 == 0)

    with ChatServer(reply) as server:
        for model in ("weak", "strong"):
            cli("eval", TARGET, *endpoint(server.url, model), "--samples", 40)
    code, out, _ = cli("compare", "evals/sums-weak", "evals/sums-strong", "--json")
    found = json.loads(out)
    assert (code, found["samples"], found["left_out"]) == (0, 40, 0)
    assert (found["first"], found["second"]) == (0.5, 0.75)
    assert (found["better"], found["worse"]) == (20, 10)
    assert found["difference"]["value"] == pytest.approx(0.25)
    assert found["difference"]["low"] < 0.25 < found["difference"]["high"]
    assert found["p_value"] == pytest.approx(0.0987, abs=1e-4)  # McNemar's exact test of 20 and 10
    assert [row["index"] % 4 for row in found["changed"][:10]] == [0] * 10
    code, out, _ = cli("compare", "evals/sums-weak", "evals/sums-strong")
    assert (code, "p = 0.0987" in out) == (0, True)


def test_evaluations_without_common_samples_are_not_compared(cli):
    with ChatServer(play_sums) as server:
        cli("eval", TARGET, *endpoint(server.url), "--index", 1, "-o", "a")
        cli("eval", TARGET, *endpoint(server.url), "--index", 2, "-o", "b")
        cli("eval", TARGET, *endpoint(server.url), "--index", 2, "--split", "train", "-o", "c")
    assert "no common sample" in cli("compare", "a", "b")[2]
    assert "evaluations in it: a, b, c" in cli("compare", ".", "b")[2]
    assert "sums/test and sums/train" in cli("compare", "b", "c")[2]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "give --base-url and --model, or --replay"),
        (["--replay", "x", "--model", "m"], "--replay plays without an endpoint"),
        (["--replay", "x", "--split", "train", "--seed", "1"], "recorded samples and messages; omit --split"),
        (["--base-url", "localhost:9/v1", "--model", "m"], "must start with http:// or https://"),
        (["--base-url", "", "--model", "m"], "the URL '' cannot be used: it must start with http://"),
        (["--base-url", "u", "--model", "m", "--split", "dev"], "has no split 'dev'; splits: train, test"),
        (["--base-url", "http://u", "--model", "m", "--index", "99"], "no index 99"),
        (["--base-url", "u", "--model", "m", "--api-key-env", "NONE"], "NONE is empty or not set"),
    ],
)
def test_options_that_do_not_fit_are_explained(cli, options, sentence):
    code, _, err = cli("eval", TARGET, *options)
    assert code == 1
    assert sentence in err
    assert "Traceback" not in err


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.depth = Counter(), [], []

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        self.links += [name for name, _ in attributes if name.startswith("on")]


def test_report_escapes_models_and_environments_and_loads_nothing(cli):
    attack = "</pre></details><script>alert(1)</script><img src=http://x onerror=alert(2)>"

    def reply(body):
        if len(numbers(body)) == 1:
            return completion(ToolCall.of("look"), text=attack, reasoning_content=attack)
        return completion(ToolCall.of(attack, x=attack))

    with ChatServer(reply) as server:
        cli("eval", TARGET, *endpoint(server.url, attack), "--samples", 2, "-o", "here")
    text = Path("here/report.html").read_text()
    page = _Page()
    page.feed(text)
    assert not {"script", "img", "link", "iframe", "form"} & set(page.tags)
    assert page.links == []
    assert "&lt;script&gt;alert(1)" in text
    assert re.search(r"https?://(?!127\.0\.0\.1)", text.replace("http://x onerror", "")) is None
    assert "default-src 'none'" in text


async def test_library_evaluates_a_python_function(tmp_path):
    async def guess(messages, tools):
        assert {tool.function.name for tool in tools} == {"look", "answer"}
        return Completion(message=Message.assistant(None, ToolCall.of("answer", total=1000)))

    settings = EvaluationSettings(task="sums", split="test", model="guess", indices=tuple(range(5)))
    seen = []
    async with EnvClient.local(Sums) as client:
        with RunFile(tmp_path, settings) as file:
            run = await evaluate(client, lambda index, attempt: guess, file, on_episode=seen.append)
    summary = summarize(run)
    assert (summary.success.value, summary.tokens.input, summary.tokens.cost) == (0.2, None, None)
    assert [episode.index for episode in run.counted] == [0, 1, 2, 3, 4]
    assert len(seen) == 5
    write_report(tmp_path / "page.html", run, summary, transcripts=2)
    assert "3 more are in episodes.jsonl" in (tmp_path / "page.html").read_text()


async def _message(messages, tools):
    return Message.assistant("5")


@pytest.mark.parametrize("policy", [_message, lambda *_: Completion(message=Message.assistant("5"))])
async def test_function_that_is_no_policy_is_explained(tmp_path, policy):
    settings = EvaluationSettings(task="sums", split="test", model="m", indices=(0, 1))
    async with EnvClient.local(Sums) as client:
        with RunFile(tmp_path, settings) as file, pytest.raises(EvaluationError, match="async function that"):
            await evaluate(client, lambda index, attempt: policy, file)


async def test_repeated_evaluation_gives_equal_results(tmp_path):
    settings = EvaluationSettings(task="sums", split="test", model="small", indices=(3, 9), attempts=2)
    found = []
    with ChatServer(play_sums) as server:
        for name in "ab":
            async with EnvClient.local(Sums) as client, ChatModel(server.url, "small") as model:
                with RunFile(tmp_path / name, settings) as file:
                    run = await evaluate(client, model_policy(model, file.run), file)
            found.append([(e.key, e.seed, e.opening, e.reward) for e in run.counted])
    assert found[0] == found[1]
    assert compare(read_run(tmp_path / "a"), read_run(tmp_path / "b")).p_value == 1.0


def test_evaluation_needs_no_further_package():
    code = "import sys, agentrl_env.evaluation; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"openai", "polars", "anthropic", "torch", "textual"} & set(done.stdout.split())
