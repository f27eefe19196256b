"""The file of a sweep: its runs, and the errors for invalid files."""

from pathlib import Path

import pytest

from agentrl_train.errors import ConfigError
from agentrl_train.sweep.plan import load_sweep
from agentrl_train.sweep.processes import last_error

ROOT = Path(__file__).parents[3]
BASE = f"""
name = "mine"
config = "{ROOT}/examples/quickstart/train.toml"
folder = "out"
"""
GOOD = """
seeds = [1, 2]
presets = ["grpo", "rloo"]
baseline = "rloo"

[set]
run.steps = 7
train.learning_rate = 1e-3

[variants.slow]
train.learning_rate = 1e-5
algorithm = { preset = "gspo", region.low = 0.1 }
environments = [{ serve = ["../../environments/shop"] }]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(BASE + text)
    return path


def test_every_variant_has_a_run_for_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = load_sweep(write(tmp_path, GOOD), cores=4)
    assert [(run.variant, run.seed) for run in sweep.runs] == [
        ("grpo", 1), ("rloo", 1), ("slow", 1), ("grpo", 2), ("rloo", 2), ("slow", 2),
    ]  # fmt: skip
    slow = sweep.runs[-1]
    assert slow.folder == tmp_path / "out/mine/slow/seed-2"
    assert slow.config.run.seed == 2
    assert slow.config.run.steps == 7
    assert slow.config.train.learning_rate == 1e-5
    assert (slow.config.algorithm.ratio.name, slow.config.algorithm.region.low) == ("sequence", 0.1)
    assert slow.config.environments[0].serve == (str(ROOT / "environments/shop"),)
    assert sweep.runs[0].config.train.learning_rate == 1e-3
    assert sweep.baseline == "rloo"


def test_error_of_a_failed_run_is_its_last_one_or_the_signal_that_killed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = load_sweep(write(tmp_path, GOOD), cores=2).runs[0]
    assert last_error(run, 2) == "exit status 2"
    run.log.parent.mkdir(parents=True)
    run.log.write_text("agentrl-train: the port is in use\nstep 1/7\n")
    assert last_error(run, 2) == "the port is in use"
    assert last_error(run, -9).startswith("killed by SIGKILL, as the system does if memory runs out: repeat")
    assert last_error(run, -11) == "killed by SIGSEGV"


def test_settings_can_name_the_seed_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = GOOD.replace("[set]", f'[set]\nmodel.path = "{tmp_path}/policy-{{seed}}"')
    for seed in (1, 2):
        (tmp_path / f"policy-{seed}").mkdir()
    sweep = load_sweep(write(tmp_path, text), cores=2)
    assert [Path(run.config.model.path).name for run in sweep.runs] == ["policy-1"] * 3 + ["policy-2"] * 3


@pytest.mark.parametrize(
    ("cores", "asked", "processes", "threads"),
    [(4, None, 4, 1), (16, None, 6, 2), (8, 2, 2, 4), (1, 3, 3, 1)],
)
def test_concurrent_runs_share_the_cores(
    tmp_path: Path, cores: int, asked: int | None, processes: int, threads: int
) -> None:
    sweep = load_sweep(write(tmp_path, GOOD), cores=cores, processes=asked)
    assert sweep.processes == processes
    assert {run.config.run.threads for run in sweep.runs} == {threads}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is nothing to run"),
        ('presets = ["grpo"]\nseeds = []', "at least 1 item"),
        ('presets = ["grpo"]\nseeds = [1, 1]', "has duplicates"),
        ('presets = ["grpo"]\nseeds = [-1]', "greater than or equal to 0"),
        ('presets = ["grpo", "grpo"]', "two variants are called 'grpo'"),
        ('presets = ["grpo"]\nbaseline = "rloo"', "baseline = 'rloo' is not one of grpo"),
        ('presets = ["grpo"]\nprocess = 2', "did you mean processes?"),
        ('presets = ["grpp"]', "variant grpp of"),
        ('presets = ["grpo"]\n[variants."a/b"]\nrun.steps = 1', "variants.a/b"),
        ('presets = ["grpo"]\n[set]\nrun.seed = 3', "set sets run.seed, which the sweep sets itself"),
        ("[variants.a]\nrun.name = 'x'", "variants.a sets run.name"),
        ("[variants.a]\ntrain.learnin_rate = 1", "did you mean learning_rate?"),
        ("[variants.a]\neval.samples = 0", "nothing to rank"),
    ],
)
def test_invalid_sweep_is_a_config_error(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_sweep(write(tmp_path, text), cores=2)
    assert words in str(error.value)


def test_note_on_the_settings_of_several_runs_is_given_once(tmp_path: Path) -> None:
    text = 'presets = ["grpo", "reinforce", "opo"]\nset = {run.steps = 2}'
    shortened, wide = load_sweep(write(tmp_path, text), cores=2).notes
    assert shortened == "train.warmup_steps is 1 instead of 5: the run has run.steps = 2"
    assert wide.startswith("reinforce, opo: algorithm.region = 'cap' is for tokens of the policy")
    quiet = 'presets = ["grpo"]\nset = {run.steps = 20}'
    assert load_sweep(write(tmp_path, quiet), cores=2).notes == []


def test_missing_base_configuration_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text('name = "mine"\nconfig = "nowhere.toml"\npresets = ["grpo"]\n')
    with pytest.raises(ConfigError, match=r"nowhere.toml does not exist"):
        load_sweep(path, cores=2)
