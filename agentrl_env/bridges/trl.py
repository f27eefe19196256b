"""Make a task a class for the ``environment_factory`` of TRL's ``GRPOTrainer``.

Example::

    factory = Guess.trl()
    trainer = GRPOTrainer(
        model, environment_factory=factory, train_dataset=Dataset.from_list(factory.rows(1000))
    )

TRL creates one object per rollout of a batch, calls ``reset`` with a row of the data set, offers the public
methods as tools, and reads the reward with ``get_reward``.
"""

from __future__ import annotations

import inspect
import json
import keyword
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union
from urllib.parse import unquote

from agentrl_env.bridges.episode import RESPOND, offered_tools
from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.client.formatting import message_text
from agentrl_env.errors import AgentRLError, DefinitionError, InvalidRequest, SessionEnded
from agentrl_env.gym.env import FAILURES, TaskClient
from agentrl_env.gym.spaces import action_message
from agentrl_env.types import Message, ToolSpec

RESERVED = ("reset", "get_reward", "rows", "close")
CHOICE = ("split", "index", "seed", "sample")
"""Data set columns that choose the problem."""
_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": None,
}


def trl_environment(
    url: str | None = None,
    task: str | None = None,
    *,
    client: Callable[[], EnvClient] | None = None,
    token: str | None = None,
    target: str | None = None,
    split: str = "train",
    wait: float = 600.0,
) -> type[TrlEpisode]:
    """Return an ``environment_factory`` class for a task.

    Args:
        url: address of a server. Give either this, ``client`` or ``target``.
        task: name of the task. Optional if there is only one.
        client: a callable that returns an EnvClient, such as ``Guess.local``.
        token: the server's token.
        target: a folder with an ``environment.py``, ``file.py:Class`` or ``module:Class``.
        split: split for rows without a column ``split``.
        wait: maximum seconds to wait for a place on a full server.

    Raises UnknownTask, ServerUnreachable, or DefinitionError if a tool cannot be a method.
    """
    tasks = TaskClient(url, task, client=client, token=token, target=target)
    info = tasks.run(tasks.info())
    tools = offered_tools(info, info.tools)
    methods = {tool.function.name: _method(tool) for tool in tools}
    fields = {"__doc__": info.description, "_tasks": tasks, "_split": split, "_wait": wait, **methods}
    fields["_talks"] = RESPOND in tools
    return type(info.name, (TrlEpisode,), fields)


class TrlEpisode:
    """The episodes of one rollout slot, one after another. Subclasses have the task's tools as methods."""

    _tasks: TaskClient
    _split: str
    _wait: float
    _talks: bool
    """True if ``respond`` represents messages without a tool call."""

    def __init__(self) -> None:
        self._session: ClientSession | None = None
        self._reward = 0.0
        self._failed = False
        self._calls = 0

    @classmethod
    def rows(cls, n: int, split: str | None = None, first: int = 0) -> list[dict[str, Any]]:
        """Return data set rows for the problems ``first`` to ``first + n - 1`` of a split."""
        prompt = [{"role": "user", "content": ""}]
        return [
            {"prompt": prompt, "split": split or cls._split, "index": index}
            for index in range(first, first + n)
        ]

    @classmethod
    def close(cls) -> None:
        """Disconnect. A later ``reset`` connects again. Idempotent."""

        async def nothing() -> None:
            return None

        cls._tasks.close(nothing)

    def reset(self, **row: Any) -> str:
        """Start an episode and return the opening messages as text.

        Args:
            row: row of the data set. Its columns ``split``, ``index``, ``seed`` and ``sample`` choose the
                problem.

        Raises InvalidRequest if no column chooses the problem, because the rollouts of a group would get
        different problems.
        """
        choice = {name: row[name] for name in CHOICE if row.get(name) is not None}
        if not choice.keys() & {"index", "seed", "sample"}:
            raise InvalidRequest("the data set needs a column index, seed or sample; rows(n) makes one")
        self._tasks.run(self._begin({"split": self._split, **choice}))
        assert self._session is not None
        return "\n\n".join(message_text(message) for message in self._session.messages)

    def get_reward(self) -> float | None:
        """End the episode and return the sum of the rewards, or None if the environment failed.

        TRL excludes rollouts without a reward from their group's baseline and gradient.
        """
        self._tasks.run(self._end())
        return None if self._failed else self._reward

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Play one turn and return its messages as text. Raises AgentRLError."""
        if self._session is None or self._session.status.final:
            raise SessionEnded("the episode has ended")
        self._calls += 1
        message = action_message({"name": name, "arguments": arguments}, call_id=f"call_{self._calls}")
        if name == RESPOND.function.name and self._talks:
            message = Message.assistant(str(arguments.get("text", "")))
        try:
            result = self._tasks.run(self._session.step(message))
        except AgentRLError:
            self._failed = True
            raise
        if result.status in FAILURES:
            self._failed = True
            raise FAILURES[result.status]("the environment failed")
        self._reward += result.reward
        return "\n".join(message_text(message) for message in result.messages)

    async def _begin(self, choice: dict[str, Any]) -> None:
        await self._end()
        client, task = await self._tasks.connect()
        self._reward, self._failed, self._calls = 0.0, False, 0
        self._session = await client.open(task, wait=self._wait, **choice)

    async def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _method(tool: ToolSpec) -> Callable[..., Any]:
    """Return a method with a named, annotated parameter for each argument of a tool."""
    root, name = tool.function.parameters, tool.function.name
    schema = _follow(root, root, frozenset())[0]
    arguments: Mapping[str, Any] = schema.get("properties", {})
    if name in RESERVED or name.startswith("_") or not all(map(_is_python_name, arguments)):
        raise DefinitionError(
            f"tool {name!r} cannot be a method of a TRL environment; rename it, or its arguments"
        )
    required = schema.get("required", ())
    described, parameters = [], []
    for key, part in sorted(arguments.items(), key=lambda item: item[0] not in required):
        about = part if isinstance(part, Mapping) else {}
        described.append(f"    {key}: {_description(key, about, root)}")
        default = inspect.Parameter.empty if key in required else about.get("default")
        annotation = python_type(part, root)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(key, kind, annotation=annotation, default=default))

    def method(self: TrlEpisode, **given: Any) -> str:
        return self._call(name, given)

    lines = [" ".join(tool.function.description.split()) or name]
    lines += ["", "Args:", *described] if described else []
    method.__name__ = method.__qualname__ = name
    method.__doc__ = "\n".join([*lines, "", "Returns:", "    The answer."])
    method.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    return method


def _description(key: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Return an argument's description with the schemas of its objects, which Python types cannot express."""
    about = " ".join(str(schema.get("description", key)).split())
    objects = [json.dumps(part) for part in _objects(schema, root, frozenset())]
    return " ".join([about, *(f"JSON Schema of the object: {text}." for text in dict.fromkeys(objects))])


def _objects(schema: Any, root: Mapping[str, Any], within: frozenset[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects with properties in an argument's schema, including objects in lists and unions."""
    schema, within = _follow(schema, root, within)
    if "properties" in schema:
        yield {key: _resolve(value, root, within) for key, value in schema.items() if key != "description"}
        return
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items")):
        if isinstance(part, Mapping):
            yield from _objects(part, root, within)


def _resolve(schema: Any, root: Mapping[str, Any], within: frozenset[str]) -> Any:
    """Return part of a schema with its references replaced, except recursive references."""
    if isinstance(schema, list):
        return [_resolve(part, root, within) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    schema, within = _follow(schema, root, within)
    return {key: _resolve(value, root, within) for key, value in schema.items()}


def _is_python_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and name != "self"


def python_type(schema: Any, root: Mapping[str, Any], within: frozenset[str] = frozenset()) -> Any:
    """Return the Python type of a schema, as close as ``typing`` can express it.

    Args:
        schema: a part of ``root``.
        root: the schema in which references are resolved.
        within: references that enclose the part. A repeated reference becomes ``Any``.
    """
    schema, within = _follow(schema, root, within)
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices:
        return Literal[tuple(choices)]
    options = schema.get("anyOf", schema.get("oneOf"))
    if options:
        return Union[tuple(python_type(option, root, within) for option in options)]  # noqa: UP007
    kind = schema.get("type")
    if isinstance(kind, list):
        return Union[tuple(_TYPES.get(one, Any) for one in kind)]  # noqa: UP007
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return list[python_type(schema["items"], root, within)]  # type: ignore[misc]
    return _TYPES.get(str(kind), Any)


def _follow(
    schema: Any, root: Mapping[str, Any], within: frozenset[str]
) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return a schema with its top-level reference replaced, and ``within`` extended by this reference."""
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        found: Any = root if reference == "#" or reference.startswith("#/") else None
        for part in reference.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        if reference in within or not isinstance(found, Mapping):
            return {}, within
        within |= {reference}
        schema = {**found, **{key: value for key, value in schema.items() if key != "$ref"}}
    return (schema if isinstance(schema, Mapping) else {}), within
