"""Time that a constraint adds to a token in the torch engine and in vLLM, with a stored model.

Constrained completions are text of letters and spaces. Free completions are any tokens except stop tokens.
Both have the same length and take turns, so that other load affects both. A set is the time of the library
alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_train.engine.constraint import Grammars
from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pool import EnginePool
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.models.architecture import Threads
from agentrl_train.models.loading import copy_of, load_policy, local_model
from agentrl_train.types import Engine, SamplingParams
from tests.benchmarks.stored_engine import CACHE_BYTES, VLLM_PYTHON

PROMPT, NEW = 128, 48
GRAMMAR = f"start: /[a-z ]{{{40 * NEW}}}/"
"""Requires more text than a completion can hold, so that every completion has the maximum length."""


class Policy(NamedTuple):
    folder: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@contextmanager
def torch_engine(policy: Policy, *, sessions: int, threads: int) -> Iterator[Engine]:
    engine = TorchEngine(
        {"current": copy_of(policy.model, dtype="float32", device="cpu")},
        stop_token_ids=[policy.tokenizer.eos_token_id],
        tokenizer=policy.tokenizer,
        max_sequences=sessions,
        max_context=PROMPT + NEW + 8,
        threads=Threads(threads),
    )
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


@contextmanager
def vllm_engine(policy: Policy, *, sessions: int, threads: int) -> Iterator[Engine]:
    options = ServingOptions(
        model=policy.folder,
        stop_token_ids=[policy.tokenizer.eos_token_id],
        max_sessions=sessions,
        max_context=PROMPT + NEW + 8,
        args={"kv_cache_memory_bytes": CACHE_BYTES},
        threads=threads,
    )
    engine = EnginePool(options, python=str(VLLM_PYTHON))
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def seconds(engine: Engine, *, sessions: int, grammar: str, vocabulary: int, seed: int) -> float:
    """Return the seconds per token of each session, including prompts."""
    prompts = np.random.default_rng(seed).integers(3, vocabulary, (sessions, PROMPT)).tolist()

    async def complete() -> int:
        done = await asyncio.gather(
            *(
                engine.generate(
                    prompt,
                    sampling=SamplingParams(max_new_tokens=NEW, seed=seed + number, grammar=grammar),
                    session_key=f"{seed} {number}",
                )
                for number, prompt in enumerate(prompts)
            )
        )
        for number in range(sessions):
            engine.release(f"{seed} {number}")
        return max(len(one.token_ids) for one in done)

    started = time.perf_counter()
    passes = asyncio.run(complete())
    return (time.perf_counter() - started) / passes


def set_seconds(tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the library's mean seconds for a set."""
    matcher = Grammars(tokenizer, stop_token_ids=[tokenizer.eos_token_id]).start(GRAMMAR)
    tokens = tokenizer.encode("the quick brown fox jumps over the lazy dog " * 8, add_special_tokens=False)
    started = time.perf_counter()
    matcher.sets_of(tokens)
    return (time.perf_counter() - started) / len(tokens)


def run(path: str, *, quick: bool, threads: int) -> None:
    """Print a row for each engine and number of sessions."""
    torch.set_num_threads(threads)
    policy = Policy(local_model(path), *load_policy(path))
    vocabulary = policy.model.config.vocab_size
    table = Table(title=f"{path}, vocabulary {vocabulary:,}, {PROMPT} + {NEW} tokens, threads: {threads}")
    for heading in ("engine", "sessions", "ms a pass, free", "constrained", "more a token"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    makers = {"torch engine": torch_engine} | ({"vLLM": vllm_engine} if VLLM_PYTHON.exists() else {})
    for name, make in makers.items():
        for sessions in (1, 16):
            with make(policy, sessions=sessions, threads=threads) as engine:
                found: dict[str, list[float]] = {"": [], GRAMMAR: []}
                for seed in range(3 if quick else 7):
                    for grammar, own in found.items():
                        options = {"sessions": sessions, "grammar": grammar, "vocabulary": vocabulary}
                        own.append(seconds(engine, seed=1000 * seed + len(grammar), **options))
            free, constrained = (1e3 * min(own[1:]) for own in found.values())  # the first call compiles
            more = (constrained - free) / sessions
            table.add_row(name, str(sessions), f"{free:.1f}", f"{constrained:.1f}", f"{more:.2f} ms")
    Console(width=100).print(table)
    print(f"a set: {1e3 * set_seconds(policy.tokenizer):.2f} ms")
