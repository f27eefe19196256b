"""From no daemon and no hub to tasks that are served from images and pass their checks."""

import hashlib
import shutil
from pathlib import Path

import pytest

from agentrl_env.errors import LaunchError, TargetError
from agentrl_env.launch.docker import DockerServer
from tests.docker.conftest import BASE, ROOT, agentrl_env, until

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
    """Return all that can be known of a folder's files."""
    return {
        (str(path), path.lstat().st_mtime_ns, path.lstat().st_mode, path.is_file() and digest(path))
        for path in [folder, *folder.rglob("*")]
    }


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def task(tmp_path):
    """Write a task whose import and first message can be chosen."""

    def write(imports="", hello='"Hello."'):
        folder = tmp_path / "guess"
        folder.mkdir()
        (folder / "environment.py").write_text(GUESS.format(imports=imports, hello=hello))
        return folder

    return write


@pytest.mark.parametrize("name", ["household", "shop", "sql"])
def test_a_task_is_built_served_and_passes_its_checks(client, base, wheelhouse, nothing_left, tmp_path, name):
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
    with DockerServer(image=image, oracle=True, token="s3cret") as server:
        checked = agentrl_env("check", server.url, "--token", "s3cret")
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert f"{name}: " in checked.stdout


def test_a_second_build_changes_nothing(client, build):
    first = client.images.get(build(ROOT / "environments/shop")).id
    assert client.images.get(build(ROOT / "environments/shop")).id == first


def test_packages_of_pip_and_debian_are_in_the_image_and_what_is_ignored_is_not(client, base, task):
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
    said = (
        client.containers.run("guess:2", ["-c", script], entrypoint="sh", remove=True).decode().splitlines()
    )
    assert said[:4] == ["/srv", "/srv/guess", "/srv/guess/.dockerignore", "/srv/guess/environment.py"]
    assert not any("secret" in line or ".env" in line.split("/")[-1][:4] for line in said)
    assert any(line.startswith("tree v") for line in said)
    assert said[-2:] == ["65532", "read only"]


def test_a_file_and_a_module_are_targets_too(build, tmp_path, monkeypatch):
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "__init__.py").touch()
    (tmp_path / "games" / "guess.py").write_text(GUESS.format(imports="", hello='"Hello."'))
    monkeypatch.syspath_prepend(tmp_path)
    for target in (f"{tmp_path}/games/guess.py:Guess", "games.guess:Guess"):
        with DockerServer(image=build(target)) as server:
            until(lambda: "serving guess at" in server.output(), "the task is named")


def test_an_image_refuses_an_open_door(client, probe):
    container = client.containers.create(probe)
    try:
        container.start()
        assert container.wait(timeout=60)["StatusCode"] == 1
        assert container.logs().decode().strip() == (
            "error: refusing to serve on 0.0.0.0 without a token; give --token (or AGENTRL_TOKEN), "
            "or --insecure if everybody who can reach it may use it"
        )
    finally:
        container.remove(force=True)


def test_an_image_serves_with_a_token_and_is_healthy_when_it_does(client, probe):
    interval = {**client.images.get(probe).attrs["Config"]["Healthcheck"], "Interval": 200_000_000}
    check = {key.lower(): value for key, value in interval.items() if key != "StartPeriod"}
    options = {"environment": {"AGENTRL_TOKEN": "x"}, "read_only": True, "tmpfs": {"/tmp": ""}}
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


def refused(*arguments):
    """Return the sentence, and the log under it, with which a build ended."""
    done = agentrl_env("build", *arguments)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    sentence, *log = done.stderr[done.stderr.rindex("error: ") :].strip().splitlines()
    assert all(line.startswith("  | ") for line in log)
    return sentence, "\n".join(log)


def test_a_package_that_is_not_there_is_one_sentence_with_the_end_of_the_log(base, wheelhouse, task):
    folder = task()
    (folder / "requirements.txt").write_text("no-such-package-of-anybody==7\n")
    sentence, log = refused(folder, "--wheelhouse", wheelhouse, "--network", "none")
    assert "the image was not built; what failed was RUN /opt/agentrl/bin/python -m pip install" in sentence
    assert "No matching distribution found for no-such-package-of-anybody==7" in log


def test_a_module_that_is_not_in_the_image_is_one_sentence(base, wheelhouse, task):
    sentence, log = refused(task("import iniconfig"), "--wheelhouse", wheelhouse, "--network", "none")
    assert "needs the module 'iniconfig'" in sentence
    assert "requirements.txt" in sentence
    assert log == ""


def test_a_base_that_is_not_there_is_one_sentence(daemon, task):
    sentence, log = refused(task(), "--base", "nobody/has-this:1")
    assert "what failed was FROM nobody/has-this:1" in sentence
    assert log


def test_a_base_without_python_is_one_sentence(client, base, task):
    files = client.api.create_container(base)
    try:
        client.api.commit(files, "nothing", "1", changes=["ENV PATH=/nowhere"])
    finally:
        client.api.remove_container(files)
    sentence, log = refused(task(), "--base", "nothing:1")
    assert 'what failed was RUN ["python3"' in sentence
    assert "not found" in log


def test_without_a_daemon_a_build_says_what_to_start(task, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    sentence, log = refused(task())
    assert sentence == (
        "error: no Docker daemon answers at unix:///nowhere/docker.sock; "
        "start dockerd, or point DOCKER_HOST at one"
    )
    assert log == ""


def test_a_wrong_target_is_told_before_anything_is_built(daemon, build):
    with pytest.raises(TargetError, match="no such folder"):
        build("nowhere")
    with pytest.raises(LaunchError, match="has no wheels"):
        build(ROOT / "environments/shop", wheelhouse=Path(__file__).parent)
    with pytest.raises(LaunchError, match="no such file of certificates"):
        build(ROOT / "environments/shop", ca=Path("nowhere.pem"))


def test_the_base_is_an_ordinary_name(client, base):
    assert BASE in client.images.get(base).tags
