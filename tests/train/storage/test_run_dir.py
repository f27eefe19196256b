"""Run folders: claiming, locking, and settings that cannot change on resume."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_train.config import RunConfig, TrainSection
from agentrl_train.errors import CheckpointError, ConfigError
from agentrl_train.learner import Learner
from agentrl_train.storage.run_dir import claim_run_dir, write_config
from tests.tiny_models import make_model
from tests.train.learner.test_learner import llama, qwen


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
    """Write a checkpoint and its configuration to a run folder."""
    (folder / "checkpoints" / "step_000000").mkdir(parents=True)
    write_config(folder, configured().to_toml())
    return folder


def claim(folder: Path, config: RunConfig, *, resume: bool = False) -> list[str]:
    """Claim and release a run folder. Return the changed settings."""
    with claim_run_dir(folder, config.changes_since, resume=resume) as changed:
        return changed


def test_run_without_checkpoint_can_be_restarted_under_same_name(tmp_path: Path) -> None:
    for resume in (False, False, True):
        assert claim(tmp_path / "one", configured(), resume=resume) == []
    with pytest.raises(ConfigError, match="contains no run to resume"):
        claim(tmp_path / "none", configured(), resume=True)


def test_restarted_run_without_checkpoint_does_not_get_the_groups_of_the_first_start(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    (journal / "step_000000-1.bin").write_bytes(b"groups of another model")
    claim(tmp_path, configured())
    assert not journal.exists()
    begun(tmp_path)
    journal.mkdir()
    claim(tmp_path, configured(), resume=True)
    assert journal.exists()


def test_existing_run_requires_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already contains a run"):
        claim(begun(tmp_path), configured())


def test_run_folder_is_locked(tmp_path: Path) -> None:
    with (
        claim_run_dir(tmp_path, configured().changes_since, resume=False),
        pytest.raises(ConfigError, match="another process"),
    ):
        claim(tmp_path, configured())


def test_resume_reports_changed_settings(tmp_path: Path) -> None:
    changed = claim(begun(tmp_path), configured(learning_rate=3e-5), resume=True)
    assert changed == ["train.learning_rate = 3e-05 (was auto)"]


def test_lora_settings_cannot_change_on_resume(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    before = (folder / "config.toml").read_text()
    lora = configured(lora={"rank": 4, "alpha": 8})
    with pytest.raises(ConfigError, match=r"train\.lora\.rank was not set when .* began, and is 4 now"):
        claim(folder, lora, resume=True)
    assert (folder / "config.toml").read_text() == before


def test_model_cannot_change_on_resume(tmp_path: Path) -> None:
    other = configured()
    other = other.model_copy(update={"model": other.model.model_copy(update={"path": "another"})})
    with pytest.raises(
        ConfigError, match=r"model\.path was policy when .* if the model has only moved, corr"
    ):
        claim(begun(tmp_path), other, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_steps_without_a_checkpoint_are_not_overwritten(resume: bool, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl has the steps of a run, but .* has no checkpoint"):
        claim(tmp_path, configured(), resume=resume)


@pytest.mark.parametrize("other", [qwen, llama])
def test_checkpoint_of_different_model_is_rejected(tmp_path: Path, other) -> None:  # type: ignore[no-untyped-def]
    Learner(make_model(), TrainSection(learning_rate=1e-3)).snapshot().write(tmp_path)
    with pytest.raises(CheckpointError, match=r"contains a different model than model\.path"):
        Learner(other(), TrainSection(learning_rate=1e-3)).load(tmp_path)


def test_setting_added_in_this_version_does_not_count_as_changed(tmp_path: Path) -> None:
    write_config(tmp_path, configured().to_toml())
    path = tmp_path / "config.toml"
    text = path.read_text()
    begin = text.index("[reward]")
    path.write_text(text[:begin] + text[text.index("\n[", begin) + 1 :])
    assert configured().changes_since(path) == {}
    assert configured(learning_rate=0.5).changes_since(path) == {"train.learning_rate": ("auto", 0.5)}


def test_former_spellings_of_a_run_folder_are_not_changes(tmp_path: Path) -> None:
    write_config(tmp_path, configured().to_toml())
    path = tmp_path / "config.toml"
    path.write_text(path.read_text().replace("[algorithm]", "[algorithm]\nclip_low = 0.1", 1))
    assert configured().changes_since(path) == {}
    assert configured(learning_rate=0.5).changes_since(path) == {"train.learning_rate": ("auto", 0.5)}
    assert "train.lora.rank" in configured(lora={"rank": 4, "alpha": 8}).changes_since(path)


def crediting(credit: object) -> RunConfig:
    return RunConfig.model_validate(configured().model_dump(mode="json") | {"algorithm": {"credit": credit}})


@pytest.mark.parametrize("before", ["trajectory", "gae_turn"])
def test_run_does_not_resume_with_an_added_critic(tmp_path: Path, before: str) -> None:
    folder = begun(tmp_path / "run")
    write_config(folder, crediting(before).to_toml())
    with pytest.raises(ConfigError, match=r"algorithm\.credit\.name was .*, and is gae_token now"):
        claim(folder, crediting("gae_token"), resume=True)
    assert claim(folder, crediting({"name": "turn", "gamma": 0.9}), resume=True)


def failing(folder: Path, write: Callable[[], object]) -> None:
    with claim_run_dir(folder, configured().changes_since, resume=False):
        write()
        raise RuntimeError


def test_failed_start_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with pytest.raises(RuntimeError):
        failing(folder, lambda: (folder / "trace.json").write_text("["))
    assert not folder.exists()
    with pytest.raises(RuntimeError):
        failing(folder, lambda: write_config(folder, configured().to_toml()))
    assert (folder / "config.toml").exists()


def test_failed_start_in_an_existing_folder_deletes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        failing(tmp_path, lambda: (tmp_path / "notes.txt").write_text("mine"))
    assert (tmp_path / "notes.txt").exists()
