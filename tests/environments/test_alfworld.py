"""ALFWorld: games, engine processes, and their failures."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.hosting.loader import load_target
from tests.environments import agentbench
from tests.environments.play import play

pytestmark = pytest.mark.environments

if not importlib.util.find_spec("textworld"):
    pytest.skip("the extra alfworld is not installed", allow_module_level=True)

FOLDER = Path(__file__).parents[2] / "environments" / "alfworld"
ALFWORLD = load_target(str(FOLDER))
PACKAGE = ALFWORLD.__module__.rpartition(".")[0]
environment, workers = sys.modules[ALFWORLD.__module__], sys.modules[f"{PACKAGE}.workers"]
LEVELS = ("", "-2", "-3")


@pytest.fixture
async def client():
    async with EnvClient.local(ALFWORLD) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    ALFWORLD.engine.close()


def act(action):
    return Message.assistant(None, ToolCall.of("take_action", action=action))


def children(pid):
    """Return the living child processes of a process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(status.parent.name))
    return sorted(found)


async def wait_for_children(count):
    deadline = time.monotonic() + 60
    while len(children(ALFWORLD.engine.process.pid)) != count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def actions(text):
    return text.partition("AVAILABLE ACTIONS: ")[2].split("\n")


@pytest.mark.parametrize("level", LEVELS)
async def test_expert_wins_and_a_seed_gives_one_transcript(client, level):
    first, reward, _ = await play(await client.open("alfworld", split="test" + level, index=3))
    again, *_ = await play(await client.open("alfworld", split="test" + level, index=3))
    assert reward == 1.0
    assert first == again
    await wait_for_children(0)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
async def test_expert_wins_two_hundred_held_out_games(client, level):
    for index in range(200):
        assert (await play(await client.open("alfworld", split="test" + level, index=index)))[1] == 1.0


async def test_actions_that_are_not_admissible_do_nothing(client):
    session = await client.open("alfworld", split="test", index=0)
    available = actions(session.messages[0].content)
    first = next(action for action in available if action.startswith("go to"))
    for action in (
        first.upper(),
        first + " please",
        first[:-1],
        "go to",
        "",
        "win",
        "#intro#",
        '{"x": 1}\n["step"]',
    ):
        result = await session.step(act(action))
        assert result.messages[0].content.startswith("Nothing happens.\nAVAILABLE ACTIONS: ")
        assert actions(result.messages[0].content) == available
        assert result.metrics["invalid_calls"] == 1.0
    result = await session.step(act(f" {first} "))
    assert not result.messages[0].content.startswith("Nothing happens.")
    await session.close()


async def test_one_message_has_no_more_actions_than_an_episode(client):
    session = await client.open("alfworld", split="test", index=0)
    calls = [ToolCall.of("take_action", action="look") for _ in range(25)]
    result = await session.step(Message.assistant(None, *calls))
    assert result.terminated
    assert result.reward == 0.0
    assert result.metrics["actions"] == 20.0


async def test_expert_finds_the_way_back_after_other_actions(client):
    session = await client.open("alfworld", split="test-2", index=1)
    for action in ("inventory", actions(session.messages[0].content)[0]):
        await session.step(act(action))
    assert (await play(session))[1] == 1.0


async def test_noisy_expert_takes_detours_and_wins(client):
    noisy = type("Noisy", (ALFWORLD,), {"name": "alfworld", "expert_noise": 0.3})
    async with EnvClient.local(noisy) as other:
        plans = [await play(await client.open("alfworld", index=index)) for index in range(4)]
        detours = [await play(await other.open("alfworld", index=index)) for index in range(4)]
    assert [played.reward for played in detours] == [1.0] * 4
    assert sum(len(played.transcript) for played in detours) > sum(len(played.transcript) for played in plans)


async def test_fork_continues_in_its_own_process(client):
    session = await client.open("alfworld", split="test", index=2)
    await session.step(await session.expert())
    (fork,) = await session.fork(1)
    await wait_for_children(2)
    assert (await play(fork))[1] == (await play(session))[1] == 1.0


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGKILL])
async def test_crash_of_the_engine_fails_only_its_session(client, how):
    await wait_for_children(0) if ALFWORLD.engine.process else None
    victim = await client.open("alfworld", split="test", index=0)
    (child,) = children(ALFWORLD.engine.process.pid)
    neighbour = await client.open("alfworld", split="test", index=1)
    os.kill(child, how)
    result = await victim.step(act("look"))
    assert result.status == "failed_environment"
    assert "the engine of this session" in json.dumps(result.info)
    assert (await play(neighbour))[1] == 1.0
    await wait_for_children(0)


async def test_death_of_the_engine_itself_spares_the_sessions_and_the_next_one_starts_it(client):
    session = await client.open("alfworld", split="test", index=0)
    process = ALFWORLD.engine.process
    process.kill()
    process.wait()
    assert (await play(session))[1] == 1.0
    assert (await play(await client.open("alfworld", split="test", index=1)))[1] == 1.0
    assert ALFWORLD.engine.process is not process


def test_endless_request_ends_with_its_process():
    engine = workers.Engine(cpu_seconds=0.02)
    try:
        player, neighbour = engine.open(), engine.open()
        with pytest.raises(workers.EngineFailed, match="crashed, or it reached its limit"):
            player.call("generate", "test", 3, 0)
        player.close()
        neighbour.close()
    finally:
        engine.close()


def test_closing_the_engine_leaves_no_process():
    engine = workers.Engine()
    player = engine.open()
    pid = engine.process.pid
    player.close()
    engine.close()
    assert not Path(f"/proc/{pid}").exists()


def test_missing_package_is_named_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "textworld.py").write_text("raise ImportError('No module named textworld')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(workers.EngineFailed, match=r"pip install 'agentrl-kit\[alfworld\]'"):
        workers.Engine().open()


def test_server_imports_neither_textworld_nor_the_planner():
    assert not {"textworld", "fast_downward", "jericho"} & set(sys.modules)


# ALFWorld's download and AgentBench's list of games


def write_games(root, names):
    """Write a generated game to each path, as in ALFWorld's download. The name gives the task type."""
    levels = {"two": 3}
    engine = ALFWORLD.engine
    for name in names:
        wanted = name.split("/")[2].split("-")[0]
        number = 0
        while True:
            player = engine.open()
            seen = player.call("generate", "test", levels.get(wanted.split("_")[1], 2), number)
            if seen["task"] == wanted:
                player.call("save", str((root / name).parent))
            player.close()
            if seen["task"] == wanted:
                break
            number += 1


async def test_games_of_alfworlds_download_load(tmp_path, monkeypatch, client):
    names = [
        "json_2.1.1/valid_unseen/pick_and_place_simple-Pen-None-Desk-308/trial_1/game.tw-pddl",
        "json_2.1.1/valid_unseen/look_at_obj_in_light-Pen-None-DeskLamp-308/trial_2/game.tw-pddl",
    ]
    write_games(tmp_path, names)
    skipped = tmp_path / "json_2.1.1/valid_unseen/pick_and_place_with_movable_recep-A/trial_3"
    skipped.mkdir(parents=True)
    (skipped / "game.tw-pddl").write_text('{"solvable": true}')
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    monkeypatch.setenv("ALFWORLD_GAMES", str(tmp_path / "dev.json"))
    (tmp_path / "dev.json").write_text(json.dumps({"pick_and_place": names[:1]}))
    again = load_target(str(FOLDER))
    environment._official_games.cache_clear()
    games = environment._official_games("valid_unseen")
    assert [game["game"] for game in games] == sorted(names)
    assert environment._official_games("") == [{"game": names[0]}]
    assert {"official", "official-valid_unseen"} <= set(environment._splits())
    assert again.name == "alfworld"
    for game in games:
        assert (await play(await client.open("alfworld", split="train", sample=game)))[1] == 1.0
    with pytest.raises(Exception, match="there is no game"):
        await client.open("alfworld", split="train", sample={"game": "../../etc/passwd"})
    environment._official_games.cache_clear()


@pytest.mark.parametrize("content", ['{"type": 5}', "[]", "5", '["a", 5]', '{"type": ["a", null]}', "{"])
def test_invalid_list_of_games_is_rejected(tmp_path, monkeypatch, content):
    path = tmp_path / "games.json"
    path.write_text(content)
    monkeypatch.setenv("ALFWORLD_GAMES", str(path))
    environment._official_games.cache_clear()
    with pytest.raises(environment.DefinitionError, match=r"games\.json"):
        environment._official_games("")


def test_single_game_of_a_type_is_one_game(tmp_path, monkeypatch):
    path = tmp_path / "games.json"
    path.write_text('{"type": "a/game.tw-pddl", "other": ["b/game.tw-pddl"]}')
    monkeypatch.setenv("ALFWORLD_GAMES", str(path))
    environment._official_games.cache_clear()
    assert environment._official_games("") == [{"game": "a/game.tw-pddl"}, {"game": "b/game.tw-pddl"}]
    environment._official_games.cache_clear()


@pytest.mark.slow
async def test_games_that_agentbench_lists_are_played(tmp_path, monkeypatch, client):
    path = agentbench.folder("alfworld") / "dev.json"
    names = [name for names in json.loads(path.read_text()).values() for name in names]
    write_games(tmp_path, names)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    monkeypatch.setenv("ALFWORLD_GAMES", str(path))
    environment._official_games.cache_clear()
    games = environment._official_games("")
    assert len(games) == 20
    for game in games:
        assert (await play(await client.open("alfworld", split="train", sample=game)))[1] == 1.0
    environment._official_games.cache_clear()
