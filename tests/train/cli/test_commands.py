"""Commands: the output folder of models, and the evaluated model."""

import io
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from agentrl_train.__main__ import EXTRA_MODULES, app
from agentrl_train.cli import commands
from agentrl_train.cli.evaluating import evaluate_and_record
from agentrl_train.config import RunConfig
from agentrl_train.errors import ConfigError
from agentrl_train.learner.lora import is_adapter
from agentrl_train.sft import expert_sequences
from agentrl_train.storage.checkpoint import InModelFolder, save_checkpoint
from agentrl_train.training.evaluation import EvaluationJournal, Evaluations
from agentrl_train.training.trainer import Trainer
from agentrl_train.types import TokenSequence
from tests.tiny_models import make_model, make_tokenizer
from tests.train.fakes import CHAT, Countdown
from tests.train.test_sft import SOURCES

ROOT = Path(__file__).parents[3]


def configured(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "one", "steps": 4, "folder": str(folder)},
            "model": {"path": "policy"},
            "environments": [{"serve": ["shop"]}],
        }
    )


@pytest.mark.parametrize("parent", [False, True])
def test_file_as_output_is_rejected_before_training(parent: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "model" if parent else tmp_path / "file"
    with pytest.raises(ConfigError, match=r"file.* cannot be written \(.*\): choose another folder"):
        commands.sft(configured(tmp_path), output=output)


def test_merge_of_no_model_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is not a model folder"):
        commands.merge(tmp_path / "empty", output=tmp_path / "merged", dtype="float32")
    assert not (tmp_path / "merged").exists()


def test_output_folder_with_a_model_is_rejected_before_training(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="already contains a model"):
        commands.sft(configured(tmp_path), output=tmp_path)


def test_evaluation_of_the_working_directory_is_named_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []

    def evaluate(trainer: Trainer, *, model: str, journal: EvaluationJournal) -> Evaluations:
        folders.append(journal.folder.name)
        raise ConfigError("enough")

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    (tmp_path / "policy").mkdir()
    monkeypatch.chdir(tmp_path / "policy")
    with pytest.raises(ConfigError, match="enough"):
        evaluate_and_record(Trainer(configured(tmp_path)), path=".", output=None)
    assert folders[0].startswith("policy-")


@pytest.mark.parametrize("choice", ["nothing", "checkpoint", "run", "name"])
def test_evaluation_names_its_model(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path)
    evaluated: list[str] = []

    def evaluate(trainer: Trainer, *, model: str, journal: EvaluationJournal) -> Any:
        evaluated.append(model)
        raise ConfigError("enough")

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    saved = config.run_folder / "checkpoints" / "step_000003" / "model"
    if choice != "nothing":
        parts = [InModelFolder(pretrained=make_model()), InModelFolder(pretrained=make_tokenizer())]
        save_checkpoint(saved.parents[1], step=3, parts=parts, loop={})
    model = {"run": str(config.run_folder), "name": "org/model"}.get(choice)
    with pytest.raises(ConfigError, match="enough"):
        commands.evaluate_policy(Trainer(config), model=model)
    expected, reason = {
        "nothing": ("policy", "model.path; the run has no checkpoint"),
        "checkpoint": (str(saved), "the newest checkpoint; --model evaluates another"),
        "run": (str(saved), "--model"),
        "name": ("org/model", "--model"),
    }[choice]
    assert evaluated == [expected]
    assert capsys.readouterr().out.startswith(f"evaluating {expected} ({reason})\n")


def test_interrupted_evaluation_is_continued_and_a_finished_one_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folders = configured(tmp_path), list[Path]()
    results: list[Evaluations | KeyboardInterrupt] = []

    def evaluate(trainer: Trainer, *, model: str, journal: EvaluationJournal) -> Evaluations:
        folders.append(journal.folder)
        result = results.pop()
        if isinstance(result, KeyboardInterrupt):
            raise result
        return result

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    finished = Evaluations(step=None, tasks={})
    for result in (KeyboardInterrupt(), finished, finished):
        results.append(result)
        with suppress(KeyboardInterrupt):
            evaluate_and_record(Trainer(config), path="org/model", output=None)
    interrupted, continued, repeated = folders
    assert interrupted == continued
    assert interrupted.parent == config.run_folder / "evaluations"
    assert (continued / "result.json").exists()
    assert repeated.name == f"{continued.name}-2"


@pytest.mark.parametrize("change", ["weights", "settings"])
def test_evaluation_of_other_weights_or_settings_has_its_own_folder(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folders = configured(tmp_path), list[Path]()

    def evaluate(trainer: Trainer, *, model: str, journal: EvaluationJournal) -> Evaluations:
        folders.append(journal.folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    weights = tmp_path / "policy" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"1")
    for number in range(2):
        if number and change == "weights":
            weights.write_bytes(b"12")
        if number and change == "settings":
            engine = config.engine.model_copy(update={"temperature": 0.5})
            config = config.model_copy(update={"engine": engine})
        with suppress(KeyboardInterrupt):
            evaluate_and_record(Trainer(config), path=str(weights.parent), output=None)
    assert len(set(folders)) == 2


async def test_imitation_honours_lora_and_dtype_and_shows_loss_and_time_left(tmp_path: Path) -> None:
    async with Countdown.local() as client:
        sequences, *_ = await expert_sequences(
            {"countdown": client}, CHAT, sources=SOURCES, count=4, max_sessions=4
        )
    table = configured(tmp_path).model_dump() | {"sft": {"steps": 3, "batch_size": 2}}
    table["model"]["dtype"] = "bfloat16"
    table["train"]["lora"] = {"rank": 4, "alpha": 8.0}
    model = make_model().to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.named_parameters()}
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    learner = commands.imitate(
        RunConfig.model_validate(table), model=model, sequences=sequences, console=console
    )
    assert learner.num_updates == 3
    frozen = [value for name, value in model.named_parameters() if not is_adapter(name)]
    assert {value.dtype for value in frozen} == {torch.bfloat16}
    after = dict(learner.weights())
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name].to(torch.bfloat16), value) for name, value in before.items())
    first, *_, last = shown.getvalue().splitlines()
    assert first == "0/3 updates, - left"
    assert re.fullmatch(r"3/3 updates, loss \d+\.\d{4}, [\d,]+ tokens/s, 0:00 left", last)


def test_imitation_without_a_layer_for_adapters_is_refused(tmp_path: Path) -> None:
    table = configured(tmp_path).model_dump()
    table["train"]["lora"] = {"rank": 4, "alpha": 8.0, "targets": ["absent"]}
    with pytest.raises(ConfigError, match=r"train\.lora\.targets = \['absent'\] matches no linear layer"):
        commands.imitate(RunConfig.model_validate(table), model=make_model(), sequences=())


def of_length(size: int) -> TokenSequence:
    """Return an episode of which the second half is sampled."""
    sampled = np.arange(size) >= size // 2
    return TokenSequence(
        token_ids=np.zeros(size, dtype=np.int64),
        loss_mask=sampled.astype(np.float32),
        logprobs=np.zeros(size, dtype=np.float32),
        versions=np.full(size, -1),
        advantages=sampled.astype(np.float32),
        task="a",
        group_id=0,
    )


def test_experts_longer_than_the_context_of_the_model_are_refused(tmp_path: Path) -> None:
    model = make_model()
    model.config.max_position_embeddings = 32
    config = RunConfig.model_validate(configured(tmp_path).model_dump() | {"sft": {"steps": 1}})
    with pytest.raises(
        ConfigError, match=r"longest episode .* has 33 tokens, but the model supports at most 32"
    ):
        commands.imitate(config, model=model, sequences=[of_length(8), of_length(33)])
    commands.imitate(config, model=model, sequences=[of_length(32)], console=Console(file=io.StringIO()))


def test_experts_longer_than_the_limits_of_the_engine_give_warnings(tmp_path: Path) -> None:
    engine = {"max_new_tokens": 16, "max_context": 32}
    config = RunConfig.model_validate(configured(tmp_path).model_dump() | {"engine": engine})
    assert list(commands.limit_warnings(config, [of_length(32)])) == []
    assert list(commands.limit_warnings(config, [of_length(33)])) == [
        "the longest turn of the experts has 17 tokens, but engine.max_new_tokens = 16 cuts turns off: set "
        "it to at least 17",
        "the longest episode of the experts has 33 tokens, but engine.max_context = 32 cuts episodes off: "
        "set it to at least 33",
    ]


WITHOUT_TRAIN = """
import sys
for module in sys.argv.pop(1).split(","):
    sys.modules[module] = None
from agentrl_train.__main__ import main
main()
"""


@pytest.mark.parametrize("arguments", [["settings"], ["plan", "examples/quickstart/train.toml"]])
def test_command_without_the_extra_explains_how_to_install_it(arguments: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT_TRAIN, ",".join(EXTRA_MODULES), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "is not installed: pip install 'agentrl-kit[train]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["gateway", "model", "--port", "-1"],
        ["gateway", "model", "--port", "65536"],
        ["gateway", "model", "--idle-timeout", "0"],
        ["gateway", "model", "--idle-timeout", "nan"],
        ["watch", "run", "--port", "70000"],
    ],
)
def test_number_outside_the_range_of_its_option_is_rejected(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[2]}': Input should be " in result.output
