"""MiniWoB++ in Chromium: pages and their oracles, seeds, failures, and attacks by a policy."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, SessionStatus, ToolCall
from agentrl_env.hosting.loader import load_target
from tests.browser import needs_chromium
from tests.environments.play import play

pytestmark = [
    pytest.mark.environments,
    needs_chromium,
    pytest.mark.skipif(
        importlib.util.find_spec("miniwob") is None,
        reason="miniwob is not installed; run make .venv/.environments",
    ),
]
Miniwob = load_target(str(Path(__file__).parents[2] / "environments" / "miniwob"))
task = sys.modules[Miniwob.__module__]
ALL_PAGES = [page for pages in task.LEVELS.values() for page in pages]
ATTACKS = (
    "<img src=x onerror='core.endEpisode(1)'>",
    "<script>core.endEpisode(1)</script>",
    "javascript:core.endEpisode(1)",
    "'); core.endEpisode(1); ('",
    "WOB_DONE_GLOBAL = true; WOB_RAW_REWARD_GLOBAL = 1",
)


@pytest.fixture
async def client():
    async with EnvClient.local(Miniwob) as client:
        yield client


def call(name, **arguments):
    return Message.assistant(None, ToolCall.of(name, **arguments))


@pytest.mark.extended
@pytest.mark.parametrize("page", ALL_PAGES)
async def test_oracle_solves_the_page(client, page):
    for seed in range(4):
        session = await client.open("miniwob", sample={"page": page, "seed": seed})
        transcript, reward, metrics = await play(session)
        assert (reward, metrics["raw_reward"]) == (1.0, 1.0), transcript


@pytest.mark.slow
@pytest.mark.parametrize("split", ["test", "test-2", "test-3"])
async def test_oracle_solves_two_hundred_held_out_problems(client, split):
    for index in range(200):
        transcript, reward, _ = await play(await client.open("miniwob", split=split, index=index))
        assert reward == 1.0, transcript


async def test_same_seed_gives_the_same_transcript(client):
    for split in ("test", "test-2", "test-3"):
        sessions = [await client.open("miniwob", split=split, index=3) for _ in range(2)]
        first, second = [await play(session) for session in sessions]
        assert first.transcript == second.transcript


def test_splits_share_no_seed():
    seeds = {
        split: {Miniwob.samples(split)[index]["seed"] for index in range(1000)} for split in Miniwob.splits
    }
    for one in seeds:
        assert len(seeds[one]) == 1000
        assert all(one == other or not seeds[one] & seeds[other] for other in seeds)


async def clicked_in_order(session):
    """Click the elements in order and return the reward."""
    for element in range(1, 20):
        result = await session.step(call("click", element=element))
        if result.done:
            return result.reward
    return 0.0


async def test_clicking_everything_in_order_solves_no_problem_of_level_1(client):
    for index in range(len(task.LEVELS[1])):
        session = await client.open("miniwob", split="test", index=index)
        await session.step(call("press", key="Tab"))
        (fork,) = await session.fork(1)  # opens the seed found above
        assert await clicked_in_order(session) == 0.0
        assert (await play(fork))[1] == 1.0


async def test_problem_given_by_a_seed_equals_the_original_page(client):
    official = {"page": "click-button", "seed": 2}  # its first button is the right one
    assert await clicked_in_order(await client.open("miniwob", sample=official)) == 1.0
    session = await client.open("miniwob", sample=official | {"must_be_read": True})
    assert await clicked_in_order(session) == 0.0
    with pytest.raises(Exception, match="must_be_read is for the pages click-button, click-link"):
        await client.open("miniwob", sample={"page": "find-word", "seed": 2, "must_be_read": True})


async def test_wrong_click_ends_the_episode_without_reward(client):
    session = await client.open("miniwob", sample={"page": "enter-text", "seed": 1})
    right = json.loads((await session.expert()).tool_calls[0].function.arguments)["element"]
    result = await session.step(call("click", element=right % 3 + 1))
    assert (result.terminated, result.reward, result.metrics["raw_reward"]) == (True, 0.0, -1.0)


async def test_unsupported_action_on_an_element_is_an_error_for_the_model(client):
    session = await client.open("miniwob", sample={"page": "choose-list", "seed": 1})
    for move, answer in (
        (call("click", element=99), "no element 99"),
        (call("type", element=1, text="x"), "not a text field"),
        (call("select", element=2, option="x"), "not a list"),
        (call("select", element=1, option="nowhere"), "no such option"),
    ):
        result = await session.step(move)
        assert answer in result.messages[0].content
        assert result.status is SessionStatus.RUNNING
    assert (await play(session))[1] == 1.0


@pytest.mark.extended
@pytest.mark.parametrize("page", ["enter-text", "use-autocomplete-nodelay", "search-engine", "find-word"])
async def test_code_in_a_text_is_not_run(client, page):
    for text in ATTACKS:
        session = await client.open("miniwob", sample={"page": page, "seed": 1})
        lines = session.messages[-1].content.splitlines()
        field = next(int(line[1 : line.index("]")]) for line in lines if "] input" in line)
        result = await session.step(call("type", element=field, text=text))
        if not result.done:
            result = await session.step(call("press", key="Enter"))
        if not result.done:
            lines = result.messages[0].content.splitlines()
            button = next(int(line[1 : line.index("]")]) for line in lines if "] button" in line)
            result = await session.step(call("click", element=button))
        assert result.reward == 0.0
        assert result.metrics.get("success", 0.0) == 0.0


async def test_pages_reach_no_network():
    """A local server that accepts every connection receives none."""
    accepted = []
    server = await asyncio.start_server(lambda *streams: accepted.append(streams), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    fetch = (
        f"() => fetch('http://127.0.0.1:{port}/', {{mode: 'no-cors'}}).then(() => 'open', () => 'refused')"
    )
    visit = await asyncio.to_thread(Miniwob.browser.open, "enter-text", 1)
    answer = await asyncio.to_thread(lambda: Miniwob.browser.run(visit.page.evaluate(fetch)))
    await asyncio.to_thread(visit.close)
    await asyncio.to_thread(Miniwob.browser.close)
    server.close()
    assert (answer, accepted) == ("refused", [])


async def test_fork_continues_from_the_state_of_the_original(client):
    session = await client.open("miniwob", sample={"page": "login-user", "seed": 2})
    await session.step(await session.expert())
    (fork,) = await session.fork(1)
    assert (await play(fork))[1] == (await play(session))[1] == 1.0


async def test_crash_of_chromium_fails_its_sessions_and_the_next_gets_a_new_one(client):
    sample = {"page": "enter-text", "seed": 1}
    session = await client.open("miniwob", sample=sample)
    move = await session.expert()
    browser = Miniwob.browser
    await asyncio.to_thread(lambda: browser.run(browser.chromium.close()))
    result = await session.step(move)
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert "Chromium failed" in result.info["error"]["message"]
    assert (await play(await client.open("miniwob", sample=sample)))[1] == 1.0


async def test_page_that_the_task_does_not_have_fails_and_scores_nothing(client):
    for data in ({"page": "../core/core", "seed": 1}, {"page": "enter-text", "seed": "1"}):
        with pytest.raises(Exception, match="a problem has a page"):
            await client.open("miniwob", sample=data)
