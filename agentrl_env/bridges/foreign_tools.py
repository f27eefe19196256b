"""Tools of another server as tools of an Environment, with the server's own JSON Schemas."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl_env.errors import TargetError
from agentrl_env.json_schema import SchemaArguments, SchemaProblem
from agentrl_env.tools import foreign_tool

logger = logging.getLogger("agentrl_env")
MAX_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTool:
    """A tool as a server describes it.

    Args:
        name: name on the server, with any characters.
        description: description for the model.
        schema: JSON Schema of the arguments, not validated.
    """

    name: str
    description: str
    schema: Any


def tools_of(
    server: str, listed: Iterable[ForeignTool], play: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """Return the tools of a server as methods of an Environment, by attribute name.

    A tool that cannot be served is omitted, and the reason is logged as a warning. Characters that models do
    not accept in a name become ``_``.

    Args:
        server: name of the server in warnings.
        listed: tools of the server.
        play: ``await play(environment, name, arguments)`` answers a call.

    Raises TargetError if no tool can be served.
    """
    methods: dict[str, Callable[..., Any]] = {}
    reasons = []
    shown: set[str] = set()
    for tool in listed:
        attribute = f"_tool_{tool.name}"
        try:
            if attribute in methods:
                raise SchemaProblem("another tool has the same name")
            name = _free_name(tool.name, shown)
            arguments = SchemaArguments(tool.schema, tool.description)
        except SchemaProblem as error:
            reasons.append(f"{tool.name!r}: {error}")
            continue
        shown.add(name)
        methods[attribute] = foreign_tool(name, arguments, partial(_play, play, tool.name))
        for pattern in arguments.compiled.unchecked:
            logger.warning(
                "%s: the pattern %s of tool %r cannot be checked here; only the server checks it",
                server,
                pattern,
                tool.name,
            )
    for reason in reasons:
        logger.warning("%s: omitted tool %s", server, reason)
    if reasons and not methods:
        raise TargetError(f"{server}: no tool can be served: {'; '.join(reasons[:3])}")
    return methods


async def _play(play: Callable[..., Any], name: str, environment: Any, arguments: dict[str, Any]) -> Any:
    return await play(environment, name, arguments)


def _free_name(name: str, shown: set[str]) -> str:
    """Return an unused name that models accept. Raises SchemaProblem."""
    cleaned = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:MAX_NAME]
    if not cleaned:
        raise SchemaProblem("it has no name")
    found, number = cleaned, 1
    while found in shown:
        number += 1
        found = f"{cleaned[: MAX_NAME - len(str(number)) - 1]}_{number}"
    return found
