"""A session as a ``gymnasium.Env``, over HTTP or in-process.

Example::

    env = gymnasium.make("agentrl_env:agentrl/Env-v0", url="http://localhost:8000", task="guess")
    observation, info = env.reset(seed=7)
    call = {"name": "guess", "arguments": {"n": 7}}
    observation, reward, terminated, truncated, info = env.step(call)

The observation is the whole conversation so far, a tuple of messages in OpenAI chat format, so a
chat model can be called with ``messages=observation, tools=info["tools"]``. An action is a tool
call, an assistant message or plain text; anything else is an unusable turn, which the environment
answers as it answers a model that forgot to call a tool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from agentrl_env.client.client import EnvClient
from agentrl_env.gym.connection import Connection
from agentrl_env.gym.episode import Episode, choose
from agentrl_env.gym.spaces import ChatMessage, Conversation, ToolCallSpace
from agentrl_env.types import TaskInfo, ToolSpec

ENV_ID = "agentrl/Env-v0"


class GymEnv(gymnasium.Env[tuple[ChatMessage, ...], Any]):
    """One task of a server (``url``) or of a local client (``client``) as a Gymnasium environment.

    ``reset(seed=s)`` opens an episode with exactly that seed; a ``reset()`` after it draws the
    next seed from the generator that ``s`` started, so a run repeats from its first seed.
    ``reset(options={"split", "index", "sample"})`` chooses the problem; with an index and no seed
    the sample keeps its own seed.

    ``terminated`` means that the task ended, ``truncated`` that a turn or time limit was reached.
    An infrastructure failure is neither: ``step`` raises it (``EnvironmentFailed``,
    ``SessionExpired``), so it can never pass for an episode of reward zero. ``reset()`` goes on.

    The connection is made at the first use and not carried over by pickle or fork.

    Args:
        url: Address of a server. Give either this or ``client``.
        task: Name of the task; not needed where there is one only.
        client: A callable that makes an EnvClient, such as ``Guess.local``, or a new EnvClient.
        token: The server's token.
        split: Where samples come from unless ``reset`` says otherwise.
        render_mode: ``"ansi"`` makes ``render()`` return the conversation as text.
        wait: Seconds to wait for a free session on a full server.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  -- declared so by Gymnasium

    def __init__(
        self,
        url: str | None = None,
        task: str | None = None,
        *,
        client: EnvClient | Callable[[], EnvClient] | None = None,
        token: str | None = None,
        split: str = "train",
        render_mode: str | None = None,
        wait: float = 30.0,
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"There is no render mode {render_mode!r}; use 'ansi' or none.")
        self.render_mode = render_mode
        self._connection = Connection(url, task, client=client, token=token)
        self._split, self._wait = split, wait
        self._episode = Episode()

    @cached_property
    def task_info(self) -> TaskInfo:
        """What the server says of the task. Raises UnknownTask."""
        return self._connection.run(self._connection.task_info())

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools a policy may call, in OpenAI format."""
        return self.task_info.tools

    @cached_property
    def action_space(self) -> ToolCallSpace:  # type: ignore[override]
        """Tool calls; ``step`` takes assistant messages and text as well."""
        return ToolCallSpace(self.tools)

    @cached_property
    def observation_space(self) -> Conversation:  # type: ignore[override]
        """The whole conversation so far."""
        return Conversation()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[ChatMessage, ...], dict[str, Any]]:
        """Open a new episode and return its first messages and an ``info`` that names the sample.

        Raises:
            ValueError: ``options`` has an unknown key.
            AgentRLError: no session could be opened, for the reason that the error's class says.
        """
        super().reset(seed=seed)
        choice = choose(options or {}, seed=seed, split=self._split, rng=self.np_random)
        info = self._connection.run(self._episode.begin(self._connection, choice, wait=self._wait))
        return self._episode.observation(), info

    def step(self, action: Any) -> tuple[tuple[ChatMessage, ...], float, bool, bool, dict[str, Any]]:
        """Take one turn.

        After an error the episode is over: reset.

        Raises:
            ResetNeeded: no episode is running.
            EnvironmentFailed: the environment broke; the episode has no outcome.
            SessionExpired: the session was idle past its lease.
        """
        if not self._episode.running:
            raise ResetNeeded("No episode is running: call reset() before step().")
        turn = self._connection.run(self._episode.step(action))
        return self._episode.observation(), turn.reward, turn.terminated, turn.truncated, turn.info

    def render(self) -> str | None:
        """Return the conversation as text in render mode ``"ansi"``, None otherwise."""
        if self.render_mode is None:
            return None
        return self._episode.text()

    def close(self) -> None:
        """Close the session and the connection; again and again does no harm."""
        self._connection.close(self._episode.end)
        self._episode = Episode()
        super().close()


if ENV_ID not in gymnasium.registry:
    gymnasium.register(
        ENV_ID,
        entry_point="agentrl_env.gym.env:GymEnv",
        vector_entry_point="agentrl_env.gym.vector:GymVectorEnv",
    )
