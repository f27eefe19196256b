"""TextWorld: games, engine processes, and hidden information."""

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.hosting.loader import load_target
from tests.environments.play import play

pytestmark = pytest.mark.environments

if not importlib.util.find_spec("textworld"):
    pytest.skip("the extra textworld is not installed", allow_module_level=True)

FOLDER = Path(__file__).parents[2] / "environments" / "textworld"
TEXTWORLD = load_target(str(FOLDER))
PACKAGE = TEXTWORLD.__module__.rpartition(".")[0]
environment, workers = sys.modules[TEXTWORLD.__module__], sys.modules[f"{PACKAGE}.workers"]
LEVELS = ("", "-2", "-3")


@pytest.fixture
async def client():
    async with EnvClient.local(TEXTWORLD) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    TEXTWORLD.engine.close()


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
    deadline = time.monotonic() + 300
    while len(children(TEXTWORLD.engine.process.pid)) != count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def actions(text):
    return text.partition("AVAILABLE ACTIONS: ")[2].split("\n")


def run_generator(code, *arguments):
    """Run code with the generator in another process, and return the printed JSON."""
    ran = subprocess.run(
        [sys.executable, "-c", "import json, sys\nfrom generator import make\n" + code, *map(str, arguments)],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": str(FOLDER), "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(ran.stdout)


@pytest.mark.parametrize("level", LEVELS)
async def test_expert_wins_and_a_seed_gives_one_transcript(client, level):
    first, reward, metrics = await play(await client.open("textworld", split="test" + level, index=3))
    again, *_ = await play(await client.open("textworld", split="test" + level, index=3))
    assert reward == metrics["points"] == 1.0
    assert metrics["actions"] == {"": 4.0, "-2": 6.0, "-3": 9.0}[level]
    assert first == again
    await wait_for_children(0)


async def test_every_thing_in_the_solution_can_be_named(client):
    number = 934  # the first game of its seeds has a safe beside an "American style safe"
    assert (await play(await client.open("textworld", split="test", index=number)))[1] == 1.0
    code = (
        "from generator import ambiguous\nprint(json.dumps([ambiguous(*c) for c in json.loads(sys.argv[1])]))"
    )
    cases = [
        (["safe"], ["safe", "American style safe"]),
        (["Safe"], ["old safe", "key"]),
        (["American style safe"], ["safe", "American style safe"]),
        (["key"], ["keycard", "safe", "key"]),
        ([], ["safe", "old safe"]),
    ]
    assert run_generator(code, json.dumps(cases)) == [True, True, False, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
async def test_expert_wins_two_hundred_held_out_games(client, level):
    for index in range(200):
        assert (await play(await client.open("textworld", split="test" + level, index=index)))[1] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("level", "count"), [(1, 1000), (2, 100), (3, 100)])
def test_held_out_games_are_different_and_not_among_those_of_training(level, count):
    code = """
games = {}
for split in ("train", "validation", "test"):
    games[split] = []
    for number in range(int(sys.argv[2])):
        game = make(split, int(sys.argv[1]), number)
        names = sorted(str(info.name) for info in game.infos.values())
        games[split].append(json.dumps([game.walkthrough, names]))
print(json.dumps(games))
"""
    games = {split: set(found) for split, found in run_generator(code, level, count).items()}
    assert len(games["test"]) == len(games["validation"]) == count
    assert not games["test"] & games["validation"]
    assert not games["train"] & (games["test"] | games["validation"])


async def test_actions_that_are_not_admissible_do_nothing(client):
    session = await client.open("textworld", split="test", index=0)
    available = actions(session.messages[0].content)
    first = next(action for action in available if action.startswith("go "))
    for action in (first.upper(), first + " please", first[:-1], "go", "", "win", '{"x": 1}\n["plan"]'):
        result = await session.step(act(action))
        assert result.messages[0].content.startswith("Nothing happens.\nAVAILABLE ACTIONS: ")
        assert actions(result.messages[0].content) == available
        assert result.metrics["invalid_calls"] == 1.0
    result = await session.step(act(f" {first} "))
    assert not result.messages[0].content.startswith("Nothing happens.")
    await session.close()


async def test_one_message_has_no_more_actions_than_an_episode(client):
    session = await client.open("textworld", split="test", index=0)
    calls = [ToolCall.of("take_action", action="look") for _ in range(25)]
    result = await session.step(Message.assistant(None, *calls))
    assert result.terminated
    assert result.reward == 0.0
    assert result.metrics["actions"] == 10.0


async def test_expert_finds_the_way_back_after_other_actions(client):
    session = await client.open("textworld", split="test-2", index=1)
    text = session.messages[0].content
    for _ in range(3):
        way = next(action for action in actions(text) if action.startswith("go "))
        text = (await session.step(act(way))).messages[0].content
    assert (await play(session))[1] == 1.0


async def test_fork_continues_in_its_own_process(client):
    session = await client.open("textworld", split="test", index=2)
    await session.step(await session.expert())
    (fork,) = await session.fork(1)
    await wait_for_children(2)
    assert (await play(fork))[1] == (await play(session))[1] == 1.0


@pytest.mark.extended
@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGKILL])
async def test_crash_of_the_engine_fails_only_its_session(client, how):
    await wait_for_children(0) if TEXTWORLD.engine.process else None
    victim = await client.open("textworld", split="test", index=0)
    (child,) = children(TEXTWORLD.engine.process.pid)
    neighbour = await client.open("textworld", split="test", index=1)
    os.kill(child, how)
    result = await victim.step(act("look"))
    assert result.status == "failed_environment"
    assert "the engine of this session" in json.dumps(result.info)
    assert (await play(neighbour))[1] == 1.0
    await wait_for_children(0)


@pytest.mark.extended
async def test_death_of_the_engine_itself_spares_the_sessions_and_the_next_one_starts_it(client):
    session = await client.open("textworld", split="test", index=0)
    process = TEXTWORLD.engine.process
    process.kill()
    process.wait()
    assert (await play(session))[1] == 1.0
    assert (await play(await client.open("textworld", split="test", index=1)))[1] == 1.0
    assert TEXTWORLD.engine.process is not process


def test_endless_request_ends_with_its_process():
    engine = workers.Engine(cpu_seconds=0.02)
    try:
        player, neighbour = engine.open(), engine.open()
        with pytest.raises(workers.EngineFailed, match="crashed, or it reached its limit"):
            player.start("generate", "test", 3, 0)
        player.close()
        neighbour.close()
    finally:
        engine.close()


@pytest.mark.extended
def test_concurrent_compilations_are_limited(monkeypatch):
    engine, running, most = workers.Engine(starts=2), [], []
    call = workers.Player.call

    def counted(player, *arguments):
        running.append(player)
        most.append(len(running))
        try:
            return call(player, *arguments)
        finally:
            running.remove(player)

    monkeypatch.setattr(workers.Player, "call", counted)
    players = [engine.open() for _ in range(6)]
    try:
        with ThreadPoolExecutor(len(players)) as threads:
            begun = list(threads.map(lambda player: player.start("generate", "test", 1, 0), players))
        assert [one["text"] for one in begun] == [begun[0]["text"]] * 6
        assert max(most) <= 2
    finally:
        for player in players:
            player.close()
        engine.close()


def test_missing_package_is_named_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "textworld.py").write_text("raise ImportError('No module named textworld')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(workers.EngineFailed, match=r"pip install 'agentrl-kit\[textworld\]'"):
        workers.Engine().open()


def test_server_does_not_import_textworld():
    assert not {"textworld", "jericho"} & set(sys.modules)


# A hostile policy


SOME_COMMANDS = ("undo", "save", "tw-reveal", "walkthrough", "look\nlook", "look" * 10_000)
FURTHER_COMMANDS = (
    *("restart", "quit", "restore", "script on", "version", "verify", "showme", "tree", "purloin key"),
    *("tw-print player", "tw-extra-infos score", "tw-trace-actions", "restrict commands", "actions on"),
    *("objective", "hint", "help", "look. look", "look then look", "again", "g", "\x1b[A"),
)


@pytest.mark.parametrize(
    "commands",
    [SOME_COMMANDS, *(pytest.param((one,), marks=pytest.mark.extended) for one in FURTHER_COMMANDS)],
    ids=lambda commands: commands[0],
)
async def test_commands_to_the_interpreter_do_not_reach_it(client, commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = await client.open("textworld", split="test", index=0)
    for command in commands:
        result = await session.step(act(command))
        assert result.messages[0].content.startswith("Nothing happens.")
    assert os.listdir(tmp_path) == []
    assert (await play(session))[1] == 1.0


async def test_no_file_of_a_game_exists_while_it_is_played(client, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    await wait_for_children(0) if TEXTWORLD.engine.process else None
    session = await client.open("textworld", split="test", index=0)
    (child,) = children(TEXTWORLD.engine.process.pid)
    links = [os.readlink(f"/proc/{child}/fd/{number}") for number in os.listdir(f"/proc/{child}/fd")]
    assert not [link for link in links if link.startswith(str(tmp_path))]
    assert os.listdir(tmp_path) == []
    await session.close()


@pytest.mark.extended
async def test_session_does_not_reveal_the_solution(client):
    session = await client.open("textworld", split="test-3", index=0)
    plan = run_generator("print(json.dumps(make('test', 3, 0).walkthrough))")
    told = session.messages[0].content.partition("AVAILABLE ACTIONS: ")[0]
    assert len(plan) == 9
    assert not [command for command in plan if command in told]
    await session.close()


# Games of a folder


@pytest.fixture
def games(tmp_path, monkeypatch):
    """A folder with one compiled game, and one game as JSON in a subfolder."""
    (tmp_path / "train").mkdir()
    code = """
import textworld
from textworld.generator import compile_game
for number, folder in enumerate(("", "train/")):
    options = textworld.GameOptions()
    options.path = f"{sys.argv[1]}/{folder}game-{number}.z8"
    compile_game(make("train", 1, number), options)
print("null")
"""
    run_generator(code, tmp_path)
    (tmp_path / "train" / "game-1.z8").unlink()
    monkeypatch.setenv("TEXTWORLD_GAMES", str(tmp_path))
    return tmp_path


@pytest.mark.extended
async def test_games_of_a_folder_are_played(games):
    official = load_target(str(shutil.copytree(FOLDER, games.parent / "textworld-official")))
    assert {"official", "official-train"} <= set(official.splits)
    async with EnvClient.local(official) as client:
        for split in ("official", "official-train"):
            assert (await play(await client.open("textworld", split=split, index=0)))[1] == 1.0
        for game in ("../secret.json", "/etc/passwd", "game-0.z8", "missing.json"):
            with pytest.raises(Exception, match="there is no game"):
                await client.open("textworld", sample={"game": game})
        (games / "broken.json").write_text("{}")
        with pytest.raises(Exception, match="is no game of TextWorld"):
            await client.open("textworld", sample={"game": "broken.json"})


def test_folder_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TEXTWORLD_GAMES", str(tmp_path / "missing"))
    with pytest.raises(Exception, match="TEXTWORLD_GAMES must name a folder"):
        environment._splits()
