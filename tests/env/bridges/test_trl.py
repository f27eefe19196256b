"""Tasks as environment classes of TRL."""

import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from agentrl_env import Environment, tool
from agentrl_env.bridges.foreign_tools import ForeignTool, tools_of
from agentrl_env.bridges.trl import trl_environment
from agentrl_env.errors import DefinitionError, EnvironmentFailed, InvalidRequest, SessionEnded
from tests.env.tasks import Guess, Quick

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
ROOT = Path(__file__).parents[3]


class Clash(Environment):
    """Has a tool with a name that TRL reserves."""

    def reset(self, sample, rng):
        return ""

    @tool(name="get_reward")
    def reward(self):
        """Tell the reward."""
        return "0"


def test_rollouts_play_the_problem_of_their_row():
    factory = Quick.trl(split="test")
    rows = factory.rows(3, first=2)
    assert [(row["split"], row["index"]) for row in rows] == [("test", 2), ("test", 3), ("test", 4)]
    slots = [factory() for _ in rows]
    for slot, row in zip(slots, rows, strict=True):
        assert slot.reset(**row).startswith("Be quick.\n\n")
        slot.gain(amount=row["index"] / 10)
    assert [slot.get_reward() for slot in slots] == [0.2, 0.3, 0.4]


def test_tools_are_the_only_public_methods_that_trl_sees():
    found = {name for name, _ in inspect.getmembers(Guess.trl(), inspect.isfunction) if name[0] != "_"}
    assert found == {"guess", "reset", "get_reward"}


def test_siblings_of_a_group_get_the_same_problem():
    factory = Guess.trl()
    (row,) = factory.rows(1, first=7)
    answers = []
    for _ in range(2):
        slot = factory()
        slot.reset(**row)
        answers.append([slot.guess(n=n) for n in (5, 10, 15)])
    assert answers[0] == answers[1]
    with pytest.raises(InvalidRequest, match="needs a column index, seed or sample"):
        factory().reset()


def test_calls_after_the_end_are_refused_and_keep_the_reward():
    slot = Quick.trl()()
    slot.reset(index=1)
    assert slot.finish(reward=2.0) == "bye"
    with pytest.raises(SessionEnded):
        slot.gain()
    assert slot.get_reward() == 2.0


def test_rollout_whose_environment_failed_has_no_reward():
    slot = Quick.trl()()
    slot.reset(index=1)
    slot.gain()
    with pytest.raises(EnvironmentFailed, match="environment failed"):
        slot.crash()
    assert slot.get_reward() is None
    slot.reset(index=1)
    assert slot.get_reward() == 0.0


def test_tool_with_a_name_that_trl_reserves_is_rejected():
    with pytest.raises(DefinitionError, match="cannot be a method of"):
        Clash.trl()


async def test_server_url_can_be_an_environment(serving):
    import asyncio

    server = await serving(Guess, max_sessions=1)

    def play():
        factory = trl_environment(server.url, split="test")
        rewards = []
        for row in factory.rows(2):
            slot = factory()
            slot.reset(**row)
            slot.guess(n=0)
            rewards.append(slot.get_reward())
        factory.close()
        return rewards

    assert await asyncio.to_thread(play) == [0.0, 0.0]
    assert server.pool.open_sessions == 0


def test_schemas_for_the_model_equal_the_tasks_schemas():
    utils = pytest.importorskip("transformers.utils", reason="the extra train is not installed")
    schema = utils.get_json_schema(Guess.trl()().guess)["function"]
    assert schema["description"] == "Guess the number."
    assert schema["parameters"]["required"] == ["n"]
    assert schema["parameters"]["properties"]["n"]["type"] == "integer"


def foreign(schema):
    """Return the annotations of a method that is a foreign tool."""

    async def play(environment, name, arguments):
        return json.dumps(arguments)

    methods = tools_of("server", [ForeignTool(name="look", description="Look.", schema=schema)], play)
    reset = {"__doc__": "Look.", "reset": lambda self, sample, rng: ""}
    slot = type("Bridged", (Environment,), {**reset, **methods}).trl()()
    slot.reset(index=0)
    return slot, {name: part.annotation for name, part in inspect.signature(slot.look).parameters.items()}


TREE = {"type": "array", "items": {"$ref": "#/$defs/tree"}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"properties": {"start": {"type": "integer"}, "end": {"$ref": "#/properties/start"}}}, {"end": int}),
        ({"properties": {"a": {"$ref": "#/$defs/x/size"}}, "$defs": {"x": {"size": {"const": 2}}}}, {"a": 2}),
        ({"properties": {"tree": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": TREE}}, {"tree": list[Any]}),
        ({"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": {"type": "string"}}}}}, {"a": str}),
        (
            {"properties": {"a": True, "b": {"$ref": "#/x~1y"}}, "x/y": {"type": "boolean"}},
            {"a": Any, "b": bool},
        ),
        (
            {"$schema": DRAFT_7, "properties": {"at": {"type": "array", "items": [{"type": "number"}]}}},
            {"at": list},
        ),
    ],
)
def test_foreign_tools_are_methods_with_the_types_of_their_schemas(schema, types):
    _, found = foreign(schema)
    shown = {name: get_args(part)[0] if get_origin(part) is Literal else part for name, part in found.items()}
    assert types.items() <= shown.items()


def test_calls_of_foreign_tools_reach_their_server():
    slot, _ = foreign({"properties": {"start": {"type": "integer"}, "end": {"$ref": "#/properties/start"}}})
    assert slot.look(end=3) == '{"end": 3}'
    assert "'x' is not of type 'integer'" in slot.look(end="x")


@dataclass
class Spot:
    x: int
    inner: "Spot | None" = None


class Points(Environment):
    """Takes points."""

    def reset(self, sample, rng):
        return ""

    @tool
    def draw(self, spots: list[Spot], at: Spot | None = None):
        """Draw.

        Args:
            spots: The spots.
            at: The center.
        """
        return f"{spots}, {at}"


def test_description_of_an_object_has_its_schema():
    slot = Points.trl()()
    slot.reset(index=0)
    spots, at = re.findall(r"    (?:spots|at): (.*)", inspect.getdoc(slot.draw).replace("\n    ", "\n    "))
    about, _, schema = spots.partition(" JSON Schema of the object: ")
    assert about == "The spots."
    assert json.loads(schema.removesuffix("."))["properties"]["x"] == {"type": "integer"}
    assert at.startswith("The center. JSON Schema of the object: {")
    assert slot.draw(spots=[{"x": 1}], at={"x": 2}) == "[Spot(x=1, inner=None)], Spot(x=2, inner=None)"


@pytest.mark.bridges
@pytest.mark.filterwarnings("ignore")
def test_trl_sets_the_response_template_only_for_its_own_chat_templates():
    pytest.importorskip("trl", reason="TRL is not installed; run make bridges")
    from transformers import AutoTokenizer
    from trl import chat_template_utils

    page = (ROOT / "docs/how-to/bridges.md").read_text()
    (template,) = re.findall(r"`trl\.chat_template_utils\.(\w+)`", page)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/quickstart/starter")
    with pytest.raises(ValueError, match="manually set the response schema"):
        chat_template_utils.add_response_schema(tokenizer)
    tokenizer.response_template = getattr(chat_template_utils, template)
    call = '<tool_call>\n{"name": "look", "arguments": {"place": "desk"}}\n</tool_call>'
    (read,) = tokenizer.parse_response(call, prefix="")["tool_calls"]
    assert read["function"] == {"name": "look", "arguments": {"place": "desk"}}
    tokenizer.response_template, tokenizer.chat_template = None, chat_template_utils.qwen3_chat_template
    chat_template_utils.add_response_schema(tokenizer)
    assert tokenizer.response_template == getattr(chat_template_utils, template)


@pytest.mark.bridges
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_grpo_trainer_trains_on_a_starter_task(tmp_path, monkeypatch):
    """The quick start's policy calls the shop's tools through TRL's own loop."""
    pytest.importorskip("trl", reason="TRL is not installed; run make bridges")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from agentrl_env.hosting.loader import load_target

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    starter = ROOT / "examples/quickstart/starter"
    tokenizer = AutoTokenizer.from_pretrained(starter, padding_side="left")
    tokenizer.response_template = qwen3_template  # TRL knows only the syntax of its own templates
    factory = load_target(str(ROOT / "environments/shop")).trl()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(starter, dtype=torch.float32),
        environment_factory=factory,
        train_dataset=Dataset.from_list(factory.rows(4)),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            max_steps=1,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=256,
            max_tool_calling_iterations=4,
            dataloader_pin_memory=False,
        ),
    )
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    (log,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert log["tools/call_frequency"] > 0
    assert 0.0 <= log["reward"] <= 1.0
    assert any(not torch.equal(before[name], weight) for name, weight in trainer.model.named_parameters())
