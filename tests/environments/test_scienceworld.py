"""ScienceWorld: variations, Java processes, and attacks by a policy."""

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.errors import EnvironmentFailed
from agentrl_env.hosting.loader import load_target
from tests.environments.play import play

pytestmark = [
    pytest.mark.environments,
    # py4j does not close a socket that an ended process refuses. Garbage collection closes it.
    pytest.mark.filterwarnings("ignore:.*ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
]

if not importlib.util.find_spec("scienceworld"):
    pytest.skip("the extra scienceworld is not installed", allow_module_level=True)
if not shutil.which("java"):
    pytest.skip("Java is not installed", allow_module_level=True)

FOLDER = Path(__file__).parents[2] / "environments" / "scienceworld"
SCIENCEWORLD = load_target(str(FOLDER))
PACKAGE = SCIENCEWORLD.__module__.rpartition(".")[0]
simulator, variations = sys.modules[f"{PACKAGE}.simulator"], sys.modules[f"{PACKAGE}.variations"]
ANIMAL = {"task": "find-animal", "variation": 225, "simplifications": "easy"}


@pytest.fixture
async def client():
    async with EnvClient.local(SCIENCEWORLD) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    SCIENCEWORLD.simulators.close()


def act(action):
    return Message.assistant(None, ToolCall.of("take_action", action=action))


def java_processes():
    """Return the living Java processes that this process started."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z" and b"scienceworld.jar" in command:
            found.add(int(status.parent.name))
    return found


async def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.extended
async def test_gold_path_solves_and_a_seed_gives_one_transcript_in_new_and_used_processes(client):
    SCIENCEWORLD.simulators.close()
    played = []
    for _ in range(2):
        session = await client.open("scienceworld", sample=ANIMAL)
        played.append(await play(session))
        await wait_until(lambda: len(SCIENCEWORLD.simulators.idle) == 1)
    SCIENCEWORLD.simulators.close()
    played.append(await play(await client.open("scienceworld", sample=ANIMAL)))
    assert played[0].reward == pytest.approx(1.0)
    assert played[0].metrics["success"] == 1.0
    assert played[0] == played[1] == played[2]


async def gold_reward(session):
    """Play the gold path and return its reward. Some gold paths have actions that the simulator rejects."""
    reward = 0.0
    while not session.status.final:
        reward += (await session.step(await session.expert())).reward
    return reward


@pytest.mark.slow
@pytest.mark.parametrize("level", ["", "-2", "-3"])
async def test_gold_path_solves_held_out_variations(client, level):
    for index in range(60):
        session = await client.open("scienceworld", split="test" + level, index=index)
        assert await gold_reward(session) == pytest.approx(1.0)


@pytest.mark.extended
async def test_problems_that_the_gold_path_fails_are_omitted(client):
    played = {(one["task"], one["variation"]) for one in variations.problems("train", 1)}
    assert not played & variations.UNSOLVED
    sample = {"task": "test-conductivity", "variation": 375}
    sample["simplifications"] = variations.simplifications("test-conductivity", 1)
    assert await gold_reward(await client.open("scienceworld", sample=sample)) < 1.0


@pytest.mark.slow
def test_variations_are_divided_as_the_package_divides_them():
    java = simulator.Simulator()
    try:
        for task, count in variations.VARIATIONS.items():
            java.load(task, 0, "")
            assert java.call("getTaskMaxVariations", task) == count
            for split, name in (("train", "Train"), ("validation", "Dev"), ("test", "Test")):
                assert list(java.call(f"getVariations{name}")) == list(variations.variations(task, split))
    finally:
        java.close()


@pytest.mark.parametrize("level", [1, 2, 3])
def test_levels_have_a_thousand_held_out_problems_and_splits_share_none(level):
    drawn = {
        split: {(one["task"], one["variation"]) for one in variations.problems(split, level)}
        for split in variations.NAMES
    }
    assert min(len(drawn["validation"]), len(drawn["test"])) >= 1000
    for split, problems in drawn.items():
        assert len(problems) == len(variations.problems(split, level))
    assert not drawn["train"] & (drawn["validation"] | drawn["test"])
    assert not drawn["validation"] & drawn["test"]


async def test_expert_continues_after_other_actions(client):
    session = await client.open("scienceworld", sample=ANIMAL)
    for action in ("look around", "inventory"):
        await session.step(act(action))
    assert (await play(session))[2]["success"] == 1.0


async def test_fork_has_its_own_process(client):
    session = await client.open("scienceworld", sample=ANIMAL)
    await session.step(act("look around"))
    (fork,) = await session.fork(1)
    assert len(java_processes()) >= 2
    assert (await play(fork))[2]["success"] == (await play(session))[2]["success"] == 1.0


async def test_death_of_java_fails_only_its_session_and_leaves_no_process(client):
    SCIENCEWORLD.simulators.close()
    assert java_processes() == set()
    victim = await client.open("scienceworld", sample=ANIMAL)
    (pid,) = java_processes()
    neighbour = await client.open("scienceworld", sample=ANIMAL)
    os.kill(pid, signal.SIGKILL)
    result = await victim.step(act("look around"))
    assert result.status == "failed_environment"
    assert "the simulator of this session failed" in json.dumps(result.info)
    assert (await play(neighbour))[2]["success"] == 1.0
    await wait_until(lambda: pid not in java_processes() and len(SCIENCEWORLD.simulators.idle) == 1)
    SCIENCEWORLD.simulators.end_solver()
    assert java_processes() == {SCIENCEWORLD.simulators.idle[0].process.pid}
    SCIENCEWORLD.simulators.close()
    assert java_processes() == set()


async def test_idle_processes_and_episodes_of_a_process_are_limited(client, monkeypatch):
    SCIENCEWORLD.simulators.close()
    monkeypatch.setattr(simulator, "IDLE", 1)
    sessions = [await client.open("scienceworld", sample=ANIMAL) for _ in range(2)]
    for session in sessions:
        await session.close()
    await wait_until(lambda: len(java_processes()) == len(SCIENCEWORLD.simulators.idle) == 1)
    monkeypatch.setattr(simulator, "EPISODES", 1)
    await (await client.open("scienceworld", sample=ANIMAL)).close()
    await wait_until(lambda: java_processes() == set())


@pytest.mark.extended
async def test_gold_path_is_computed_once_and_outside_the_processes_of_sessions(client, monkeypatch):
    SCIENCEWORLD.simulators.close()
    SCIENCEWORLD.simulators.paths.clear()
    loaded = []
    load = simulator.Simulator.load

    def counted(self, *problem, gold=False):
        loaded.append(gold)
        return load(self, *problem, gold=gold)

    monkeypatch.setattr(simulator.Simulator, "load", counted)
    sessions = [await client.open("scienceworld", sample=ANIMAL) for _ in range(2)]
    for session in sessions:
        assert (await play(session))[2]["success"] == 1.0
    assert sorted(loaded) == [False, False, True]


async def test_session_beyond_the_process_limit_reports_the_limit(client, monkeypatch):
    monkeypatch.setattr(simulator, "LIMIT", 1)
    session = await client.open("scienceworld", sample=ANIMAL)
    with pytest.raises(EnvironmentFailed, match="SCIENCEWORLD_PROCESSES"):
        await client.open("scienceworld", sample=ANIMAL)
    await session.close()
    await wait_until(lambda: SCIENCEWORLD.simulators.open_now == 0)
    assert (await play(await client.open("scienceworld", sample=ANIMAL)))[2]["success"] == 1.0


async def test_limit_of_actions_truncates_an_episode(client):
    session = await client.open("scienceworld", sample={**ANIMAL, "actions": 2})
    assert not (await session.step(act("look around"))).final
    result = await session.step(act("look around"))
    assert result.truncated
    assert not result.terminated


def test_missing_java_is_named_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(simulator.SimulatorFailed, match="install Java"):
        simulator.Simulator()


# A hostile policy


@pytest.mark.parametrize("action", ["", "win", "OBJ", "focus on", "look around; look around", "/etc/passwd"])
async def test_invalid_action_is_reported_and_earns_nothing(client, action):
    session = await client.open("scienceworld", sample=ANIMAL)
    result = await session.step(act(action))
    assert result.messages[0].content.startswith("No known action matches that input.")
    assert result.metrics["invalid_calls"] == 1.0
    assert result.reward == 0.0
    await session.close()


@pytest.mark.parametrize("action", ["look around\nlook around", "x" * 10_000, "\x00", "look\x1baround"])
async def test_texts_of_several_lines_do_not_reach_the_simulator(client, action):
    session = await client.open("scienceworld", sample=ANIMAL)
    result = await session.step(act(action))
    assert "An action is one line" in result.messages[0].content
    await session.close()


async def test_focus_on_the_wrong_thing_forfeits_all_points(client):
    session = await client.open("scienceworld", sample=ANIMAL)
    total = 0.0
    for _ in range(2):
        total += (await session.step(await session.expert())).reward
    result = await session.step(act("focus on agent"))
    assert result.terminated
    assert total + result.reward == pytest.approx(0.0)


@pytest.mark.parametrize("box", ["yellow", "purple"])
async def test_box_without_a_measurement_fails(client, box):
    sample = next(one for one in variations.problems("test", 1) if one["task"] == "use-thermometer")
    session = await client.open("scienceworld", sample=sample)
    assert "An answer fails without these steps: use instrument on object." in session.messages[0].content
    guess = ("pick up thermometer", "focus on thermometer in inventory", "teleport to bathroom")
    guess += ("pick up unknown substance B", "focus on unknown substance B in inventory")
    guess += (f"move unknown substance B in inventory to {box} box",)
    results = [await session.step(act(action)) for action in ("teleport to kitchen", *guess)]
    assert results[-1].terminated
    assert sum(result.reward for result in results) == pytest.approx(0.0)
    assert results[-1].metrics["success"] == 0.0


async def test_official_score_of_an_own_sample_needs_no_measurement(client):
    sample = {"task": "use-thermometer", "variation": 405, "simplifications": "easy"}
    sessions = [await client.open("scienceworld", sample=sample) for _ in range(2)]
    guess = ("teleport to kitchen", "pick up thermometer", "focus on thermometer in inventory")
    guess += ("teleport to bathroom", "pick up unknown substance B")
    guess += ("focus on unknown substance B in inventory",)
    won = []
    for session, box in zip(sessions, ("yellow", "purple"), strict=True):
        actions = (*guess, f"move unknown substance B in inventory to {box} box")
        results = [await session.step(act(action)) for action in actions]
        won.append(results[-1].metrics["success"])
    assert won == [0.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(variations.MEASUREMENTS))
async def test_gold_path_measures_before_it_answers(client, task):
    chosen = [one for one in variations.problems("test", 2) if one["task"] == task][:12]
    for sample in chosen:
        assert await gold_reward(await client.open("scienceworld", sample=sample)) == pytest.approx(1.0)


async def test_session_does_not_reveal_the_gold_path(client):
    session = await client.open("scienceworld", sample=ANIMAL)
    told = session.messages[0].content
    while not session.status.final:
        move = await session.expert()
        action = json.loads(move.tool_calls[0].function.arguments)["action"]
        assert action in ("look around", "inventory", "wait", "wait1") or action not in told
        await session.step(move)
