import sys

import pytest

from agentrl_env import Environment
from agentrl_env.errors import TargetError
from agentrl_env.hosting.loader import load_target, load_targets
from tests.env.tasks import Guess, Quick

SOURCE = """
from agentrl_env import Environment, tool
from .words import WORDS

class Base(Environment):
    '''Abstract: no reset.'''

class {name}(Base):
    def reset(self, sample, rng):
        return WORDS

    @tool
    def go(self):
        return WORDS
"""


@pytest.fixture
def folder(tmp_path):
    def make(name, source=SOURCE, class_name="Task"):
        place = tmp_path / name
        place.mkdir()
        (place / "environment.py").write_text(source.replace("{name}", class_name))
        (place / "words.py").write_text(f"WORDS = {name!r}")
        return place

    return make


def test_folders_are_loaded(folder):
    one, two = load_targets([str(folder("one")), str(folder("two", class_name="Other"))])
    assert (one.name, two.name) == ("task", "other")
    assert (one().reset(None, None), two().reset(None, None)) == ("one", "two")


def test_target_loaded_twice_is_the_same_class(folder):
    place = folder("same")
    assert load_target(str(place)) is load_target(f"{place}/environment.py:Task")


def test_task_inside_the_folder_of_another_shares_its_code(folder):
    outer = folder("outer")
    (outer / "inner").mkdir()
    inner = SOURCE.replace(".words", "..words").replace("{name}", "Inner")
    (outer / "inner" / "environment.py").write_text(inner)
    one, two = load_targets([str(outer), str(outer / "inner")])
    assert (one.__name__, two.__name__) == ("Task", "Inner")
    assert sys.modules[two.__module__].WORDS is sys.modules[one.__module__].WORDS


def test_classes_are_loaded_from_files_and_modules(folder, monkeypatch, tmp_path):
    place = folder("named", SOURCE + SOURCE.replace("{name}", "Second"))
    assert load_target(f"{place}/environment.py:Second").name == "second"
    (tmp_path / "my_module.py").write_text("from tests.env.tasks import Guess")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_target("my_module:Guess") is Guess
    assert load_target("tests.env.tasks:Guess") is Guess


def test_class_is_its_own_target():
    assert load_target(Quick) is Quick


class Toolless(Environment):
    def reset(self, sample, rng):
        return ""


class Talker(Toolless):
    def respond(self, text):
        return text


class Untyped(Toolless):
    def go(self, n): ...

    from agentrl_env import tool

    go = tool(go)


def test_task_with_respond_needs_no_tools():
    assert load_target(Talker) is Talker


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Toolless, "Toolless has no tools; mark at least one method with @tool"),
        (Untyped, "parameter 'n' needs a type annotation"),
        ("", "the target is empty; a target is a folder"),
        (" ", "the target is empty; a target is a folder"),
        ("/nowhere/at/all", "no such folder; a target is a folder"),
        ("/nowhere/at/all.py", "no such file"),
        ("/nowhere/at/all.py:Task", "no such file"),
        ("no_such_module:Task", "there is no module 'no_such_module'"),
        ("tests.env.nothing:Task", "there is no module 'tests.env.nothing'"),
        ("tests.env.tasks:Nothing", "no Environment class named 'Nothing'"),
        ("tests.env.tasks:Clock", "no Environment class named 'Clock'"),
    ],
)
def test_invalid_target_raises_one_sentence(target, message):
    with pytest.raises(TargetError, match=message) as caught:
        load_target(target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "importing it failed: ZeroDivisionError"),
        ("def (", "importing it failed: SyntaxError"),
        ("import no_such_package", "it needs the module 'no_such_package'; install it"),
        ("x = 1", "needs exactly one Environment class .found: none"),
        (SOURCE + SOURCE.replace("{name}", "Second"), r"found: Task, Second"),
    ],
)
def test_invalid_folder_raises_target_error(folder, source, message):
    with pytest.raises(TargetError, match=message):
        load_target(str(folder("broken", source)))


def test_empty_folder_and_empty_list_raise_target_error(tmp_path):
    with pytest.raises(TargetError, match=r"has no environment\.py"):
        load_target(str(tmp_path))
    with pytest.raises(TargetError, match="nothing to serve"):
        load_targets([])
