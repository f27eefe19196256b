import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

from agentrl_env import Done, EnvClient, Environment, ToolCall, __version__, tool
from agentrl_env.__main__ import main
from agentrl_env.cli.play import UnreadableLine, parse_line, signature
from agentrl_env.client.http import HttpBackend
from agentrl_env.errors import Unauthorized
from agentrl_env.launch.process import ServerProcess
from agentrl_env.testing.fresh_process import FRESH
from tests.env.thread_server import controller_on_thread

HERE = __file__


class Guess(Environment):
    """Guess a secret number between 1 and 20."""

    max_turns = 4

    def reset(self, sample, rng):
        self.secret = int(rng.integers(1, 21))
        return "I picked a number."

    @tool
    def guess(self, n: int):
        """Guess the number."""
        if n == 13:
            raise RuntimeError("unlucky")
        if n == self.secret:
            return Done("Correct!", reward=1.0)
        return "higher" if n < self.secret else "lower"

    def expert(self, rng):
        return ToolCall.of("guess", n=self.secret)


SLOW_START = '''
import time
from agentrl_env import Environment, tool

class Slow(Environment):
    """Wait."""

    @classmethod
    def startup(cls):
        time.sleep(2)

    def reset(self, sample, rng):
        return "Wait."

    @tool
    def wait(self):
        """Wait."""
        return "more"
'''


class Polite(Environment):
    """Says hello back."""

    max_turns = 4

    def reset(self, sample, rng):
        return "Hello."

    def respond(self, text):
        return Done("Bye.", reward=1.0) if text == "bye now" else "Hello again."


class Place(Environment):
    """Puts things into places."""

    def reset(self, sample, rng):
        return "Hello."

    @tool
    def put(self, item: str, place: str, count: int = 1, gently: bool | None = None):
        """Put an item somewhere."""
        return "ok"


class Shelf(Environment):
    """Samples with numbers as names."""

    def reset(self, sample, rng):
        return sample.data["title"]

    @classmethod
    def samples(cls, split):
        return {"2": {"title": "two"}, "0": {"title": "zero"}, "1": {"title": "one"}}

    def respond(self, text):
        return Done("Bye.")


class Ask(Environment):
    """Answers queries."""

    def reset(self, sample, rng):
        return "Hello."

    @tool
    def query(self, sql: str):
        """Run a query."""
        return "ok"


TOKEN_FILE = "../token.txt"


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run the command line. Return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("AGENTRL_TOKEN", raising=False)
    Path(TOKEN_FILE).write_text("s3cret\n")

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["agentrl-env", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


@pytest.fixture(scope="module")
def server():
    with ServerProcess(f"{HERE}:Guess", f"{HERE}:Polite", token="s3cret") as server:
        yield server


@pytest.fixture
def one_process(monkeypatch):
    """Make the checks skip the comparison with another process, as in a process that they started."""
    monkeypatch.setenv(FRESH, "1")


def one_line(text):
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) == 1
    return text


@pytest.mark.slow
def test_new_environment_passes_its_check_and_its_test(cli, tmp_path):
    code, out, _ = cli("new", "number_game")
    assert code == 0
    assert "agentrl-env check number_game" in out
    names = {file.name for file in Path("number_game").iterdir()}
    assert names == {"environment.py", "README.md", "test_number_game.py"}
    assert "pip install pytest && pytest number_game" in Path("number_game/README.md").read_text()
    code, out, _ = cli("check", "number_game")
    assert code == 0
    assert "number_game: 18 passed, 4 skipped" in out
    code, out, _ = cli("play", "number_game", stdin="guess 99\n")
    assert code == 0
    assert "lower" in out
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "number_game"]
    ran = subprocess.run(tests, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "1 passed" in ran.stdout, ran.stdout


def test_tests_of_two_new_environments_run_together(cli, tmp_path):
    cli("new", "one")
    cli("new", "two")
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "one", "two"]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(collect, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=bare)
    assert "2 tests collected" in ran.stdout, ran.stdout


@pytest.mark.parametrize("arguments", [["check", "guess"], ["serve", "guess"], ["eval", "guess"]])
def test_commands_name_the_supported_systems_on_windows(cli, monkeypatch, arguments):
    monkeypatch.setattr("platform.system", lambda: "Windows")
    code, _, err = cli(*arguments)
    assert code == 1
    assert err.startswith(
        "error: the commands run on Linux and macOS, and not on Windows itself; run them in WSL"
    )


def test_new_environment_is_short(cli):
    cli("new", "guess")
    source = Path("guess/environment.py").read_text()
    code = [line for line in source.splitlines() if line.strip()]
    assert len(code) <= 22


@pytest.mark.parametrize("name", ["Guess", "2048", "my-game", "class", "_x", "ü", "a b", ".", "x/.."])
def test_invalid_name_is_rejected_and_nothing_written(cli, tmp_path, name):
    code, _, err = cli("new", name)
    assert code == 1
    assert "is not a valid task name" in one_line(err)
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_unchanged(cli, tmp_path):
    (tmp_path / "guess").mkdir()
    code, _, err = cli("new", "guess")
    assert code == 1
    assert "exists already" in one_line(err)
    assert list((tmp_path / "guess").iterdir()) == []


def test_check_prints_a_table_and_succeeds(cli):
    code, out, _ = cli("check", f"{HERE}:Place")
    assert code == 0
    assert "seed_replay" in out
    assert "place: " in out


@pytest.mark.usefixtures("one_process")
def test_check_fails_if_a_check_fails(cli):
    code, out, err = cli("check", f"{HERE}:Guess")
    assert code == 1
    assert "guess(n=13) broke the environment: RuntimeError: unlucky" in " ".join(out.split())
    assert "Traceback" not in out + err


@pytest.mark.usefixtures("one_process")
def test_check_shows_tracebacks_on_demand(cli):
    _, _, err = cli("check", f"{HERE}:Guess", "--traceback")
    assert 'raise RuntimeError("unlucky")' in err


@pytest.mark.usefixtures("one_process")
def test_check_as_json_is_one_object_on_stdout(cli):
    code, out, _ = cli("check", f"{HERE}:Guess", "--json")
    report = json.loads(out)
    assert code == 1
    assert report["ok"] is False
    verdicts = {result["name"]: result["verdict"] for result in report["reports"][0]["results"]}
    assert verdicts["fuzz"] == "fail"
    assert verdicts["limits"] == "pass"


PRINTING = '''
from agentrl_env import Done, Environment, tool

class Printing(Environment):
    """Say a word."""

    def reset(self, sample, rng):
        print("opened", end=" ")
        return "Say a word."

    @tool
    def say(self, word: str):
        """Say a word."""
        return Done("Thank you.", reward=1.0)
'''


@pytest.mark.usefixtures("one_process")
def test_output_of_a_task_is_not_in_the_json_of_check(cli):
    Path("environment.py").write_text(f"print('imported')\n{PRINTING}")
    _, out, err = cli("check", ".", "--json")
    assert json.loads(out)["reports"]
    assert err.startswith("imported\nopened opened ")


def test_check_as_json_reports_why_a_class_does_not_load(cli):
    Path("environment.py").write_text("from agentrl_env import Environment\n\nx = itn\n")
    code, out, err = cli("check", ".", "--json")
    assert code == 1
    failure = json.loads(out)
    assert (failure["ok"], failure["reports"]) == (False, [])
    (error,) = failure["errors"]
    assert (error["target"], error["type"]) == (".", "TargetError")
    assert "NameError: name 'itn' is not defined (environment.py:3)" in error["message"]
    assert error["message"] in one_line(err)


def test_check_as_json_reports_why_a_server_is_unreachable(cli, monkeypatch):
    monkeypatch.setitem(HttpBackend.__init__.__kwdefaults__, "patience", 0.1)
    code, out, _ = cli("check", "http://127.0.0.1:9", "--json")
    assert code == 1
    assert json.loads(out)["errors"][0]["type"] == "ServerUnreachable"


def test_check_that_times_out_before_the_tasks_are_known_prints_one_line(cli):
    Path("environment.py").write_text(f"{SLOW_START}")
    code, _, err = cli("check", ".", "--deadline", "0.2")
    assert code == 1
    assert "the tasks were not listed within 0.2 s (--deadline sets a longer time)" in one_line(err)


@pytest.mark.parametrize(("index", "title"), [("2", "two"), ("0", "zero"), ("1", "one")])
def test_play_opens_the_sample_with_the_name_of_the_index(cli, index, title):
    code, out, _ = cli("play", f"{HERE}:Shelf", "--index", index, stdin="/quit\n")
    assert code == 0
    assert title in out


def test_play_gives_no_reward_to_a_failed_episode(cli):
    code, out, _ = cli("play", f"{HERE}:Guess", "--index", "2", stdin="guess 13\n")
    assert code == 1
    assert "The environment failed: RuntimeError: unlucky" in out
    assert "failed_environment after 1 turn: no result, which is not a reward of 0" in out
    assert "success" not in out
    assert "reward 0" not in out


def test_check_of_a_url_covers_every_task_or_the_selected_one(cli, server):
    code, out, _ = cli("check", server.url, "--token-file", TOKEN_FILE, "--json")
    assert code == 1
    assert [report["task"] for report in json.loads(out)["reports"]] == ["guess", "polite"]
    code, out, _ = cli("check", server.url, "--token-file", TOKEN_FILE, "--task", "polite")
    assert code == 0
    assert "oracle" in out


@pytest.fixture(scope="module")
def empty_controller():
    with controller_on_thread(token="s3cret") as url:
        yield url


@pytest.mark.parametrize("options", [(), ("--quality",)])
def test_check_of_a_controller_without_servers_is_an_error(cli, empty_controller, options):
    url = empty_controller
    code, out, err = cli("check", url, "--token-file", TOKEN_FILE, *options)
    assert (code, out) == (1, "")
    assert f"{url} serves no task; is a server linked to the controller?" in one_line(err)
    code, out, _ = cli("check", url, "--token-file", TOKEN_FILE, "--json", *options)
    assert (code, json.loads(out)["ok"]) == (1, False)
    assert json.loads(out)["errors"][0]["type"] == "UnknownTask"


@pytest.mark.parametrize(
    "command",
    [("play",), ("bench",), ("eval", "--base-url", "http://127.0.0.1:9/v1", "--model", "none")],
)
def test_commands_on_a_controller_without_servers_suggest_to_link_a_server(cli, empty_controller, command):
    name, *options = command
    code, _, err = cli(name, empty_controller, "--token-file", TOKEN_FILE, *options)
    assert code == 1
    assert "no task is served here; is a server linked to the controller?" in one_line(err)


def test_check_without_the_token_prints_one_error_line(cli, server):
    code, _, err = cli("check", server.url)
    assert code == 1
    assert "token" in one_line(err)


def test_token_on_the_command_line_works_with_a_warning(cli, server):
    code, out, err = cli("check", server.url, "--token", "s3cret", "--task", "polite")
    assert (code, "oracle" in out) == (0, True)
    assert one_line(err) == (
        "warning: other users of this machine can read --token; use --token-file or AGENTRL_TOKEN\n"
    )


@pytest.mark.parametrize("command", ["check", "play", "bench"])
def test_wrong_token_is_explained_in_the_words_of_the_command_line(cli, server, command):
    Path("wrong.txt").write_text("wrong\n")
    code, _, err = cli(command, server.url, "--token-file", "wrong.txt")
    assert code == 1
    assert "does not accept this token; pass its token with --token-file FILE" in one_line(err)
    assert "AGENTRL_TOKEN" in err
    assert "subprotocol" not in err


def test_check_of_an_unknown_task_names_the_served_tasks(cli, server):
    code, _, err = cli("check", server.url, "--token-file", TOKEN_FILE, "--task", "chess")
    assert code == 1
    assert "guess, polite" in one_line(err)


def test_unreachable_url_prints_one_error_line(cli, monkeypatch):
    monkeypatch.setitem(HttpBackend.__init__.__kwdefaults__, "patience", 0.1)
    code, _, err = cli("check", "http://127.0.0.1:9")
    assert code == 1
    assert "http://127.0.0.1:9" in one_line(err)


@pytest.mark.parametrize("command", ["check", "play", "serve"])
@pytest.mark.parametrize("target", ["nowhere", "no_such.py:Guess", "no.such.module:Guess", "json:loads"])
def test_invalid_target_prints_one_error_line(cli, command, target):
    code, _, err = cli(command, target)
    assert code == 1
    assert err.startswith("error: ")
    one_line(err)


@pytest.mark.parametrize("source", ["def (", "import no_such_module", "1 / 0", "x = 1"])
def test_environment_that_does_not_import_prints_one_error_line(cli, tmp_path, source):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "environment.py").write_text(source)
    code, _, err = cli("check", "task")
    assert code == 1
    one_line(err)


def test_check_rejects_options_that_only_measure_quality(cli):
    code, _, err = cli("check", f"{HERE}:Guess", "--samples", "3", "--model", "m")
    assert code == 1
    assert "--samples, --model: add --quality, or omit this" in err


@pytest.mark.parametrize("arguments", [["check"], ["fly"], ["serve"], ["check", "x", "--deadline", "soon"]])
def test_usage_error_has_exit_code_two(cli, arguments):
    code, _, err = cli(*arguments)
    assert code == 2
    assert "Error: " in err
    assert "Traceback" not in err


def test_help_lists_the_commands(cli):
    code, out, _ = cli("--help")
    assert code == 0
    assert all(f"  {command} " in out for command in ("new", "serve", "check", "play"))


def test_agent_tokens_are_replaced_and_revoked(cli, server):
    with EnvClient.connect_sync(server.url, token="s3cret") as operator:
        session = operator.open("polite")
        code, out, _ = cli("token", server.url, session.session_id, "--token-file", TOKEN_FILE)
        assert code == 0
        with EnvClient.connect_sync(server.url, token=out.strip()) as agent:
            assert agent.resume(session.session_id).turn == 0
            code, out, _ = cli(
                "token", server.url, session.session_id, "--revoke", "--token-file", TOKEN_FILE
            )
            assert (code, out) == (0, f"revoked all tokens of {session.session_id}\n")
            with pytest.raises(Unauthorized, match="this agent token was revoked"):
                agent.resume(session.session_id)
        session.close()
    code, _, err = cli("token", server.url, "x.y", "--token-file", TOKEN_FILE)
    assert code == 1
    assert "no such session" in one_line(err)


def test_serving_beyond_loopback_without_a_token_is_rejected(cli):
    code, _, err = cli("serve", f"{HERE}:Guess", "--host", "0.0.0.0")
    assert code == 1
    assert "--insecure" in one_line(err)


def test_play_reads_from_a_pipe(cli):
    code, out, _ = cli(
        "play",
        f"{HERE}:Polite",
        "--seed",
        "3",
        stdin="what now\nbye now\nnever read\n",
    )
    assert code == 0
    assert "Says hello back." in out
    assert "[1/4] > what now" in out
    assert "user: Hello again." in out
    assert "completed after 2 turns: success, reward 1" in out
    assert "never read" not in out


def test_play_shows_tools_hints_and_the_expert(cli):
    lines = ["", "gues 3", "/tools", "/expert", "/nonsense", "/help", "guess n=", "/quit"]
    code, out, _ = cli("play", f"{HERE}:Guess", "--index", "2", stdin="\n".join(lines))
    assert code == 0
    assert out.count("guess(n: integer)") == 2
    assert "There is no tool 'gues'; tools: guess." in out
    assert "assistant: guess(n=" in out
    assert "There is no command '/nonsense'; try /help." in out
    assert "Left after 1 turn." in out


def test_check_names_the_line_and_points_to_the_traceback(cli, tmp_path):
    source = "from agentrl_env import Environment, tool\n\n\n" + BROKEN
    (tmp_path / "environment.py").write_text(source)
    code, out, err = cli("check", ".")
    assert code == 1
    assert "KeyError: 'missing' (environment.py:13, in guess)" in out
    assert one_line(err) == "--traceback shows the tracebacks of the task's code.\n"
    code, _, err = cli("check", ".", "--traceback")
    assert code == 1
    assert 'environment.py", line 13, in guess' in err
    assert "--traceback shows" not in err


def test_failed_import_names_the_line_and_has_a_traceback_on_request(cli, tmp_path):
    (tmp_path / "environment.py").write_text("from .words import WORDS")
    (tmp_path / "words.py").write_text("# Words.\nWORDS = itn\n")
    message = "error: .: importing it failed: NameError: name 'itn' is not defined (words.py:2)\n"
    code, _, err = cli("check", ".")
    assert (code, one_line(err)) == (1, message)
    code, _, err = cli("check", ".", "--traceback")
    assert code == 1
    assert err.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/environment.py", line 1')
    assert err.endswith(message)


BROKEN = '''\
class Guess(Environment):
    """Guess."""

    def reset(self, sample, rng):
        return "Guess."

    @tool
    def guess(self):
        """Guess."""
        return {}["missing"]
'''


def test_play_combines_expert_and_do(cli):
    code, out, _ = cli("play", f"{HERE}:Guess", "--index", "2", "--expert")
    assert code == 0
    assert "[1/" in out
    assert "> /do" in out
    assert "success, reward 1" in out
    code, out, _ = cli("play", f"{HERE}:Guess", "--index", "2", stdin="/do\n")
    assert code == 0
    assert "success, reward 1" in out


def test_play_with_expert_fails_if_the_task_has_no_expert(cli):
    code, out, err = cli("play", f"{HERE}:Polite", "--expert")
    assert code == 1
    assert "task 'polite' offers no expert: define expert(rng)" in one_line(err)
    assert out == ""


def test_version_is_printed(cli):
    code, out, _ = cli("--version")
    assert code == 0
    assert out == f"agentrl-env {__version__}\n"


def test_play_ends_at_the_end_of_input(cli):
    code, out, _ = cli("play", f"{HERE}:Guess")
    assert code == 0
    assert "Left after 0 turns." in out


def test_play_fails_if_the_environment_breaks(cli):
    code, out, err = cli("play", f"{HERE}:Guess", stdin="guess 13\n")
    assert code == 1
    assert "The environment failed: RuntimeError: unlucky" in out
    assert "Traceback" not in out + err


def test_play_works_on_a_url(cli, server):
    url = ["play", server.url, "--token-file", TOKEN_FILE]
    code, _, err = cli(*url)
    assert code == 1
    assert "choose one with task= or --task: guess, polite" in one_line(err)
    code, out, _ = cli(*url, "--task", "polite", stdin="bye now\n")
    assert code == 0
    assert "success" in out
    code, out, err = cli(*url, "--task", "guess", stdin="/expert\n")
    assert code == 0
    assert "--oracle" in out


def test_unknown_sample_prints_one_error_line(cli):
    code, _, err = cli("play", f"{HERE}:Guess", "--split", "valid")
    assert code == 1
    assert "'valid'" in one_line(err)


PUT = Place.tool_specs()


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("put apple box", {"item": "apple", "place": "box"}),
        ("put item=apple place=box", {"item": "apple", "place": "box"}),
        ("put place=box apple", {"item": "apple", "place": "box"}),
        ("put 'big apple' box 3 true", {"item": "big apple", "place": "box", "count": 3, "gently": True}),
        ('put(item="big apple", place=box, count=3)', {"item": "big apple", "place": "box", "count": 3}),
        ('put {"item": "apple"}', {"item": "apple"}),
        ('{"name": "put", "arguments": {"item": "apple"}}', {"item": "apple"}),
        ("put item=7", {"item": "7"}),
        ("put count=many", {"count": "many"}),
        ("put item=a=b", {"item": "a=b"}),
        ("put unknown=1", {"unknown": 1}),
        ("put", {}),
    ],
)
def test_line_is_parsed_as_a_call(line, arguments):
    (call,) = parse_line(line, PUT).tool_calls
    assert call.function.name == "put"
    assert json.loads(call.function.arguments) == arguments


@pytest.mark.parametrize(
    ("line", "sql"),
    [
        ("query SELECT a FROM b WHERE c = 3", "SELECT a FROM b WHERE c = 3"),
        ("query sql='SELECT 1'", "SELECT 1"),
        ('query "SELECT 1"', "SELECT 1"),
        ('query(sql="SELECT 1")', "SELECT 1"),
    ],
)
def test_single_string_argument_needs_no_quotes(line, sql):
    (call,) = parse_line(line, Ask.tool_specs()).tool_calls
    assert json.loads(call.function.arguments) == {"sql": sql}


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("take apple", "There is no tool 'take'; tools: put"),
        ("put a b 1 true more", "Too many values"),
        ("put 'apple", "quotes do not match"),
        ("{broken", "Not a tool call"),
        ("{}", "Not a tool call"),
        ('{"name": 7}', "Not a tool call"),
        ("?", "There is no tool"),
    ],
)
def test_invalid_line_has_a_hint(line, hint):
    with pytest.raises(UnreadableLine, match=hint):
        parse_line(line, PUT)


class Line(BaseModel):
    order_id: int
    reasons: list[Literal["late", "broken"]] = []
    parent: "Line | None" = None


class Support(Environment):
    """Refunds orders."""

    def reset(self, sample, rng):
        return "Hello."

    @tool
    def refund(self, line: Line, note: str = "", tags: list[str] | None = None):
        """Refund a line of an order."""
        return f"refunded {line.order_id} {line.reasons} {note} {tags}"


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ('refund line={"order_id":1}', {"line": {"order_id": 1}}),
        ('refund line={"order_id": 1, "reasons": ["late"]}', {"line": {"order_id": 1, "reasons": ["late"]}}),
        ('refund line={"order_id": 1} note="too late"', {"line": {"order_id": 1}, "note": "too late"}),
        ('refund {"order_id": 1} late', {"line": {"order_id": 1}, "note": "late"}),
        ('refund(line={"order_id": 1}, note=late)', {"line": {"order_id": 1}, "note": "late"}),
        ("refund line='{\"order_id\": 1}'", {"line": {"order_id": 1}}),
        ('refund {"line": {"order_id": 1}}', {"line": {"order_id": 1}}),
        ('refund note={"a": "it\'s"} tags=["x y", "z"]', {"note": '{"a": "it\'s"}', "tags": ["x y", "z"]}),
        ('refund note="{[" tags=[]', {"note": "{[", "tags": []}),
        ("refund note={x", {"note": "{x"}),
    ],
)
def test_json_value_needs_no_quotes(line, arguments):
    (call,) = parse_line(line, Support.tool_specs()).tool_calls
    assert json.loads(call.function.arguments) == arguments


def test_play_shows_the_fields_of_nested_arguments(cli):
    lines = ["/tools", 'refund line={"order_id":1} note=late', "/quit"]
    code, out, _ = cli("play", f"{HERE}:Support", stdin="\n".join(lines))
    assert code == 0
    shown = 'refund(line: {order_id: integer, reasons?: ["late" | "broken", ...], parent?: {order_id: integer'
    assert out.count(shown) == 2
    assert "Line | null" in out
    assert "refunded 1 [] late None" in out


def test_plain_text_requires_say_if_the_task_has_tools():
    assert parse_line("say I think so", PUT).content == "I think so"
    assert parse_line("I think so", []).content == "I think so"


def test_signature_shows_types_and_optional_parameters():
    (put,) = PUT
    assert signature(put.function) == (
        "put(item: string, place: string, count?: integer, gently?: boolean | null)"
    )


def test_help_does_not_import_the_web_framework():
    code = "import sys; sys.argv[1:] = ['--help']\nimport agentrl_env.__main__ as m\n"
    code += "try: m.main()\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'fastapi', 'uvicorn') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == "[]"


INTERRUPTED_IMPORT = """
import sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from {package}.__main__ import main
main()
"""


@pytest.mark.parametrize("package", ["agentrl_env", "agentrl_train"])
def test_interrupt_during_the_imports_ends_quietly(package):
    command = [sys.executable, "-c", INTERRUPTED_IMPORT.format(package=package), "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_serve_stops_cleanly_on_interrupt():
    command = [sys.executable, "-m", "agentrl_env", "serve", f"{HERE}:Guess", "--port", "0", "--drain", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline().startswith("serving guess at http://127.0.0.1:")
        child.send_signal(2)
        assert child.wait(timeout=60) == 0  # no session is open, so the drain ends immediately
        lines = child.stderr.read().splitlines()
        assert [line.split(" INFO ")[1].split(" pid=")[0] for line in lines] == ["draining", "stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_serve_reloads_a_changed_task_until_a_signal(tmp_path, stop):
    folder, helper = tmp_path / "guess", tmp_path / "guess" / "words.py"
    folder.mkdir()
    (folder / "environment.py").write_text(
        "from agentrl_env import Environment, tool\nfrom .words import OPENING\n\n\n"
        "class Guess(Environment):\n    def reset(self, sample, rng):\n        return OPENING\n\n"
        "    @tool\n    def guess(self, n: int):\n        return ''\n"
    )
    helper.write_text("OPENING = 'one'\n")

    def opening(line):
        url = line.split("serving at ")[1].split(";")[0]
        with EnvClient.connect_sync(url) as client:
            return client.open("guess").messages[0].content  # stays open

    command = [sys.executable, "-m", "agentrl_env", "serve", str(folder), "--port", "0", "--reload"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True) as child:
        try:
            assert opening(child.stdout.readline()) == "one"
            helper.write_text("OPENING = 'two'  # and a half\n")
            assert child.stdout.readline().endswith("guess/words.py changed, restarting\n")
            lines = iter(child.stdout.readline, "")
            assert opening(next(line for line in lines if "serving at" in line)) == "two"
            helper.write_text("OPENING = \n")
            assert "words.py:1" in next(line for line in lines if line.startswith("error: "))
            assert "waiting for a file to change" in next(lines)
            helper.write_text("OPENING = 'three'\n")
            assert opening(next(line for line in lines if "serving at" in line)) == "three"
            child.send_signal(stop)
            assert child.wait(timeout=60) == 0
        finally:
            child.kill()


def test_reload_and_controller_are_mutually_exclusive(cli):
    code, _, err = cli("serve", f"{HERE}:Guess", "--reload", "--controller", "http://127.0.0.1:9")
    assert code == 1
    assert "give --reload or --controller" in one_line(err)


def test_workers_and_controller_are_mutually_exclusive(cli):
    code, _, err = cli("serve", f"{HERE}:Guess", "--workers", "2", "--controller", "http://x")
    assert code == 1
    assert err == "error: --workers starts its own controller; give --workers or --controller\n"


def test_resume_without_workers_is_rejected(cli):
    code, _, err = cli("serve", f"{HERE}:Guess", "--resume")
    assert code == 1
    assert err == (
        "error: --resume resumes the sessions of a dead worker and needs --workers; "
        "for separate servers use agentrl-env controller --resume\n"
    )
