"""Tasks that installed packages publish by short names."""

import sys

import pytest

from agentrl_env.errors import TargetError
from agentrl_env.fleet.config import resolve_target
from agentrl_env.hosting.loader import load_target
from agentrl_env.launch.image_context import TaskFiles
from agentrl_env.launch.installed import installed_task, installed_tasks
from agentrl_train.config import load_config
from agentrl_train.errors import ConfigError

SOURCE = '''
from agentrl_env import Done, Environment, tool


class Riddle(Environment):
    """Solve a riddle.

    More of it.
    """

    def reset(self, sample, rng):
        return "Well?"

    @tool
    def say(self, word: str):
        """Say a word."""
        return Done("Yes.", reward=1.0)
'''


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Return a function that installs a package with one task in pip's layout."""
    place = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(place)

    def install(package, name="riddle"):
        folder = place / package / name
        folder.mkdir(parents=True)
        (folder / "environment.py").write_text(SOURCE)
        (folder / "requirements.txt").write_text("iniconfig\n")
        info = place / f"{package}-2.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.1\n")
        target = f"{package}.{name}.environment:Riddle"
        (info / "entry_points.txt").write_text(f"[agentrl_env.tasks]\n{name} = {target}\n")
        return folder

    yield install
    for module in [name for name in sys.modules if name.partition(".")[0] in ("riddles", "puzzles")]:
        del sys.modules[module]


def test_installed_task_is_listed_with_its_package_and_summary_without_being_imported(publish):
    publish("riddles")
    (task,) = (task for task in installed_tasks() if task.name == "riddle")
    assert (task.package, task.summary()) == ("riddles 2.1", "Solve a riddle.")
    assert "riddles.riddle.environment" not in sys.modules


def test_name_of_an_installed_task_is_a_target(publish, tmp_path):
    folder = publish("riddles")
    assert load_target("riddle") is load_target("riddles.riddle.environment:Riddle")
    files = TaskFiles.of("riddle")
    assert (files.root, files.lines("requirements.txt")) == (folder, ["iniconfig"])
    assert resolve_target(tmp_path, "riddle") == "riddles.riddle.environment:Riddle"


def test_folder_takes_precedence_over_an_installed_task_of_the_same_name(publish, tmp_path, monkeypatch):
    publish("riddles")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "riddle").mkdir()  # a folder without a task, such as the folder of a run
    assert installed_task("riddle") is not None
    (tmp_path / "riddle" / "environment.py").write_text(SOURCE)
    assert installed_task("riddle") is None
    assert load_target("riddle").__module__ != "riddles.riddle.environment"
    assert resolve_target(tmp_path, "riddle") == str(tmp_path / "riddle")


def test_name_published_by_two_packages_is_ambiguous(publish):
    publish("riddles")
    publish("puzzles")
    with pytest.raises(TargetError, match=r"write puzzles\.riddle.*\(puzzles 2\.1\) or riddles\.riddle"):
        load_target("riddle")


def test_misspelt_name_gets_a_suggestion(publish):
    publish("riddles")
    with pytest.raises(TargetError, match=r"^ridle: no such folder; did you mean 'riddle'\? a target is"):
        load_target("ridle")


def test_run_serves_an_installed_task_by_name(publish, tmp_path):
    publish("riddles")
    file = tmp_path / "train.toml"
    text = '[run]\nname = "x"\nsteps = 1\n[model]\npath = "package:y"\n[[environments]]\nserve = ["{}"]\n'
    file.write_text(text.format("riddle"))
    (section,) = load_config(file).environments
    assert section.serve == ("riddles.riddle.environment:Riddle",)
    file.write_text(text.format("ridle"))
    with pytest.raises(ConfigError, match=r"there is no .*ridle"):
        load_config(file)
