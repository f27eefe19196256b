"""Which run folder may be used for what, and what a resumed run may not change."""

from pathlib import Path

import pytest

from agentrl_train.errors import CheckpointError, ConfigError
from agentrl_train.learner import Learner
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.run_dir import claim_run_dir, write_config
from tests.conftest import make_model
from tests.train.test_learner import llama, qwen


def configured(**train: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "one", "steps": 4},
            "model": {"path": "policy"},
            "environments": [{"serve": ["shop"]}],
            "train": train,
        }
    )


def begun(folder: Path) -> Path:
    """A folder with a checkpoint and the configuration that it was made by."""
    (folder / "checkpoints" / "step_000000").mkdir(parents=True)
    write_config(folder, configured())
    return folder


def claim(folder: Path, config: RunConfig, *, resume: bool = False) -> list[str]:
    """Take a folder, say what has changed, and leave it."""
    with claim_run_dir(folder, config, resume=resume) as changed:
        return changed


def test_what_failed_before_its_first_checkpoint_does_not_keep_the_name(tmp_path: Path) -> None:
    for resume in (False, False, True):
        assert claim(tmp_path / "one", configured(), resume=resume) == []
    with pytest.raises(ConfigError, match="holds no run to resume"):
        claim(tmp_path / "none", configured(), resume=True)


def test_a_run_that_has_begun_is_not_begun_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds a run already"):
        claim(begun(tmp_path), configured())


def test_a_run_is_in_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        claim_run_dir(tmp_path, configured(), resume=False),
        pytest.raises(ConfigError, match="another process"),
    ):
        claim(tmp_path, configured())


def test_a_resumed_run_is_told_what_has_changed(tmp_path: Path) -> None:
    changed = claim(begun(tmp_path), configured(learning_rate=3e-5), resume=True)
    assert changed == ["train.learning_rate = 3e-05 (was 1e-05)"]


def test_adapters_cannot_come_or_go_within_a_run(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    before = (folder / "config.toml").read_text()
    lora = configured(lora={"rank": 4, "alpha": 8})
    with pytest.raises(ConfigError, match=r"train\.lora\.rank was not set when .* began, and is 4 now"):
        claim(folder, lora, resume=True)
    assert (folder / "config.toml").read_text() == before


@pytest.mark.parametrize("other", [qwen, llama])
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other) -> None:  # type: ignore[no-untyped-def]
    Learner(make_model(), learning_rate=1e-3).snapshot().write(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds another model than model\.path"):
        Learner(other(), learning_rate=1e-3).load(tmp_path)
