"""The conformance checks of a task's description: its tools, methods and samples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations, zip_longest

from agentrl_env.author_code import place
from agentrl_env.dataset import empty_split
from agentrl_env.definition import uncalled_methods
from agentrl_env.environment import Environment
from agentrl_env.errors import UnknownSample
from agentrl_env.json_schema import SchemaProblem, compiled_schema
from agentrl_env.testing.context import CheckContext
from agentrl_env.testing.report import CheckOutcome, failed, passed, readable, skipped, warned
from agentrl_env.tools import Tool, toolset
from agentrl_env.types import FunctionSpec

ENDLESS_INDEX = 10**6
"""An index that must exist in every endless split."""
COMPARED, COMPARED_AT_LEAST = 400, 40
"""Number of samples to compare between splits: of all splits together, and at least of each split."""


async def schema(context: CheckContext) -> CheckOutcome:
    """Do the tools have valid JSON Schemas, and names that model APIs accept?"""
    functions = [tool.function for tool in context.task.tools]
    if not functions and "respond" not in context.task.capabilities:
        return warned("The task has no tools: a model can only send text.")
    names = [function.name for function in functions]
    for function in functions:
        if problem := _schema_problem(function):
            return failed(f"Tool {function.name!r}: {problem}")
    if len(set(names)) < len(names):
        return failed(f"Two tools have the same name: {', '.join(sorted(names))}.")
    missing = ", ".join(_missing_descriptions(context))
    if problems := [*([f"No description: {missing}"] if missing else []), *_unknown_descriptions(context)]:
        return warned(f"{'. '.join(problems)}. Models rely on descriptions.")
    return passed(f"Valid names and schemas: {', '.join(names)}." if names else "respond() answers text.")


def _schema_problem(function: FunctionSpec) -> str | None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function.name):
        return "its name must be 1 to 64 letters, digits, '_' or '-'."
    try:
        compiled_schema(function.parameters)
    except SchemaProblem as error:
        return f"its parameters are not a valid JSON Schema: {error}."
    if function.parameters.get("type") != "object":
        return 'its parameters must be a JSON Schema of type "object".'
    return None


def _missing_descriptions(context: CheckContext) -> Iterator[str]:
    own = context.environment
    if not context.task.description.strip():
        yield f"the task{_brackets(place(own) if own else '')}"
    for function in (tool.function for tool in context.task.tools):
        missing = [] if function.description.strip() else [f"{function.name}()"]
        for name, part in function.parameters.get("properties", {}).items():
            if isinstance(part, dict) and not part.get("description") and "$ref" not in part:
                missing.append(f"{function.name}({name})")
        if missing:
            yield ", ".join(missing) + _brackets(_place_of_tool(context, function.name))


def _unknown_descriptions(context: CheckContext) -> Iterator[str]:
    for tool in _own_tools(context).values():
        where = _brackets(_place_of_tool(context, tool.name))
        for name in tool.arguments.unknown:
            yield f"The Args: section of {tool.name}() describes {name!r}, which is not a parameter{where}"


def _own_tools(context: CheckContext) -> dict[str, Tool]:
    return toolset(context.environment).tools if context.environment is not None else {}


def _place_of_tool(context: CheckContext, name: str) -> str:
    tool = _own_tools(context).get(name)
    return place(getattr(context.environment, tool.attribute)) if tool is not None else ""


def _brackets(where: str) -> str:
    return where and f" ({where})"


async def hooks(context: CheckContext) -> CheckOutcome:
    """Is every method with the name of another library's hook called?"""
    if context.environment is None:
        return skipped("Not visible from outside.")
    if found := uncalled_methods(context.environment, base=Environment):
        return warned(f"{'; '.join(found)}.")
    return passed("No method that nothing calls has the name of another library's hook.")


async def samples(context: CheckContext) -> CheckOutcome:
    """Can all splits be opened, are unknown samples rejected, and is no problem in two splits?"""
    if "train" not in context.task.splits:
        known = ", ".join(context.task.splits) or "none"
        return failed(
            f"There is no split named 'train' (splits: {known}); name one of them so, which clients open by "
            "default."
        )
    for split in context.task.splits:
        if context.size(split) == 0:
            return context.broke(empty_split(split), f"The {empty_split(split)}.")
        if problem := await _split_problem(context, split):
            return failed(problem)
    try:
        await context.open(0, split="no_such_split")
        return failed("The unknown split 'no_such_split' was opened.")
    except UnknownSample:
        pass
    sizes = ", ".join(f"{split} {_format_size(context.size(split))}" for split in context.task.splits)
    seen = await _problem_keys(context)
    for one, other in combinations(seen, 2):
        if shared := seen[one].keys() & seen[other].keys():
            key = min(shared)
            both = f"{one}/{seen[one][key]} and {other}/{seen[other][key]}"
            return failed(f"The samples {both} are the same problem: {key[:120]}")
    if "test" not in context.task.splits:
        return warned(f"There is no split named 'test' for evaluation ({sizes}).")
    compared = sum(len(keys) for keys in seen.values())
    return passed(f"{sizes}; no two splits share a problem among {compared} different samples compared.")


def _format_size(size: int | None) -> str:
    return "endless" if size is None else f"{size:,}"


async def _split_problem(context: CheckContext, split: str) -> str | None:
    size = context.size(split)
    for index in (0, ENDLESS_INDEX if size is None else size - 1):
        session = await context.open(index, split=split)
        if not any(message.content for message in session.messages):
            return f"Sample {split}/{index} opens without text: reset() must return a message."
        await session.close()
    for index in (-1,) if size is None else (size, size + 1000, -1):
        try:
            await context.open(index, split=split)
        except UnknownSample:
            continue
        return f"Index {index} of split {split!r} ({_format_size(size)} samples) was opened."
    return None


async def _problem_keys(context: CheckContext) -> dict[str, dict[str, int]]:
    """Return, for each split, keys of some problems (their data, or else their seed) and their indices.

    The splits take turns, so that all of them are compared even if time runs out.
    """
    splits = list(context.task.splits)
    share = max(COMPARED // len(splits), COMPARED_AT_LEAST)
    by_split = [[(split, index) for index in context.indices(share, split)] for split in splits]
    found: dict[str, dict[str, int]] = {split: {} for split in splits}
    plan = [one for turn in zip_longest(*by_split) for one in turn if one is not None]
    for split, index in context.while_time(plan, least=len(splits)):
        session = await context.open(index, split=split)
        found[split][readable(session.sample.data or {"seed": session.sample.seed})] = index
        await session.close()
    return found
