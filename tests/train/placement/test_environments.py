"""Environment servers of a run that are given by URL."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import EnvServer
from agentrl_train.config import EnvironmentSection
from agentrl_train.errors import ConfigError, EnvironmentUnavailable
from agentrl_train.placement.environments import environments
from tests.train.fakes import Countdown

TOKEN = "a token of the operator"


@pytest.fixture
async def server() -> AsyncIterator[EnvServer]:
    server = EnvServer([Countdown], port=0, drain_s=0.0, token=TOKEN)
    await server.start()
    yield server
    await server.stop()


async def test_token_is_sent_to_a_server_if_its_section_names_the_variable(
    server: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_TOKEN", TOKEN)
    section = EnvironmentSection(url=server.url, token_env="FLEET_TOKEN")
    async with environments([section], max_sessions=1) as served:
        assert list(served.clients) == ["countdown"]


async def test_token_of_the_environment_is_not_sent_to_a_server_without_a_named_variable(
    server: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match=r"needs a token: .*environments.token_env"):
        async with environments([EnvironmentSection(url=server.url)], max_sessions=1):
            raise AssertionError("the server has accepted the call")


async def test_rejected_token_is_reported_with_its_variable(
    server: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_TOKEN", "another-" + TOKEN)
    with pytest.raises(ConfigError, match=r"rejects the token in FLEET_TOKEN: export"):
        async with environments(
            [EnvironmentSection(url=server.url, token_env="FLEET_TOKEN")], max_sessions=1
        ):
            raise AssertionError("the server has accepted the call")


async def test_server_that_starts_too_late_names_the_key_of_its_deadline() -> None:
    section = EnvironmentSection(serve=("tests.train.fakes:Countdown",), start_timeout_s=0.001)
    with pytest.raises(EnvironmentUnavailable, match=r"within 0.001 s.*environments.start_timeout_s"):
        async with environments([section], max_sessions=1):
            raise AssertionError("the server has answered at once")


async def test_controller_without_servers_is_reported_before_training() -> None:
    controller = ControllerServer(FleetService(), port=0)
    await controller.start()
    try:
        with pytest.raises(EnvironmentUnavailable, match="serves no task; is a server linked"):
            async with environments([EnvironmentSection(url=controller.url)], max_sessions=1):
                raise AssertionError("training would start without tasks")
    finally:
        await controller.stop()
