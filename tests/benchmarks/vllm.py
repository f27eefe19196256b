"""Sampled tokens a second of vLLM through our ``Engine``, compared with raw vLLM, the ceiling.

Both have the same model and arguments and take turns, pass by pass, so that other load affects both.
Requires ``make vllm``.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pool import EnginePool
from agentrl_train.types import SamplingParams
from tests.benchmarks.engine import make_model

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
SESSIONS, PROMPT = 64, 60


def load(seed: int) -> tuple[list[list[int]], list[int]]:
    """Return prompts that no earlier pass has used, and the length of each completion."""
    draw = np.random.default_rng(seed)
    prompts = draw.integers(3, 500, size=(SESSIONS, PROMPT)).tolist()
    return prompts, draw.integers(16, 48, size=SESSIONS).tolist()


class Raw:
    """Raw vLLM in its own process."""

    def __init__(self, options: ServingOptions) -> None:
        self._process = subprocess.Popen(
            [str(PYTHON), "-m", "tests.benchmarks.vllm_raw", json.dumps(asdict(options))],
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
        """Return the text after a word in the output, which also has the log of vLLM."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit(f"vLLM ended in {PYTHON}: run `make vllm` first")

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


async def measure(options: ServingOptions, passes: int) -> tuple[list[float], list[float]]:
    """Return the tokens a second of each pass, ours and raw."""
    engine, raw = EnginePool(options, python=str(PYTHON)), Raw(options)
    speeds: tuple[list[float], list[float]] = ([], [])
    try:
        for number in range(-2, passes):  # the first two passes are a warm-up
            prompts, lengths = load(number + 2)
            pair = await ours(engine, prompts, lengths), raw.seconds(prompts, lengths)
            if number >= 0:
                for speed, seconds in zip(speeds, pair, strict=True):
                    speed.append(sum(lengths) / seconds)
    finally:
        await engine.close()
        raw.close()
    return speeds


def run(*, quick: bool) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        make_model().save_pretrained(folder)
        options = ServingOptions(
            model=folder, stop_token_ids=(), max_sessions=SESSIONS, max_context=512, kv_gib=0.125
        )
        own, raw = asyncio.run(measure(options, passes=6 if quick else 20))
    ratios = [a / b for a, b in zip(own, raw, strict=True)]
    table = Table(
        title=f"vLLM on a CPU, 0.5 M parameters, {SESSIONS} at once, {len(own)} passes of each in turn"
    )
    for heading in ("", "tokens/s (median)", "best"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("through Engine", f"{statistics.median(own):,.0f}", f"{max(own):,.0f}")
    table.add_row("raw (ceiling)", f"{statistics.median(raw):,.0f}", f"{max(raw):,.0f}")
    table.add_row("share of raw", f"{statistics.median(ratios):.0%}", f"{max(own) / max(raw):.0%}")
    Console(width=110).print(table)
