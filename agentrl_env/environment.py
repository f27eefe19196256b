"""``Environment``, the base class of all tasks."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from agentrl_env import definition
from agentrl_env.dataset import EndlessSamples, Samples
from agentrl_env.errors import NotSupported
from agentrl_env.tools import toolset
from agentrl_env.types import Message, TaskSample, ToolSpec
from agentrl_env.wording import Wording

if TYPE_CHECKING:
    from agentrl_env.bridges.trl import TrlEpisode
    from agentrl_env.client.client import EnvClient
    from agentrl_env.client.sync import SyncClientSession
    from agentrl_env.gym.env import GymEnv
    from agentrl_env.gym.vector import GymVectorEnv


class Environment(ABC):
    """Base class of a task. Each session has its own instance, and its ``@tool`` methods are the tools.

    All sessions share the settings, which are class attributes. A session with its own ``max_turns`` or
    other limit on ``self`` ends as ``failed_environment``.

    Methods can be plain or ``async``. Plain methods run on a thread, unless ``blocking`` is False.
    Tools return ``str | Message | list[Message] | Reply | Done``. Raising ``ToolError`` answers the
    model. Any other exception ends the session as ``failed_environment``.

    Defining a class raises DefinitionError if a setting has a wrong type, or if the parameters of a method
    differ from the method in this class.
    """

    name: ClassVar[str]
    """Name of the task. By default the class name in snake_case."""
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    max_turns: ClassVar[int] = 20
    """Turns until the episode is truncated."""
    max_seconds: ClassVar[float | None] = None
    """Seconds until the episode is truncated, including the time between steps."""
    tool_timeout: ClassVar[float] = 30.0
    """Time limit in seconds of a tool call, ``respond``, ``score`` or ``expert``."""
    reset_timeout: ClassVar[float] = 60.0
    """Time limit in seconds of ``reset``, ``session_tools`` and ``close``."""
    max_output_chars: ClassVar[int] = 1_000_000
    """Maximum number of characters in the opening or in the answers to one message. Longer text is cut."""
    blocking: ClassVar[bool] = True
    """True runs plain methods on threads. False runs them on the event loop, for quick pure Python."""
    wording: ClassVar[Wording] = Wording()
    """The texts that a file can replace: messages, the descriptions of tools, and answers."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__)
            cls.name = cls.name.lower()
        for attribute, value in list(vars(cls).items()):
            definition.check_attribute(cls, attribute, value, base=Environment)

    @abstractmethod
    def reset(self, sample: TaskSample, rng: np.random.Generator) -> Any:
        """Start the episode and return its opening messages: ``str | Message | list[Message]``."""

    def respond(self, text: str) -> Any:
        """Answer an assistant turn without a tool call. The return values are the same as for a tool."""
        return toolset(type(self)).without_call()

    def answer_message(self, message: Message) -> Any:
        """Answer a whole assistant message with its tool calls. The return values are the same as for a tool.

        This is for tasks that are played elsewhere. A task that overrides it has no ``@tool`` methods,
        since neither they nor ``respond`` are called.
        """
        raise NotSupported(f"task {self.name!r} answers by its tools")

    def session_tools(self) -> Sequence[ToolSpec]:
        """Return the tools of this session. By default these are the tools of the task.

        It is called once, after ``reset`` or ``restore``, with the time limit ``reset_timeout``. A session
        offers and runs only these tools. They are ``@tool`` methods, unless the task overrides
        ``answer_message``.
        """
        return self.tool_specs()

    def close(self) -> Any:
        """Release the resources of the session. Called exactly once."""
        return None

    def score(self) -> Any:
        """Return metrics of the whole episode at its end. ``success`` overrides the default criterion."""
        return {}

    def expert(self, rng: np.random.Generator) -> Any:
        """Return the oracle's next move in the current state: ``ToolCall | str | Message``."""
        raise NotSupported(f"task {self.name!r} has no expert")

    def snapshot(self) -> Any:
        """Return the state of the episode between two turns: any value that can be deep-copied.

        Defining ``snapshot`` and ``restore`` makes sessions forkable. The state must contain everything
        that later turns depend on, including the random generator if they use it, and nothing that
        sessions cannot share, such as a connection or a process: store its parameters instead.
        ``snapshot`` must not change the episode, which continues. The SDK copies the value immediately,
        once for each fork, so most tasks can write ``return vars(self)``. The timeout is ``tool_timeout``.

        If a controller continues the sessions of dead servers elsewhere (``--resume``), it is called
        after every step, and the value is encoded as plain data (``agentrl_env.session.state_codec``):
        the types of ``state_codec.SUPPORTED``, which include dates, decimals, paths and NumPy's generators,
        and dataclasses, named tuples, pydantic models and enums of the task's own package. They are decoded
        without calling ``__init__``. A session whose state contains anything else, or exceeds 1 MiB, is
        lost with its server.
        """
        raise NotSupported(f"task {self.name!r} has no snapshot")

    def restore(self, state: Any) -> Any:
        """Restore the state returned by ``snapshot``. Called on a new instance instead of ``reset``.

        ``state`` is this instance's own copy: ``vars(self).update(state)`` is the inverse of
        ``return vars(self)``. The return value is ignored. The timeout is ``reset_timeout``.
        """
        raise NotSupported(f"task {self.name!r} has no snapshot")

    @classmethod
    def samples(cls, split: str) -> Samples:
        """Return the samples of a split, an indexable collection of dicts. By default endless and empty."""
        return EndlessSamples()

    @classmethod
    def startup(cls) -> Any:
        """Open resources that all sessions of a process share, such as a database server or an index."""
        return None

    @classmethod
    def shutdown(cls) -> Any:
        """Release the resources that ``startup`` opened."""
        return None

    @classmethod
    def tool_specs(cls) -> tuple[ToolSpec, ...]:
        """Return the tool definitions for the model."""
        return toolset(cls).specs

    @classmethod
    def description(cls) -> str:
        """Return the description of the task: the docstring of the class."""
        return inspect.cleandoc(cls.__doc__ or "")

    @classmethod
    def overrides(cls, method: str) -> bool:
        """Return True if the task overrides the default ``method``."""
        return inspect.getattr_static(cls, method) is not vars(Environment)[method]

    @classmethod
    def local(cls, **options: Any) -> EnvClient:
        """Return a client that runs this task in this process, without HTTP.

        Args:
            options: Options of ``SessionPool``, such as ``max_sessions``.
        """
        from agentrl_env.client.client import EnvClient

        return EnvClient.local(cls, **options)

    @classmethod
    def session(
        cls,
        *,
        seed: int | None = None,
        index: int | str | None = None,
        split: str = "train",
        sample: dict[str, Any] | None = None,
    ) -> SyncClientSession:
        """Open one session of this task in this process, for scripts and notebooks.

        Example::

            with Guess.session(seed=7) as session:
                print(session.messages)
                result = session.step(ToolCall.of("guess", n=7))

        Args:
            seed: Seed of the episode. By default the seed of the sample.
            index: Index of the sample. By default a sample is picked.
            split: Split of the dataset.
            sample: Data to use instead of the dataset's.
        """
        from agentrl_env.client.sync import SyncClientSession

        choice: dict[str, Any] = {"seed": seed, "index": index, "split": split, "sample": sample}
        return SyncClientSession.single(cls.local(), cls.name, **choice)

    @classmethod
    def gym(cls, **options: Any) -> GymEnv:
        """Return this task as a Gymnasium environment that runs in this process.

        Args:
            options: Options of ``GymEnv``, such as ``split`` and ``render_mode``.
        """
        from agentrl_env.gym.env import GymEnv

        return GymEnv(client=cls.local, **options)

    @classmethod
    def gym_vec(cls, n: int, **options: Any) -> GymVectorEnv:
        """Return ``n`` episodes of this task as a Gymnasium vector environment in this process.

        Args:
            n: The number of environments.
            options: Options of ``GymVectorEnv``, such as ``autoreset_mode``.
        """
        from agentrl_env.gym.vector import GymVectorEnv

        return GymVectorEnv(n, client=cls.local, **options)

    @classmethod
    def trl(cls, **options: Any) -> type[TrlEpisode]:
        """Return this task, in this process, as a class for the ``environment_factory`` of TRL.

        Args:
            options: Options of ``trl_environment``, such as ``split``.
        """
        from agentrl_env.bridges.trl import trl_environment

        return trl_environment(client=cls.local, **options)


def find_class(target: type[Environment] | str) -> type[Environment]:
    """Return the Environment class of a target. The target can be of any kind that ``agentrl-env`` accepts.

    Raises TargetError, or DefinitionError for an invalid class.
    """
    if not isinstance(target, str):
        return check_class(target)
    from agentrl_env.hosting.loader import load_target

    return load_target(target)


def check_class(environment: Any) -> type[Environment]:
    """Return an Environment class if sessions can be opened. Raises DefinitionError."""
    return definition.check_class(environment, base=Environment)  # type: ignore[type-abstract]
