"""A session as a ``gymnasium.Env``, over HTTP or in-process.

Example::

    env = gymnasium.make("agentrl_env:agentrl/Env-v0", url="http://localhost:8000", task="guess")
    observation, info = env.reset(seed=7)
    call = {"name": "guess", "arguments": {"n": 7}}
    observation, reward, terminated, truncated, info = env.step(call)

The observation is the whole conversation so far, a tuple of messages in OpenAI chat format, so a chat
model can be called with ``messages=observation, tools=info["tools"]``. An action is a tool call, an
assistant message or plain text. Any other value is an invalid turn, which the environment answers like
a message without a tool call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from agentrl_env.client.client import EnvClient
from agentrl_env.gym.episode import EpisodeRunner, TaskEnv, open_arguments
from agentrl_env.gym.spaces import ChatMessage, Conversation, ToolCallSpace


class GymEnv(TaskEnv, gymnasium.Env[tuple[ChatMessage, ...], Any]):
    """One task of a server (``url``) or of a local client (``client``) as a Gymnasium environment.

    ``reset(seed=s)`` opens an episode with exactly that seed. A later ``reset()`` draws its seed from
    the generator that ``s`` initialized, so a run is reproducible from its first seed.
    ``reset(options={"split", "index", "sample"})`` chooses the problem; with an index and no seed the
    sample keeps its own seed.

    ``terminated`` means that the task ended, ``truncated`` that a turn or time limit was reached. An
    infrastructure failure is neither: ``step`` raises it (``EnvironmentFailed``, ``SessionExpired``),
    so it cannot be mistaken for an episode of reward zero. Call ``reset()`` to continue.

    The connection is made on first use and does not survive pickle or fork.

    Args:
        url: Address of a server. Give either this or ``client``.
        task: Name of the task; optional if there is only one.
        client: A callable that returns an EnvClient, such as ``Guess.local``, or an unused EnvClient.
        token: The server's token.
        split: The split that samples come from, unless ``reset`` names one.
        render_mode: With ``"ansi"``, ``render()`` returns the conversation as text.
        wait: Seconds to wait for a free session on a full server.
    """

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
        self._configure(url, task, client, token, split, render_mode, wait)
        self._episode = EpisodeRunner()

    @cached_property
    def action_space(self) -> ToolCallSpace:  # type: ignore[override]
        """Tool calls; ``step`` also accepts assistant messages and text."""
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
            AgentRLError: The session could not be opened.
        """
        super().reset(seed=seed)
        choice = open_arguments(options or {}, seed=seed, split=self._split, rng=self.np_random)
        info = self._client.run(self._episode.begin(self._client, choice, wait=self._wait))
        return self._episode.observation(), info

    def step(self, action: Any) -> tuple[tuple[ChatMessage, ...], float, bool, bool, dict[str, Any]]:
        """Play one turn. An error ends the episode.

        Raises:
            ResetNeeded: No episode is running.
            EnvironmentFailed: The environment failed; the episode has no outcome.
            SessionExpired: The session was idle for longer than its lease.
        """
        if not self._episode.running:
            raise ResetNeeded("No episode is running: call reset() before step().")
        result = self._client.run(self._episode.step(action))
        return self._episode.observation(), result.reward, result.terminated, result.truncated, result.info

    def render(self) -> str | None:
        """Return the conversation as text in render mode ``"ansi"``, otherwise None."""
        return None if self.render_mode is None else self._episode.text()

    def close(self) -> None:
        """Close the session and the connection. Idempotent."""
        self._client.close(self._episode.close)
        self._episode = EpisodeRunner()
        super().close()
