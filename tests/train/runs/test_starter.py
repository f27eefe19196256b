"""The quickstart's starter policy: tokenizer, chat template and script."""

import asyncio
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_train.chat import ChatFormat
from agentrl_train.sft import expert_sequence

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
TASKS = ("household", "shop", "sql")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(QUICKSTART / "starter")


@pytest.fixture(scope="module")
def starter():
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("starter", QUICKSTART / "starter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def conversation():
    return [
        Message(role="user", content="Bring the apple to the shelf."),
        Message.assistant("apple to shelf.", ToolCall.of("look", place="fridge")),
        Message(role="tool", content="fridge: apple.", tool_call_id="call_0"),
        Message(role="user", content="Go on."),
        Message.assistant(None, ToolCall.of("look", place="box"), ToolCall.of("look", place="desk")),
    ]


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template([m.wire() for m in messages], tokenize=False, **options)


def test_noise_applies_only_to_tasks_with_a_noisy_expert(starter):
    assert starter.clumsy("dbbench", 0.4).expert_noise == 0.4
    assert starter.clumsy("sql", 0.4).expert_noise == starter.EXPERT_NOISE["sql"]
    assert not hasattr(starter.clumsy("countdown", 0.4), "expert_noise")


def test_messages_append_to_rendered_text(tokenizer):
    messages = conversation()
    for end in range(1, len(messages)):
        before, after = (render(tokenizer, messages[:n]) for n in (end, end + 1))
        assert after.startswith(before)
        assert len(after) > len(before)


def test_turn_is_rendered_as_hermes_tool_calls(tokenizer):
    text = render(tokenizer, conversation()[:3], add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nBring the apple to the shelf.<|im_end|>\n"
        "<|im_start|>assistant\napple to shelf.\n"
        '<tool_call>\n{"name": "look", "arguments": {"place": "fridge"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nfridge: apple.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("task", TASKS)
async def test_word_is_one_token_in_prose_and_json(tokenizer, starter, task):
    async with EnvClient.local(starter.clumsy(task)) as client:
        words = {
            word
            for index in range(100)
            for key, value in (await client.open(task, index=index)).info.sample.data.items()
            if key != "level"
            for word in str(value).split()
        }
    for word in words:
        (token,) = tokenizer(word)["input_ids"]
        assert token in tokenizer(f"Is a {word} there?")["input_ids"]
        assert token in tokenizer(f'{{"place": "{word}"}}\n</tool_call>')["input_ids"]


@pytest.mark.parametrize("task", TASKS)
async def test_expert_tokens_match_tokenized_conversation(tokenizer, starter, task):
    chat = ChatFormat(tokenizer)
    async with EnvClient.local(starter.clumsy(task)) as client:
        sequence, _ = await expert_sequence(client, chat, task=task, split="train", index=0)
    ids = sequence.token_ids.tolist()
    assert tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids
    ends = [i for i, token in enumerate(ids) if token == tokenizer.eos_token_id and sequence.loss_mask[i]]
    assert ends[-1] == len(ids) - 1


@pytest.mark.parametrize("task", TASKS)
async def test_starter_makes_valid_calls(tokenizer, starter, task):
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / "starter", dtype=torch.float32)
    chat = ChatFormat(tokenizer)
    async with EnvClient.local(starter.clumsy(task)) as client:
        session = await client.open(task, split="test", index=0)
        prompt = torch.tensor([chat.opening(session.messages, session.tools)])
        torch.manual_seed(0)
        rows = await asyncio.to_thread(
            model.generate, prompt, do_sample=True, max_new_tokens=48, num_return_sequences=32, top_k=0
        )
        names = {tool.function.name for tool in session.tools}
    messages = [chat.parse(row[prompt.shape[1] :].tolist(), turn=1)[0] for row in rows]
    good = [m.tool_calls is not None and m.tool_calls[0].function.name in names for m in messages]
    assert np.mean(good) > 0.8


@pytest.mark.parametrize("induction", [False, True])
def test_model_with_induction_heads_continues_a_repetition_before_training(starter, tokenizer, induction):
    model = starter.new_model(tokenizer, width=128, seed=0, induction=induction)
    torch.manual_seed(0)
    once = torch.stack([torch.randperm(len(tokenizer))[:60] for _ in range(8)])
    with torch.no_grad():
        guesses = model(torch.cat([once, once], dim=1)).logits[:, 60:-1].argmax(-1)
    continued = (guesses == once[:, 1:]).float().mean()
    assert continued > 0.3 if induction else continued < 0.1


def test_script_creates_loadable_model_and_announces_its_long_steps(starter, tmp_path, capsys):
    arguments = ["--output", str(tmp_path), "--traces", "20", "--steps", "2", "--induction"]
    starter.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "the default options take about five minutes",
        "playing 2 episodes of each expert for the tokenizer",
    ]
    assert "playing 20 episodes of each expert for the model" in lines
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() < 1_000_000
