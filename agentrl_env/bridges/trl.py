"""A task as a class for the ``environment_factory`` of TRL's ``GRPOTrainer``.

Example::

    factory = Guess.trl()
    trainer = GRPOTrainer(
        model, environment_factory=factory, train_dataset=Dataset.from_list(factory.rows(1000))
    )

TRL makes one object for each rollout of a batch, calls ``reset`` with the row of the data set, offers the
public methods as tools, and takes the reward from ``get_reward``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from agentrl_env.bridges.episode import RESPOND, offered_tools
from agentrl_env.bridges.signatures import function_of, has_python_names, inlined, python_type
from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.client.formatting import message_text
from agentrl_env.errors import AgentRLError, DefinitionError, InvalidRequest, SessionEnded
from agentrl_env.gym.env import FAILURES, TaskClient
from agentrl_env.gym.spaces import action_message
from agentrl_env.types import Message, ToolSpec

RESERVED = ("reset", "get_reward", "rows", "close")
CHOICE = ("split", "index", "seed", "sample")
"""Columns of the data set that choose the problem."""


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
    """Return the class of a task's episodes, an ``environment_factory``.

    Args:
        url: address of a server. Give either this, ``client`` or ``target``.
        task: name of the task; optional if there is only one.
        client: a callable that returns an EnvClient, such as ``Guess.local``.
        token: the server's token.
        target: a folder with an ``environment.py``, ``file.py:Class`` or ``module:Class``.
        split: of the problems whose row has no column ``split``.
        wait: seconds that an opening waits for a place on a full server.

    Raises DefinitionError where a tool cannot be a method. Raises UnknownTask, ServerUnreachable.
    """
    tasks = TaskClient(url, task, client=client, token=token, target=target)
    info = tasks.run(tasks.info())
    tools = offered_tools(info, info.tools)
    methods = {tool.function.name: _method(tool) for tool in tools}
    fields = {"__doc__": info.description, "_tasks": tasks, "_split": split, "_wait": wait, **methods}
    fields["_talks"] = RESPOND in tools
    return type(info.name, (TrlEpisode,), fields)


class TrlEpisode:
    """The episodes of one rollout slot, one after another; subclasses have the task's tools as methods."""

    _tasks: TaskClient
    _split: str
    _wait: float
    _talks: bool
    """True if ``respond`` stands for messages without a tool call."""

    def __init__(self) -> None:
        self._session: ClientSession | None = None
        self._reward = 0.0
        self._failed = False
        self._calls = 0

    @classmethod
    def rows(cls, n: int, split: str | None = None, first: int = 0) -> list[dict[str, Any]]:
        """Return rows of a data set: the problems ``first`` to ``first + n - 1`` of a split."""
        prompt = [{"role": "user", "content": ""}]
        return [
            {"prompt": prompt, "split": split or cls._split, "index": index}
            for index in range(first, first + n)
        ]

    @classmethod
    def close(cls) -> None:
        """Disconnect; a later ``reset`` connects again. Idempotent."""

        async def nothing() -> None:
            return None

        cls._tasks.close(nothing)

    def reset(self, **row: Any) -> str:
        """Begin an episode; return the opening messages as text.

        Args:
            row: of the data set. Its columns ``split``, ``index``, ``seed`` and ``sample`` choose the
                problem.

        Raises InvalidRequest where no column chooses the problem: the rollouts of a group would get
        different ones.
        """
        choice = {name: row[name] for name in CHOICE if row.get(name) is not None}
        if not choice.keys() & {"index", "seed", "sample"}:
            raise InvalidRequest("the data set needs a column index, seed or sample; rows(n) makes one")
        self._tasks.run(self._begin({"split": self._split, **choice}))
        assert self._session is not None
        return "\n\n".join(message_text(message) for message in self._session.messages)

    def get_reward(self) -> float | None:
        """Return the sum of the rewards, and end the episode; None where the environment failed.

        TRL leaves a rollout without a reward out of its group's baseline and gradient.
        """
        self._tasks.run(self._end())
        return None if self._failed else self._reward

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Play one turn; return its messages as text. Raises AgentRLError."""
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
    function = tool.function
    schema = inlined(function.parameters)
    name = function.name
    if name in RESERVED or name.startswith("_") or not has_python_names(schema):
        raise DefinitionError(
            f"tool {name!r} cannot be a method of a TRL environment; rename it, or its arguments"
        )
    described = {key: value.get("description", key) for key, value in schema.get("properties", {}).items()}
    lines = [" ".join(function.description.split()) or name]
    lines += ["", "Args:"] if described else []
    lines += [f"    {key}: {' '.join(text.split())}" for key, text in described.items()]
    lines += ["", "Returns:", "    The answer."]
    return function_of(name, "\n".join(lines), schema, python_type, partial(_play, name))


def _play(name: str, episode: TrlEpisode, /, **arguments: Any) -> str:
    return episode._call(name, arguments)
