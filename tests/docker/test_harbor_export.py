"""Exported Harbor task folders, built and played through the Harbor bridge."""

import asyncio

import pytest

from agentrl_env import EnvClient, SessionStatus, ToolCall
from agentrl_env.bridges.harbor.export import export
from tests.docker.conftest import ROOT
from tests.docker.test_sandbox_docker import until_none
from tests.environments.play import play


@pytest.fixture(scope="module")
def folder(base, wheelhouse, tmp_path_factory):
    """Export two samples of a starter task."""
    out = tmp_path_factory.mktemp("exported")
    household = str(ROOT / "environments/household")
    made = asyncio.run(export(household, out, count=2, base=base, wheelhouse=wheelhouse))
    assert [(one.folder.name, one.oracle) for one in made] == [
        ("household-test-0000", 1.0),
        ("household-test-0001", 1.0),
    ]
    return out


async def run(session, command, **options):
    """Run a command as the model does and return its output."""
    result = await session.step(ToolCall.of("shell", command=command, **options))
    return result.messages[0].content


async def test_solution_gets_the_oracles_reward_and_an_untouched_machine_gets_none(folder, client):
    async with EnvClient.local(f"harbor:{folder}") as tasks:
        (name,) = await tasks.tasks()
        for index in range(2):
            assert (await play(await tasks.open(name, index=index))).reward == 1.0
        session = await tasks.open(name, index=0)
        assert "Bring the" in session.messages[0].content
        result = await session.step(ToolCall.of("submit"))
        assert (result.status, result.reward) == (SessionStatus.COMPLETED, 0.0)
    until_none(client)


async def test_agent_plays_with_the_command_and_cannot_read_sample_task_or_record(folder):
    async with EnvClient.local(f"harbor:{folder}") as tasks:
        session = await tasks.open(index=1)
        shown = await run(session, "id -un; pwd; task")
        assert shown.startswith("agent\n/home/agent\nBring the")
        assert "task look {" in shown
        assert "There is no x;" in await run(session, """task look '{"place": "x"}'""")
        assert "not JSON" in await run(session, "task look fridge")
        for path in ("/opt/agentrl-task/sample.json", "/srv/household/environment.py"):
            assert "Permission denied" in await run(session, f"cat {path}")
        record = "/var/lib/agentrl-task/reward.json"
        assert "Permission denied" in await run(session, f"cat {record}; echo '{{\"reward\": 1}}' >{record}")
        server = "$(grep -lz '[s]erve' /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3 | head -1)"
        assert "ermitted" in await run(session, f"kill -9 {server}")
        assert "Permission denied" in await run(session, f"cat /proc/{server}/environ")
        # A command killed by its time limit does not affect the episode.
        assert "killed" in await run(session, "sleep 1000", timeout=1)
        assert "Bring the" in await run(session, "task")
        forge = "while :; do mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; done"
        await run(session, f"nohup sh -c '{forge}' >/dev/null 2>&1 &")
        result = await session.step(ToolCall.of("submit"))
        assert (result.status, result.reward) == (SessionStatus.COMPLETED, 0.0)


async def test_failed_start_of_the_episode_fails_the_session_with_the_reason(folder):
    (folder / "household-test-0000/environment/sample.json").write_text('{"target": "/srv/none"}')
    async with EnvClient.local(f"harbor:{folder}/household-test-0000") as tasks:
        with pytest.raises(Exception, match=r"(?s)health check.*/srv/none"):
            await tasks.open()
