"""Fakes for tests: an engine with scripted completions, and an environment that fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from agentrl_env import Done, EnvClient, Environment, ToolCall, tool
from agentrl_env.types import Message
from agentrl_train.actor import Actor, Episode
from agentrl_train.chat import ChatFormat
from agentrl_train.config import RolloutSection
from agentrl_train.errors import EngineError
from agentrl_train.reward import Rewards
from agentrl_train.types import Completion, Sampling, SamplingParams
from tests.tiny_models import make_tokenizer

CHAT = ChatFormat(make_tokenizer())
EPISODE = Episode(task="countdown", split="train", index=3, seed=None, draw_seed=(0, 3))
Script = Callable[[Sequence[int], str], Message | Sequence[int]]


class ScriptedEngine:
    """Returns scripted completions and records every call."""

    def __init__(self, chat: ChatFormat, script: Script, *, version: int = 0) -> None:
        self.chat = chat
        self.script = script
        self.version = version
        self.calls: list[tuple[str, tuple[int, ...], SamplingParams, str]] = []
        self.released: set[str] = set()
        self.failures = 0

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        session_key: str,
        policy: str = "current",
    ) -> Completion:
        await asyncio.sleep(0)
        self.calls.append((session_key, tuple(token_ids), sampling, policy))
        if self.failures:
            self.failures -= 1
            raise EngineError("the scripted engine fails")
        said = self.script(token_ids, session_key)
        ids = self.chat.completion(said) if isinstance(said, Message) else list(said)
        ids = ids[: sampling.max_new_tokens]
        stopped = ids[-1] in self.chat.stop_token_ids
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[self.version] * len(ids),
            finish_reason="stop" if stopped else "length",
            policy=policy,
        )

    def release(self, session_key: str) -> None:
        self.released.add(session_key)

    async def close(self) -> None:
        return None


class Countdown(Environment):
    """Count down from five to zero."""

    max_turns = 8
    blocking = False
    broken_resets = 0
    broken_steps = 0

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        if type(self).broken_resets:
            type(self).broken_resets -= 1
            raise RuntimeError("the reset is broken")
        self.left = 3
        return f"Sample {sample.index}: call down() three times."

    @tool
    def down(self) -> str | Done:
        """Decrease the counter."""
        if type(self).broken_steps:
            type(self).broken_steps -= 1
            raise RuntimeError("the step is broken")
        self.left -= 1
        return Done("zero", reward=1.0) if self.left == 0 else str(self.left)

    def expert(self, rng):  # type: ignore[no-untyped-def]
        return ToolCall.of("down")


def always(message: Message) -> Script:
    """Return a script that repeats one message."""
    return lambda context, key: message


DOWN = Message.assistant("down we go", ToolCall.of("down"))


SAMPLING = {one.name for one in fields(Sampling)}


def make_actor(
    engine: ScriptedEngine,
    client: EnvClient,
    *,
    greedy: Actor | None = None,
    rewards: Rewards | None = None,
    **play: Any,
) -> Actor:
    sampling = {"max_new_tokens": 120, "max_context": 4000} | {k: v for k, v in play.items() if k in SAMPLING}
    rollout = {"environment_wait_timeout_s": 0.0} | {k: v for k, v in play.items() if k not in SAMPLING}
    return Actor(
        engine=engine,
        chat=CHAT,
        clients={"countdown": client, "vault": client},
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        rollout=RolloutSection(**rollout),  # type: ignore[arg-type]
        slots=asyncio.Semaphore(4),
        greedy=greedy,
        rewards=rewards,
    )
