"""The parts of ``make gpu-quick``. Each prints its result as JSON in its last line."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl_train.engine.torch import TorchEngine
from agentrl_train.models.loading import load_policy
from agentrl_train.telemetry.throughput import copy_bytes_per_s
from agentrl_train.types import SamplingParams
from tests.benchmarks import learner as learner_benchmark
from tests.benchmarks.shapes import make_model

ROOT = Path(__file__).parents[3]
TASKS = [str(ROOT / "environments" / name) for name in ("household", "shop", "sql")]
TRAINING_S = 240.0
"""Time limit of the training run."""
PROMPT, NEW = 128, 128
"""Tokens of a prompt and of a completion."""


def tests(model: str, folder: Path, device: str) -> dict[str, Any]:
    """Run all tests with the mark ``gpu`` and count their outcomes."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests", "-q", "-rA", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-8000:], done.stderr[-2000:])
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout.splitlines()[-1])
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    return {kind: int(number) for number, kind in counts} | {"failed_tests": failed}


def training(model: str, folder: Path, device: str) -> dict[str, Any]:
    """Write a configuration, imitate experts and train. Return the curve."""
    config, start, steps = folder / "train.toml", folder / "imitated", ["run.steps=1000"]
    if device == "cpu":
        steps = ["run.steps=2", "rollout.groups_per_step=3", "rollout.group_size=2", "eval.samples=4"]
        steps += ["sft.steps=2", "sft.traces=8"]
    train = [sys.executable, "-m", "agentrl_train"]
    options = [part for one in [f"run.folder={folder}", "run.name=run", *steps] for part in ("--set", one)]
    limit = ["--set", f"run.run_timeout_s={TRAINING_S}", "--set", f"model.path={start}"]
    begun = time.monotonic()
    for command in (
        [*train, "init", model, *TASKS, "-o", str(config)],
        [*train, "sft", str(config), "-o", str(start), *options],
        [*train, "run", str(config), *options, *limit],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        print("$", *command, "\n", done.stdout[-3000:], done.stderr[-3000:])
        if done.returncode:
            raise RuntimeError(f"{command[3]} ended with status {done.returncode}")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    curve = [
        {key: one.get(key) for key in ("step", "success", "reward", "seconds")}
        for one in map(json.loads, lines)
    ]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return {"seconds": time.monotonic() - begun, "curve": curve, "tasks": summary["tasks"]}


def engine(model: str, folder: Path, device: str) -> dict[str, Any]:
    """Return sampled tokens per second by model and batch, and the limit of the bandwidth."""
    bandwidth = 2 * copy_bytes_per_s(device)  # a copy both reads and writes
    found: dict[str, Any] = {"bytes_per_s": bandwidth}
    for name, batches in {
        "stored": (1, 64),
        large(device): (64,) if device == "cpu" else (1, 64, 256),
    }.items():
        for batch in batches:
            policy = sampling_model(name, model, device)
            rate = asyncio.run(sampled_per_s(policy, batch=batch))
            limit = bandwidth * batch / pass_bytes(policy, batch=batch)
            found[f"{name}, {batch}"] = {"tokens_per_s": rate, "limit": limit, "share": rate / limit}
    return found


def learner(model: str, folder: Path, device: str) -> dict[str, Any]:
    """Return trained tokens per second and the share of the largest matrix product, by shape and method."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    most = learner_benchmark.ceiling(device, dtype)
    found: dict[str, Any] = {"operations_per_s": most}
    for size in ["tiny"] if device == "cpu" else ["135 M", "0.5 B", "1.7 B"]:
        for variant in ("as it is", "LoRA, rank 16"):
            try:
                result = learner_benchmark.measure(size, variant, device=device, quick=True)
            except torch.OutOfMemoryError:
                found[f"{size}, {variant}"] = "out of memory"
                continue
            found[f"{size}, {variant}"] = result | {"mfu": result["rate"] / most}
    return found


def push(model: str, folder: Path, device: str) -> dict[str, Any]:
    """Return the seconds of a weight update in an engine, and the time of a copy."""
    copied, found = copy_bytes_per_s(device), {}
    for name in ("stored", large(device)):
        policy = sampling_model(name, model, device)
        state = {key: value.detach().clone() for key, value in policy.state_dict().items()}
        sampler = TorchEngine({"current": policy}, stop_token_ids=[], max_sequences=8, max_context=512)
        size = sum(value.numel() * value.element_size() for value in state.values())
        seconds = []
        for version in range(1, 4):
            begun = learner_benchmark.moment(device)
            sampler.publish(state, policy_version=version)
            seconds.append(learner_benchmark.moment(device) - begun)
        asyncio.run(sampler.close())
        found[name] = {"seconds": min(seconds), "copy": size / copied, "bytes": size}
    return found


PARTS: dict[str, Callable[[str, Path, str], dict[str, Any]]] = {
    "tests": tests,
    "training": training,
    "engine": engine,
    "learner": learner,
    "push": push,
}
LIMITS_S = {"tests": 180, "training": 480, "engine": 240, "learner": 180, "push": 60}
"""Time limit of each part."""


def large(device: str) -> str:
    """Return the shape of the second model."""
    return "tiny" if device == "cpu" else "0.5 B"


def sampling_model(name: str, path: str, device: str) -> PreTrainedModel:
    """Return the stored model or a model with random weights, prepared for sampling."""
    found = load_policy(path)[0] if name == "stored" else make_model(name, device=device)
    return found.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


async def sampled_per_s(model: PreTrainedModel, *, batch: int) -> float:
    """Return the tokens per second of concurrent sessions, including prefill."""
    sampler = TorchEngine(
        {"current": model}, stop_token_ids=[], max_sequences=batch, max_context=PROMPT + NEW
    )
    vocabulary = model.config.vocab_size

    async def session(number: int, seed: int) -> int:
        context = [(number * 7919 + at * 104_729 + seed) % (vocabulary - 3) + 3 for at in range(PROMPT)]
        sampling = SamplingParams(max_new_tokens=NEW, seed=seed + number)
        done = await sampler.generate(context, sampling=sampling, session_key=str(number))
        sampler.release(str(number))
        return len(done.token_ids)

    await asyncio.gather(*(session(number, 0) for number in range(batch)))
    begun = time.perf_counter()
    tokens = sum(await asyncio.gather(*(session(number, 10**6) for number in range(batch))))
    seconds = time.perf_counter() - begun
    await sampler.close()
    return tokens / seconds


def pass_bytes(model: PreTrainedModel, *, batch: int) -> float:
    """Return the bytes that a pass in the middle of the completions reads: weights, keys and values."""
    config = model.config
    width = next(model.parameters()).element_size()
    weights = sum(value.numel() for value in model.parameters()) * width
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * width
    return weights + batch * (PROMPT + NEW / 2) * token
