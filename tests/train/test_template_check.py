"""The self-check rejects formats that lose tools, calls or results, and the suggested settings fix them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from agentrl_env import Done, Environment, tool
from agentrl_env.types import FunctionSpec, Message, ToolCall, ToolSpec
from agentrl_train.actor import Actor
from agentrl_train.chat import ChatFormat
from agentrl_train.config import AlgorithmSection, ModelSection, RolloutSection, TrainSection
from agentrl_train.errors import ConfigError, EngineError
from agentrl_train.models.loading import chat_format
from agentrl_train.telemetry.diagnosis import Diagnosis, cut_turns_warnings, no_calls_warning
from agentrl_train.template_check import check_format, check_sessions, describe_completions
from agentrl_train.tool_calls import PARSERS
from agentrl_train.types import Sampling, Step, TaskSource, TrajectoryGroup
from tests.tiny_models import CHAT_TEMPLATE, make_model, make_tokenizer
from tests.train.fakes import EPISODE, Countdown, ScriptedEngine

SOURCES = [TaskSource(task="countdown")]
WITHOUT_TOOLS = CHAT_TEMPLATE[CHAT_TEMPLATE.index("{%- for message") :]
WITHOUT_RESULTS = CHAT_TEMPLATE.replace(
    "{{ message.content or '' }}", "{{ message.content if message.role != 'tool' }}"
)
OTHER_CALLS = CHAT_TEMPLATE.replace(
    "{{ call.function | tojson }}", "{{ call.function.name }}: {{ call.function.arguments }}"
)
WITHOUT_ROLES = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def format_of(template: str, **settings: object) -> ChatFormat:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return ChatFormat(tokenizer, **settings)  # type: ignore[arg-type]


async def played(chat: ChatFormat, task: type[Environment], said: Message | Sequence[int]) -> TrajectoryGroup:
    """Check the format with a task, and play an episode with a policy that repeats one completion."""
    async with task.local() as client:
        await check_sessions(chat, {"countdown": client}, sources=SOURCES)
        actor = Actor(
            engine=ScriptedEngine(chat, lambda context, key: said),
            chat=chat,
            clients={"countdown": client},
            sampling=Sampling(max_new_tokens=200, max_context=4000),
            rollout=RolloutSection(environment_wait_timeout_s=0.0),
            slots=asyncio.Semaphore(1),
        )
        group, failures = await actor.group(EPISODE, size=1, group_id=0, admitted_version=0)
    assert not failures, failures[0].error
    return group


DOWN = Message.assistant(None, ToolCall.of("down"))


async def test_format_of_a_whole_template_passes_and_plays() -> None:
    group = await played(format_of(CHAT_TEMPLATE), Countdown, DOWN)
    assert group.trajectories[0].reward == 1.0


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (WITHOUT_TOOLS, "does not show the tool 'down'.*tool_parser = 'prompt'"),
        (WITHOUT_RESULTS, "does not show the result of 'down'.*tool_parser = 'prompt'"),
        (OTHER_CALLS, "writes calls in another syntax than 'hermes'; set model.tool_parser"),
    ],
)
async def test_template_that_loses_a_part_is_rejected_with_the_setting_that_fixes_it(
    template: str, reason: str
) -> None:
    async with Countdown.local() as client:
        with pytest.raises(ConfigError, match=f"task countdown cannot be played.*{reason}"):
            await check_sessions(format_of(template), {"countdown": client}, sources=SOURCES)


@pytest.mark.parametrize(
    ("parser", "call", "result"),
    [
        ("prompt", '{"name": "down"', "<tool_response>\n2\n</tool_response>"),
        ("prompt_python", "[down(", "Result: 2<"),
    ],
)
@pytest.mark.parametrize("template", [WITHOUT_TOOLS, WITHOUT_ROLES, CHAT_TEMPLATE])
async def test_tools_are_in_the_prompt_if_the_template_supports_none(
    template: str, parser: str, call: str, result: str
) -> None:
    chat = format_of(template, tool_parser=parser, system_prompt="Be brief.")
    assert chat.syntax == parser
    group = await played(chat, Countdown, DOWN)
    first, second, _ = group.trajectories[0].turns
    assert group.trajectories[0].reward == 1.0
    opening = chat.text(first.prompt_ids)
    assert "Be brief." in opening
    assert '"name": "down"' in opening
    assert call in chat.text(first.completion.token_ids)
    assert result in chat.text(second.prompt_ids)


def test_template_without_known_calls_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"no known syntax: set model\.tool_parser .* hermes.*, prompt"):
        format_of(WITHOUT_ROLES.replace("{%- if", "{%- if message.role != 'tool' and"))


def test_template_that_drops_the_task_is_refused() -> None:
    chat = format_of(
        CHAT_TEMPLATE.replace("{{ message.content or '' }}", "{{ message.content if not loop.first }}")
    )
    with pytest.raises(ConfigError, match="does not show the opening's user message"):
        check_format(chat, task="t", opening=[Message(role="user", content="Go.")], tools=())


async def test_unreachable_task_is_left_to_the_run() -> None:
    Countdown.broken_resets = 1
    async with Countdown.local() as client:
        await check_sessions(format_of(WITHOUT_TOOLS), {"countdown": client}, sources=SOURCES)


async def test_context_without_room_for_a_turn_is_refused_before_the_run() -> None:
    chat, sampling = format_of(CHAT_TEMPLATE), Sampling(max_context=64, max_new_tokens=40)
    async with Countdown.local() as client:
        with pytest.raises(EngineError, match=r"raise engine\.max_context from 64 to at least \d+$"):
            await check_sessions(chat, {"countdown": client}, sources=SOURCES, sampling=sampling)
        await check_sessions(chat, {"countdown": client}, sources=SOURCES, sampling=Sampling())


class Listening(Environment):
    """Say the word, aloud."""

    name = "countdown"
    heard: ClassVar[list[str]] = []

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        return "Say the word."

    @tool
    def down(self) -> str:
        """Do nothing."""
        return "nothing"

    def respond(self, text: str) -> str | Done:
        self.heard.append(text)
        return Done("well", reward=float("word" in text))


@pytest.mark.parametrize(
    ("said", "heard", "thought"),
    [
        ("<think>the word</think>Hello.", "Hello.", "the word"),
        ('<think>the word <tool_call>{"name": "down", "arguments": {}}</tool_call>', "", "the word"),
    ],
)
async def test_environment_never_sees_a_thought(said: str, heard: str, thought: str) -> None:
    Listening.heard.clear()
    chat = format_of(CHAT_TEMPLATE)
    ids = chat.tokenizer(f"{said}<|im_end|>", add_special_tokens=False).input_ids
    (trajectory,) = (await played(chat, Listening, ids)).trajectories
    assert trajectory.reward == 0.0
    assert Listening.heard == [heard]
    assert trajectory.turns[0].message.tool_calls is None
    assert trajectory.turns[0].thought is not None
    assert thought in trajectory.turns[0].thought


async def test_step_without_a_call_gives_a_warning_that_quotes_a_completion() -> None:
    chat = format_of(CHAT_TEMPLATE)
    group = await played(chat, Listening, Message.assistant("down()"))
    warning = no_calls_warning([group], chat=chat)
    assert warning is not None
    assert "'down()<|im_end|>'" in warning
    assert no_calls_warning([await played(chat, Countdown, DOWN)], chat=chat) is None


async def test_many_turns_cut_by_the_token_limit_give_one_warning_per_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat = format_of(CHAT_TEMPLATE)
    cut = await played(chat, Listening, chat.tokenizer("I go", add_special_tokens=False).input_ids)
    whole = await played(chat, Countdown, DOWN)
    assert cut_turns_warnings([whole]) == {}
    (warning,) = cut_turns_warnings([cut]).values()
    assert warning.startswith("100% of the turns of countdown were cut off by engine.max_new_tokens")
    diagnosis = Diagnosis(chat, algorithm=AlgorithmSection(), train=TrainSection())
    step = Step(groups=[cut])
    for _ in range(2):
        diagnosis.examine(step, {"loss_tokens": 1.0})
    assert caplog.text.count("of the turns of countdown were cut off") == 1


PICTURE = [
    {"type": "text", "text": "Look."},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
]


class Pictures(Environment):
    """Shows a picture in the opening, or after a turn."""

    name = "countdown"
    max_turns = 2
    in_opening = True

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        return Message(role="user", content=PICTURE if self.in_opening else "Go.")

    def respond(self, text):  # type: ignore[no-untyped-def]
        return Message(role="user", content="Go on." if self.in_opening else PICTURE)


@pytest.mark.parametrize("in_opening", [True, False])
async def test_unsupported_pictures_give_one_warning_per_task(
    in_opening: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pictures, "in_opening", in_opening)
    warning = "task countdown sends image_url in messages, which the policy reads as [image_url]"
    chat = format_of(CHAT_TEMPLATE)
    async with Pictures.local() as client:
        prompts = await check_sessions(chat, {"countdown": client}, sources=SOURCES, sampling=Sampling())
    assert caplog.text.count(warning) == in_opening
    group = await played(chat, Pictures, Message.assistant("I see."))
    caplog.clear()
    hidden = {one.task for one in prompts if one.hidden}
    diagnosis = Diagnosis(chat, algorithm=AlgorithmSection(), train=TrainSection(), hidden=hidden)
    for _ in range(2):
        diagnosis.examine(Step(groups=[group]), {"loss_tokens": 1.0})
    assert caplog.text.count(warning) == (not in_opening)


def test_settings_of_the_model_reach_the_format(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(CHAT_TEMPLATE + "{% if thinking %}<think>\n{% endif %}")
    model, tokenizer = make_model(), make_tokenizer()
    model.generation_config.eos_token_id = [2, 0]
    settings = ModelSection(
        path="policy",
        chat_template=str(file),
        template_kwargs={"thinking": True},
        stop=("</tool_call>",),
        system_prompt="Be brief.",
    )
    chat = chat_format(settings, model=model, tokenizer=tokenizer)
    assert set(chat.stop_token_ids) == {0, 2, 4}
    opening = chat.opening([Message(role="user", content="hello")], ())
    text = chat.text(opening)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert text.endswith("<think>\n")
    message, thought, _ = chat.parse(chat.tokenizer("just a thought").input_ids, turn=1, prompt=opening)
    assert (message.content, message.tool_calls, thought) == (None, None, "just a thought")


def test_stop_text_of_several_tokens_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"model\.stop: 'END' is not one token"):
        format_of(CHAT_TEMPLATE, stop=["END"])


def test_unknown_parser_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"model\.tool_parser: there is no 'herms'; choose one of .*hermes"):
        format_of(CHAT_TEMPLATE, tool_parser="herms")


def test_every_parser_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/chat-formats.md").read_text()
    assert [name for name in PARSERS if f"`{name}`" not in page] == []


def test_endlessly_recursive_template_is_rejected_with_the_setting_that_fixes_it() -> None:
    endless = "{% macro of(schema) %}{{ of(schema) }}{% endmacro %}{% if tools[0].function.name != 'probe' %}"
    chat = format_of(endless + "{{ of(tools) }}{% endif %}" + CHAT_TEMPLATE)
    tool = ToolSpec(
        function=FunctionSpec(name="look", parameters={"type": "object", "properties": {"v": {}}})
    )
    with pytest.raises(ConfigError, match=r"refuses its messages .*recursion.*tool_parser = 'prompt'"):
        check_format(chat, task="any", opening=[Message(role="user", content="start")], tools=[tool])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (DOWN, "4 have a call in the syntax 'hermes', 0 another call that was read, and 0 none"),
        (
            Message.assistant('```json\n{"name": "down", "arguments": {}}\n```'),
            "0 have a call in the syntax 'hermes', 4 another call that was read, and 0 none (no setting is "
            "needed; a short `agentrl-train sft` teaches the syntax). The first: '```json",
        ),
        (
            Message.assistant("I go down."),
            "0 another call that was read, and 4 none (see model.tool_parser, or start with "
            "`agentrl-train sft`). The first: 'I go down.",
        ),
    ],
)
async def test_completions_before_the_first_step_are_described_by_their_parse_results(
    said: Message, expected: str
) -> None:
    chat = format_of(CHAT_TEMPLATE)
    engine = ScriptedEngine(chat, lambda context, key: said)
    async with Countdown.local() as client:
        prompts = await check_sessions(
            chat, {"countdown": client}, sources=SOURCES, sampling=Sampling(max_new_tokens=200)
        )
    (line,) = await describe_completions(chat, engine, prompts)
    assert line.startswith("countdown: of 4 completions, ")
    assert expected in line
