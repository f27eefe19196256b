"""Sampled tokens per second of the torch engine and of Hugging Face ``generate`` with the same model.

There are two loads. *One turn* has all prompts at once with completions of equal length, the best case of
``generate``. *Five turns* has sessions with completions of different lengths and a reply after each turn. In
each turn, ``generate`` must prefill the whole history and waits for the longest row.

The random model repeats nothing, so speculation does not help the engine. The ceiling is the model's forward
pass at the full batch size, without sampling or bookkeeping.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl_train.engine.cache import ATTENTION, Group, Pass, SlotCache
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.models.architecture import Threads
from agentrl_train.types import SamplingParams

PROMPT, NEW, REPLY, TURNS, VOCABULARY = 60, 28, 12, 5, 512


def make_model() -> Qwen3ForCausalLM:
    """Return a random model of the quick start's size."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def lengths(sessions: int) -> np.ndarray:
    """Return the number of tokens of each session and turn, [sessions, turns]."""
    return np.random.default_rng(0).integers(8, 2 * NEW - 8, size=(sessions, TURNS))


def ours(sessions: int, *, turns: int, said: np.ndarray) -> float:
    """Return the torch engine's sampled tokens per second."""

    async def session(engine: TorchEngine, number: int, seed: int) -> int:
        context = [(number * 7 + i) % 500 + 3 for i in range(PROMPT)]
        total = 0
        for turn in range(turns):
            sampling = SamplingParams(max_new_tokens=int(said[number, turn]), seed=seed + number * 100 + turn)
            done = await engine.generate(context, sampling=sampling, session_key=str(number))
            total += len(done.token_ids)
            context = [*context, *done.token_ids, *range(3, 3 + REPLY)]
        engine.release(str(number))
        return total

    async def measure() -> float:
        engine = TorchEngine(
            {"current": make_model()},
            stop_token_ids=[],
            max_sequences=sessions,
            max_context=512,
            threads=Threads(torch.get_num_threads()),
        )
        await asyncio.gather(*(session(engine, n, 0) for n in range(sessions)))
        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(session(engine, n, 10**6) for n in range(sessions))))
        seconds = time.perf_counter() - started
        await engine.close()
        return tokens / seconds

    return asyncio.run(measure())


@torch.inference_mode()
def huggingface(sessions: int, *, turns: int, said: np.ndarray) -> float:
    """Return the sampled tokens per second of ``generate``, with all sessions in one batch, turn by turn."""
    model = make_model()

    def play() -> int:
        ids = torch.tensor([[(n * 7 + i) % 500 + 3 for i in range(PROMPT)] for n in range(sessions)])
        reply = torch.arange(3, 3 + REPLY).expand(sessions, -1)
        total = 0
        for turn in range(turns):
            longest = int(said[:, turn].max())
            ids = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=longest,
                do_sample=True,
                return_dict_in_generate=True,
                output_logits=True,
            ).sequences
            total += int(said[:, turn].sum())
            ids = torch.cat([ids, reply], dim=1)
        return total

    play()
    started = time.perf_counter()
    tokens = play()
    return tokens / (time.perf_counter() - started)


@torch.inference_mode()
def ceiling(sessions: int) -> float:
    """Return tokens per second of bare decode steps in the middle of an episode."""
    model, length = make_model(), PROMPT + 2 * NEW
    model.set_attn_implementation(ATTENTION)
    cache = SlotCache(model, num_slots=sessions, max_context=512)

    def step() -> None:
        group = Group(begin=0, end=sessions, slots=range(sessions), counts=[1] * sessions, length=length + 1)
        one = Pass(
            token_ids=[5] * sessions, slots=range(sessions), positions=[length] * sessions, groups=[group]
        )
        with cache.reading(one, device=torch.device("cpu")) as inputs:
            model.lm_head(model.model(**inputs).last_hidden_state)

    for _ in range(10):
        step()
    started = time.perf_counter()
    for _ in range(100):
        step()
    return 100 * sessions / (time.perf_counter() - started)


def run(*, quick: bool, threads: int) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    table = Table(title=f"sampled tokens/s, 0.5 M parameters, {threads} threads")
    for heading in ("load", "sessions", "torch engine", "generate", "ratio", "ceiling", "of ceiling"):
        table.add_column(heading, justify="right")
    for sessions in (64,) if quick else (1, 16, 64, 128):
        top = ceiling(sessions)
        same = np.full((sessions, TURNS), NEW)
        for load, turns, said in (("one turn", 1, same), ("five turns", TURNS, lengths(sessions))):
            own, peer = (measure(sessions, turns=turns, said=said) for measure in (ours, huggingface))
            table.add_row(
                load,
                str(sessions),
                f"{own:,.0f}",
                f"{peer:,.0f}",
                f"{own / peer:.2f}",
                f"{top:,.0f}",
                f"{own / top:.0%}",
            )
    Console(width=110).print(table)
