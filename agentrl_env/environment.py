"""``Environment``, the base class of all tasks."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from agentrl_env.dataset import EndlessSamples, Samples
from agentrl_env.errors import DefinitionError, NotSupported, place
from agentrl_env.tools import Reply, is_seconds, is_tool, toolset
from agentrl_env.types import Message, TaskSample, ToolSpec

if TYPE_CHECKING:
    from agentrl_env.bridges.trl import TrlEpisode
    from agentrl_env.client.client import EnvClient
    from agentrl_env.client.sync import SyncClientSession
    from agentrl_env.gym.env import GymEnv
    from agentrl_env.gym.vector import GymVectorEnv


class Environment(ABC):
    """Base class of a task: each session has its own instance, whose ``@tool`` methods are the model's tools.

    Methods may be plain or ``async``. Plain ones run on a thread, unless ``blocking`` is False.
    Tools return ``str | Message | list[Message] | Reply | Done``; raising ``ToolError`` answers the
    model; any other exception ends the session as ``failed_environment``.

    A class whose settings have another type, or whose methods have other parameters than those below,
    raises DefinitionError when it is defined.
    """

    name: ClassVar[str]
    """The task's name; the class name in snake_case unless given."""
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    max_turns: ClassVar[int] = 20
    """Turns until the episode is truncated."""
    max_seconds: ClassVar[float | None] = None
    """Seconds until the episode is truncated, including the time between steps."""
    tool_timeout: ClassVar[float] = 30.0
    """Seconds one tool call (or ``respond``, ``score``, ``expert``) may take."""
    reset_timeout: ClassVar[float] = 60.0
    """Seconds ``reset`` may take, and ``close``."""
    max_output_chars: ClassVar[int] = 1_000_000
    """Characters that the answers to one message, or the opening, may have; what exceeds them is cut."""
    blocking: ClassVar[bool] = True
    """True if plain methods may block; False runs them on the event loop, for quick pure Python."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__)
            cls.name = cls.name.lower()
        for attribute, value in list(vars(cls).items()):
            _check_attribute(cls, attribute, value)

    @abstractmethod
    def reset(self, sample: TaskSample, rng: np.random.Generator) -> Any:
        """Start the episode and return its opening messages: ``str | Message | list[Message]``."""

    def respond(self, text: str) -> Any:
        """Answer an assistant turn without a tool call; same return values as a tool."""
        names = toolset(type(self)).names
        return Reply(f"Call one of the tools: {names}.", metrics={"invalid_calls": 1.0})

    def answer_message(self, message: Message) -> Any:
        """Answer a whole assistant message, tool calls included; same return values as a tool.

        For tasks that are played elsewhere. A task that overrides it has no ``@tool`` methods of its own:
        neither they nor ``respond`` are called.
        """
        raise NotSupported(f"task {self.name!r} answers by its tools")

    def session_tools(self) -> Sequence[ToolSpec]:
        """Return the tools of this session, after ``reset``; by default those of the task."""
        return self.tool_specs()

    def close(self) -> Any:
        """Release the resources of the session; called exactly once."""
        return None

    def score(self) -> Any:
        """Return metrics of the whole episode at its end; ``success`` overrides the default criterion."""
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
        once for each fork, so most tasks can write ``return vars(self)``. Has the timeout of a tool.

        If a controller continues the sessions of dead servers elsewhere (``--resume``), it is called
        after every step, and the value is encoded as plain data (``agentrl_env.session.state_codec``):
        None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, deque, NumPy arrays, scalars
        and generators, ``random.Random``, the models of ``agentrl_env.types``, and dataclasses, pydantic
        models and enums that the task's package defines at the top level of a module. They are decoded
        without calling ``__init__``. A session whose state contains anything else, or exceeds 1 MiB, is
        lost with its server.
        """
        raise NotSupported(f"task {self.name!r} has no snapshot")

    def restore(self, state: Any) -> Any:
        """Restore the state returned by ``snapshot``; called on a new instance instead of ``reset``.

        ``state`` is this instance's own copy: ``vars(self).update(state)`` is the inverse of
        ``return vars(self)``. The return value is ignored. Has the timeout of ``reset``.
        """
        raise NotSupported(f"task {self.name!r} has no snapshot")

    @classmethod
    def samples(cls, split: str) -> Samples:
        """Return the samples of a split, an indexable collection of dicts; by default endless and empty."""
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
        """Return whether the task overrides the default ``method``."""
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
            seed: Seed of the episode; by default that of the sample.
            index: Index of the sample; by default one is picked.
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


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (
        lambda value: isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) is not None,
        "text of letters, digits, '_', '-' or '.'",
    ),
    "splits": (
        lambda value: isinstance(value, tuple | list) and all(isinstance(v, str) and v for v in value),
        'a tuple of names, such as ("train", "test")',
    ),
    "max_turns": (_is_count, "a whole number of at least 1"),
    "max_output_chars": (_is_count, "a whole number of at least 1"),
    "max_seconds": (lambda value: value is None or is_seconds(value), "seconds above 0, or None"),
    "tool_timeout": (is_seconds, "seconds above 0"),
    "reset_timeout": (is_seconds, "seconds above 0"),
    "blocking": (lambda value: isinstance(value, bool), "True or False"),
}
"""The class attributes that configure a task: what each may be, in code and in words."""
_HOOKS = (
    "reset", "respond", "answer_message", "session_tools",
    "close", "score", "expert", "snapshot", "restore", "samples", "startup", "shutdown",
    "description",
)  # fmt: skip
"""The methods that a task overrides."""
_FOREIGN_HOOKS = {
    "oracle": "expert", "teardown": "close", "tear_down": "close", "cleanup": "close", "clean_up": "close",
    "setup": "startup", "set_up": "startup", "get_samples": "samples", "load_samples": "samples",
    "get_dataset": "samples", "load_dataset": "samples", "get_state": "snapshot", "set_state": "restore",
}  # fmt: skip
"""Names that other libraries give to hooks."""


def find_class(target: type[Environment] | str) -> type[Environment]:
    """Return the Environment class of a target: a folder, ``file.py:Class``, ``module:Class`` or the class.

    Raises TargetError, and DefinitionError for an invalid class.
    """
    if not isinstance(target, str):
        return check_class(target)
    from agentrl_env.hosting.loader import load_target

    return load_target(target)


def check_class(environment: Any) -> type[Environment]:
    """Return an Environment class that is complete: sessions can be opened. Raises DefinitionError.

    This is what cannot be told when a class is defined, since it may be a base of others, and its
    annotations may name later classes.
    """
    if not isinstance(environment, type) or not issubclass(environment, Environment):
        what = environment.__name__ if isinstance(environment, type) else f"{environment!r:.80}"
        hint = "; pass the class, not an instance" if isinstance(environment, Environment) else ""
        raise DefinitionError(f"{what} is no class that derives from Environment{hint}")
    own = environment.__name__
    if missing := sorted(getattr(environment, "__abstractmethods__", ())):
        wanted = ", ".join(_signature_text(name) for name in missing)
        similar = difflib.get_close_matches(missing[0], vars(environment), n=1, cutoff=0.7)
        hint = f"; {own} has {similar[0]!r}, is that it?" if similar else ""
        raise DefinitionError(f"{own} has no {wanted}{hint}", environment, similar[0] if similar else "")
    if not _takes(environment, 0):
        raise DefinitionError(
            f"{own}.__init__() is called without arguments; set up the episode in reset()",
            environment,
            "__init__",
        )
    if environment.overrides("snapshot") != environment.overrides("restore"):
        has, lacks = ("snapshot", "restore") if environment.overrides("snapshot") else ("restore", "snapshot")
        raise DefinitionError(
            f"{own} has {has}() and no {lacks}(): sessions fork only with both", environment, has
        )
    toolset(environment)
    return environment


def _check_attribute(environment: type[Environment], attribute: str, value: Any) -> None:
    """Raise DefinitionError where an attribute of a task's class contradicts what Environment defines."""
    what = f"{environment.__name__}.{attribute}"
    original = vars(Environment).get(attribute)
    if is_tool(value):
        if original is not None or attribute in _SETTINGS:
            raise DefinitionError(
                f"{what} is a tool, but Environment has an attribute of this name; rename it, "
                f"and keep the name for models with @tool(name={attribute!r})",
                value,
            )
    elif attribute in _SETTINGS:
        valid, wanted = _SETTINGS[attribute]
        if not valid(value):
            raise DefinitionError(f"{what} is {value!r:.80}; it must be {wanted}", environment, attribute)
    elif attribute.startswith("_"):
        return
    elif original is not None:
        _check_method(environment, attribute, value, original)
    elif inspect.isfunction(_plain(value)):
        _check_helper(environment, attribute, value)
        if any(is_tool(vars(base).get(attribute)) for base in environment.__mro__[1:]):
            raise DefinitionError(
                f"{what} replaces a tool and is none: put @tool on it; {attribute} = None removes the tool",
                value,
            )
    elif not hasattr(value, "__get__"):
        similar = difflib.get_close_matches(attribute, set(_SETTINGS) - {"name"}, n=1, cutoff=0.85)
        if similar:
            raise DefinitionError(
                f"{what} is no setting; did you mean {similar[0]!r}?", environment, attribute
            )


def _check_helper(environment: type[Environment], name: str, value: Any) -> None:
    """Raise DefinitionError for a method that nothing calls: its name is nearly that of a hook.

    A helper that the task itself calls, one of a base class, and one beside the hook are none. Without
    ``reset`` the class is not complete, which ``check_class`` tells.
    """
    hooks = [hook for hook in _HOOKS if _is_misspelt(name, hook) and hook not in vars(environment)]
    bases = environment.__mro__[1 : environment.__mro__.index(Environment)]
    if not hooks or (hooks[0] == "reset" and not environment.overrides("reset")):
        return
    own = [_plain(method) for owner in (environment, *bases) for method in vars(owner).values()]
    called = any(_mentions(method.__code__, name) for method in own if inspect.isfunction(method))
    if not called and not any(name in vars(base) for base in bases):
        raise DefinitionError(
            f"{environment.__name__}.{name} is never called; did you mean {_signature_text(hooks[0])}? "
            f"Rename a helper, or call it _{name}",
            value,
        )


def uncalled_methods(environment: type[Environment]) -> list[str]:
    """Return a sentence for each method that nothing calls and that other libraries have as a hook.

    A method beside the hook of that name is a helper, and so is one that the code of the task's modules
    mentions, or that a base class of a library has too.
    """
    bases = [base for base in environment.__mro__ if base not in Environment.__mro__]
    own = [base for base in bases if issubclass(base, Environment)]
    modules = [sys.modules[base.__module__] for base in own if base.__module__ in sys.modules]
    values = [value for module in modules for value in vars(module).values()]
    classes = [value for value in values if isinstance(value, type)]
    values += [value for one in (*bases, *classes) if one is not Environment for value in vars(one).values()]
    code = [part for value in values if (part := _code(value)) is not None]
    found = []
    for name, hook in _FOREIGN_HOOKS.items():
        owners = [base for base in bases if name in vars(base)]
        if not owners or environment.overrides(hook) or any(_mentions(part, name) for part in code):
            continue
        value = vars(owners[0])[name]
        if set(owners) <= set(own) and inspect.isfunction(_plain(value)) and not is_tool(value):
            what, where = f"{owners[0].__name__}.{name}", place(value)
            advice = f"the hook is {_signature_text(hook)}"
            found.append(f"{what} is never called; {advice}{where and f' ({where})'}")
    return found


def _code(value: Any) -> CodeType | None:
    """Return the code of a function or a method, also below a decorator that keeps it; None for others."""
    if isinstance(value, property | cached_property):
        value = value.fget if isinstance(value, property) else value.func
    value = getattr(_plain(value), "__wrapped__", _plain(value))
    return value.__code__ if inspect.isfunction(value) else None


def _is_misspelt(name: str, hook: str) -> bool:
    """Return whether a name is one edit from that of a hook, or two after the same three letters."""
    allowed = 2 if name[:3] == hook[:3] else 1
    rows = [list(range(len(hook) + 1))]
    for i, letter in enumerate(name, start=1):
        row = [i]
        for j, wanted in enumerate(hook, start=1):
            costs = [rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != wanted)]
            if i > 1 and j > 1 and name[i - 2 : i] == hook[j - 2 : j][::-1]:
                costs.append(rows[-2][j - 2] + 1)  # two letters are swapped
            row.append(min(costs))
        rows.append(row)
    return 0 < rows[-1][-1] <= allowed


def _mentions(code: CodeType, name: str) -> bool:
    """Return whether code, or a function inside it, uses a name or a text that is the name."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return name in code.co_names or name in code.co_consts or any(_mentions(part, name) for part in inner)


def _check_method(environment: type[Environment], name: str, value: Any, original: Any) -> None:
    """Raise DefinitionError unless a method can be called like the one of Environment that it overrides."""
    what = f"{environment.__name__}.{name}"
    of_class = isinstance(original, classmethod)
    if not callable(getattr(value, "__func__", value)):
        raise DefinitionError(
            f"{what} is a {type(value).__name__}, but Environment has a method of this name; rename it",
            environment,
            name,
        )
    if isinstance(value, classmethod) and not of_class:
        raise DefinitionError(f"{what} is a classmethod; the state of an episode belongs on self", value)
    parameters = list(inspect.signature(getattr(original, "__func__", original)).parameters.values())
    given = sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if of_class or isinstance(value, staticmethod) or not hasattr(type(value), "__get__"):
        given -= 1  # cls, or self
    if not _takes(getattr(environment, name), given):
        advice = f"write {_signature_text(name)}"
        if of_class and inspect.isfunction(value):
            advice = f"put @classmethod above it, and {advice}"
        raise DefinitionError(f"{what} is called with other arguments; {advice}", value)
    if of_class and name not in ("startup", "shutdown") and inspect.iscoroutinefunction(_plain(value)):
        raise DefinitionError(f"{what} cannot be async; write a plain classmethod", value)
    if not of_class and (inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value)):
        raise DefinitionError(f"{what} yields; return the value instead", value)


def _plain(value: Any) -> Any:
    return getattr(value, "__func__", value)


def _takes(function: Callable[..., Any], given: int) -> bool:
    """Return whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * given)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _signature_text(name: str) -> str:
    function = _plain(vars(Environment)[name])
    return f"{name}({', '.join(inspect.signature(function).parameters)})"
