"""Choosing one of the tasks that a client serves."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl_env.errors import UnknownTask
from agentrl_env.types import TaskInfo


def select_task(tasks: Mapping[str, TaskInfo], name: str | None = None) -> TaskInfo:
    """Return the task called ``name``; without a name, the only task.

    Raises:
        UnknownTask: No task has that name, or no name is given and several tasks are served.
    """
    if name is None and len(tasks) == 1:
        return next(iter(tasks.values()))
    known = ", ".join(tasks) or "none"
    if name is None:
        raise UnknownTask(f"Several tasks are served; choose one with task= or --task: {known}.")
    if name not in tasks:
        raise UnknownTask(f"No task {name!r} is served; the tasks are: {known}.")
    return tasks[name]
