"""The images of a release, built from the wheels of the working tree."""

import io
import json
import shutil
import tarfile
from contextlib import contextmanager

import pytest

from agentrl_env import EnvClient, ToolCall, __version__
from agentrl_env.server.auth import link_token
from release.dist import build as build_distributions
from tests.docker.conftest import ROOT
from tests.docker.daemon import bridge_address, run
from tests.processes import until

TOKEN = "SRLhZ9Qe-only-for-this-test"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Build the wheels of the working tree into the build context of the images."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("context")
    build_distributions(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def context(wheels, wheelhouse, bridge):
    """Add the wheels of the dependencies, so that images build without a network."""
    for wheel in wheelhouse.glob("*.whl"):
        shutil.copy(wheel, wheels)
    return wheels


@pytest.fixture(scope="module")
def trainer_context(wheels, base, tmp_path_factory):
    """Collect the wheels of the working tree and the trainer's dependencies, with PyTorch for the CPU."""
    folder = tmp_path_factory.mktemp("trainer")
    for wheel in wheels.glob("agentrl_*.whl"):
        shutil.copy(wheel, folder)
    (kit,) = folder.glob("agentrl_kit-*.whl")
    download = ["/usr/bin/python3", "-m", "pip", "download", "--quiet", "--dest", folder]
    done = run(*download, "-c", ROOT / "constraints.txt", f"{kit}[train]", timeout=1200)
    assert done.returncode == 0, done.stderr
    return folder


def build_offline(client, role, context, extras=""):
    """Build the image for a role and return its name."""
    name = f"agentrl-{role}:{__version__}"
    client.images.build(
        path=str(context),
        dockerfile=str(ROOT / f"release/images/{role}.Dockerfile"),
        tag=name,
        rm=True,
        forcerm=True,
        network_mode="none",
        buildargs={"PIP_NO_INDEX": "1", "EXTRAS": extras},
    )
    return name


@contextmanager
def running(client, image, port, *arguments, token=TOKEN):
    """Run a container without privileges and yield its URL."""
    container = client.containers.run(
        image,
        list(arguments),
        detach=True,
        init=True,
        read_only=True,
        cap_drop=["ALL"],
        tmpfs={"/tmp": ""},
        environment={"AGENTRL_TOKEN": token},
    )
    try:
        address = bridge_address(container)
        until(lambda: b" at http://" in container.logs(), f"{image} announces its address")
        yield f"http://{address}:{port}"
        container.stop(timeout=40)
        assert container.wait(timeout=60)["StatusCode"] == 0
    finally:
        container.remove(force=True)


def test_server_serves_published_tasks_by_name(client, base, context, nothing_left):
    image = build_offline(client, "server", context)
    assert client.images.get(image).attrs["Config"]["User"] == "65532:65532"
    with (
        running(client, image, 8000, "household", "shop") as url,
        EnvClient.connect_sync(url, token=TOKEN) as served,
        served.open("household", seed=1) as session,
    ):
        assert set(served.tasks()) == {"household", "shop"}
        assert session.step(ToolCall.of("look", place="sofa")).reward == 0


@pytest.mark.extended
def test_controller_places_sessions_on_a_server_of_the_other_image(client, base, context, nothing_left):
    controller = build_offline(client, "controller", context)
    server = build_offline(client, "server", context)
    with (
        running(client, controller, 8100) as url,
        running(client, server, 8000, "shop", "--controller", url, token=link_token(TOKEN)),
        EnvClient.connect_sync(url, token=TOKEN) as fleet,
    ):
        until(lambda: "shop" in fleet.tasks(), "the server joins")
        with fleet.open("shop", seed=1) as session:
            assert session.status == "running"


def file_of(container, path):
    """Return the content of a file in a container."""
    pieces, _ = container.get_archive(path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
        return archive.extractfile(archive.getmembers()[0]).read()


@pytest.mark.extended
def test_trainer_trains_two_steps_without_a_network(client, trainer_context, nothing_left):
    image = build_offline(client, "trainer", trainer_context, extras="train")
    assert client.images.get(image).attrs["Config"]["User"] == "65532:65532"
    settings = client.containers.run(image, ["settings"], remove=True, network_mode="none").decode()
    assert "groups_per_step" in settings
    changes = ["run.steps=2", "eval.samples=4", "rollout.groups_per_step=3", "rollout.group_size=2"]
    options = [part for change in changes for part in ("--set", change)]
    container = client.containers.create(
        image, ["quickstart", *options], init=True, network_mode="none", cap_drop=["ALL"]
    )
    try:
        container.start()
        assert container.wait(timeout=900)["StatusCode"] == 0, container.logs().decode()[-2000:]
        summary = json.loads(file_of(container, "/work/runs/quickstart/summary.json"))
        assert summary["policy_version"] == 2
        assert set(summary["tasks"]) == {"household", "shop", "sql"}
        checkpoint = "/work/runs/quickstart/checkpoints/step_000002/model/config.json"
        assert json.loads(file_of(container, checkpoint))["model_type"]
    finally:
        container.remove(force=True)
