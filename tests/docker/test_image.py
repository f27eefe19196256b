"""Building images and serving tasks from them."""

import hashlib
import shutil
from pathlib import Path

import pytest

from agentrl_env.errors import LaunchError, TargetError
from agentrl_env.launch.docker import DockerServer
from tests.docker.conftest import BASE, ROOT, agentrl_env
from tests.processes import until

TOKEN = "SRLhZ9Qe-only-for-this-test"
GUESS = '''
from agentrl_env import Done, Environment, tool
{imports}

class Guess(Environment):
    """Guess a number."""

    def reset(self, sample, rng):
        return {hello}

    @tool
    def guess(self, n: int):
        """Guess."""
        return Done("Yes.", reward=1.0)
'''


def fingerprint(folder):
    """Return paths, times, modes and contents of a folder's files."""
    return {
        (str(path), path.lstat().st_mtime_ns, path.lstat().st_mode, path.is_file() and digest(path))
        for path in [folder, *folder.rglob("*")]
    }


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def task(tmp_path):
    """Return a function that writes a task with the given imports and first message."""

    def write(imports="", hello='"Hello."'):
        folder = tmp_path / "guess"
        folder.mkdir()
        (folder / "environment.py").write_text(GUESS.format(imports=imports, hello=hello))
        return folder

    return write


@pytest.mark.parametrize("name", ["household", "shop", "sql"])
def test_task_is_built_served_and_passes_its_checks(client, base, wheelhouse, nothing_left, tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(ROOT / "environments" / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = fingerprint(folder)
    built = agentrl_env("build", folder, "--wheelhouse", wheelhouse, "--network", "none")
    assert built.returncode == 0, built.stderr[-2000:]
    image = built.stdout.splitlines()[-1]
    assert image == f"agentrl-{name}:latest"
    assert fingerprint(folder) == before
    config = client.images.get(image).attrs["Config"]
    assert config["Labels"]["org.agentrl.tasks"] == name
    assert config["Labels"]["org.agentrl.protocol"] == "1"
    assert config["User"] == "65532:65532"
    token_file = tmp_path / "token.txt"
    token_file.write_text(TOKEN)
    with DockerServer(image=image, oracle=True, token=TOKEN) as server:
        checked = agentrl_env("check", server.url, "--token-file", token_file)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert f"{name}: " in checked.stdout


def test_second_build_gives_the_same_image(client, build):
    first = client.images.get(build(ROOT / "environments/shop")).id
    assert client.images.get(build(ROOT / "environments/shop")).id == first


def test_pip_and_debian_packages_are_installed_and_ignored_files_are_not_copied(client, base, task):
    hello = 'subprocess.check_output(["tree", "--version"], text=True) + iniconfig.__name__'
    folder = task("import subprocess, iniconfig", hello)
    (folder / "requirements.txt").write_text("# to read settings\niniconfig>=2\n")
    (folder / "packages.txt").write_text("tree  # to list folders\n")
    (folder / ".dockerignore").write_text("secret.txt\n")
    (folder / "secret.txt").write_text("secret")
    (folder / ".env").write_text("TOKEN=secret")
    built = agentrl_env("build", folder, "--network", "host", "--tag", "guess:2")
    assert built.returncode == 0, built.stderr[-2000:]
    assert built.stdout.splitlines()[-1] == "guess:2"
    script = 'find /srv | sort; tree --version; id -u; test -w /srv/guess || echo "read only"'
    printed = (
        client.containers.run("guess:2", ["-c", script], entrypoint="sh", remove=True).decode().splitlines()
    )
    assert printed[:4] == ["/srv", "/srv/guess", "/srv/guess/.dockerignore", "/srv/guess/environment.py"]
    assert not any("secret" in line or ".env" in line.split("/")[-1][:4] for line in printed)
    assert any(line.startswith("tree v") for line in printed)
    assert printed[-2:] == ["65532", "read only"]


def test_files_and_modules_are_targets(build, tmp_path, monkeypatch):
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "__init__.py").touch()
    (tmp_path / "games" / "guess.py").write_text(GUESS.format(imports="", hello='"Hello."'))
    monkeypatch.syspath_prepend(tmp_path)
    for target in (f"{tmp_path}/games/guess.py:Guess", "games.guess:Guess"):
        with DockerServer(image=build(target)) as server:
            until(lambda: "serving guess at" in server.output(), "the task is served")


def test_image_refuses_to_serve_without_a_token(client, probe):
    container = client.containers.create(probe)
    try:
        container.start()
        assert container.wait(timeout=60)["StatusCode"] == 1
        assert container.logs().decode().strip() == (
            "error: refusing to serve on 0.0.0.0 without a token; give --token-file (or AGENTRL_TOKEN), "
            "or --insecure to admit every caller that can reach it"
        )
    finally:
        container.remove(force=True)


def test_image_with_a_token_serves_and_is_healthy(client, probe):
    interval = {**client.images.get(probe).attrs["Config"]["Healthcheck"], "Interval": 200_000_000}
    check = {key.lower(): value for key, value in interval.items() if key != "StartPeriod"}
    options = {"environment": {"AGENTRL_TOKEN": TOKEN}, "read_only": True, "tmpfs": {"/tmp": ""}}
    container = client.containers.create(probe, healthcheck=check, **options)
    try:
        container.start()

        def is_healthy():
            container.reload()
            return container.attrs["State"]["Health"]["Status"] == "healthy"

        until(is_healthy, "healthy")
        container.stop(timeout=30)
        container.reload()
        assert container.attrs["State"]["ExitCode"] == 0
    finally:
        container.remove(force=True)


def build_error(*arguments):
    """Return the error line and the log of a failed build."""
    done = agentrl_env("build", *arguments)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    sentence, *log = done.stderr[done.stderr.rindex("error: ") :].strip().splitlines()
    assert all(line.startswith("  | ") for line in log)
    return sentence, "\n".join(log)


def test_missing_package_is_one_error_line_with_the_end_of_the_log(base, wheelhouse, task):
    folder = task()
    (folder / "requirements.txt").write_text("no-such-package-of-anybody==7\n")
    sentence, log = build_error(folder, "--wheelhouse", wheelhouse, "--network", "none")
    assert "the image was not built; the failed step is RUN /opt/agentrl/bin/python -m pip" in sentence
    assert "No matching distribution found for no-such-package-of-anybody==7" in log


def test_module_missing_in_the_image_is_one_error_line(base, wheelhouse, task):
    sentence, log = build_error(task("import iniconfig"), "--wheelhouse", wheelhouse, "--network", "none")
    assert "needs the module 'iniconfig'" in sentence
    assert "requirements.txt" in sentence
    assert log == ""


def test_missing_base_is_one_error_line(daemon, task):
    sentence, log = build_error(task(), "--base", "nobody/has-this:1")
    assert "the failed step is FROM nobody/has-this:1" in sentence
    assert log


def test_base_without_python_is_one_error_line(client, base, task):
    files = client.api.create_container(base)
    try:
        client.api.commit(files, "nothing", "1", changes=["ENV PATH=/nowhere"])
    finally:
        client.api.remove_container(files)
    sentence, log = build_error(task(), "--base", "nothing:1")
    assert 'the failed step is RUN ["python3"' in sentence
    assert "not found" in log


def test_build_without_a_daemon_is_one_error_line(task, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    sentence, log = build_error(task())
    assert sentence == (
        "error: no Docker daemon answers at unix:///nowhere/docker.sock; "
        "start dockerd, or point DOCKER_HOST at one"
    )
    assert log == ""


def test_invalid_arguments_are_rejected_before_the_build(daemon, build):
    with pytest.raises(TargetError, match="no such folder"):
        build("nowhere")
    with pytest.raises(LaunchError, match="has no wheels"):
        build(ROOT / "environments/shop", wheelhouse=Path(__file__).parent)
    with pytest.raises(LaunchError, match="no such certificate file"):
        build(ROOT / "environments/shop", ca=Path("nowhere.pem"))


def test_base_image_can_be_named(client, base):
    assert BASE in client.images.get(base).tags
