"""A private Docker daemon for the tests, which does not change this machine's network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agentrl_env.launch.image import build_image
from agentrl_env.launch.image_context import make_wheel, wheel_name
from agentrl_env.sandbox.docker_daemon import FOLDER_PREFIX, connect
from tests.docker.base_image import import_base_image, missing_packages

BASE = "python:3.11-slim"
TASKS = Path(__file__).with_name("tasks")
ROOT = Path(__file__).parents[2]
_BRIDGE, _ADDRESS = f"agentrl{os.getpid()}", f"10.213.{os.getpid() % 250}.1/24"
FORBIDDEN = re.compile("operation not permitted|permission denied", re.IGNORECASE)
_SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)


def run(*command, timeout=60, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def skip_reason():
    """Return why this machine cannot start a daemon; empty if it can."""
    if os.geteuid() != 0:
        return "starting a Docker daemon needs root"
    for tool in ("dockerd", "ip"):
        if shutil.which(tool, path=_SBIN) is None:
            return f"{tool} is not installed; make docker installs it"
    if missing := missing_packages():
        return f"the base image needs {', '.join(missing)} here; make docker installs them"
    return ""


def until(condition, what, seconds=60.0):
    """Return the condition's value once it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="session")
def daemon():
    """Start dockerd on a bridge without routing or iptables; stop it and remove its files."""
    if reason := skip_reason():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="dockerd-", dir="/var/tmp"))
    address = f"unix://{folder}/docker.sock"
    environment = {**os.environ, "PATH": _SBIN}
    run("ip", "link", "add", _BRIDGE, "type", "bridge", env=environment)
    run("ip", "address", "add", _ADDRESS, "dev", _BRIDGE, env=environment)
    run("ip", "link", "set", _BRIDGE, "up", env=environment)
    command = ["dockerd", "--data-root", folder / "data", "--exec-root", folder / "exec", "-H", address]
    command += ["--pidfile", folder / "pid", "--bridge", _BRIDGE, "--iptables=false", "--ip-forward=false"]
    log = folder / "log"
    with log.open("wb") as output, pytest.MonkeyPatch.context() as patch:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        patch.setenv("DOCKER_HOST", address)
        try:
            until(lambda: answers() or process.poll() is not None, "dockerd answers")
            if process.poll() is not None and FORBIDDEN.search(output := log.read_text()):
                pytest.skip(f"this machine does not permit a Docker daemon: {output.splitlines()[-1]}")
            assert process.poll() is None, log.read_text()[-2000:]
            yield address
            left = run("docker", "-H", address, "ps", "--all", "--quiet").stdout
        finally:
            process.terminate()
            process.wait(60)
            run("ip", "link", "delete", _BRIDGE, env=environment)
            run("umount", folder / "exec/netns/default", env=environment)
            shutil.rmtree(folder, ignore_errors=True)
    assert left == "", f"containers were left behind: {left}"
    assert not folder.exists()


def answers():
    try:
        connect(5.0).close()
    except Exception:
        return False
    return True


@pytest.fixture(scope="session")
def client(daemon):
    client = connect()
    yield client
    client.close()


@pytest.fixture(scope="session")
def base(client):
    """Make the base image from this machine's Debian packages, without a registry."""
    import_base_image(client, BASE)
    return BASE


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory, base):
    """Download the wheels of this package's dependencies."""
    folder = tmp_path_factory.mktemp("wheels")
    own = folder / wheel_name()
    own.write_bytes(make_wheel(files=False))
    done = run("/usr/bin/python3", "-m", "pip", "download", "--quiet", "--dest", folder, own, timeout=300)
    assert done.returncode == 0, done.stderr
    own.unlink()
    return folder


@pytest.fixture(scope="session")
def build(wheelhouse):
    """Return a function that builds a target's image without network."""

    def build(target, **options):
        options = {"wheelhouse": wheelhouse, "network": "none", **options}
        return build_image(str(target), **options).name

    return build


@pytest.fixture(scope="session")
def probe(build):
    """Build the image of a task whose tools attempt forbidden operations."""
    return build(TASKS / "probe")


@pytest.fixture
def nothing_left(client):
    """Verify that a test leaves no container and no folder."""

    def present():
        folders = set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))
        containers = client.containers.list(all=True, ignore_removed=True)
        return {container.name for container in containers} | folders

    before = present()
    yield
    assert present() == before


def agentrl_env(*arguments, timeout=300, **options):
    """Run the command line in a child process."""
    return run(sys.executable, "-m", "agentrl_env", *map(str, arguments), timeout=timeout, **options)
