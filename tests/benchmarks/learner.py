"""The learner's trained tokens per second and model FLOPs utilization (MFU).

Models have random weights: the shapes of Qwen3 0.6 B, 1.7 B and 4 B on a GPU, and a tiny model on a CPU,
which only exercises the code path. Rows are packed, and half of the tokens are sampled, in turns. The useful
work per token is 6 operations per body parameter, attention over the preceding tokens, and for sampled tokens
6 operations per head weight. Recomputation to save memory does not count. The ceiling is a large matrix
product on the same device in the same run.

``--model PATH`` measures a stored model on a CPU with a group of 8 episodes of 574 tokens and a common
prompt, which counts once. TRL's trainer computes the loss of the same samples, each with its own prompt, and
takes turns with our trainer, in float32 and, if the processor multiplies it faster, in bfloat16. Each row is
compared with TRL in the same dtype. On one thread, seconds are processor time, which hardly depends on other
processes.

Episodes of ``SIBLINGS`` share half of their tokens, like a group with a long opening. Their tokens/s count
every token of every episode.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3ForCausalLM

from agentrl_train.batch import pack
from agentrl_train.config import LoraSection, TrainSection
from agentrl_train.learner import Learner
from agentrl_train.models.loading import load_policy
from agentrl_train.types import Batch, TokenSequence
from tests.benchmarks.shapes import make_model, sizes

SIBLINGS = "as it is, siblings"
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "activation checkpointing": {"activation_checkpointing": True},
    "optimizer on the host": {"offload_optimizer": True},
    "LoRA, rank 16": {"lora": LoraSection(rank=16, alpha=32.0)},
    SIBLINGS: {},
}
GROUP_SIZE = 8
EPISODE_TOKENS, PROMPT_TOKENS = 574, 260
STORED: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "automatic precision": {},
    "LoRA, rank 16": {"lora": LoraSection(rank=16, alpha=32.0)},
    "activation checkpointing": {"activation_checkpointing": True},
}
"""Variants for a stored model."""


def sequences(count: int, *, longest: int, vocabulary: int, siblings: bool) -> list[TokenSequence]:
    """Return episodes with turns of prompt tokens and as many sampled tokens."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        length = int(rng.integers(longest // 2, longest + 1))
        turn = max(1, longest // 16)
        if number % GROUP_SIZE == 0:
            opening = rng.integers(0, vocabulary, longest // 2)
        tokens = rng.integers(0, vocabulary, length)
        if siblings:
            tokens[: length // 2] = opening[: length // 2]
        mask = ((np.arange(length) // turn) % 2).astype(np.float32)
        made.append(
            TokenSequence(
                token_ids=tokens,
                loss_mask=mask,
                logprobs=mask * np.float32(-np.log(vocabulary)),
                versions=np.where(mask > 0, 0, -1),
                advantages=mask * np.float32(rng.normal()),
                task="random",
                group_id=number,
            )
        )
    return made


def operations(model: Qwen3ForCausalLM, batch: Batch, lengths: list[int]) -> float:
    """Return the floating-point operations of one update's useful work."""
    config = model.config
    head = model.get_output_embeddings().weight.numel()
    body = sum(value.numel() for value in model.model.layers.parameters())
    width = config.num_attention_heads * config.head_dim
    attention = 6 * config.num_hidden_layers * width * sum(length**2 for length in lengths)
    return 6.0 * body * batch.num_tokens + attention + 6.0 * head * batch.num_loss_tokens


def run_stored(path: str, *, quick: bool = False, threads: int = 1) -> None:
    """Print a row for each method of training a stored model on a CPU, and rows for TRL."""
    torch.set_num_threads(threads)
    most = {dtype: ceiling("cpu", getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
    rates = ", ".join(f"{dtype} {rate / 1e9:.0f}" for dtype, rate in most.items())
    table = Table(title=f"learner, {path}, threads: {threads}; a large matrix product in GFLOP/s: {rates}")
    for heading in ("variant", "dtype", "s an update", "tokens/s", "GFLOP/s", "of the ceiling", "TRL / it"):
        table.add_column(heading, justify="left" if heading in ("variant", "dtype") else "right")
    clock = time.process_time if threads == 1 else time.perf_counter
    model, tokenizer = load_policy(path)
    made = group(model.config.vocab_size)
    fast = most["bfloat16"] > most["float32"]
    peers = {
        dtype: trl_update(model, tokenizer, made, dtype=dtype)
        for dtype in (("float32", "bfloat16") if fast else ("float32",))
    }
    peer_s: dict[str, list[float]] = {dtype: [] for dtype in peers}
    tokens = GROUP_SIZE * EPISODE_TOKENS - (GROUP_SIZE - 1) * PROMPT_TOKENS
    rows = []
    for variant, options in STORED.items():
        model, _ = load_policy(path)
        learner = Learner(model, TrainSection(learning_rate=1e-6, **options))
        (batch,) = pack(made, max_tokens=2**20, shared=learner.shares_prefixes)
        seconds: list[float] = []
        for _ in range(2 if quick else 4):  # the first update allocates
            turns = [(partial(learner.step, [batch]), seconds)]
            turns += [(peer, peer_s[dtype]) for dtype, peer in peers.items()]
            for update, taken in turns:
                started = clock()
                update()
                taken.append(clock() - started)
        rate = stored_operations(model, batch, tokens, frozen="lora" in options) / min(seconds)
        rows.append((variant, learner.settings.precision, min(seconds), rate))
    rows += [("TRL 1.16", dtype, min(taken), None) for dtype, taken in peer_s.items()]
    for variant, dtype, best_s, rate in rows:
        speed = ("-", "-") if rate is None else (f"{rate / 1e9:.0f}", f"{rate / most[dtype]:.1%}")
        ratio = min(peer_s[dtype]) / best_s if dtype in peer_s else float("nan")
        table.add_row(variant, dtype, f"{best_s:.2f}", f"{tokens / best_s:.0f}", *speed, f"{ratio:.2f}")
    Console(width=120).print(table)


def trl_update(
    model: PreTrainedModel, tokenizer: Any, episodes: Sequence[TokenSequence], *, dtype: str
) -> Callable[[], object]:
    """Return an update with TRL's loss on all episodes as one batch, with autocast for bfloat16."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    size = len(episodes)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            per_device_train_batch_size=size,
            num_generations=size,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "none"}] * size),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6, weight_decay=0.0)
    ids = torch.tensor(np.stack([one.token_ids for one in episodes]))
    mask = torch.tensor(np.stack([one.loss_mask for one in episodes]))[:, PROMPT_TOKENS:]
    inputs = {
        "prompt_ids": ids[:, :PROMPT_TOKENS],
        "prompt_mask": torch.ones(size, PROMPT_TOKENS, dtype=torch.long),
        "completion_ids": ids[:, PROMPT_TOKENS:],
        "completion_mask": torch.ones_like(mask, dtype=torch.long),
        "tool_mask": mask.long(),
        "advantages": torch.arange(size) - (size - 1) / 2,
        "num_items_in_batch": mask.sum(),
    }

    def update() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def group(vocabulary: int) -> list[TokenSequence]:
    """Return episodes with a common prompt and turns of 40 tokens. Every second turn is sampled."""
    made = sequences(GROUP_SIZE, longest=2 * EPISODE_TOKENS, vocabulary=vocabulary, siblings=False)
    opening, mask = made[0].token_ids[:PROMPT_TOKENS], np.zeros(EPISODE_TOKENS, np.float32)
    mask[PROMPT_TOKENS:] = (np.arange(EPISODE_TOKENS - PROMPT_TOKENS) // 40) % 2 == 0
    return [
        replace(
            one,
            token_ids=np.concatenate([opening, one.token_ids[PROMPT_TOKENS:EPISODE_TOKENS]]),
            loss_mask=mask,
            logprobs=mask * np.float32(-np.log(vocabulary)),
            versions=np.where(mask > 0, 0, -1),
            advantages=mask * np.float32(number - 3.5),
        )
        for number, one in enumerate(made)
    ]


def stored_operations(model: PreTrainedModel, batch: Batch, tokens: int, *, frozen: bool) -> float:
    """Return the operations of an update. Frozen matrices save a third of the work."""
    head = model.get_output_embeddings().weight.numel()
    matrices = [value.numel() for name, value in model.named_parameters() if ".layers." in name]
    config, own = model.config, EPISODE_TOKENS - PROMPT_TOKENS
    width = config.hidden_size
    pairs = PROMPT_TOKENS**2 + GROUP_SIZE * own * (own + 2 * PROMPT_TOKENS)
    attention = 6.0 * config.num_hidden_layers * width * pairs
    per_weight = 4.0 if frozen else 6.0
    return per_weight * (sum(matrices) * tokens + head * batch.num_loss_tokens) + attention


def ceiling(device: str, dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product."""
    size = 8192 if device == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(10):
        started = moment(device)
        left @ right
        best = max(best, 2.0 * size**3 / (moment(device) - started))
    return best


def moment(device: str) -> float:
    """Return the current time after the device has finished all pending work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(size: str, variant: str, *, device: str, quick: bool) -> dict[str, float]:
    """Return seconds per update, tokens per second, operations per second and peak memory."""
    on_gpu = device == "cuda"
    model = make_model(size, device=device)
    longest, count = (4096, 16 if quick else 32) if on_gpu else (256, 16)
    made = sequences(count, longest=longest, vocabulary=model.config.vocab_size, siblings=variant == SIBLINGS)
    learner = Learner(
        model,
        TrainSection(learning_rate=1e-6, precision="bfloat16" if on_gpu else "float32", **VARIANTS[variant]),
    )
    (batch,) = pack(made, max_tokens=4 * longest, row_tokens=longest, shared=learner.shares_prefixes)
    work = 0.0 if variant == SIBLINGS else operations(model, batch, [len(one) for one in made])
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    learner.step([batch])
    seconds = []
    for _ in range(2 if quick else 4):
        started = moment(device)
        learner.step([batch])
        seconds.append(moment(device) - started)
    best = min(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
    return {"seconds": best, "tokens": batch.num_tokens / best, "rate": work / best, "memory": peak}


def run(*, device: str, quick: bool = False) -> None:
    """Print a row for each model and each method of training."""
    if device == "cpu":
        torch.set_num_threads(1)  # two threads would compete with other processes
    most = ceiling(device, torch.bfloat16 if device == "cuda" else torch.float32)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    table = Table(title=f"learner on {name}; a large matrix product: {most / 1e12:.2f} TFLOP/s")
    for heading in ("model", "variant", "s an update", "tokens/s", "TFLOP/s", "of the ceiling", "peak GiB"):
        table.add_column(heading, justify="left" if heading in ("model", "variant") else "right")
    for size in sizes(device):
        for variant in VARIANTS:
            try:
                found = measure(size, variant, device=device, quick=quick)
            except torch.OutOfMemoryError:
                table.add_row(size, variant, "out of memory")
                continue
            table.add_row(
                size,
                variant,
                f"{found['seconds']:.3f}",
                f"{found['tokens']:,.0f}",
                f"{found['rate'] / 1e12:.3f}" if found["rate"] else "-",
                f"{found['rate'] / most:.1%}" if found["rate"] else "-",
                f"{found['memory']:.1f}" if device == "cuda" else "-",
            )
    Console().print(table)
