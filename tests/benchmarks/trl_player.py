"""Run TRL's GRPO trainer on the task of ``trl_task`` and print one line of JSON per step."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agentrl_env.client import EnvClient
from agentrl_env.types import TaskSample, ToolSpec
from agentrl_train.chat import ChatFormat
from tests.benchmarks.trl_task import FirstOpen, FirstPick, parity, reward

GROUP_SIZE = 8


async def prompts(
    task: type[FirstPick | FirstOpen], chat: ChatFormat, number: int, *, seed: int
) -> tuple[Sequence[ToolSpec], list[dict[str, str]]]:
    """Return the tools, and prompts that encode to our actor's tokens with the right answers."""
    rows, tokenizer = [], chat.tokenizer
    async with EnvClient.local(task) as client:
        tools = (await client.open(index=0)).tools
    problems, draws = task.samples("train"), np.random.default_rng(seed)
    for index in draws.choice(len(problems), size=number, replace=False):
        environment, data = task(), problems[index]
        messages = environment.reset(TaskSample(task=task.name, data=data), draws)
        ids = chat.opening(messages, tools)
        text = str(tokenizer.decode(ids, skip_special_tokens=False))
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        rows.append({"prompt": text, "right": environment.wanted})
    return tools, rows


class Steps(TrainerCallback):  # type: ignore[misc]
    """Writes the reward, sampled tokens and seconds of each step."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._mark, self._cpu_s = time.perf_counter(), time.process_time()

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if not logs or "completions/mean_length" not in logs:
            return
        now = time.perf_counter()
        record = {
            "success": logs["reward"],
            "tokens": logs["completions/mean_length"] * self._episodes,
            "seconds": now - self._mark,
            "cpu_seconds": time.process_time() - self._cpu_s,
        }
        self._mark, self._cpu_s = now, time.process_time()
        print(json.dumps(record), file=sys.__stdout__, flush=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--max-grad-norm", type=float, required=True)
    parser.add_argument("--tool-parser")
    parser.add_argument("--bf16", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    tokenizer = AutoTokenizer.from_pretrained(chosen.model, padding_side="left")
    chat = ChatFormat(tokenizer, tool_parser=chosen.tool_parser)
    task = {one.__name__: one for one in (FirstPick, FirstOpen)}[chosen.task]
    tools, rows = asyncio.run(prompts(task, chat, chosen.steps * chosen.groups, seed=1000 * chosen.seed))

    def rate(text: str, right: str) -> float:
        if chosen.device == "cuda":
            return parity(text)  # the only reward that random weights can earn
        return reward(chat.parse_text(text, turn=0, tools=tools).message, right, task.choices)

    on_gpu = {
        "bf16": True,
        "gradient_checkpointing": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
    }
    on_cpu = {"use_cpu": True, "bf16": chosen.bf16, "gradient_checkpointing": False}
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            **(on_gpu if chosen.device == "cuda" else on_cpu),
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=chosen.seed,
            max_steps=chosen.steps,
            per_device_train_batch_size=chosen.micro_batch,
            gradient_accumulation_steps=chosen.groups * GROUP_SIZE // chosen.micro_batch,
            num_generations=GROUP_SIZE,
            max_completion_length=chosen.tokens,
            temperature=1.0,
            learning_rate=chosen.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=3,
            adam_beta2=0.99,
            max_grad_norm=chosen.max_grad_norm,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="grpo",
            dataloader_pin_memory=False,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32),
            reward_funcs=lambda completions, right, **_: [
                rate(text, one) for text, one in zip(completions, right, strict=True)
            ],
            args=config,
            # Explicit, because some versions of pyarrow cannot derive it from the content of a table.
            train_dataset=Dataset(InMemoryTable.from_pylist(rows), fingerprint="prompts"),
            processing_class=tokenizer,
            callbacks=[Steps(chosen.groups * GROUP_SIZE)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
