"""``--config`` and ``--token-file`` of ``serve`` and ``controller``, and their help."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from agentrl_env.__main__ import main
from agentrl_env.launch.process import ServerProcess

GUESS = f"{Path(__file__).with_name('test_cli.py')}:Guess"


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run the command line with a configuration file. Return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("AGENTRL_TOKEN", raising=False)

    def run(*arguments, config=None):
        if config is not None:
            Path("settings.toml").write_text(config)
            arguments = (*arguments, "--config", "settings.toml")
        monkeypatch.setattr(sys, "argv", ["agentrl-env", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


@pytest.fixture
def called(monkeypatch):
    """Replace ``serve`` and ``control`` by functions that record their arguments."""
    calls = []

    def record(*arguments, **options):
        calls.append((*arguments, options))

    monkeypatch.setattr("agentrl_env.hosting.serve.serve", record)
    monkeypatch.setattr("agentrl_env.fleet.serve.serve_with_workers", record)
    monkeypatch.setattr("agentrl_env.fleet.serve.control", record)
    return calls


def test_config_sets_options_and_targets(cli, called, tmp_path):
    (tmp_path / "shop").mkdir()
    config = """
    targets = ["shop", "module:Class"]
    port = 0
    max-sessions = 7
    drain = 5
    oracle = true
    controller = ["http://a:8100", "http://b:8100"]
    caller_limit = "rate_per_s=100"
    log_level = "error"
    """
    code, _, err = cli("serve", config=config)
    assert (code, err) == (0, "")
    targets, options = called[0]
    assert targets == ["shop", "module:Class"]
    assert (options["port"], options["max_sessions"], options["drain_s"]) == (0, 7, 5.0)
    assert options["oracle"] is True
    assert list(options["controllers"]) == ["http://a:8100", "http://b:8100"]
    assert options["limits"].rate_per_s == 100


def test_config_sets_options_of_the_controller(cli, called):
    config = 'queue = 1\nlimit = ["shop=3"]\nlost-after = 9\nport = 8200'
    code, _, err = cli("controller", config=config)
    assert (code, err) == (0, "")
    _, options = called[0]
    assert options["port"] == 8200


def test_command_line_takes_precedence_over_config(cli, called):
    config = 'targets = ["x:Y"]\nport = 1\nlease = 2.0\nworkers = 3\ntraces = false'
    cli("serve", GUESS, "--port", "0", "--workers", "1", config=config)
    targets, options = called[0]
    assert targets == [GUESS]
    assert (options["port"], options["lease_s"]) == (0, 2.0)
    assert "workers" not in options


def test_paths_are_relative_to_the_config(cli, called, tmp_path):
    folder = tmp_path / "deploy"
    (folder / "shop").mkdir(parents=True)
    (folder / "secret").write_text("s3cret\n")
    (folder / "serve.toml").write_text('targets = "shop"\ntoken-file = "secret"')
    cli("serve", "--config", "deploy/serve.toml")
    targets, options = called[0]
    assert targets == ["deploy/shop"]
    assert options["token"] == "s3cret"


@pytest.mark.parametrize(
    ("command", "config", "message"),
    [
        ("serve", "max-session = 1", "unknown option 'max-session'; did you mean 'max_sessions'?"),
        ("serve", "resum = true", "unknown option 'resum'; did you mean 'resume'?"),
        ("controller", "lost_afters = 1", "unknown option 'lost_afters'; did you mean 'lost_after'?"),
        ("controller", 'targets = ["x"]', "unknown option 'targets'"),
        ("serve", 'config = "other.toml"', "unknown option 'config'"),
        ("serve", 'token = "s3cret"', "token is a secret; use token_file or the variable AGENTRL_TOKEN"),
        ("controller", 'token = "s3cret"', "token is a secret; use token_file"),
        ("serve", "port = 1\nport = 2", "cannot read settings.toml"),
        ("serve", "log-level = 'info'\nlog_level = 'info'", "log_level is given twice"),
        ("serve", "port = 99999", "settings.toml: port: "),
        ("serve", 'port = "many"', "settings.toml: port: "),
        ("serve", "port = [1]", "settings.toml: port: "),
        ("serve", 'log-format = "xml"', "log-format: 'xml' is not one of"),
        ("serve", 'oracle = "perhaps"', "settings.toml: oracle: "),
    ],
)
def test_invalid_config_is_rejected_in_one_line(cli, called, command, config, message):
    code, _, err = cli(command, config=config)
    assert code == 1
    assert err.startswith("error: ")
    assert "settings.toml" in err
    assert message in err
    assert len(err.splitlines()) == 1
    assert "s3cret" not in err
    assert not called


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("serve", "--lease=0"),
        ("serve", "--lease=0.5"),
        ("serve", "--lease=-1"),
        ("serve", "--lease=nan"),
        ("serve", "--drain=-1"),
        ("serve", "--drain=nan"),
        ("serve", "--slow-step=-1"),
        ("serve", "--slow-step=nan"),
        ("serve", "--stuck-after=nan"),
        ("controller", "--queue=-1"),
        ("controller", "--queue=nan"),
        ("controller", "--lost-after=nan"),
        ("check", "--deadline=0"),
        ("check", "--deadline=nan"),
        ("check", "--deadline=inf"),
    ],
)
def test_number_of_seconds_outside_the_range_is_rejected(cli, called, command, option):
    targets = [] if command == "controller" else [GUESS]
    code, out, err = cli(command, *targets, option)
    assert (code, out) == (2, "")
    assert f"Invalid value for '{option.partition('=')[0]}': Input should be " in err
    assert not called


def test_number_of_seconds_outside_the_range_is_rejected_in_a_config(cli, called):
    code, _, err = cli("serve", GUESS, config="lease = 0")
    assert (code, called) == (1, [])
    assert "settings.toml: lease: " in err


def test_files_of_a_windows_editor_are_read(cli, called, tmp_path):
    (tmp_path / "secret").write_bytes(b"\xef\xbb\xbfs3cret\r\n")
    cli("serve", GUESS, config='\ufefftoken-file = "secret"\r\nport = 0\r\n')
    assert (called[-1][-1]["token"], called[-1][-1]["port"]) == ("s3cret", 0)


def test_missing_config_is_rejected(cli):
    code, _, err = cli("serve", "--config", "nowhere.toml")
    assert code == 1
    assert err.startswith("error: cannot read nowhere.toml: ")


def test_serve_needs_a_target_somewhere(cli, called):
    code, _, err = cli("serve", config="port = 1")
    assert code == 2
    assert "TARGET...: give at least one, here or as targets in the --config file" in err
    assert not called


def test_token_file_is_read(cli, called, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("  from-file\n")
    cli("serve", GUESS, "--token-file", "secret")
    assert called[-1][-1]["token"] == "from-file"
    cli("controller", "--token-file", "secret")
    assert called[-1][-1]["token"] == "from-file"
    monkeypatch.setenv("AGENTRL_TOKEN", "from-environment")
    cli("serve", GUESS, "--token-file", "secret")
    assert called[-1][-1]["token"] == "from-file"
    cli("serve", GUESS, config='token_file = "secret"')
    assert called[-1][-1]["token"] == "from-environment"
    cli("serve", GUESS, "--token", "given", config='token_file = "secret"')
    assert called[-1][-1]["token"] == "given"


def test_link_token_is_derived_from_the_token_file(cli, tmp_path):
    (tmp_path / "secret").write_text("s3cret")
    code, from_file, _ = cli("controller", "--print-link-token", "--token-file", "secret")
    assert code == 0
    assert from_file == cli("controller", "--print-link-token", "--token", "s3cret")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--token", "a", "--token-file", "secret"), "give --token or --token-file, not both"),
        (("--token-file", "nowhere"), "cannot read the token: "),
        (("--token-file", "empty"), "empty is empty; it must contain the token"),
    ],
)
def test_invalid_token_file_is_rejected(cli, called, tmp_path, arguments, message):
    (tmp_path / "secret").write_text("s3cret")
    (tmp_path / "empty").write_text("\n")
    code, _, err = cli("serve", GUESS, *arguments)
    assert code == 1
    assert message in err
    assert not called


def test_server_runs_from_a_config(tmp_path):
    (tmp_path / "secret").write_text("s3cret\n")
    file = tmp_path / "serve.toml"
    file.write_text(f'targets = ["{GUESS}"]\nhost = "none"\ntoken-file = "secret"\nmax-sessions = 3\n')
    with ServerProcess(arguments=["--config", str(file)]) as server:
        health = httpx.get(f"{server.url}/v1/tasks", timeout=60)
        assert health.status_code == 401
        tasks = httpx.get(f"{server.url}/v1/tasks", headers={"authorization": "Bearer s3cret"}, timeout=60)
        assert [task["name"] for task in tasks.json()["tasks"]] == ["guess"]


@pytest.mark.parametrize("command", ["serve", "controller"])
def test_help_groups_the_options_and_fits_eighty_columns(cli, command):
    code, out, _ = cli(command, "--help")
    assert code == 0
    for panel in ("Listening", "Sessions", "Security", "Fleet", "Logs and traces"):
        assert f"─ {panel} ─" in out
    assert "--config" in out
    assert "--token-file" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_help_states_which_lines_the_log_has_by_default(cli):
    _, out, _ = cli("serve", "--help")
    words = " ".join(out.replace("│", " ").split())
    assert "info for json, else warning, with the drain and the end of the process" in words


def test_usage_errors_are_plain_text():
    command = [sys.executable, "-m", "agentrl_env", "serve", "--fly"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "Error: No such option: --fly"
