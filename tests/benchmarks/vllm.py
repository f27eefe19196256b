"""Sampled tokens per second of vLLM through our ``Engine``, compared with raw vLLM as the ceiling.

Both have the same model and arguments and take turns, pass by pass, so that other load affects both. Then
weights are pushed to our engine. The ceiling of a push is the memory bandwidth of the device. On a GPU the
models have the shapes of Qwen3. On a CPU, with the vLLM of ``make vllm``, a tiny model exercises the code
path.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pool import EnginePool
from agentrl_train.telemetry.throughput import copy_bytes_per_s
from agentrl_train.types import SamplingParams
from tests.benchmarks.shapes import make_model, save_model, sizes

ROOT = Path(__file__).parents[2]
PYTHON = {
    "cpu": os.environ.get("VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python")),
    "cuda": sys.executable,
}
LOAD = {
    "cpu": {"sessions": 64, "prompt": 60, "shortest": 16, "longest": 48},
    "cuda": {"sessions": 256, "prompt": 512, "shortest": 64, "longest": 448},
}
PUSHES = 4


def load(seed: int, *, device: str) -> tuple[list[list[int]], list[int]]:
    """Return new prompts and the length of each completion."""
    draw, size = np.random.default_rng(seed), LOAD[device]
    prompts = draw.integers(3, 500, size=(size["sessions"], size["prompt"])).tolist()
    return prompts, draw.integers(size["shortest"], size["longest"], size=size["sessions"]).tolist()


class Raw:
    """Raw vLLM in its own process."""

    def __init__(self, options: ServingOptions) -> None:
        self._process = subprocess.Popen(
            [PYTHON[options.device], "-m", "tests.benchmarks.vllm_raw", json.dumps(asdict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, **options.environment},
        )
        self._answer("ready")

    def seconds(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Return the duration of one pass."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, lengths]) + "\n")
        self._process.stdin.flush()
        return float(self._answer("seconds"))

    def _answer(self, word: str) -> str:
        """Return the text after a word in the output, skipping the log of vLLM."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit("raw vLLM ended: run `make vllm` first, or on a GPU install agentrl-kit[vllm]")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


async def ours(engine: EnginePool, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the duration of one pass through our engine."""
    started = time.perf_counter()
    await asyncio.gather(
        *(
            engine.generate(
                prompt, sampling=SamplingParams(max_new_tokens=length, seed=i), session_key=str(i)
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        )
    )
    return time.perf_counter() - started


async def measure(
    options: ServingOptions, passes: int, weights: Mapping[str, torch.Tensor]
) -> tuple[list[float], list[float], float]:
    """Return the tokens per second of each pass, ours and raw, and the seconds of the fastest push."""
    engine, raw = EnginePool(options, python=PYTHON[options.device]), Raw(options)
    speeds: tuple[list[float], list[float]] = ([], [])
    pushes = []
    try:
        for number in range(-2, passes):  # the first two passes are a warm-up
            prompts, lengths = load(number + 2, device=options.device)
            pair = await ours(engine, prompts, lengths), raw.seconds(prompts, lengths)
            if number >= 0:
                for speed, seconds in zip(speeds, pair, strict=True):
                    speed.append(sum(lengths) / seconds)
        for version in range(1, 1 + PUSHES):
            started = time.perf_counter()
            await asyncio.to_thread(engine.publish, weights, policy_version=version)
            pushes.append(time.perf_counter() - started)
    finally:
        await engine.close()
        raw.close()
    return *speeds, min(pushes)


def run(*, device: str, quick: bool) -> None:
    """Print a row for each model."""
    size = LOAD[device]
    passes = 6 if quick else 20
    bandwidth = copy_bytes_per_s(device)
    place = "a CPU" if device == "cpu" else torch.cuda.get_device_name()
    table = Table(
        title=f"vLLM on {place}, {size['sessions']} at once, {passes} passes of each in turn; copies: "
        f"{bandwidth / 2**30:,.0f} GiB/s"
    )
    headings = "model", "tokens/s through Engine", "raw (ceiling)", "share", "best"
    for heading in (*headings, "push s", "GiB/s", "of copies"):
        table.add_column(heading, justify="right" if heading != "model" else "left")
    for name in sizes(device):
        with tempfile.TemporaryDirectory() as folder:
            save_model(name, folder, device=device)
            options = ServingOptions(
                model=folder,
                stop_token_ids=(),
                max_sessions=size["sessions"],
                max_context=512 if device == "cpu" else 1024,
                device=device,
                dtype="float32" if device == "cpu" else "bfloat16",
                # Two engines and the pushed weights share a GPU.
                args={"kv_cache_memory_bytes": 2**27}
                if device == "cpu"
                else {"gpu_memory_utilization": 0.35},
            )
            weights = dict(make_model(name, device=device).named_parameters())
            own, raw, push = asyncio.run(measure(options, passes, weights))
        width = 4 if device == "cpu" else 2
        pushed = width * sum(value.numel() for value in weights.values()) / push
        ratio = statistics.median(a / b for a, b in zip(own, raw, strict=True))
        table.add_row(
            name,
            f"{statistics.median(own):,.0f}",
            f"{statistics.median(raw):,.0f}",
            f"{ratio:.0%}",
            f"{max(own) / max(raw):.0%}",
            f"{push:.3f}",
            f"{pushed / 2**30:.2f}",
            f"{pushed / bandwidth:.1%}",
        )
    Console(width=130).print(table)
