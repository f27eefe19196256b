"""GRPO compared with TRL's trainer on the same model, task and number of samples.

Both start from the quick start's policy and play the one-turn task of ``trl_task``. They have the same prompt
tokens, at most 48 new tokens, groups of 8 scaled by their standard deviation, one update per step with
clipping at 0.2 and 0.28, means over sequences, AdamW with the same learning rate and gradient clipping, and
the same number of threads. TRL samples with Hugging Face ``generate``. They take turns seed by seed, so that
other load affects both.

A stored model (``--model``) learns which database to open in sql, with the learning rate and the syntax of
calls of examples/real/smollm2-135m.toml, in bfloat16 on both sides if the processor multiplies it faster.
This takes an hour. Its runs are kept in runs/trl, so an interrupted command continues when it is repeated.

On a GPU the models have random weights and the shapes of Qwen3, completions have 256 tokens, and both sample
with vLLM on the training GPU: TRL with "colocate", we with the layouts "colocated" (synchronous) and
"shared".

*Tokens/s* is the number of sampled tokens in the trained episodes divided by the time of all steps but the
first. The ceiling is a loop that never waits: tokens divided by the working time of the engine or the
trainer, whichever is longer, in the synchronous run. *Tokens/CPU s* uses the processor time of the training
process, which hardly depends on other load. *Success* is measured on the last quarter of the samples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

import torch
from rich.console import Console
from rich.table import Table

from agentrl_train.config import load_config
from agentrl_train.models.sources import local_model
from tests.benchmarks.learner import ceiling
from tests.benchmarks.shapes import save_model, sizes

ROOT = Path(__file__).parents[2]
TASK = Path(__file__).with_name("trl_task.py")
GROUP_SIZE = 8
THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What both trainers train, and how."""

    model: Path
    task: str = "FirstPick"
    """Class of ``trl_task``."""
    config: Path = ROOT / "examples/quickstart/train.toml"
    device: str = "cpu"
    new_tokens: int = 48
    learning_rate: float = 7e-4
    max_grad_norm: float = 0.1
    bfloat16: bool = False
    tool_parser: str | None = None
    steps: int = 30
    groups: int = 8
    micro_batch: int = 64
    """TRL's sequences in memory at a time."""
    kept: bool = False
    """Keep the runs, so that an interrupted command continues."""


QUICKSTART = Setting(model=ROOT / "examples/quickstart/starter")
ON_GPU = (
    "engine.kind=vllm",
    "engine.device=cuda",
    "engine.dtype=bfloat16",
    "engine.max_context=1024",
    "engine.vllm.args.gpu_memory_utilization=0.3",
    "train.precision=bfloat16",
    "train.activation_checkpointing=true",
    "train.micro_batch_tokens=16384",
)
SETTINGS = (
    "eval.samples=0",
    "metrics.tensorboard=false",
    "metrics.trajectories=0",
    "metrics.trace=false",
    "checkpoint.every=1000",
    f"rollout.group_size={GROUP_SIZE}",
    "rollout.window=1",
    "rollout.stale.fraction=0.0",
    "algorithm.normalization=none",
    "algorithm.penalties.invalid_call=0.0",
    "train.warmup_steps=3",
    "train.betas=[0.9, 0.99]",
    "train.decay.to=1.0",
    "train.minibatches=1",
    "algorithm.region.dual=0.0",
)
Step = Mapping[str, float]


def trl(setting: Setting, *, seed: int, steps: int) -> list[Step]:
    """Run TRL and return each step's success, sampled tokens and seconds."""
    options: dict[str, object] = {
        "model": setting.model,
        "task": setting.task,
        "device": setting.device,
        "tokens": setting.new_tokens,
        "steps": steps,
        "groups": setting.groups,
        "micro-batch": setting.micro_batch,
        "seed": seed,
        "threads": THREADS,
        "learning-rate": setting.learning_rate,
        "max-grad-norm": setting.max_grad_norm,
    }
    if setting.tool_parser is not None:
        options["tool-parser"] = setting.tool_parser
    command = [sys.executable, "-m", "tests.benchmarks.trl_player", *(["--bf16"] if setting.bfloat16 else [])]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"success"')]


def ours(setting: Setting, *, staleness: int, seed: int, steps: int) -> list[Step]:
    """Run our trainer. Return the same measurements and the idle shares."""
    on_gpu = setting.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        options = [
            *SETTINGS,
            f"environments=[{{serve=['{TASK}:{'Parity' if on_gpu else setting.task}']}}]",
            "run.name=ours",
            f"run.folder={folder}",
            f"run.steps={steps}",
            f"run.seed={seed}",
            f"run.threads={THREADS}",
            f"rollout.groups_per_step={setting.groups}",
            f"rollout.max_staleness={staleness}",
            f"model.path={setting.model}",
            f"engine.max_new_tokens={setting.new_tokens}",
            f"train.learning_rate={setting.learning_rate}",
            f"train.max_grad_norm={setting.max_grad_norm}",
        ]
        if on_gpu:
            options += [*ON_GPU, f"placement.layout={'shared' if staleness else 'colocated'}"]
        else:
            options.append(f"train.precision={'bfloat16' if setting.bfloat16 else 'float32'}")
        command = [sys.executable, "-m", "agentrl_train", "run", str(setting.config)]
        command += [part for option in options for part in ("--set", option)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        lines = (Path(folder) / "ours" / "metrics.jsonl").read_text().splitlines()
    return [
        {
            "success": task["success"],
            "tokens": task["tokens"],
            "seconds": record["step_seconds"],
            "cpu_seconds": record["cpu_seconds"],
            "trainer_idle": record["trainer_idle"],
            "engine_idle": record["engine_idle"],
        }
        for record in map(json.loads, lines)
        for task in record["tasks"].values()
    ]


def speed(steps: Sequence[Step], clock: str = "seconds") -> float:
    """Return trained tokens per second of wall-clock or processor time over all steps but the first."""
    return sum(step["tokens"] for step in steps[1:]) / sum(step[clock] for step in steps[1:])


def idle(steps: Sequence[Step], who: str) -> float:
    """Return the share of the time that the engine or the trainer was idle."""
    seconds = sum(step["seconds"] for step in steps[1:])
    return sum(step[f"{who}_idle"] * step["seconds"] for step in steps[1:]) / seconds


def run(*, device: str, quick: bool, model: str | None = None) -> None:
    """Print a table for each model."""
    if model is not None:
        _print(stored(model), title=model, quick=quick)
    elif device == "cpu":
        _print(QUICKSTART, title="the quick start", quick=quick)
    else:
        for size in sizes(device):
            with tempfile.TemporaryDirectory() as folder:
                save_model(size, folder, device=device)
                torch.cuda.empty_cache()
                setting = replace(QUICKSTART, model=Path(folder), device=device, new_tokens=256)
                _print(setting, title=f"{size} on {torch.cuda.get_device_name()}", quick=quick)


def stored(name: str) -> Setting:
    """Return the setting of a stored model."""
    path = ROOT / "examples/real/smollm2-135m.toml"
    config = load_config(path)
    rates = {dtype: ceiling("cpu", getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
    return Setting(
        model=Path(local_model(name)).absolute(),
        task="FirstOpen",
        config=path,
        learning_rate=config.train.learning_rate,
        max_grad_norm=config.train.max_grad_norm,
        bfloat16=rates["bfloat16"] > rates["float32"],
        tool_parser=config.model.tool_parser,
        steps=20,
        groups=4,
        micro_batch=8,
        kept=True,
    )


def _runs(setting: Setting, *, quick: bool) -> dict[str, list[list[Step]]]:
    seeds = 1 if quick or setting.device == "cuda" else 3
    steps = 8 if quick else setting.steps
    runs: dict[str, list[list[Step]]] = {"TRL": [], "synchronous": [], "staleness 1": []}
    for seed in range(seeds):
        for name in runs:
            one = _repeat(setting, name, seed=seed, steps=steps)
            runs[name].append(one)
            success = " ".join(f"{step['success']:.2f}" for step in one)
            print(f"{name}, seed {seed}: {speed(one):,.0f} tokens/s, success {success}", flush=True)
    return runs


def _repeat(setting: Setting, name: str, *, seed: int, steps: int) -> list[Step]:
    """Run a trainer, or return its kept run with the same setting."""
    path = ROOT / "runs/trl" / f"{name.replace(' ', '-')}-{seed}.json"
    if setting.kept and path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["setting"] == str(setting) and len(found["steps"]) == steps:
            return list(found["steps"])
    if name == "TRL":
        one = trl(setting, seed=seed, steps=steps)
    else:
        one = ours(setting, staleness=int(name != "synchronous"), seed=seed, steps=steps)
    if setting.kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"setting": str(setting), "steps": one}) + "\n", encoding="utf-8")
    return one


def _print(setting: Setting, *, title: str, quick: bool) -> None:
    runs = _runs(setting, quick=quick)
    about = (
        f"{len(runs['TRL'][0])} steps of {setting.groups * GROUP_SIZE} episodes, {len(runs['TRL'])} seeds, "
        f"{THREADS} threads of {os.cpu_count()} processors"
    )
    Console(width=120).print(_table(runs, title=f"GRPO, {title}, {about}"))


def _table(runs: Mapping[str, Sequence[Sequence[Step]]], *, title: str) -> Table:
    steps = len(runs["TRL"][0])
    table = Table(title=title)
    headings = "trainer", "tokens/s", "ratio", "of ceiling", "tokens/CPU s", "ratio"
    for heading in (*headings, "1st quarter", "2nd", "3rd", "last", "seconds"):
        table.add_column(heading, justify="right")
    base, base_cpu = (fmean(speed(one, clock) for one in runs["TRL"]) for clock in ("seconds", "cpu_seconds"))
    working = fmean(1 - min(idle(one, "trainer"), idle(one, "engine")) for one in runs["synchronous"])
    ceiling = fmean(speed(one) for one in runs["synchronous"]) / working
    for name, repeats in runs.items():
        own, own_cpu = (fmean(speed(one, clock) for one in repeats) for clock in ("seconds", "cpu_seconds"))
        size = steps // 4
        quarters = [
            [fmean(step["success"] for step in one[part * size : (part + 1) * size]) for one in repeats]
            for part in range(4)
        ]
        last = quarters[-1]
        table.add_row(
            name,
            f"{own:,.0f}",
            f"{own / base:.2f}",
            "-" if name == "TRL" else f"{own / ceiling:.0%}",
            f"{own_cpu:,.0f}",
            f"{own_cpu / base_cpu:.2f}",
            *(f"{fmean(part):.0%}" for part in quarters[:-1]),
            f"{fmean(last):.1%}" + (f" ± {stdev(last):.1%}" if len(last) > 1 else ""),
            f"{fmean(sum(step['seconds'] for step in one[1:]) for one in repeats):.0f}",
        )
    return table
