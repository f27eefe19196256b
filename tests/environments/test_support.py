"""Support: problems, customers and rewards."""

import json
import sys
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.hosting.loader import load_target
from tests.env.evaluation.chat_server import ChatServer, completion
from tests.environments.play import play

pytestmark = pytest.mark.environments

FOLDER = Path(__file__).parents[2] / "environments" / "support"
DESKS = {"support": load_target(str(FOLDER))}
DESKS |= {name: load_target(str(FOLDER / name)) for name in ("airline", "telecom")}
PACKAGE = DESKS["support"].__module__.rpartition(".")[0]
desk, customer, shop = (sys.modules[f"{PACKAGE}.{name}"] for name in ("desk", "customer", "shop.problems"))
KINDS = {"support": shop.KINDS, "airline": sys.modules[f"{PACKAGE}.airline.draws"].KINDS}
KINDS["telecom"] = sys.modules[f"{PACKAGE}.telecom.problems"].KINDS
every_desk = pytest.mark.parametrize("task", DESKS)
every_level = pytest.mark.parametrize("level", [1, 2, 3])


@pytest.fixture
async def client():
    async with EnvClient.local(*DESKS.values()) as client:
        yield client


def split(level, name="test"):
    return f"{name}-{level}" if level > 1 else name


def index_of(level, *kinds):
    """Return the first test problem with only these kinds of request."""
    samples = shop.problems("test", level)
    return next(i for i in range(200) if {w["kind"] for w in samples[i]["requests"]} <= set(kinds))


@every_desk
@every_level
async def test_expert_solves_every_kind_of_request_deterministically(client, task, level):
    kinds = set()
    for index in range(30):
        session = await client.open(task, split=split(level), index=index)
        kinds |= {wish["kind"] for wish in session.sample.data["requests"]}
        played = await play(session)
        assert (played.reward, played.metrics["records"], played.metrics["told"]) == (1.0, 1.0, 1.0)
        assert played.metrics["success"] == 1.0
    assert kinds == set(KINDS[task][level])
    assert await play(await client.open(task, split=split(level), index=29)) == played


@pytest.mark.slow
@every_desk
@every_level
async def test_two_hundred_episodes_of_the_expert_succeed_and_leave_nothing_behind(client, task, level):
    for index in range(200):
        async with await client.open(task, split=split(level, "train"), index=index) as session:
            hidden = customer.instructions(DESKS[task].problem(session.sample.data))
            played = await play(session)
            assert played.reward == 1.0
            assert not any(hidden in text or "Only if you are asked" in text for text in played.transcript)


@every_desk
@every_level
def test_test_split_has_a_thousand_different_problems_and_no_customers_of_train(task, level):
    test, train = (DESKS[task].samples(split(level, name)) for name in ("test", "train"))
    drawn = [test[index] for index in range(len(test))]
    assert len({json.dumps([d["customer"], d["requests"]]) for d in drawn}) == len(drawn) == 1000
    assert len(train) == 10_000
    assert not {d["customer"] for d in drawn} & {train[index]["customer"] for index in range(500)}


async def test_same_calls_without_the_required_fact_earn_nothing(client):
    session = await client.open("support", index=index_of(1, "cancel"), split="test")
    while not session.status.final:
        move = await session.expert()
        result = await session.step(move if move.tool_calls else "Your order has been cancelled.")
    assert (result.reward, result.metrics["records"], result.metrics["told"]) == (0.0, 1.0, 0.0)


async def test_refusal_earns_its_reward_with_the_date_and_without_changes(client):
    index = index_of(1, "late")
    rewards = []
    for extra in (False, True):
        session = await client.open("support", index=index, split="test")
        data = session.sample.data["requests"][0]
        if extra:
            card = shop.ShopProblem(session.sample.data).customer["payment_methods"][0]["payment_id"]
            given = {"order_id": data["order"], "item_ids": data["items"], "refund_to": card}
            await session.step(ToolCall.of("return_items", **given))
        rewards.append((await play(session)).reward)
    assert rewards == [1.0, 0.0]


async def test_facts_in_thoughts_and_in_long_messages_do_not_count(client):
    for hide in ("<think>{}</think>It has been cancelled.", "It has been cancelled. {}" + " and so on" * 70):
        session = await client.open("support", index=index_of(1, "cancel"), split="test")
        while not session.status.final:
            move = await session.expert()
            result = await session.step(move if move.tool_calls else hide.format(move.content))
        assert (result.reward, result.metrics["told"]) == (0.0, 0.0)


async def test_customer_gives_up_on_messages_that_it_does_not_understand(client):
    session = await client.open("support", index=0, split="test-2")
    texts = [(await session.step("The weather is nice.")).messages[0].content for _ in range(3)]
    assert texts == [customer.LOST, customer.LOST, customer.GIVES_UP]
    assert session.status.final
    assert session.last.reward == 0.0


async def test_customers_understand_other_wordings(client):
    session = await client.open("support", index=index_of(2, "cancel"), split="test-2")
    said = await session.step("Hi! To help you, please provide your e-mail address.")
    assert "email address" in said.messages[0].content
    said = await session.step("Got it. Could you share the reason for the cancellation?")
    assert said.messages[0].content in shop.REASONS.values()
    said = await session.step("Thanks. I will cancel the order now, shall I go ahead?")
    assert said.messages[0].content == "Yes, please."
    said = await session.step("I have cancelled your order. Is there anything else I can do?")
    assert said.terminated


async def test_model_can_play_the_customer(client, monkeypatch):
    def reply(body):
        turns = sum(message["role"] == "user" for message in body["messages"])
        return completion(text="Cancel it, please." if turns == 1 else "Thank you. [END]")

    with ChatServer(reply) as server:
        endpoint = customer.Endpoint(url=server.url)
        monkeypatch.setattr(desk, "ENDPOINT", endpoint)
        session = await client.open("support", index=0, split="test-2")
        result = await session.step(Message.assistant("It is cancelled."))
    assert session.messages[-1].content == "Cancel it, please."
    assert "Only if you are asked" in server.requests[0]["messages"][0]["content"]
    assert (result.terminated, result.reward) == (True, 0.0)
    assert result.metrics["user_requests"] == 2


@every_desk
async def test_slips_of_a_noisy_expert_fail_its_episodes(task):
    clumsy = type(DESKS[task].__name__, (DESKS[task],), {"name": task, "expert_noise": 1.0})
    async with EnvClient.local(clumsy) as client:
        for index in range(5):
            assert (await play(await client.open(task, split="test", index=index))).reward == 0.0


async def test_expert_solves_the_simple_requests_of_the_example():
    example = load_target(f"{FOLDER.parents[1] / 'examples/users/desk.py'}:Desk")
    kinds = set()
    async with EnvClient.local(example) as client:
        for index in range(20):
            session = await client.open("desk", split="test", index=index)
            kinds |= {wish["kind"] for wish in session.sample.data["requests"]}
            assert (await play(session)).reward == 1.0
    assert kinds == {"cancel", "address", "shipped"}
