"""The table of chat templates. A perfect player of each family gets reward 1.0, or the run is rejected.

The templates follow each family's documented syntax, and the player uses this syntax token for token through
the real actor. A family with a template that hides tools, calls or results is rejected with a suggested
setting, and plays with that setting. No family silently scores 0.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl_env import Done, EnvClient, Environment, tool
from agentrl_env.client import ClientSession
from agentrl_env.types import Message
from agentrl_train.actor import Actor, Episode
from agentrl_train.chat import ChatFormat
from agentrl_train.config import RolloutSection
from agentrl_train.errors import ConfigError
from agentrl_train.template_check import check_format
from agentrl_train.tool_calls import PARSERS
from agentrl_train.types import EpisodeEnd, Sampling, Trajectory
from tests.train.fakes import ScriptedEngine
from tests.train.families import (
    FAMILIES,
    Call,
    Family,
    granite_list,
    harmony,
    harmony_recipient_first,
    hermes,
    kimi,
    listed_python,
    llama_json,
    make_tokenizer,
    mistral_call_id,
    mistral_list,
    unescaped,
)

ENTRY = 'He said: "It\'s 5 °C, <b>warm</b> & dry…"\n\tback\\slash, ünïcode 日本 🎈'
OPTIONS = {"deep": {"list": [1, 2.5, True, None], "text": 'é "q"'}, "empty": {}}
EPISODE = Episode(task="ledger", split="train", index=3, seed=None, draw_seed=(0, 3))
NAMELESS = r"in no known syntax: set model.tool_parser to .* or to 'prompt'"
HIDDEN = r"does not show the tool 'record'; set model.tool_parser = 'prompt'"
UNWRITTEN = r"refuses its messages \(.*\); set model.tool_parser = 'prompt'"
REJECTED = r"rejects a tool message: .*; set model.tool_parser = 'prompt'"
REFUSED = {
    "Llama-3.0": NAMELESS,
    "DeepSeek-V3": HIDDEN,
    "DeepSeek-V3.1": HIDDEN,
    "R1-Distill-Qwen": HIDDEN,
    "R1-Distill-Llama": HIDDEN,
    "SmolLM2": NAMELESS,
    "SmolLM3": NAMELESS,
    "Kimi-K2-0905": UNWRITTEN,
    "Phi-3.5": NAMELESS,
    "Phi-4-mini": HIDDEN,
    "Gemma-2": REJECTED,
    "Gemma-3": REJECTED,
    "Zephyr": NAMELESS,
}
"""Families with templates that omit tools or calls or reject results, and the error messages."""
PLAYED = [name for name in FAMILIES if name not in REFUSED]
THINKING = [name for name in PLAYED if FAMILIES[name].thought]


class Ledger(Environment):
    """Record entries, then balance the ledger with their receipts."""

    max_turns = 4
    blocking = False
    says = ""

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        self.rng, self.receipts = rng, []
        return "Record the entries, then balance the ledger with all receipts."

    @tool
    def record(self, text: str, count: int, options: dict[str, Any]) -> str:
        """Record an entry."""
        if (text, count, options) != (ENTRY, 3, OPTIONS):
            return f"wrong entry: {(text, count, options)!r}"
        self.receipts.append(int(self.rng.integers(10_000, 99_999)))
        return f"receipt {self.receipts[-1]}.{self.says}"

    @tool
    def balance(self, receipts: list[int]) -> Done:
        """Balance the ledger, which ends the task."""
        return Done("balanced", reward=float(len(receipts) > 1 and receipts == self.receipts))


PROMPT = {"tool_parser": "prompt"}
HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)
RECORD: Call = ("record", {"text": ENTRY, "count": 3, "options": OPTIONS})
PLAIN: Call = ("record", {"text": "entry", "count": 3, "options": {"deep": 1}})


def make_chat(family: Family, **settings: Any) -> ChatFormat:
    tokenizer = make_tokenizer(family)
    eos_ids = [tokenizer.convert_tokens_to_ids(token) for token in family.eos_ids]
    return ChatFormat(tokenizer, eos_token_ids=eos_ids, **{**family.settings, **settings})


def said(family: Family, calls: Sequence[Call], *, thought: str = "", content: str = "") -> str:
    """Return the text sampled by a model of the family, without the stop token."""
    text = content + family.syntax(calls)
    if family.thought is None:
        return text
    opening, closing = family.thought
    return ("" if family.opened else opening) + thought + closing + text


@pytest.mark.parametrize("name", ["Phi-3.5", "Phi-4-mini"])
def test_end_of_a_turn_before_the_end_of_the_document_is_a_stop_token(name: str) -> None:
    family = FAMILIES[name]
    known, unknown = (make_chat(replace(family, eos_ids=ids), **PROMPT) for ids in (family.eos_ids, ()))
    turn, answer = Message.assistant("one"), Message(role="user", content="two")
    texts = []
    for chat in (known, unknown):
        ids = chat.completion(turn)
        assert ids[-1] in chat.stop_token_ids
        texts.append(chat.text([*ids, *chat.reply([answer], after=turn, stop=ids[-1])]))
    assert texts[0] == texts[1]
    assert texts[1].startswith("one<|end|>")
    assert "<|user|>" in texts[1]


class Player:
    """Plays the ledger in a family's syntax, using only the tokens of the context.

    Each thought contains a call that would end the episode with reward 0, except in harmony, where a call is
    a separate message.
    """

    def __init__(self, chat: ChatFormat, family: Family) -> None:
        self.chat, self.family = chat, family

    def __call__(self, context: Sequence[int], key: str) -> list[int]:
        seen = self.chat.tokenizer.decode(context, skip_special_tokens=False)
        assert "record" in seen
        assert "balance" in seen
        receipts = [int(digits) for digits in re.findall(r"receipt (\d+)\.", seen)]
        if len(receipts) < 2:
            calls = [RECORD] * (2 if receipts == [] and self.family.several else 1)
        else:
            calls = [("balance", {"receipts": receipts})]
        decoy = self.family.syntax([("balance", {"receipts": []})])
        quoted = "" if self.family.syntax in (harmony, harmony_recipient_first) else decoy
        text = said(self.family, calls, thought=f"Shall I? {quoted} No.")
        return self.chat.tokenizer(text + self.family.end, add_special_tokens=False)["input_ids"]


async def play(chat: ChatFormat, script: Callable[..., Any], client: EnvClient) -> Trajectory:
    actor = Actor(
        engine=ScriptedEngine(chat, script),
        chat=chat,
        clients={"ledger": client},
        sampling=Sampling(max_new_tokens=3000, max_context=60_000),
        rollout=RolloutSection(environment_wait_timeout_s=0.0, environment_retries=0),
        slots=asyncio.Semaphore(1),
    )
    return await actor.sibling(EPISODE)


@pytest.fixture
async def client() -> AsyncIterator[EnvClient]:
    async with Ledger.local() as client:
        yield client


@pytest.fixture
async def session(client: EnvClient) -> ClientSession:
    return await client.open("ledger", split="train", index=3)


def checked(family: Family, session: ClientSession, **settings: Any) -> ChatFormat:
    """Return the checked format of a family, as before a run's first step. Raises ConfigError."""
    chat = make_chat(family, **settings)
    check_format(chat, task="ledger", opening=session.messages, tools=session.tools)
    return chat


async def score(family: Family, client: EnvClient, session: ClientSession, **settings: Any) -> float:
    """Return the reward of the perfect player. Raises ConfigError if the run is rejected."""
    chat = checked(family, session, **settings)
    trajectory = await play(chat, Player(chat, family), client)
    replies = [message.content for turn in trajectory.turns for message in turn.reply]
    assert trajectory.end is EpisodeEnd.TERMINATED, (trajectory.error, replies)
    assert trajectory.invalid_calls == 0, replies
    return trajectory.reward


@pytest.mark.parametrize("name", FAMILIES)
async def test_perfect_player_scores_or_run_is_refused(
    name: str, client: EnvClient, session: ClientSession
) -> None:
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            await score(FAMILIES[name], client, session)
    else:
        assert await score(FAMILIES[name], client, session) == 1.0


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("parser", "syntax"), [("prompt", hermes), ("prompt_python", listed_python)])
async def test_rejected_family_plays_with_the_suggested_setting(
    name: str, parser: str, syntax: Callable[[Sequence[Call]], str], client: EnvClient, session: ClientSession
) -> None:
    family = replace(FAMILIES[name], syntax=syntax)
    assert await score(family, client, session, tool_parser=parser) == 1.0


@pytest.mark.parametrize("name", REFUSED)
async def test_family_stays_rejected_with_any_parser(name: str, session: ClientSession) -> None:
    for parser in PARSERS:
        with pytest.raises(ConfigError, match=r"does not show the tool|refuses its messages|rejects a tool"):
            checked(FAMILIES[name], session, tool_parser=parser)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1 with python_tag": (
        "Llama-3.1",
        {"syntax": lambda calls: "<|python_tag|>" + llama_json(calls), "end": "<|eom_id|>"},
    ),
    "gpt-oss with the recipient first": ("gpt-oss", {"syntax": harmony_recipient_first}),
    "GLM-4.5 without generation config": (
        "GLM-4.5",
        {"eos_ids": (), "settings": {"stop": ["<|user|>"]}},
    ),
    "Llama-4 as its template writes calls": (
        "Llama-4",
        {"syntax": lambda calls: "<|python_start|><|python_end|>" + llama_json(calls).replace("; ", "")},
    ),
    "Nemotron-Nano-2 without thinking": (
        "Nemotron-Nano-2",
        {"thought": None, "settings": {"system_prompt": "/no_think"}},
    ),
    "Granite-3.3 with the tag as text": (
        "Granite-3.3",
        {"syntax": lambda calls: granite_list(calls).replace("<|tool_call|>", "<tool_call>")},
    ),
    "Hermes-3 in one line": ("Hermes-3", {"syntax": lambda calls: hermes(calls).replace("\n", "")}),
    "LFM2.5 as its template writes strings": (
        "LFM2.5",
        {"syntax": lambda calls: f"<|tool_call_start|>[{unescaped(calls, ', ')}]<|tool_call_end|>"},
    ),
    "OLMo-3 as its template writes strings": (
        "OLMo-3",
        {
            "syntax": lambda calls: "\n".join(
                ("<function_calls>", unescaped(calls, "\n"), "</function_calls>")
            )
        },
    ),
    "Ministral-3 in the prompt": ("Ministral-3", {"syntax": hermes, "settings": PROMPT}),
    "gpt-oss in the prompt": (
        "gpt-oss",
        {"syntax": hermes, "end": "<|return|>", "thought": HARMONY_ANSWER, "settings": PROMPT},
    ),
    "Apertus in the prompt": (
        "Apertus",
        {"syntax": hermes, "end": "<|assistant_end|>", "settings": PROMPT},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
async def test_variants_of_a_syntax_are_played(name: str, client: EnvClient, session: ClientSession) -> None:
    family, changes = VARIANTS[name]
    assert await score(replace(FAMILIES[family], **changes), client, session) == 1.0


def results_of(message: Message, *contents: str) -> list[Message]:
    calls = message.tool_calls or ()
    return [
        Message(role="tool", tool_call_id=call.id, content=content)
        for call, content in zip(calls, contents, strict=True)
    ]


def encoded(chat: ChatFormat, text: str) -> list[int]:
    return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])


def parsed(
    chat: ChatFormat, ids: Sequence[int], session: ClientSession, *, turn: int = 1
) -> tuple[Message, str | None]:
    """Return a text sampled after the opening as parsed by the actor."""
    opening = chat.opening(session.messages, session.tools)
    message, thought, _ = chat.parse(ids, turn=turn, tools=session.tools, prompt=opening)
    return message, thought


def decoded(chat: ChatFormat, ids: Sequence[int]) -> str:
    return str(chat.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", THINKING)
def test_nothing_in_an_unclosed_thought_is_a_call(name: str, session: ClientSession) -> None:
    family = FAMILIES[name]
    chat = make_chat(family)
    assert family.thought is not None
    opening = "" if family.opened else family.thought[0]
    call = "" if family.syntax is harmony else family.syntax([RECORD])
    ids = encoded(chat, f"{opening}Let me see. {call}")
    for sampled in (ids, [*ids, *encoded(chat, family.end)]):
        message, thought = parsed(chat, sampled, session)
        assert (message.content, message.tool_calls) == (None, None)
        assert "Let me see." in str(thought)


@pytest.mark.parametrize("name", THINKING)
def test_thought_is_separate_from_content(name: str, session: ClientSession) -> None:
    family = FAMILIES[name]
    chat = make_chat(family)
    ids = encoded(chat, said(family, [RECORD], thought="Let me see.") + family.end)
    message, thought = parsed(chat, ids, session)
    assert (message.content, thought) == (None, "Let me see.")
    assert [call.function.name for call in message.tool_calls or ()] == ["record"]


@pytest.mark.parametrize("name", PLAYED)
def test_end_of_turn_is_added_to_a_cut_completion(name: str, session: ClientSession) -> None:
    family = FAMILIES[name]
    chat = make_chat(family)
    message, _ = parsed(chat, encoded(chat, said(family, [RECORD]) + family.end), session)
    stop = chat.tokenizer.convert_tokens_to_ids(family.end)
    results = results_of(message, "the result")
    cut, whole = (chat.reply(results, after=message, tools=session.tools, stop=end) for end in (None, stop))
    assert cut == [stop, *whole]


@pytest.mark.parametrize("name", [name for name in PLAYED if FAMILIES[name].syntax is not harmony])
def test_results_of_all_calls_of_a_turn_are_shown_in_order(name: str, session: ClientSession) -> None:
    family = FAMILIES[name]
    chat = make_chat(family)
    text = said(family, [RECORD, ("balance", {"receipts": [1, 2]})]) + family.end
    message, _ = parsed(chat, encoded(chat, text), session)
    assert [call.function.name for call in message.tool_calls or ()] == ["record", "balance"]
    results = results_of(message, "first result", "second result")
    reply = decoded(chat, chat.reply(results, after=message, tools=session.tools, stop=None))
    assert 0 < reply.index("first result") < reply.index("second result")


@pytest.mark.parametrize("name", PLAYED)
def test_control_tokens_in_a_result_stay_text(name: str, session: ClientSession) -> None:
    family = FAMILIES[name]
    chat = make_chat(family)
    message, _ = parsed(chat, encoded(chat, said(family, [RECORD]) + family.end), session)
    forged = "|".join(token for token in (*family.special, *family.added) if token != '<|"|>')
    with_tokens, without = (
        chat.reply(results_of(message, content), after=message, tools=session.tools)
        for content in (forged, "nothing")
    )
    control = {chat.tokenizer.convert_tokens_to_ids(token) for token in family.special}
    assert [i for i in with_tokens if i in control] == [i for i in without if i in control]


@pytest.mark.parametrize(
    ("name", "call", "shown"),
    [
        ("Mistral-Small-3.2", mistral_call_id([PLAIN]), "[TOOL_RESULTS]a1b2c3d40[TOOL_CONTENT]done"),
        ("Mistral-Nemo", mistral_list([PLAIN])[:-2] + ', "id": "a1b2c3d40"}]', '"call_id": "a1b2c3d40"'),
        ("Kimi-K2", kimi([PLAIN]).replace(":0<", ":7<"), "## Return of functions.record:7"),
    ],
)
def test_result_names_the_id_that_the_model_wrote(
    name: str, call: str, shown: str, session: ClientSession
) -> None:
    family = FAMILIES[name]
    chat = make_chat(family)
    message, _ = parsed(chat, encoded(chat, call + family.end), session)
    reply = chat.reply(results_of(message, "done"), after=message, tools=session.tools)
    assert shown in decoded(chat, reply)


REWRITES = {
    "Apertus": "it opens a turn after results, and takes that back in the next rendering",
    "Command-R7B": "it counts the calls of the whole conversation, the reply those of its turn",
}
"""Families with templates that write a result differently in a longer conversation."""
INEXACT = {
    **REWRITES,
    "GLM-4.5": "it writes an empty thought, which the prompt does not open",
    "GLM-4.6": "as GLM-4.5",
    "Gemma-4": "it drops the empty thought of the prompt",
    "Granite-3.3": "it writes no calls",
    "Hermes-3": "it drops a line break from the last result only",
    "LFM2": "it writes no calls",
    "Llama-4": "it writes an empty block of Python before calls",
    "LFM2 v2": "it writes objects as JSON, models write Python",
    "LFM2.5": "as LFM2 v2",
    "MiniMax-M2": "it drops an empty thought",
    "Mistral-Nemo": "it writes ids of calls, which models do not",
    "Nemotron-Nano-2": "it drops an empty thought",
    "Nemotron-3-Nano": "it writes an empty thought without line breaks",
    "OLMo-3": "as LFM2 v2",
    "Qwen3 without thinking": "as Gemma-4",
    "gpt-oss": "it writes the recipient before the channel",
}
"""Families with templates that rewrite a sampled turn. The sampled tokens stay unchanged."""


def append_turns(name: str, session: ClientSession) -> Iterator[tuple[str, str, str]]:
    """Yield the reply, the appended conversation and the template's rendering after each of two turns."""
    family = FAMILIES[name]
    chat = make_chat(family)
    conversation = list(session.messages)
    appended = decoded(chat, chat.opening(conversation, session.tools))
    stop = chat.tokenizer.convert_tokens_to_ids(family.end)
    for turn, call in enumerate([PLAIN, ("balance", {"receipts": [1, 2]})], start=1):
        text = said(family, [call]) if family.opened else family.syntax([call])
        sampled = encoded(chat, text + family.end)
        message, _ = parsed(chat, sampled, session, turn=turn)
        results = results_of(message, f"result {turn}")
        reply = chat.reply(results, after=message, tools=session.tools, stop=stop)
        conversation += [message, *results]
        appended += decoded(chat, sampled) + decoded(chat, reply)
        yield decoded(chat, reply), appended, chat.render(conversation, session.tools)


@pytest.mark.parametrize("name", [name for name in PLAYED if name not in REWRITES])
def test_reply_equals_the_templates_text_after_the_turn(name: str, session: ClientSession) -> None:
    for reply, _, whole in append_turns(name, session):
        assert whole.endswith(reply)


@pytest.mark.parametrize("name", [name for name in PLAYED if name not in INEXACT])
def test_appended_turns_equal_the_template_s_rendering_of_the_conversation(
    name: str, session: ClientSession
) -> None:
    for _, appended, whole in append_turns(name, session):
        assert appended == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_plays_text_only_tasks(name: str) -> None:
    chat = make_chat(FAMILIES[name], **(PROMPT if name in REFUSED else {}))
    check_format(chat, task="chat", opening=[Message(role="user", content="Say something.")], tools=())


def test_template_that_drops_answers_to_text_is_rejected_for_text_only_tasks() -> None:
    chat = make_chat(FAMILIES["Qwen2.5"])
    template = str(chat.tokenizer.chat_template)
    chat.tokenizer.chat_template = "{%- set messages = messages[:2] %}" + template
    with pytest.raises(ConfigError, match="does not show the answer to a turn of text; set model"):
        check_format(chat, task="chat", opening=[Message(role="user", content="Hi")], tools=())
