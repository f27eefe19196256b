"""Harbor task folders with their own image, on a real daemon."""

import io
import os

import pytest

from agentrl_env import EnvClient, SessionStatus, ToolCall
from agentrl_env.bridges.harbor.folder import HarborTask
from agentrl_env.bridges.harbor.tasks import built_image
from agentrl_env.errors import LaunchError
from agentrl_env.launch.image import run_build
from agentrl_env.sandbox import open_sandbox
from agentrl_env.sandbox.docker_daemon import connect
from tests.docker.conftest import BASE
from tests.docker.test_sandbox_docker import containers, until_none
from tests.env.bridges.harbor_tasks import write_task
from tests.environments.play import play

DOCKERFILE = f"""FROM {BASE}
ENV WOOD=oak
RUN mkdir /app
WORKDIR /app
COPY plank.txt .
"""


@pytest.fixture
def folder(base, tmp_path):
    return write_task(tmp_path / "plank", files={"environment/Dockerfile": DOCKERFILE})


async def step(session, command, **options):
    return await session.step(ToolCall.of("shell", command=command, **options))


def images(client):
    return {image.id for image in client.images.list()}


async def test_solution_solves_the_task_in_its_image_and_nothing_is_left(folder, client):
    HarborTask.read(folder)
    built_image(HarborTask.read(folder))
    before = images(client)
    async with EnvClient.local(f"harbor:{folder}") as tasks:
        assert (await play(await tasks.open("plank", split="train", index=0))).reward == 1.0
        session = await tasks.open("plank", split="train", index=0)
        who = await step(session, "id -u; pwd; echo $WOOD; touch /usr/bin/x && apt-get --version | head -c 3")
        assert who.messages[0].content == "0\n/app\noak\napt"
        await step(session, "sleep 1000 >/dev/null 2>&1 & echo 7 cm >length.txt")
        result = await session.step(ToolCall.of("submit"))
        assert (result.status, result.reward) == (SessionStatus.COMPLETED, 0.0)
    until_none(client)
    assert images(client) == before


async def test_background_processes_stay_until_a_command_exceeds_its_time(folder):
    async with EnvClient.local(f"harbor:{folder}") as tasks:
        session = await tasks.open("plank", split="train", index=0)
        await step(session, "sleep 1000 >/dev/null 2>&1 &")
        sleeping = "grep -lz '^1000$' /proc/[0-9]*/cmdline 2>/dev/null | wc -l"
        assert (await step(session, sleeping)).messages[0].content == "1"
        late = await step(session, "sleep 1000", timeout=1)
        assert "killed: it ran longer than 1 s" in late.messages[0].content
        assert (await step(session, sleeping)).messages[0].content == "0"
        await session.close()


async def test_processes_of_the_agent_do_not_reach_the_grading(folder):
    forge = "while :; do mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; done"
    async with EnvClient.local(f"harbor:{folder}") as tasks:
        session = await tasks.open("plank", split="train", index=0)
        await step(
            session, f"nohup sh -c '{forge}' >/dev/null 2>&1 & mkdir -p /tests; echo true >/tests/test.sh"
        )
        result = await session.step(ToolCall.of("submit"))
        assert (result.status, result.reward) == (SessionStatus.COMPLETED, 0.0)


async def test_full_disk_and_full_memory_end_the_episode_without_reward(folder):
    async with EnvClient.local(f"harbor:{folder}") as tasks:
        session = await tasks.open("plank", split="train", index=0)
        result = await step(session, "head -c 200000000 /dev/zero >big")
        assert result.status is SessionStatus.COMPLETED
        assert "it wrote more than the disk's 128 MiB" in result.messages[0].content
        assert result.reward == 0.0
        session = await tasks.open("plank", split="train", index=0)
        result = await step(session, "python3 -c 'x = bytes([1]) * 10**9'")
        assert "killed: out of memory, the limit is 256 MiB" in result.messages[0].content
        assert not session.status.final
        await session.close()


async def test_changed_environment_gets_another_image(folder):
    task = HarborTask.read(folder)
    first = built_image(task)
    assert built_image(task) == first
    (folder / "environment/plank.txt").write_text("13 cm\n")
    assert built_image(task) != first


async def test_failed_image_build_fails_the_session_with_the_step(folder):
    (folder / "environment/Dockerfile").write_text(f"FROM {BASE}\nRUN no-such-program\n")
    async with EnvClient.local(f"harbor:{folder}") as tasks:
        with pytest.raises(Exception, match="no-such-program"):
            await tasks.open("plank", split="train", index=0)


def test_copy_of_a_machine_has_all_files_and_no_processes(base, client):
    with open_sandbox(image=base, root=True, memory="64m", disk="64m", background=True) as box:
        box.run("echo one >/etc/one; rm /etc/hostname.bak; sleep 1000 >/dev/null 2>&1 &")
        with box.copy() as copy:
            assert copy.run("cat /etc/one").stdout == "one\n"
            assert copy.run("ps aux 2>/dev/null | grep -c '[s]leep'; true").stdout.strip() in ("0", "")
            copy.run("echo two >/etc/one")
        assert box.run("cat /etc/one").stdout == "one\n"
    assert containers(client) == []


def test_failed_build_closes_its_connection(base):
    def sockets():
        names = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum(os.readlink(name).startswith("socket:") for name in names if os.path.lexists(name))

    before = sockets()
    client = connect()
    with pytest.raises(LaunchError, match="no-such-program") as failure:
        run_build(client, io.BytesIO(f"FROM {BASE}\nRUN no-such-program\n".encode()), "t", lambda line: None)
    client.close()
    assert failure.value
    assert sockets() == before
