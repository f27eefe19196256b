"""A private Docker daemon for the tests. It does not change this machine's network."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from agentrl_env.launch.image import build_image
from agentrl_env.launch.image_context import make_wheel, wheel_name
from agentrl_env.sandbox.docker_daemon import FOLDER_PREFIX, connect
from tests.docker.base_image import import_base_image
from tests.docker.daemon import NoDaemon, reason_against_bridge, run, running_daemon

BASE = "python:3.11-slim"
TASKS = Path(__file__).with_name("tasks")
ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)


@pytest.fixture(scope="session", autouse=True)
def temporary():
    """Use a separate folder for temporary files, because other tests run concurrently."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="docker-") as folder:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def daemon(temporary):
    """Run a private daemon."""
    try:
        with running_daemon() as address:
            yield address
    except NoDaemon as error:
        pytest.skip(str(error))


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
def bridge(client, base):
    """Skip tests that connect to a container's address if packets do not arrive."""
    if reason := reason_against_bridge(client, base):
        pytest.skip(reason)


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
    """Verify that a test leaves no containers or folders behind."""

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
