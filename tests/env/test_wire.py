import pytest

from agentrl_env.errors import UnknownTask
from agentrl_env.wire import choose_task


@pytest.mark.parametrize("name", [None, "", "guess"])
def test_only_task_is_chosen_without_a_name(name):
    assert choose_task(name, ["guess"]) == "guess"


def test_task_is_chosen_by_name():
    assert choose_task("quick", ["guess", "quick"]) == "quick"


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        (None, ["guess", "quick"], "several tasks are served; choose one with task= or --task: guess, quick"),
        ("chess", ["guess", "quick"], "no task 'chess' here; tasks: guess, quick"),
        ("chess", [], "no task 'chess' here; tasks: none"),
        (None, [], "no task is served here; is a server linked to the controller?"),
    ],
)
def test_unknown_or_ambiguous_task_raises(name, known, message):
    with pytest.raises(UnknownTask) as raised:
        choose_task(name, known)
    assert str(raised.value) == message
