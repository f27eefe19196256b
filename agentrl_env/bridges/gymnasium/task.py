"""Gymnasium environments as tasks. One tool takes the action, and observations are rendered as text.

The target ``gym:FrozenLake-v1?is_slippery=false`` names such a task. In Python::

    class Lake(GymnasiumTask):
        env_id = "FrozenLake-v1"
        options = {"is_slippery": False}
        actions = {"left": 0, "down": 1, "right": 2, "up": 3}

        def render(self, observation, info):
            return f"You are on cell {observation}."
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, ClassVar
from urllib.parse import parse_qsl

import gymnasium
import numpy as np

from agentrl_env.bridges.gymnasium.action_space import action_fields, decode
from agentrl_env.environment import Environment
from agentrl_env.errors import AUTHOR_ERRORS, DefinitionError, TargetError, ToolError
from agentrl_env.tools import Done, Reply, tool
from agentrl_env.types import TaskSample

SEEDS = 2**31
"""Upper bound of the seeds that every environment accepts. Session seeds are taken modulo this number."""
RESET, STEP = ("observation", "info"), ("observation", "reward", "terminated", "truncated", "info")
"""What the methods of an environment return."""
MAX_TURNS = 200
"""Maximum number of turns of an environment without its own step limit."""
MAX_NUMBERS = 1_000
"""Maximum number of numbers in an observation without a renderer. An image has more."""
SECTIONS = ("Description", "Observation Space", "Rewards", "Reward", "Episode End", "Episode Termination")
"""Sections of an environment's documentation that are copied to the task's description."""
PACKAGES = {"MiniGrid": "minigrid", "BabyAI": "minigrid", "miniwob": "miniwob", "ALE": "ale_py"}
"""Packages that register environment ids, by the id's first word, so that ``gym:`` targets need no module."""
_HIGHLIGHT = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0?m", re.DOTALL)


class GymnasiumTask(Environment):
    """Base class of tasks that wrap registered Gymnasium environments.

    A subclass names the environment. Defining the subclass creates the environment once, to read its spaces,
    documentation and step limit. Each session then has its own instance, which is reset with the
    session's seed. DefinitionError is raised if the environment cannot be created.

    Sessions fork by repeating the actions so far, unless the environment is registered as nondeterministic.
    The metric ``success`` is ``is_success`` or ``success`` of the last ``info``. Without them, an episode
    succeeds if its return reaches the environment's reward threshold. Without a threshold, it succeeds if the
    last reward at its end is above zero.
    """

    env_id: ClassVar[str]
    """Id for ``gymnasium.make``, such as ``FrozenLake-v1``, or ``MODULE:ID`` to import a module first."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments for ``gymnasium.make``."""
    actions: ClassVar[Mapping[str, int]] = {}
    """Names of discrete actions. By default the environment's names: the enum ``actions``, as in MiniGrid,
    or ``get_action_meanings()``, as in Atari. Numbers if it has neither.
    """

    env: gymnasium.Env[Any, Any] | None = None
    _space: ClassVar[gymnasium.Space[Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "env_id" not in vars(cls) and not hasattr(cls, "env_id"):
            return
        try:
            env = cls._make()
        except AUTHOR_ERRORS as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DefinitionError(f"cannot make the environment {cls.env_id!r}: {reason}") from error
        try:
            cls._define(env)
        finally:
            env.close()

    def render(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return an observation as text for the model. Override this method to change the text.

        The default is the environment's own text rendering, if it has one (``render_mode="ansi"``, with
        highlighted parts in brackets), followed by the observation as JSON.

        Args:
            observation: The observation that ``reset`` or ``step`` returned.
            info: The ``info`` of the same call.
        """
        assert self.env is not None
        shown: Any = self.env.render() if self.env.render_mode == "ansi" else None
        text = str(shown.getvalue() if isinstance(shown, io.StringIO) else shown or "")
        text = _HIGHLIGHT.sub(r"[\1]", text).strip("\n")
        return "\n".join([*[text] * bool(text), f"Observation: {observation_text(observation)}"])

    def reset(self, sample: TaskSample, rng: np.random.Generator) -> str:
        """Create the environment and reset it with the seed of the sample."""
        text = self._begin(sample.seed % SEEDS)
        return "\n\n".join(filter(None, (self.description(), text)))

    def close(self) -> None:
        """Close the environment."""
        if self.env is not None:
            self.env.close()

    def score(self) -> dict[str, float]:
        """Return the metric ``success``, by the rules in the class's description."""
        assert self.env is not None
        for key in ("is_success", "success"):
            if key in self._info:
                return {"success": self._number(self._info[key], f"info[{key!r}]")}
        threshold = self.env.spec.reward_threshold if self.env.spec else None
        if threshold is not None:
            return {"success": float(self._return >= threshold)}
        return {"success": float(self._terminated and self._reward > 0)}

    def snapshot(self) -> dict[str, Any]:
        """Return the seed and the actions so far. ``restore`` reaches the same state from them."""
        return {"seed": self._seed, "actions": self._played, "text": self._text}

    def restore(self, state: dict[str, Any]) -> None:
        """Repeat the actions of a snapshot. Raises RuntimeError if they lead to another observation."""
        self._begin(state["seed"])
        for arguments in state["actions"]:
            self._play(arguments)
        if self._text != state["text"]:
            raise RuntimeError(
                f"{self.env_id} is not deterministic: the same seed and actions led to another observation"
            )

    @classmethod
    def _make(cls) -> gymnasium.Env[Any, Any]:
        """Create the environment, with text rendering if supported and not overridden by ``options``."""
        word = re.split(r"[-/]", cls.env_id)[0]
        if cls.env_id not in gymnasium.registry and word in PACKAGES:
            importlib.import_module(PACKAGES[word])
        options = dict(cls.options)
        env = gymnasium.make(cls.env_id, disable_env_checker=True, **options)
        if "render_mode" not in options and "ansi" in (env.metadata.get("render_modes") or ()):
            env.close()
            env = gymnasium.make(cls.env_id, disable_env_checker=True, render_mode="ansi", **options)
        return env

    @classmethod
    def _define(cls, env: gymnasium.Env[Any, Any]) -> None:
        """Set the tool, description and turn limit of the environment."""
        documentation = _sections(type(env.unwrapped).__doc__ or "")
        if cls.__doc__ is None:
            cls.__doc__ = "\n\n".join(
                documentation[name] for name in ("", *SECTIONS) if name in documentation
            )
        if "max_turns" not in vars(cls):
            own = getattr(env.unwrapped, "max_steps", None)  # as in MiniGrid
            limit = (env.spec and env.spec.max_episode_steps) or own
            cls.max_turns = limit if isinstance(limit, int) and limit > 0 else MAX_TURNS
        if env.spec and env.spec.nondeterministic:
            cls.snapshot, cls.restore = Environment.snapshot, Environment.restore  # type: ignore[method-assign]
        if cls.render is GymnasiumTask.render and env.render_mode != "ansi":
            _check_size(env.observation_space, cls.env_id)
        cls._space = env.action_space
        cls.actions = cls.actions or _action_names(env)
        cls.step = _step_tool(cls, documentation.get("Action Space", ""))  # type: ignore[attr-defined]

    def _begin(self, seed: int) -> str:
        self._seed, self._played, self._return = seed, [], 0.0  # type: ignore[var-annotated]
        self._reward, self._terminated = 0.0, False
        self.env = self._make()
        observation, self._info = self._unpack("reset", self.env.reset(seed=seed), RESET)
        self._text = self.render(observation, self._info)
        return self._text

    def _play(self, arguments: dict[str, Any]) -> Reply:
        """Take the action given by the arguments of a call."""
        action = decode(self._space, arguments, self.actions)
        if not self._space.contains(action):
            raise ToolError(f"The action is not in the action space {self._space}.")
        assert self.env is not None
        observation, reward, *ends, self._info = self._unpack("step", self.env.step(action), STEP)
        self._terminated, truncated = (bool(self._number(end, "terminated or truncated")) for end in ends)
        self._played.append(arguments)
        self._reward = self._number(reward, "the reward")
        self._return += self._reward
        self._text = self.render(observation, self._info)
        if self._terminated or truncated:
            return Done(self._text, reward=self._reward, truncated=not self._terminated)
        return Reply(self._text, reward=self._reward)

    def _unpack(self, method: str, answer: Any, names: Sequence[str]) -> Sequence[Any]:
        """Return the parts of an answer of the environment. Raises DefinitionError."""
        if (
            not isinstance(answer, tuple | list)
            or len(answer) != len(names)
            or not isinstance(answer[-1], Mapping)
        ):
            raise DefinitionError(
                f"{self.env_id}: {method}() must return a tuple of {', '.join(names)}, which is a dict, "
                f"got {answer!r:.200}"
            )
        return answer

    def _number(self, value: Any, what: str) -> float:
        """Return a number, a boolean or an array with one of them as a float. Raises DefinitionError."""
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise DefinitionError(f"{self.env_id}: {what} must be a number or boolean, got {value!r:.200}")
        return float(array.item())


def load(target: str) -> type[GymnasiumTask]:
    """Return the task of a target, without its scheme: ``[MODULE:]ID[?OPTIONS][#MODULE:FUNCTION]``.

    Args:
        target: The id for ``gymnasium.make``. ``OPTIONS`` are keyword arguments, with values in JSON or plain
            text, such as ``map_name=8x8&is_slippery=false``. The function replaces ``GymnasiumTask.render``.

    Raises TargetError, or DefinitionError if the environment cannot be created or has no text form.
    """
    place, _, renderer = target.partition("#")
    env_id, _, query = place.partition("?")
    if not env_id:
        raise TargetError("name an environment, such as gym:FrozenLake-v1")
    return _task(env_id, query, renderer)


@cache
def _task(env_id: str, query: str, renderer: str) -> type[GymnasiumTask]:
    pairs = parse_qsl(query, keep_blank_values=True)
    name = re.sub(r"[^\w.-]+", "-", env_id.rpartition(":")[2])
    body: dict[str, Any] = {
        "name": name,
        "env_id": env_id,
        "options": {name: _value(text) for name, text in pairs},
        "__module__": __name__,
        "__target__": f"gym:{env_id}{'?' * bool(query)}{query}{'#' * bool(renderer)}{renderer}",
    }
    if renderer:
        body["render"] = _function(renderer)
    return type(name, (GymnasiumTask,), body)


def observation_text(observation: Any) -> str:
    """Return an observation as JSON on one line. Numbers have six significant digits."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(name): plain(item) for name, item in value.items()}
        if isinstance(value, np.ndarray | np.generic):
            return plain(value.tolist())
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, float):
            return float(f"{value:.6g}")
        return value if isinstance(value, int | str | bool | None) else str(value)

    return json.dumps(plain(observation), ensure_ascii=False)


def _step_tool(cls: type[GymnasiumTask], documentation: str) -> Any:
    """Return the tool that takes an action, with a parameter for each field of the action space."""

    def step(self: GymnasiumTask, **arguments: Any) -> Reply:
        return self._play(arguments)

    fields = action_fields(cls._space, cls.actions, cls.env_id)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fields]
    step.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    step.__annotations__ = fields
    step.__doc__ = f"Take one action.\n\n{documentation}".strip()
    return tool(step)


def _action_names(env: gymnasium.Env[Any, Any]) -> dict[str, int]:
    """Return the environment's own names of its discrete actions."""
    if not isinstance(env.action_space, gymnasium.spaces.Discrete):
        return {}
    valid = range(int(env.action_space.start), int(env.action_space.start + env.action_space.n))
    enum = getattr(env.unwrapped, "actions", None)
    if isinstance(enum, type) and issubclass(enum, Enum):
        return {action.name: action.value for action in enum if action.value in valid}
    meanings = getattr(env.unwrapped, "get_action_meanings", None)
    return dict(zip(meanings(), valid, strict=True)) if callable(meanings) else {}


def _sections(documentation: str) -> dict[str, str]:
    """Return the sections of an environment's documentation by title. The first section has the title ""."""
    parts = re.split(r"^ *##\s+(.+?)\s*$", documentation, flags=re.MULTILINE)
    pairs = zip(["", *parts[1::2]], map(inspect.cleandoc, parts[::2]), strict=True)
    return {title: text for title, text in pairs if text}


def _check_size(space: gymnasium.Space[Any], env_id: str) -> None:
    """Raise DefinitionError for observations that are too large for the default text, such as images."""
    sizes = [int(np.prod(box.shape)) for box in _boxes(space)]
    if sum(sizes) > MAX_NUMBERS:
        raise DefinitionError(
            f"an observation of {env_id!r} has {sum(sizes):,} numbers, too many for text; give a renderer "
            "(gym:ID#MODULE:FUNCTION), or define render() in a subclass of GymnasiumTask"
        )


def _boxes(space: gymnasium.Space[Any]) -> list[gymnasium.spaces.Box]:
    if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        inner = space.spaces.values() if isinstance(space, gymnasium.spaces.Dict) else space.spaces
        return [box for part in inner for box in _boxes(part)]
    return [space] if isinstance(space, gymnasium.spaces.Box) else []


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _function(place: str) -> Any:
    """Return the function at ``module:function``. Raises TargetError."""
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TargetError(f"cannot load the renderer {place!r}: {error}; write module:function") from error
    if not callable(found):
        raise TargetError(f"the renderer {place!r} is not a function")
    return found
