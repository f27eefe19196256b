"""Prefilled and decoded tokens per second of a stored model on a CPU: torch engine, ``generate`` and vLLM.

All engines have the same weights, random prompts without a common prefix, and completions of equal length,
the best case of ``generate``. They take turns, so that other load affects all. Completions of one token give
the prefill rate, and further tokens the decode rate. The limit is the longer of two times: the operations at
the rate of a large matrix product, or reading the weights and the cache at the bandwidth of a copy. Both are
measured in the same run with the same number of threads.

Every measurement runs in a new thread, because OpenMP workers end with their thread. If a process has more
workers than processors, OpenMP puts idle ones to sleep between operations, which slows all measurements.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.models.architecture import Threads
from agentrl_train.models.loading import copy_of, load_policy, local_model
from agentrl_train.planning.measure import product_rates
from agentrl_train.planning.memory import BYTES, size_of
from agentrl_train.types import SamplingParams
from tests.benchmarks.learner import ceiling

P = ParamSpec("P")
T = TypeVar("T")
SESSIONS, PROMPT, NEW = 32, 256, 64
VLLM_PYTHON = Path(".venv-vllm/bin/python")
CACHE_BYTES = 2**31
"""Key/value cache of vLLM."""
Prompts = Sequence[Sequence[int]]
Timed = Callable[[Prompts, int], float]
"""Returns the seconds for completions of a length, with all prompts at once."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Maximum rates of the machine in tokens per second."""

    prefill: float
    decode: float


def alone(measure: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return the result of a measurement in a new thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measure, *args, **options).result()


def limit(model: PreTrainedModel, *, dtype: str, sessions: int, threads: int) -> Limit:
    """Return the limit of operations and of bandwidth in the middle of the completions."""
    torch.set_num_threads(threads)
    size = size_of(model)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    matrices = sum(v.numel() for name, v in model.named_parameters() if ".layers." in name and v.ndim == 2)
    head = size.vocabulary * size.width
    rate = ceiling("cpu", getattr(torch, dtype))
    context = PROMPT + NEW / 2
    per_token = 2.0 * (matrices + head) + 4.0 * size.layers * width * context
    read = BYTES[dtype] * (matrices + head + sessions * context * size.cached)
    pass_s = max(sessions * per_token / rate, read / bandwidth())
    return Limit(
        prefill=rate / (2.0 * matrices + 4.0 * size.layers * width * PROMPT / 2), decode=sessions / pass_s
    )


def bandwidth() -> float:
    """Return the bytes read per second when copying a large tensor."""
    source = torch.ones(2**27)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - started))
    return best


@contextmanager
def ours(model: PreTrainedModel, *, dtype: str, sessions: int, threads: int) -> Iterator[Timed]:
    """Yield the torch engine. Every call has new prompts."""

    async def complete(prompts: Prompts, new: int) -> float:
        engine = TorchEngine(
            {"current": copy_of(model, dtype=dtype, device="cpu")},
            stop_token_ids=(),
            max_sequences=sessions,
            max_context=PROMPT + NEW + 8,
            threads=Threads(threads),
        )
        try:
            await engine.generate([1, 2, 3], sampling=SamplingParams(max_new_tokens=2), session_key="first")
            started = time.perf_counter()
            await asyncio.gather(
                *(
                    engine.generate(
                        prompt,
                        sampling=SamplingParams(max_new_tokens=new, seed=number),
                        session_key=str(number),
                    )
                    for number, prompt in enumerate(prompts)
                )
            )
            return time.perf_counter() - started
        finally:
            await engine.close()

    yield lambda prompts, new: asyncio.run(complete(prompts, new))


@contextmanager
def huggingface(model: PreTrainedModel, *, dtype: str, threads: int) -> Iterator[Timed]:
    """Yield ``generate`` with all prompts in one batch."""
    own = copy_of(model, dtype=dtype, device="cpu").eval()

    @torch.inference_mode()
    def complete(prompts: Prompts, new: int) -> float:
        torch.set_num_threads(threads)
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        own.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            min_new_tokens=new,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return time.perf_counter() - started

    yield lambda prompts, new: alone(complete, prompts, new)


@contextmanager
def vllm(folder: str, *, dtype: str, sessions: int, threads: int) -> Iterator[Timed]:
    """Yield vLLM's ``AsyncLLM`` in the environment of ``make vllm``."""
    options = ServingOptions(
        model=folder,
        stop_token_ids=(),
        max_sessions=sessions,
        max_context=PROMPT + NEW + 8,
        dtype=dtype,
        args={"kv_cache_memory_bytes": CACHE_BYTES},
        threads=threads,
    )
    with subprocess.Popen(
        [VLLM_PYTHON, "-m", "tests.benchmarks.vllm_raw", json.dumps(asdict(options))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | options.environment,
    ) as process:
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None

        def answer(start: str) -> str:
            for line in answers:
                if line.startswith(start):
                    return line
            raise RuntimeError("vLLM ended: run tests.benchmarks.vllm_raw by hand to see why")

        def complete(prompts: Prompts, new: int) -> float:
            requests.write(json.dumps([prompts, [new] * len(prompts)]) + "\n")
            requests.flush()
            return float(answer("seconds").split()[1])

        answer("ready")
        yield complete
        requests.close()


def measured(runs: dict[str, Timed], *, sessions: int, repeats: int, vocabulary: int) -> dict[str, Limit]:
    """Return the best rates of each engine. The engines take turns."""
    rng = np.random.default_rng(0)
    seconds: dict[str, dict[int, list[float]]] = {name: {1: [], NEW: []} for name in runs}
    for _ in range(repeats):
        for new in (1, NEW):
            for name, complete in runs.items():
                prompts = rng.integers(3, vocabulary, (sessions, PROMPT)).tolist()
                seconds[name][new].append(complete(prompts, new))
    return {
        name: Limit(
            prefill=sessions * PROMPT / min(own[1]),
            decode=sessions * (NEW - 1) / (min(own[NEW]) - min(own[1])),
        )
        for name, own in seconds.items()
    }


def run(path: str, *, quick: bool, threads: int) -> None:
    """Print a row for each engine and dtype."""
    torch.set_num_threads(1)  # the main thread only loads
    model, _ = load_policy(path)
    rates = alone(product_rates, "cpu")
    dtypes = ["float32", "bfloat16"] if rates["bfloat16"] > rates["float32"] else ["float32"]
    table = Table(title=f"{path}, {SESSIONS} sessions, {PROMPT} + {NEW} tokens, threads: {threads}")
    for heading in (
        "engine",
        "dtype",
        "prefill tokens/s",
        "of limit",
        "decode tokens/s",
        "of limit",
        "ours / it",
    ):
        table.add_column(heading, justify="left" if heading in ("engine", "dtype") else "right")
    for dtype in dtypes:
        top = alone(limit, model, dtype=dtype, sessions=SESSIONS, threads=threads)
        options = {"dtype": dtype, "sessions": SESSIONS, "threads": threads}
        with ours(model, **options) as own, huggingface(model, dtype=dtype, threads=threads) as peer:
            runs = {"torch engine": own, "generate": peer}
            sizes = {
                "vocabulary": model.config.vocab_size,
                "sessions": SESSIONS,
                "repeats": 1 if quick else 3,
            }
            if VLLM_PYTHON.exists():
                with vllm(str(local_model(path)), **options) as other:
                    results = measured(runs | {"vLLM": other}, **sizes)
            else:
                results = measured(runs, **sizes)
        base = results["torch engine"].decode
        for name, rate in (results | {"limit": top}).items():
            table.add_row(
                name,
                dtype,
                f"{rate.prefill:,.0f}",
                f"{rate.prefill / top.prefill:.0%}",
                f"{rate.decode:,.0f}",
                f"{rate.decode / top.decode:.0%}",
                f"{base / rate.decode:.2f}",
            )
    Console(width=120).print(table)
