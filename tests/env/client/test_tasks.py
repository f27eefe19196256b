import pytest

from agentrl_env.client.tasks import select_task
from agentrl_env.errors import UnknownTask
from agentrl_env.types import TaskInfo

GUESS, QUICK = TaskInfo(name="guess", max_turns=8), TaskInfo(name="quick", max_turns=6)


def test_only_task_is_selected_without_a_name():
    assert select_task({"guess": GUESS}) is GUESS


def test_task_is_selected_by_name():
    assert select_task({"guess": GUESS, "quick": QUICK}, "quick") is QUICK


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "Several tasks are served; choose one with task= or --task: guess, quick."),
        ("chess", "No task 'chess' is served; the tasks are: guess, quick."),
    ],
)
def test_unknown_or_ambiguous_task_raises(name, message):
    with pytest.raises(UnknownTask) as raised:
        select_task({"guess": GUESS, "quick": QUICK}, name)
    assert str(raised.value) == message


def test_no_task_raises():
    with pytest.raises(UnknownTask, match="none"):
        select_task({}, "guess")
