"""Checks of what a task says of itself: its tools and its samples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from jsonschema import Draft202012Validator, SchemaError

from agentrl_env.errors import UnknownSample
from agentrl_env.testing.context import Probe
from agentrl_env.testing.report import Outcome, failed, passed, warned
from agentrl_env.types import FunctionSpec

ENDLESS_INDEX = 10**6
"""An index that a split without end must have."""


async def schema(probe: Probe) -> Outcome:
    """Are the tools described in valid JSON Schema, with names that model APIs accept?"""
    functions = [tool.function for tool in probe.task.tools]
    if not functions:
        return warned("The task has no tools: a model can only talk to it.")
    names = [function.name for function in functions]
    for function in functions:
        if problem := _schema_problem(function):
            return failed(f"Tool {function.name!r}: {problem}")
    if len(set(names)) < len(names):
        return failed(f"Two tools have the same name: {', '.join(sorted(names))}.")
    if lacking := list(_lacking_descriptions(probe)):
        return warned(f"No description: {', '.join(lacking)}. A model knows only what it is told.")
    return passed(f"Valid names and schemas: {', '.join(names)}.")


def _schema_problem(function: FunctionSpec) -> str | None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function.name):
        return "its name must be 1 to 64 letters, digits, '_' or '-'."
    try:
        Draft202012Validator.check_schema(function.parameters)
    except SchemaError as error:
        return f"its parameters are no valid JSON Schema: {error.message}."
    if function.parameters.get("type") != "object":
        return 'its parameters must be a JSON Schema of type "object".'
    return None


def _lacking_descriptions(probe: Probe) -> Iterator[str]:
    if not probe.task.description.strip():
        yield "the task"
    for tool in probe.task.tools:
        if not tool.function.description.strip():
            yield f"{tool.function.name}()"
        for name, part in tool.function.parameters.get("properties", {}).items():
            if isinstance(part, dict) and not part.get("description") and "$ref" not in part:
                yield f"{tool.function.name}({name})"


async def samples(probe: Probe) -> Outcome:
    """Do all splits open, refuse what is beyond them, and keep test samples out of train?"""
    if "train" not in probe.task.splits:
        return failed("There is no split named 'train'.")
    for split in probe.task.splits:
        if problem := await _split_problem(probe, split):
            return failed(problem)
    try:
        await probe.open(0, split="no_such_split")
        return failed("A split that does not exist, 'no_such_split', was opened.")
    except UnknownSample:
        pass
    sizes = ", ".join(f"{split} {_count(probe.size(split))}" for split in probe.task.splits)
    if "test" not in probe.task.splits:
        return warned(f"There is no split named 'test' to evaluate on ({sizes}).")
    seen = {split: await _problems(probe, split) for split in ("train", "test")}
    if shared := seen["train"].keys() & seen["test"].keys():
        one = min(shared)
        where = f"train/{seen['train'][one]} and test/{seen['test'][one]}"
        return failed(f"The samples {where} are the same problem: {one[:120]}")
    looked = sum(len(problems) for problems in seen.values())
    return passed(f"{sizes}; none in both among {looked} different ones compared.")


def _count(size: int | None) -> str:
    return "endless" if size is None else f"{size:,}"


async def _split_problem(probe: Probe, split: str) -> str | None:
    size = probe.size(split)
    if size == 0:
        return f"The split {split!r} has no samples."
    for index in (0, ENDLESS_INDEX if size is None else size - 1):
        session = await probe.open(index, split=split)
        if not any(message.content for message in session.messages):
            return f"Sample {split}/{index} opens without a word: reset() must return a message."
        await session.close()
    for index in (-1,) if size is None else (size, size + 1000, -1):
        try:
            await probe.open(index, split=split)
        except UnknownSample:
            continue
        return f"Index {index} of split {split!r} ({_count(size)} samples) was opened."
    return None


async def _problems(probe: Probe, split: str) -> dict[str, int]:
    """Return what makes the problem of up to 200 samples, data or else seed, and the index of each."""
    found: dict[str, int] = {}
    for index in probe.while_time(probe.indices(200, split)):
        session = await probe.open(index, split=split)
        made_by = session.sample.data or {"seed": session.sample.seed}
        found[json.dumps(made_by, sort_keys=True)] = index
        await session.close()
    return found
