"""agentrl-eval against real servers and controllers."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from agentrl_env import Done, Environment, tool
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from tests.bridges.agentrl_peers import bisect, call, needs_peers, run_eval, scripted_model
from tests.env.tasks import Guess

pytestmark = [pytest.mark.bridges, needs_peers]
BEHIND = pytest.mark.parametrize("behind", ["server", "controller"])
TOKEN = "a-token-that-is-long-enough"


class Capitals(Environment):
    """Named samples with one-word answers."""

    splits = ("test",)

    @classmethod
    def samples(cls, split):
        return {"france": {"city": "Paris"}, "italy": {"city": "Rome"}, "spain": {"city": "Madrid"}}

    def reset(self, sample, rng):
        self.city = sample.data["city"]
        return f"Say {self.city}."

    @tool
    def say(self, city: str):
        """Answer with a city."""
        return Done("So it is.", reward=0.25 if city == self.city else -1.0)


@asynccontextmanager
async def serving(behind, *tasks, token=None, **options):
    """Serve tasks, optionally behind a controller. Yield the address of AgentRL's protocol."""
    controller = None
    if behind == "controller":
        controller = ControllerServer(FleetService(), port=0, token=token)
        await controller.start()
        options |= {"host": NOWHERE, "controllers": [controller.url]}
    server = EnvServer(tasks, port=0, drain_s=0, token=token, **options)
    await server.start()
    try:
        url = (controller or server).url
        yield f"{url}/api" if token is None else url.replace("http://", f"http://any:{TOKEN}@") + "/api"
    finally:
        await server.stop()
        if controller is not None:
            await controller.stop()


def named(messages):
    """Answer ``Capitals``."""
    asked = next(str(one["content"]) for one in messages if str(one["content"]).startswith("Say "))
    return call("say", city=asked[4:-1])


@BEHIND
async def test_evaluation_reports_the_rewards_of_a_task(behind, tmp_path):
    async with serving(behind, Guess) as url, scripted_model(bisect) as (model, requests):
        rows = await run_eval(url, model, tmp_path / "out", "guess", "--indices-range", "0-9", "--runs", "2")
    assert len(rows) == 20
    assert {row["status"] for row in rows} == {"completed"}
    assert {(row["metric_reward"], row["metric_score"]) for row in rows} == {(1.0, 1.0)}
    assert {json.loads(row["metrics"])["success"] for row in rows} == {1.0}
    assert all(body["tools"][0]["function"]["name"] == "guess" for body in requests if body.get("tools"))


@BEHIND
async def test_evaluation_of_named_samples_works_with_a_token(behind, tmp_path):
    async with serving(behind, Capitals, token=TOKEN) as url, scripted_model(named) as (model, _):
        rows = await run_eval(url, model, tmp_path / "named", "capitals")
        assert {row["index"]["str_value"] for row in rows} == {"france", "italy", "spain"}
        assert {row["metric_reward"] for row in rows} == {0.25}
        custom = ["--custom-params", '{"city": "Oslo"}', "--indices", "italy"]
        (row,) = await run_eval(url, model, tmp_path / "custom", "capitals-test", *custom)
        assert (row["status"], row["metric_reward"]) == ("completed", 0.25)


async def test_two_hundred_sessions_share_a_server_with_room_for_twenty(tmp_path):
    async with serving("server", Guess, max_sessions=20) as url, scripted_model(bisect) as (model, _):
        # One process has 100 connections, and waiting sessions occupy them.
        halves = await asyncio.gather(
            *(
                run_eval(
                    url, model, tmp_path / name, "guess", "--indices-range", span, "-j", "100", timeout=540
                )
                for name, span in (("first", "0-99"), ("second", "100-199"))
            )
        )
    rows = halves[0] + halves[1]
    assert len(rows) == 200
    assert {(row["status"], row["metric_reward"]) for row in rows} == {("completed", 1.0)}
