import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_train.config import RunConfig, load_config
from agentrl_train.config.reference import reference
from agentrl_train.config.toml import RENAMED, dump_toml
from agentrl_train.errors import ConfigError

MINIMAL = """
[run]
name = "try"
steps = 5

[model]
path = "policy"

[[environments]]
serve = ["tasks/shop", "package.module:Guess"]
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "policy").mkdir()
    (tmp_path / "tasks" / "shop").mkdir(parents=True)
    path = tmp_path / "train.toml"
    path.write_text(MINIMAL)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    return str(refused.value)


def test_minimal_file_is_valid(config_file: Path):
    config = load_config(config_file)
    assert (config.run.name, config.run.steps, config.rollout.group_size) == ("try", 5, 8)


def test_input_paths_are_relative_to_file_and_modules_are_unchanged(config_file: Path):
    config = load_config(config_file)
    assert config.model.path == str(config_file.parent / "policy")
    assert config.environments[0].serve == (
        str(config_file.parent / "tasks" / "shop"),
        "package.module:Guess",
    )


def test_file_target_keeps_class_name(config_file: Path):
    (config_file.parent / "tasks" / "guess.py").touch()
    config = load_config(config_file, ['environments.0.serve=["tasks/guess.py:Guess"]'])
    assert config.environments[0].serve == (f"{config_file.parent}/tasks/guess.py:Guess",)


def test_run_folder_is_relative_to_working_directory(config_file: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(config_file).run_folder == tmp_path / "elsewhere" / "runs" / "try"


def test_hub_name_is_unchanged(config_file: Path):
    assert load_config(config_file, ["model.path=Qwen/Qwen3-0.6B"]).model.path == "Qwen/Qwen3-0.6B"


def test_unknown_key_suggests_nearest_name(config_file: Path):
    assert "unknown key train.learning_rat; did you mean learning_rate?" in refusal(
        config_file, "train.learning_rat=1e-3"
    )


def test_unknown_section_suggests_nearest_name(config_file: Path):
    assert "unknown key trian; did you mean train?" in refusal(config_file, "trian.learning_rate=1e-3")


def test_key_in_wrong_section_suggests_right_section(config_file: Path):
    assert "unknown key engine.group_size; did you mean rollout.group_size?" in refusal(
        config_file, "engine.group_size=4"
    )


def test_unknown_key_lists_valid_keys(config_file: Path):
    assert "unknown key checkpoint.xyzzy; valid here: every, keep" in refusal(
        config_file, "checkpoint.xyzzy=1"
    )


def test_unknown_key_of_environment_is_reported(config_file: Path):
    assert "unknown key environments.0.taks; did you mean tasks?" in refusal(
        config_file, "environments.0.taks={}"
    )


def test_all_problems_are_reported_together(config_file: Path):
    message = refusal(
        config_file,
        "run.steps=0",
        "train.learning_rat=1",
        "rollout.stale_fraction=1.5",
        "environments.0.serve=[]",
        "model.path=./gone",
        "algorithm.dual_clip=0.5",
    )
    assert len(message.splitlines()) == 7
    for part in ("run.steps = 0", "learning_rat;", "stale_fraction = 1.5", "serve", "gone", "dual_clip"):
        assert part in message


def test_missing_section_lists_required_keys(tmp_path: Path):
    path = tmp_path / "train.toml"
    path.write_text('[model]\npath = "org/name"\n')
    message = refusal(path)
    assert "run is missing; it needs name, steps" in message
    assert "environments is missing" in message


def test_missing_file_and_invalid_toml_are_reported(tmp_path: Path):
    assert refusal(tmp_path / "none.toml") == (
        f"{tmp_path}/none.toml does not exist; give the path of a TOML file."
    )
    (tmp_path / "bad.toml").write_text("[run\n")
    assert "is not valid TOML" in refusal(tmp_path / "bad.toml")


def test_missing_environment_folder_is_reported(config_file: Path):
    assert "there is no" in refusal(config_file, 'environments.0.serve=["tasks/none"]')


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["rollout.group_size=1"], "compares siblings"),
        (["rollout.group_size=1", "algorithm.baseline=none"], "spread of siblings"),
        (["engine.temperature=0"], "siblings of a group equal"),
        (["engine.top_p=0.9"], "algorithm.correction = 'truncate'"),
        (["engine.top_k=-1"], "engine.top_k"),
        (["engine.top_p=0"], "engine.top_p"),
        (["engine.max_new_tokens=4096"], "to leave room for the prompt"),
        (["rollout.max_staleness=1", "rollout.window=10"], "can be at most"),
        (["rollout.stale_model=org/name"], "rollout.stale_model samples nothing"),
        (["train.minibatches=65"], "more than the 64 episodes"),
        (["train.warmup_steps=5"], "to reach the learning rate"),
        (["environments.0.url=http://localhost:1"], "either serve"),
        (["environments=[]"], "at least one"),
        (["run.name=../up"], "run.name"),
        (["train.learning_rate=inf"], "train.learning_rate"),
    ],
)
def test_invalid_values_are_rejected_with_reason(config_file: Path, overrides: list[str], reason: str):
    assert reason in refusal(config_file, *overrides)


def test_evaluations_have_their_own_temperature_without_truncation(config_file: Path):
    settings = [
        "engine.top_p=0.9",
        "engine.temperature=0.7",
        "algorithm.anchor=old",
        "algorithm.correction=truncate",
    ]
    assert load_config(config_file, settings).evaluation_sampling.top_p == 0.9
    greedy = load_config(config_file, [*settings, "eval.temperature=0"]).evaluation_sampling
    assert (greedy.temperature, greedy.top_p, greedy.max_new_tokens) == (0.0, 1.0, 256)


def test_synchronous_run_accepts_any_window(config_file: Path):
    config = load_config(config_file, ["rollout.window=9", "rollout.max_staleness=0"])
    assert config.rollout.window == 9


def test_overrides_have_toml_types(config_file: Path):
    config = load_config(
        config_file,
        [
            "train.learning_rate=1e-3",
            "train.betas=[0.8, 0.9]",
            "metrics.tensorboard=false",
            "engine.device=cuda",
        ],
    )
    assert (config.train.learning_rate, config.train.betas) == (1e-3, (0.8, 0.9))
    assert (config.metrics.tensorboard, config.engine.device) == (False, "cuda")


@pytest.mark.parametrize(
    "override", ["train.learning_rate", "=1", "train..x=1", "environments.7.url='http://x'"]
)
def test_override_of_missing_path_is_rejected(config_file: Path, override: str):
    assert f"--set {override}" in refusal(config_file, override)


def test_override_below_plain_value_is_rejected(config_file: Path):
    assert "--set run.name.first=1: there is no 'first' to set" in refusal(config_file, "run.name.first=1")


def test_written_configuration_loads_equal(config_file: Path, tmp_path: Path):
    config = load_config(
        config_file, ["environments.0.tasks={shop=2, 'odd name'=0.5}", "run.run_timeout_s=8.5"]
    )
    (tmp_path / "run").mkdir()
    saved = tmp_path / "run" / "config.toml"
    saved.write_text(config.to_toml())
    assert load_config(saved) == config


plain = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(st.characters(exclude_categories=["Cs"])),
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.one_of(plain, st.lists(plain))))
def test_plain_tables_round_trip(values: dict[str, object]):
    assert tomllib.loads(dump_toml({"section": values, "list": [values, {}]})) == {
        "section": values,
        "list": [values, {}],
    }


def test_loading_configuration_does_not_import_torch():
    code = "import sys, agentrl_train.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_only_user_specific_fields_are_required():
    required = {
        f"{name}.{key}"
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type)
        for key, entry in field.annotation.model_fields.items()
        if entry.is_required()
    }
    assert required == {"run.name", "run.steps", "model.path"}


def test_reference_lists_every_setting_with_default(config_file: Path):
    (config_file.parent / "examples/quickstart/starter").mkdir(parents=True)
    (config_file.parent / "environments/shop").mkdir(parents=True)
    settings = config_file.with_name("all.toml")
    settings.write_text(reference())
    own = {"run": {"name", "steps"}, "model": True, "environments": True}
    written = load_config(settings).model_dump(exclude=own)
    assert written == load_config(config_file).model_dump(exclude=own)
    unexplained = [line for line in reference().splitlines() if line and "  #" not in line]
    assert not unexplained
    assert "# rank = 16" in reference()


@pytest.mark.parametrize(("former", "current"), RENAMED.items())
def test_former_key_is_rejected_with_current_name(config_file: Path, former: str, current: str):
    assert f"unknown key {former}: it was renamed to {current}" in refusal(config_file, f"{former}=30")
    load_config(config_file, [f"{current}=30", *(["engine.kind=vllm"] if "vllm" in current else [])])


def test_every_deadline_is_named_timeout_s():
    keys = [line.split(" =")[0].lstrip("# ") for line in reference().splitlines() if " =" in line]
    assert [
        key for key in keys if key.endswith(("seconds", "minutes", "_s")) and "timeout_s" not in key
    ] == []
    never_renamed = {"completion_timeout_s", "environment_timeout_s", "environments.start_timeout_s"}
    assert sum(key.endswith("_timeout_s") for key in keys) == len(RENAMED) + len(never_renamed)
