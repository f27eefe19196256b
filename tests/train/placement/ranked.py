"""``python -m tests.train.placement.ranked FOLDER`` runs one of two ranks for ``test_ranks.py``.

Each case trains a tiny model and records the results. The test runs the same case in one process.
"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl_train.batch import pack
from agentrl_train.config import LoraSection, TrainSection
from agentrl_train.errors import LossNotFinite
from agentrl_train.learner import Learner, Place
from agentrl_train.learner.sharding import local
from agentrl_train.loss import importance_weights, old, policy_loss, sequence_ratio, sft_loss
from agentrl_train.models.stored import StoredModel, safetensors_files
from agentrl_train.placement.ranks import LeadLearner, Ranks, execute_commands, process_group
from agentrl_train.types import Batch
from tests.architectures import tiny
from tests.tiny_models import learner_arguments
from tests.train.learner.test_learner import llama, made, moved, qwen, with_

Facts = dict[str, Any]
PACKING = {"max_tokens": 64, "row_tokens": 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Some training steps."""

    steps: int = 3
    first: int = 0
    model: Callable[[], Any] = qwen
    reference: Callable[[], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    packing: dict[str, Any] = field(default_factory=lambda: PACKING)
    sequences: int = 9
    segments: int = 1
    """Number of sequences of a rollout."""
    sequence_parallel: int = 1
    loads: str | None = None
    """Folder of the checkpoint to resume from."""
    saves: bool = False
    stored: bool = False
    """True if each rank reads its shards from the model's folder."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of ``Learner``."""
        return learner_arguments(learning_rate=1e-3, **self.options)


LORA = LoraSection(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
EVERYTHING = {
    "recompute": True,
    "objective": partial(policy_loss, anchor=old, correction=importance_weights),
    "entropy_coefficient": 0.01,
    "kl_coefficient": 0.1,
    "activation_checkpointing": True,
    "weight_decay": 0.1,
    "warmup_steps": 2,
}
CASES = {
    "twenty steps": Case(steps=20, saves=True),
    "resumed": Case(steps=10, first=10, loads="alone at ten"),
    "every option": Case(options=EVERYTHING, reference=lambda: moved(qwen())),
    "a ratio by sequence": Case(options={"objective": partial(policy_loss, ratio=sequence_ratio)}),
    "an untied head": Case(model=llama),
    "one row for two ranks": Case(sequences=1),
    "rollouts of three segments": Case(segments=3, packing={**PACKING, "aggregation": "rollout_mean"}),
    "optimizer on the host": Case(options={"offload_optimizer": True}, saves=True),
    "lora": Case(options={"lora": LORA}, saves=True),
    "a mixture of experts": Case(model=partial(tiny, "Qwen3-MoE"), saves=True),
    "a router with biases": Case(model=partial(tiny, "GLM-4.5"), saves=True),
    "read from a file": Case(model=partial(qwen, num_hidden_layers=8), stored=True),
    "read from a file, with a reference": Case(
        model=qwen, reference=qwen, options={"kl_coefficient": 0.1}, stored=True
    ),
    "read from a file, lora": Case(options={"lora": LORA}, saves=True, stored=True),
    "read from a file, a mixture of experts": Case(model=partial(tiny, "Qwen3-MoE"), stored=True),
    "read from a file, a router with biases": Case(model=partial(tiny, "GLM-4.5"), saves=True, stored=True),
    "a window": Case(model=partial(tiny, "Mistral-v0.1")),
    "windows in some layers": Case(model=partial(tiny, "Gemma-3")),
    "rows shared": Case(steps=5, sequence_parallel=2),
    "rows shared, rollouts of three segments": Case(
        segments=3, sequence_parallel=2, packing={**PACKING, "aggregation": "segment_mean"}
    ),
    "rows shared, one sequence each": Case(
        sequence_parallel=2,
        packing={"max_tokens": 64, "packed": False},
        reference=lambda: moved(qwen()),
        options=EVERYTHING,
    ),
    "rows shared, fewer key heads than ranks": Case(
        sequence_parallel=2, model=lambda: qwen(num_key_value_heads=1), options={"objective": sft_loss}
    ),
}


def batches(case: Case, number: int) -> list[Batch]:
    """Return the batches of step ``number``."""
    sequences = [
        with_(one, rollout=i // case.segments) for i, one in enumerate(made(case.sequences, seed=number))
    ]
    return pack(sequences, seed=number, num_minibatches=1, **case.packing)


def train(learner: Learner, case: Case, folder: Path) -> Facts:
    """Train. Return losses, log-probabilities and weights."""
    if case.loads is not None:
        learner.load(folder / case.loads)
    metrics = [learner.step(batches(case, case.first + number)) for number in range(case.steps)]
    return {
        "metrics": [{k: v for k, v in one.items() if k != "seconds"} for one in metrics],
        "logprobs": learner.logprobs(made(5, seed=99)),
        "weights": {name: value.clone() for name, value in learner.weights().items()},
    }


class Counted(StoredModel):
    """Measures the bytes of all tensors in the process while weights are read."""

    largest = 0
    """Bytes of the largest layer."""
    peak = 0

    def layers(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the layers."""
        for tensors in super().layers():
            self.largest = max(self.largest, sum(value.nbytes for value in tensors.values()))
            self.peak = max(self.peak, held_bytes())
            yield tensors


def held_bytes() -> int:
    """Return the bytes of all tensors of this process."""
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and not one.is_meta]
    memory = {local(one.detach()).untyped_storage() for one in tensors}
    return sum({one.data_ptr(): one.nbytes() for one in memory}.values())


def learner_of(case: Case, place: Place | None = None) -> Learner:
    """Return the learner of a case."""
    reference = case.reference() if case.reference is not None else None
    return Learner(case.model(), place=place, reference=reference, **case.arguments)


def read_learner(case: Case, folder: Path, place: Place | None = None) -> tuple[Learner, Facts]:
    """Return the learner of a case with weights read from files, and the peak memory of reading."""
    if dist.get_rank() == 0:
        case.model().save_pretrained(folder, max_shard_size="50KB")
    dist.barrier()
    gc.collect()
    before = held_bytes()
    stored = Counted(folder, files=safetensors_files(folder), dtype=torch.float32)
    empty = stored.model()
    whole = sum(value.nbytes for value in empty.parameters())
    reference = stored.model() if case.reference is not None else None
    learner = Learner(empty, place=place, reference=reference, stored=stored, **case.arguments)
    return learner, {"whole": whole, "largest": stored.largest, "peak": stored.peak - before}


def mesh_of(case: Case, ranks: Ranks) -> DeviceMesh:
    """Return the mesh of a case."""
    shape = (dist.get_world_size() // case.sequence_parallel, case.sequence_parallel)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("data", "sequence"))


def refused(learner: Learner) -> str:
    """Return the error of a step with non-finite advantages in one sequence, and therefore on one rank."""
    sequences = made(9)
    spoilt = np.where(sequences[0].loss_mask > 0, np.inf, 0).astype(np.float32)
    try:
        learner.step(pack([with_(sequences[0], advantages=spoilt), *sequences[1:]], **PACKING))
    except LossNotFinite as error:
        return str(error)
    return "nothing"


def led(ranks: Ranks, folder: Path) -> Facts:
    """Train as rank 0 while the other rank executes its commands. Return the results."""
    learner = LeadLearner(qwen(), ranks=ranks, train=TrainSection(learning_rate=1e-3))
    facts: Facts = {"refused": refused(learner)}
    case = CASES["every option"]
    learner.step(batches(case, 0))
    snapshot = learner.snapshot()
    learner.num_updates = 7
    facts |= {"rates": [learner.step(batches(case, 1))["learning_rate"]], "updates": learner.num_updates}
    (folder / "led").mkdir()
    snapshot.write(folder / "led")
    learner.load(folder / "led")
    weights = learner.weights()
    first = next(iter(weights))
    facts |= {"updates after loading": learner.num_updates, "first": weights[first].clone()}
    facts |= {"again": weights[first].clone(), "names": list(weights)}
    learner.close()
    learner.close()
    return facts


def main(folder: Path) -> None:
    """Run every case. Rank 0 writes the results."""
    torch.set_num_threads(1)
    facts: dict[str, Facts] = {}
    with process_group(device="cpu", sequence_parallel=1, timeout_s=60.0) as ranks:
        for name, case in CASES.items():
            place = replace(ranks, mesh=mesh_of(case, ranks))
            held: Facts = {}
            if case.stored:
                learner, held = read_learner(case, folder / f"{name} before", place)
            else:
                learner = learner_of(case, place)
            facts[name] = train(learner, case, folder) | held
            if case.saves:
                learner.snapshot().write(folder / name)
        facts["refused"] = {"sentence": refused(learner_of(Case(), ranks))}
        if dist.get_rank() == 0:
            facts["led"] = led(ranks, folder)
            (folder / "facts.pickle").write_bytes(pickle.dumps(facts))
        else:
            execute_commands(Learner(qwen(), TrainSection(learning_rate=1e-3), place=ranks), ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
