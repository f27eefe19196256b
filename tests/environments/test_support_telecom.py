"""Telecom: the phone that only the customer can use, and refusals."""

import json
import sys
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.hosting.loader import load_target
from agentrl_env.session.state_codec import decode, encode
from tests.env.evaluation.chat_server import ChatServer, completion
from tests.environments.play import play

pytestmark = pytest.mark.environments

FOLDER = Path(__file__).parents[2] / "environments" / "support" / "telecom"
TASK = load_target(str(FOLDER))
PACKAGE = TASK.__module__.rpartition(".")[0]
hearing, phone, problems = (sys.modules[f"{PACKAGE}.{name}"] for name in ("hearing", "phone", "problems"))
desk, customer = (sys.modules[f"{PACKAGE.rpartition('.')[0]}.{name}"] for name in ("desk", "customer"))


@pytest.fixture
async def client():
    async with EnvClient.local(TASK) as client:
        yield client


def split(level):
    return f"test-{level}" if level > 1 else "test"


def index_of(level, kind, suits=lambda wish: True):
    """Return the first test problem with only one request of this kind, or with any at level 3."""
    samples = problems.problems("test", level)
    for index in range(1000):
        wishes = samples[index]["requests"]
        if any(w["kind"] == kind and suits(w) for w in wishes) and (level == 3 or len(wishes) == 1):
            return index
    raise AssertionError(kind)


def with_fault(setting, *, complaint=None):
    return lambda wish: complaint in (None, wish["complaint"]) and problems.faults_of(wish) == [setting]


async def open_fault(client, setting, level=1, **options):
    index = index_of(level, "phone", with_fault(setting, **options))
    return await client.open("telecom", index=index, split=split(level))


def change(setting, value):
    return ("change", {"setting": setting, "value": value})


def look(*settings):
    return [("look", {"setting": setting}) for setting in settings]


OUT_AND_IN = [("remove_sim", {}), ("insert_sim", {})]
RESTART, TEST = ("restart", {}), ("test_service", {})
HEARD = {
    "Could you please switch airplane mode off on your phone?": [change("airplane mode", "off")],
    "Please disable flight mode and enable mobile data.": [
        change("airplane mode", "off"),
        change("mobile data", "on"),
    ],
    "Turn airplane mode off and mobile data on.": [
        change("airplane mode", "off"),
        change("mobile data", "on"),
    ],
    "Is airplane mode turned on or off?": look("airplane mode"),
    "Can you check whether data roaming is enabled?": look("data roaming"),
    "Please check these settings:\n- Airplane mode\n- Mobile data": look("airplane mode", "mobile data"),
    "Is mobile data on? If not, please turn it on.": [change("mobile data", "on")],
    "Make sure that the VPN is off.": [change("VPN", "off")],
    "Does it work now? If not, please restart your phone.": [TEST],
    "Please reboot the device, then try to make a call.": [RESTART, TEST],
    "Turn the phone off and on again.": [RESTART],
    "Please remove the SIM, wait ten seconds, and reinsert it.": OUT_AND_IN,
    "Could you eject the SIM card and insert it again?": OUT_AND_IN,
    "Your PUK is 12345678. Please type it in.": [("enter_puk", {"code": "12345678"})],
    "Enter this code to unlock the SIM card: 1234 5678": [("enter_puk", {"code": "12345678"})],
    "Change your preferred network type from 3G to 5G, please.": [change("network mode", "5G")],
    "What is your network mode set to?": look("network mode"),
    "Turn on automatic network selection.": [change("network selection", "automatic")],
    "Please change the APN to web.corva and restart the phone.": [
        change("access point", "web.corva"),
        RESTART,
    ],
    "What do you see in the status bar?": [("look_at_screen", {})],
    "Disable data saver and leave the VPN as it is.": [change("data saver", "off")],
    "I have turned on roaming for your line. It costs 3.50 a day.": [],
    "Should I turn on roaming for your line?": [],
    "Please do not change data roaming.": [],
    "If it still does not work, turn off the VPN.": [],
    "Where should I send the new SIM card?": [],
}


@pytest.mark.parametrize(("message", "uses"), HEARD.items())
def test_customers_understand_other_words_for_the_phone(message, uses):
    assert hearing.understand([message]) == uses


def test_pronoun_refers_to_the_setting_that_was_mentioned_last():
    assert hearing.understand(["Is airplane mode on?", "Please turn it off."]) == [
        change("airplane mode", "off")
    ]
    assert hearing.understand(["Is the SIM card in place?", "Take it out and put it back in."]) == OUT_AND_IN


@pytest.mark.parametrize("setting", [setting for setting in problems.MEND if setting != "access point"])
async def test_phone_works_after_the_change_that_the_policy_names(client, setting):
    session = await open_fault(client, setting)
    played = await play(session)
    assert (played.reward, played.metrics["phone"]) == (1.0, 1.0)
    assert phone.WORKS in played.transcript[-1]


async def test_changing_a_correct_setting_earns_nothing(client):
    session = await open_fault(client, "airplane mode")
    await session.step("Please turn on data roaming in the phone.")
    played = await play(session)
    assert (played.reward, played.metrics["records"], played.metrics["phone"]) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("complaint", phone.TROUBLES)
async def test_changing_every_setting_earns_nothing(client, complaint):
    index = index_of(2, "phone", lambda wish: wish["complaint"] == complaint)
    session = await client.open("telecom", index=index, split="test-2")
    puk = session.sample.data["requests"][0]["line"]
    puk = TASK.problem.tools.tables["lines"][puk]["sim"]["puk"]
    for text in problems.MEND.values():
        result = await session.step(text.format(puk=puk, point="web.corva"))
    result = await session.step("Does it work now?")
    assert phone.WORKS in result.messages[0].content
    assert (result.terminated, result.reward, result.metrics["phone"]) == (True, 0.0, 0.0)


async def test_customer_does_not_leave_while_the_phone_does_not_work(client):
    session = await open_fault(client, "SIM card")
    said = await session.step("I am sorry to hear that. It has been solved. Is there anything else?")
    assert said.messages[0].content == phone.TROUBLES["calls"].still
    await session.step("Please take the SIM card out and put it back.")
    said = await session.step("Does it work now?")
    assert said.messages[0].content == phone.TROUBLES["calls"].still
    said = await session.step("Please restart the phone. Is it working?")
    assert (said.terminated, said.reward) == (True, 1.0)


async def test_wrong_puk_does_not_unlock_the_sim_card(client):
    session = await open_fault(client, "SIM lock")
    said = await session.step("Please enter the PUK 00000000.")
    assert said.messages[0].content == "The phone says that this PUK is wrong."
    assert (await play(session)).reward == 1.0


@pytest.mark.parametrize("kind", ["cheaper", "owing", "ended", "late"])
async def test_refusal_earns_its_reward_only_with_its_date_or_amount(client, kind):
    level = 1 if kind in problems.KINDS[1] else 3
    index, rewards = index_of(level, kind), []
    fact = next(r.told[0] for r, w in requests_of(level, index) if w["kind"] == kind)
    for hide in ("", "later"):
        session = await client.open("telecom", index=index, split=split(level))
        while not session.status.final:
            move = await session.expert()
            if hide and not move.tool_calls:
                move = Message.assistant(move.content.replace(fact, hide))
            result = await session.step(move)
        rewards.append(result.reward)
        assert result.metrics["records"] == 1.0
    assert rewards == [1.0, 0.0]


def requests_of(level, index):
    sample = problems.problems("test", level)[index]
    return list(zip(TASK.problem(sample).requests, sample["requests"], strict=True))


async def test_resumed_line_of_a_customer_who_does_not_pay_earns_nothing(client):
    index = index_of(1, "owing", lambda wish: wish["wish"] == "resume")
    session = await client.open("telecom", index=index, split="test")
    await session.step(ToolCall.of("resume_line", number=session.sample.data["requests"][0]["line"]))
    played = await play(session)
    assert (played.reward, played.metrics["records"], played.metrics["told"]) == (0.0, 0.0, 1.0)


async def test_forks_in_the_middle_have_their_own_phones(client):
    session = await open_fault(client, "airplane mode", level=2)
    await session.step("Please turn off airplane mode.")
    (fork,) = await session.fork()
    await fork.step("Please turn on airplane mode again.")
    ends = [await one.step("Does it work now?") for one in (session, fork)]
    assert [(end.terminated, end.reward) for end in ends] == [(True, 1.0), (False, 0.0)]


async def test_state_continues_on_another_server(client):
    index = index_of(2, "phone", with_fault("mobile data"))
    sample = (await client.open("telecom", index=index, split="test-2")).sample
    first, second = TASK(), TASK()
    await first.reset(sample, None)
    await first.respond("Please turn on mobile data and data saver.")
    second.restore(decode(encode(first.snapshot(), TASK), TASK))
    ends = [await one.respond("Is data saver on? Does it work now?") for one in (first, second)]
    assert ends[0].content == ends[1].content
    assert ends[0].content.startswith("Data saver is on.")


def model_customer(body):
    """Play a customer who follows all instructions for the phone."""
    last = body["messages"][-1]
    turns = sum(message["role"] == "user" for message in body["messages"])
    if last["role"] == "tool":
        return completion(text=last["content"] + " [END]" * (last["content"] == phone.WORKS))
    if turns == 1:
        return completion(text="My phone has no service.")
    if "airplane" in last["content"]:
        value = "off" if "off" in last["content"] else "on"
        return completion(ToolCall.of("change", setting="airplane mode", value=value))
    return completion(ToolCall.of("test_service"))


async def test_model_that_plays_the_customer_has_a_phone_that_forks_and_restores(client, monkeypatch):
    with ChatServer(model_customer) as server:
        monkeypatch.setattr(desk, "ENDPOINT", customer.Endpoint(url=server.url))
        session = await open_fault(client, "airplane mode", level=2)
        said = await session.step("Please switch off airplane mode.")
        (fork,) = await session.fork()
        await fork.step("Please switch airplane mode back on, sorry.")
        ends = [await one.step("Does it work?") for one in (session, fork)]
        other = TASK()
        state = {"data": session.sample.data, "seed": 0, "changes": {}, "calls": []}
        calls = [{"call": ToolCall.of("change", setting="airplane mode", value="off").model_dump()}]
        calls[0]["answer"] = ""
        other.restore({**state, "lines": [{"text": "It is off.", "calls": calls}]})
        restored = await other.respond("Does it work?")
    assert said.messages[0].content == "Airplane mode is off now."
    assert (ends[0].terminated, ends[0].reward, ends[0].metrics["phone"]) == (True, 1.0, 1.0)
    assert ends[1].messages[0].content == phone.TROUBLES["calls"].still
    assert restored.content == phone.WORKS
    names = {spec["function"]["name"] for spec in server.requests[0]["tools"]}
    assert {"look", "change", "restart", "enter_puk", "test_service"} <= names


async def test_policy_does_not_see_the_phone(client):
    session = await open_fault(client, "SIM lock", level=2)
    names = {tool.function.name for tool in session.tools}
    assert len(names) == 15
    assert not names & {"look", "change", "restart"}
    assert "SIM lock" not in json.dumps([message.content for message in session.messages])
