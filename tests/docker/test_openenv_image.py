"""Images of real OpenEnv servers as tasks."""

import signal
import subprocess
import sys
from functools import partial

import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.errors import LaunchError, ServeError, TargetError
from agentrl_env.hosting.loader import load_target
from agentrl_env.launch.docker import DockerServer, DockerService
from agentrl_env.launch.image import run_build
from tests.docker.conftest import ROOT, run
from tests.docker.test_sandbox_docker import until_none

DOCKERFILE = """FROM {base}
COPY wheels /wheels
RUN python3 -m venv /opt/openenv
RUN /opt/openenv/bin/pip install --quiet --no-index --find-links /wheels openenv==0.10.0
COPY peers.py /srv/
WORKDIR /srv
CMD ["/opt/openenv/bin/uvicorn", "peers:dice", "--factory", "--host", "0.0.0.0", "--port", "8000"]
"""


@pytest.fixture(scope="module")
def image(client, base, bridge, tmp_path_factory):
    """Build an image with the server ``dice`` from downloaded wheels."""
    import docker

    folder = tmp_path_factory.mktemp("openenv")
    download = ["-m", "pip", "download", "--quiet", "--dest", folder / "wheels", "openenv==0.10.0"]
    done = run("/usr/bin/python3", *download, timeout=600)
    assert done.returncode == 0, done.stderr
    (folder / "Dockerfile").write_text(DOCKERFILE.format(base=base))
    (folder / "peers.py").write_bytes((ROOT / "tests/env/bridges/openenv_peers.py").read_bytes())
    options = {"custom_context": True, "network_mode": "none", "tag": "dice:test"}
    with docker.utils.build.tar(str(folder)) as context:
        run_build(client, context, "dice", lambda line: None, **options)
    return "dice:test"


async def test_image_is_a_task_and_its_container_ends_with_it(image, client):
    task = load_target(f"openenv+docker:{image}#max_turns=9&name=dice")
    assert [one.attrs["Config"]["Image"] for one in client.containers.list()] == [image]
    async with EnvClient.local(task) as tasks, await tasks.open(seed=4) as session:
        right = int(session.messages[0].content.split()[-1].rstrip("."))
        result = await session.step(ToolCall.of("step", number=right))
        assert (result.reward, result.terminated) == (1.0, True)
    until_none(client)
    async with EnvClient.local(task) as tasks, await tasks.open(seed=4) as session:  # a second start
        assert str(right) in session.messages[0].content
    until_none(client)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_container_is_removed_when_the_server_ends_or_is_killed(image, client, end):
    command = [sys.executable, "-m", "agentrl_env", "serve", f"openenv+docker:{image}", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline().startswith("serving dice at ")
        assert len(client.containers.list()) == 1
        server.send_signal(end)
    until_none(client)


@pytest.mark.parametrize("server", [DockerService, partial(DockerServer, network="bridge")])
def test_container_that_ends_before_its_port_is_known_is_reported(base, client, monkeypatch, server):
    def launch_and_wait(server, image, **options):
        launch(server, image, **{**options, "command": ["sh", "-c", "echo no licence; exit 3"]})
        server._container.wait()

    launch = DockerServer._launch
    monkeypatch.setattr(DockerServer, "_launch", launch_and_wait)
    with pytest.raises(ServeError, match="ended: no licence"):
        server(image=base).start()
    until_none(client)


def test_missing_or_silent_image_is_rejected_with_the_reason(base, client):
    with pytest.raises(ServeError, match="ended: it printed nothing; exit code 0"):
        load_target(f"openenv+docker:{base}")
    with pytest.raises(LaunchError, match=r"no-such-image.*not on this machine"):
        load_target("openenv+docker:no-such-image:1")
    with pytest.raises(TargetError, match="memory"):
        load_target("openenv+docker:dice#memory=little")
    until_none(client)
