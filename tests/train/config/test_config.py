import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_train.config import RunConfig, load_config
from agentrl_train.config.former import REMOVED, RENAMED
from agentrl_train.config.reference import keys, reference
from agentrl_train.config.toml import literal
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


@pytest.mark.parametrize("override", ["model.path=models/mine", 'environments.0.serve=["models/mine"]'])
def test_path_relative_to_the_working_directory_is_reported(
    config_file: Path, tmp_path: Path, monkeypatch, override: str
):
    (folder := tmp_path / "elsewhere" / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert f"relative to the folder of the configuration, so write {folder}" in refusal(config_file, override)


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
        "rollout.stale.fraction=1.5",
        "environments.0.serve=[]",
        "model.path=./gone",
        "algorithm.region.dual=0.5",
    )
    assert len(message.splitlines()) == 7
    for part in ("run.steps = 0", "learning_rat;", "stale.fraction = 1.5", "serve", "gone", "dual (0.5)"):
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


def test_file_of_a_windows_editor_is_read(config_file: Path):
    config_file.write_bytes(b"\xef\xbb\xbf" + config_file.read_bytes().replace(b"\n", b"\r\n"))
    assert load_config(config_file).run.name


def test_file_in_another_encoding_is_reported(config_file: Path):
    config_file.write_bytes("# ä".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"is not UTF-8 at byte 2; save it as UTF-8"):
        load_config(config_file)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train=3", "train = 3 should be a table"),
        ("reward=3", "reward = 3 should be a table: set one of its keys, such as reward.functions"),
        ("train.lora=3", "train.lora = 3 should be a table: set one of its keys, such as train.lora.rank"),
        ("rollout.max_turns=3", "should be a table: set one of its keys, such as rollout.max_turns.KEY"),
        ("algorithm.region=3", "region = 3 should be a name, or a table with a name and its parameters"),
        ("environments.0.serve=3", "environments.0.serve = 3 should be a list"),
        ("run.name=a b", "run.name = 'a b' should match pattern '^[A-Za-z0-9]"),
        ("model.path=", "model.path: must not be empty"),
        ("environments.0.serve=", "environments.0.serve: must not be empty"),
        ('environments.0.serve=[" "]', "environments.0.serve.0: must not be empty"),
    ],
)
def test_wrong_value_is_described_in_the_words_of_the_file(config_file: Path, override: str, reason: str):
    assert reason in refusal(config_file, override)


def test_single_target_needs_no_brackets(config_file: Path):
    assert load_config(config_file, ["environments.0.serve=math:tau"]).environments[0].serve == ("math:tau",)


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
        (["rollout.stale.model=org/name"], "rollout.stale: model samples nothing"),
        (
            ["rollout.horizon=[30, 10, 20]"],
            "rollout.horizon: turns must rise from stage to stage: give [10, 20",
        ),
        (["train.minibatches=65"], "more than the 64 episodes"),
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
    assert "--set run.steps.first=1: there is no 'first' to set" in refusal(config_file, "run.steps.first=1")


@pytest.mark.parametrize("switch", [[], ["eval.concurrent=true"]])
def test_switch_can_be_refined_below(config_file: Path, switch: list[str]):
    config = load_config(config_file, [*switch, "eval.concurrent.max_sessions=2"])
    assert config.eval.concurrent is not None
    assert config.eval.concurrent.max_sessions == 2
    assert load_config(config_file, ["eval.concurrent=false"]).eval.concurrent is None


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
def test_literals_round_trip(values: dict[str, object]):
    assert tomllib.loads(f"table = {literal(values)}\nlist = {literal([values, {}])}") == {
        "table": values,
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
    assert {"# lora.rank = 16", "# credit.lam = 1.0"} <= {
        line.split("  ")[0] for line in reference().splitlines()
    }


FORMER = Path(__file__).with_name("former_keys.txt").read_text().split()
"""All keys of a run from before functions became tables, and keys that had been renamed even earlier."""


@pytest.mark.parametrize("former", FORMER)
def test_former_key_is_valid_or_rejected_with_the_current_spelling(config_file: Path, former: str):
    if former not in RENAMED and former not in REMOVED:
        assert any(f"{former}.".startswith(f"{key}.") for key in keys())
        return
    name = former.replace("environments.", "environments.0.")
    message = refusal(config_file, f"{name}=30")
    if former in REMOVED:
        assert f"unknown key {name}: it was removed" in message
        return
    current = RENAMED[former]
    assert f"unknown key {name}: it was renamed to {current}" in message
    setting = current.partition(",")[0].partition(" =")[0]
    assert setting == "algorithm" or any(f"{setting}.".startswith(f"{key}.") for key in keys())


def test_former_section_of_a_file_is_rejected_with_all_current_keys(config_file: Path):
    config_file.write_text(f"{MINIMAL}[critic]\nclip = 0.1\npasses = 2\n")
    message = refusal(config_file)
    assert "unknown key critic.clip: it was renamed to algorithm.credit.clip" in message
    assert "unknown key critic.passes: it was renamed to algorithm.credit.passes" in message


def test_deterministic_run_has_one_thread(config_file: Path):
    options = ["engine.deterministic=true", "rollout.max_staleness=0"]
    assert load_config(config_file, options).run.threads == 1
    assert load_config(config_file, [*options, "run.threads=1"]).run.threads == 1
    assert load_config(config_file, ["rollout.max_staleness=0"]).run.threads is None
    assert "engine.deterministic needs one thread" in refusal(config_file, *options, "run.threads=2")


def test_number_of_keys_is_at_most_120():
    assert 100 < len(set(keys())) <= 120


def test_every_deadline_is_named_timeout_s():
    names = [line.split(" =")[0].lstrip("# ") for line in reference().splitlines() if " =" in line]
    timeouts = [name for name in names if "timeout_s" in name]
    assert len(timeouts) >= 8
    assert [one for one in names if one.endswith(("seconds", "minutes", "_s")) and one not in timeouts] == []


@pytest.mark.parametrize(("steps", "warmup"), [(2, 1), (1, 0), (30, 20)])
def test_warm_up_must_be_shorter_than_the_run(config_file: Path, steps: int, warmup: int):
    config = load_config(config_file, ["train.warmup_steps=20", f"run.steps={steps}"])
    assert config.warmup_steps == warmup
    noted = f"train.warmup_steps is {warmup} instead of 20: the run has run.steps = {steps}"
    assert config.notes == ([] if warmup == 20 else [noted])


def test_head_start_of_a_critic_must_be_shorter_than_the_run(config_file: Path):
    config = load_config(
        config_file, ["algorithm.preset=archer", "algorithm.credit.warmup_steps=20", "run.steps=2"]
    )
    assert config.critic is not None
    assert config.critic.warmup_steps == 1
    assert "algorithm.credit.warmup_steps is 1 instead of 20: the run has run.steps = 2" in config.notes


@pytest.mark.parametrize("preset", ["reinforce", "opo", "archer"])
def test_preset_for_tokens_of_the_trained_policy_notes_older_samplers(config_file: Path, preset: str):
    chosen = [f"algorithm.preset={preset}", "run.steps=100"]
    synchronous = load_config(config_file, [*chosen, "rollout.max_staleness=0"])
    (note,) = load_config(config_file, chosen).notes
    (crossed,) = load_config(config_file, [*chosen, "rollout.stale.fraction=0.25"]).notes
    assert synchronous.notes == []
    assert "older policies also sample (rollout.max_staleness = 1)" in note
    assert crossed.endswith(
        "set rollout.max_staleness = 0 and rollout.stale.fraction = 0, or algorithm.region = 'clip'"
    )


@pytest.mark.parametrize("preset", ["agentrl", "cispo", "gmpo", "grpo", "dppo", "tis"])
def test_preset_that_bounds_updates_has_no_note_on_older_samplers(config_file: Path, preset: str):
    assert load_config(config_file, [f"algorithm.preset={preset}", "run.steps=100"]).notes == []


def test_override_of_a_parameter_keeps_the_function_of_the_file(config_file: Path):
    config_file.write_text(f'{MINIMAL}[algorithm]\nregion = "soft"\n')
    region = load_config(config_file, ["algorithm.region.negative=2"]).algorithm.region
    assert (region.name, region.parameters) == ("soft", {"positive": 1.0, "negative": 2.0})


def test_parameter_without_a_function_name_belongs_to_the_default_function(config_file: Path):
    config = load_config(config_file, ["algorithm.region.low=0.1"])
    assert config.algorithm.region.parameters == {"low": 0.1, "high": 0.28, "dual": 3.0}


def test_parameter_of_another_function_is_rejected(config_file: Path):
    message = refusal(config_file, "algorithm.region={name = 'soft', low = 0.1}")
    assert "unknown key algorithm.region.low; valid here: name, positive, negative" in message


def test_similar_parameter_is_suggested(config_file: Path):
    message = refusal(config_file, "algorithm.region={name = 'soft', positve = 0.1}")
    assert "unknown key algorithm.region.positve; did you mean positive?" in message


def test_preset_function_gets_a_parameter_or_is_replaced(config_file: Path):
    preset = "algorithm.preset=grpo"
    region = load_config(config_file, [preset, "algorithm.region.high=0.4"]).algorithm.region
    assert region.parameters == {"low": 0.2, "high": 0.4, "dual": 3.0}
    region = load_config(
        config_file, [preset, "algorithm.region={name = 'cap', high = 4.0}"]
    ).algorithm.region
    assert (region.name, region.parameters) == ("cap", {"low": 0.2, "high": 4.0})


def test_unknown_preset_suggests_the_nearest(config_file: Path):
    assert "algorithm.preset = 'grpoo' does not exist; did you mean grpo or " in refusal(
        config_file, "algorithm.preset=grpoo"
    )
    assert "did you mean gspo or grpo?" in refusal(config_file, "algorithm.preset=gpro")
    assert "choose one of a3po, agentrl" in refusal(config_file, "algorithm.preset=xyz")


def test_arguments_of_vllm_pass_through_and_those_of_the_trainer_are_rejected(config_file: Path):
    options = ["engine.kind=vllm", "engine.device=cuda"]
    args = "engine.vllm.args={gpu_memory_utilization = 0.5, tensor_parallel_size = 2, quantization = 'fp8'}"
    vllm = load_config(config_file, [*options, args]).engine.vllm
    assert (vllm.memory_fraction, vllm.tensor_parallel, vllm.args["quantization"]) == (0.5, 2, "fp8")
    message = refusal(config_file, *options, "engine.vllm.args={max_model_len = 9, logprobs_mode = 'x'}")
    assert "engine.vllm: args.max_model_len is set by the trainer: set engine.max_context instead" in message
    assert "engine.vllm: args.logprobs_mode is set by the trainer: leave it out" in message
