"""A gateway without a run: serves a model and writes the recorded rollouts as JSON lines."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl_env.types import TaskSample
from agentrl_train.config import RunConfig
from agentrl_train.errors import ConfigError
from agentrl_train.gateway.programs import trajectory
from agentrl_train.gateway.server import Gateway, Session
from agentrl_train.placement.environments import Served
from agentrl_train.telemetry.metrics import readable
from agentrl_train.training.admission import sample_seed
from agentrl_train.training.compose import open_launcher, served_policy
from agentrl_train.training.run import ServedPolicy
from agentrl_train.types import Completion, Engine, EpisodeEnd, Sampling

LOOPBACK = ("127.0.0.1", "::1", "localhost")
IDLE_CHECK_S = 5.0


class SeededSampler:
    """Samples the answers of one session. Equal calls of a session get equal tokens.

    So do equal calls of any sessions with the same seed in their requests.
    """

    def __init__(self, engine: Engine, *, sampling: Sampling, key: str, seed: int) -> None:
        self.sampling = sampling
        self._engine = engine
        self._key = key
        self._seed = seed
        self._count = 0
        self._used: set[str] = set()

    async def complete(
        self,
        context: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        segment: int = 0,
        grammar: str = "",
        seed: int | None = None,
    ) -> Completion:
        """Sample a turn after ``context``."""
        key = f"{self._key}/{segment}"
        self._count += 1
        self._used.add(key)
        seed = sample_seed(self._seed, self._key, self._count) if seed is None else sample_seed(seed)
        sampling = self.sampling.request(context, seed=seed, limit=max_new_tokens, grammar=grammar)
        return await self._engine.generate(context, sampling=sampling, session_key=key)

    def release(self) -> None:
        """Drop the engine's cache of the session."""
        for key in self._used:
            self._engine.release(key)


async def record(
    config: RunConfig,
    *,
    host: str,
    port: int,
    output: Path,
    token: str | None,
    ignored: Sequence[str],
    idle_timeout_s: float,
    announce: Callable[[str], None],
) -> None:
    """Serve the model of a configuration until SIGINT or SIGTERM.

    A session starts with its first call. It ends with ``POST base_url/end``, after ``idle_timeout_s`` without
    a call, or with the server. Its rollout is a line of ``output``. The reward is null if none was posted.

    Raises:
        ConfigError: the address can be reached from other machines without a token, or the token cannot be
            sent in a header.
    """
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError("AGENTRL_TOKEN has a character that is not allowed in an HTTP header: change it")
    if host not in LOOPBACK and not token:
        raise ConfigError(
            f"{host} can be reached from other machines: set AGENTRL_TOKEN, the API key of clients"
        )
    nothing = Served(clients={}, sources=(), held_out={})
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with (
        open_launcher(config) as launcher,
        launcher.single(),
        output.open("a", encoding="utf-8", errors="replace") as file,
    ):
        async with served_policy(config, path=config.model.path, launcher=launcher, served=nothing) as ready:
            samplers: dict[str, SeededSampler] = {}

            def unknown(gateway: Gateway, key: str) -> Session:
                sampling, seed = config.engine.sampling, config.run.seed
                samplers[key] = SeededSampler(ready.engine, sampling=sampling, key=key, seed=seed)
                options: dict[str, Any] = {"sampler": samplers[key], "stated": sampling, "ignored": ignored}
                return gateway.open(chat=ready.chat, key=key, **options)

            async def ended(session: Session) -> None:
                samplers.pop(session.key).release()
                if session.recorder.rollout()[0]:
                    file.write(json.dumps(_line(session, ready), ensure_ascii=False) + "\n")
                    file.flush()

            name = Path(config.model.path).name
            async with Gateway(
                host=host, port=port, model=name, unknown=unknown, ended=ended, token=token
            ) as gateway:
                announce(
                    f"serving {name} at {gateway.url}/v1, and at /s/KEY/v1 for a session of any KEY; "
                    f"rollouts: {output}"
                )
                stopping = asyncio.create_task(stop.wait())
                while not stopping.done():
                    await asyncio.wait((stopping,), timeout=IDLE_CHECK_S)
                    for session in list(gateway.sessions.values()):
                        if session.idle_s > idle_timeout_s:
                            await gateway.close(session)


def _line(session: Session, ready: ServedPolicy) -> dict[str, Any]:
    """Return the rollout of a session: readable, and with the tokens of its turns."""
    recorded = trajectory(session, sample=TaskSample(task="gateway"), end=EpisodeEnd.TERMINATED)
    turns = [
        {
            "segment": turn.segment,
            "prompt_ids": list(turn.prompt_ids),
            "token_ids": list(turn.completion.token_ids),
            "logprobs": list(turn.completion.logprobs),
            "versions": list(turn.completion.versions),
            "finish_reason": turn.completion.finish_reason,
            "reward": turn.reward,
        }
        for turn in recorded.turns
    ]
    whole = readable(recorded)
    kept = {name: whole[name] for name in ("started", "metrics", "messages")}
    kept["segments"] = whole.get("segments", [])
    reward = recorded.reward if session.rewarded else None
    return {"session": session.key, "reward": reward, **kept, "turns": turns}
