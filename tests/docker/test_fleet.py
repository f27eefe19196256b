"""``agentrl-env up`` with containers without a network."""

import asyncio
import os
import shutil

import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.fleet.config import ControllerConfig, FleetConfig, TaskConfig
from agentrl_env.fleet.manifests import compose
from agentrl_env.fleet.up import LocalFleet
from agentrl_env.launch.docker import ContainerLimits
from tests.docker.daemon import run
from tests.processes import until


@pytest.mark.usefixtures("nothing_left")
async def test_containers_without_a_network_serve_behind_a_controller(client, probe, monkeypatch):
    monkeypatch.setenv("AGENTRL_TOKEN", "s3cret")
    task = TaskConfig(name="probe", image=probe, kind="docker", replicas=2, drain=0, max_sessions=8)
    config = FleetConfig(controller=ControllerConfig(port=0), tasks=(task,))
    fleet = LocalFleet(config)
    replicas = fleet.supervisor.replicas
    await fleet.start()
    try:
        async with EnvClient.connect(fleet.url, token="s3cret", timeout=60.0) as caller:
            sessions = [await caller.open("probe") for _ in range(8)]
            assert len({session.session_id.partition(".")[0] for session in sessions}) == 2
            result = await sessions[0].step(ToolCall.of("read", path="/sys/class/net"))
            assert result.messages[0].content == "lo"
            victim = replicas[0].server.name
            await asyncio.to_thread(lambda: client.containers.get(victim).kill())
            await asyncio.to_thread(until, lambda: replicas[0].restarts, "the dead server is replaced")
            before = {replica.server.name for replica in replicas if replica.server}
            await fleet.reload(config)
            after = {replica.server.name for replica in replicas}
            assert len(after) == 2
            assert not before & after
            await (await caller.open("probe")).close()
    finally:
        await fleet.stop()


@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="docker-compose is missing; run make docker"
)
def test_compose_accepts_the_printed_file(tmp_path):
    limits = ContainerLimits(memory="512m", cpus=0.5)
    task = TaskConfig(
        name="shop", image="x", replicas=2, kind="docker", environment={"A": "b: #"}, limits=limits
    )
    file = tmp_path / "compose.yaml"
    file.write_text(compose(FleetConfig(tasks=(task,))))
    command = ["docker-compose", "-f", str(file), "config", "--quiet"]
    tokens = {"AGENTRL_TOKEN": "x", "AGENTRL_LINK_TOKEN": "y"}
    assert run(*command, env={"PATH": os.environ["PATH"], **tokens}).stderr == ""
    for name, message in (
        ("AGENTRL_TOKEN", "the token of the fleet"),
        ("AGENTRL_LINK_TOKEN", "--print-link-token"),
    ):
        rest = {key: value for key, value in tokens.items() if key != name}
        unset = run(*command, env={"PATH": os.environ["PATH"], **rest})
        assert unset.returncode != 0
        assert message in unset.stderr
