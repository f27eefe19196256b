"""Checkpoint state of the learner: copied at once, written in the background, loaded by any number of ranks.

``model/`` is a Hugging Face folder (a PEFT folder for LoRA) and the only copy of the parameters; ``learner/``
holds the optimizer, the update count and the random state, sharded by rank
(``torch.distributed.checkpoint``).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

from agentrl_train.errors import CheckpointError
from agentrl_train.learner.lora import Lora, adapter_base, read_adapter, save_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL, STATE = "model", "learner"
OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A host-memory copy of the training state; training may continue while it is written."""

    model: PreTrainedModel
    """Writes the model folder; its parameters are not read."""
    weights: Mapping[str, Tensor]
    """Full parameters, or those of the adapters, on the writing rank; empty on the others."""
    lora: Lora | None = None
    state: Mapping[str, Tensor]
    """This rank's shards of everything else."""
    group: dist.ProcessGroup | None
    """Process group of the ranks that write together."""
    announce: Callable[[Path], None] | None = None
    """Called first, to make the other ranks write into the same folder."""

    def write(self, folder: Path) -> None:
        """Write ``model/`` and ``learner/`` into a folder; every rank of the group must do so.

        Raises ``RuntimeError`` with the original error as its cause.
        """
        if self.announce is not None:
            self.announce(folder)
        if self.weights and self.lora is not None:
            save_adapter(folder / MODEL, self.model, self.lora, self.weights)
        elif self.weights:
            self.model.save_pretrained(str(folder / MODEL), state_dict=dict(self.weights))
        writer = FileSystemWriter(folder / STATE, sync_files=False)
        try:
            with _quiet():
                save(
                    dict(self.state),
                    storage_writer=writer,
                    process_group=self.group,
                    no_dist=self.group is None,
                )
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise RuntimeError(f"rank {rank} could not write {folder / STATE}: {cause}") from cause


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; a sharded tensor stays sharded."""
    return tensor.detach().to("cpu", copy=True)


def optimizer_state(
    updated: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return the optimizer's tensors as ``optimizer/<parameter>/<name>``, without copying."""
    return {
        f"{OPTIMIZER}/{name}/{what}": value
        for name, parameter in updated.items()
        for what, value in optimizer.state.get(parameter, {}).items()
    }


def read_state(
    folder: Path,
    updated: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    others: dict[str, Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Fill the optimizer and ``others`` from ``learner/`` of a checkpoint of any number of ranks."""
    reader = FileSystemReader(folder / STATE)
    with _quiet():
        names = reader.read_metadata().state_dict_metadata
        found: dict[str, Tensor] = {}
        for key in names:
            if key.startswith(f"{OPTIMIZER}/"):
                _, name, what = key.split("/")
                like = updated[name].detach()
                found[key] = torch.zeros((), device=like.device) if what == "step" else torch.zeros_like(like)
        load(found | others, storage_reader=reader, process_group=group, no_dist=group is None)
    optimizer.state.clear()
    for key, value in found.items():
        _, name, what = key.split("/")
        optimizer.state[updated[name]][what] = value


@torch.no_grad()
def read_weights(folder: Path, model: PreTrainedModel) -> None:
    """Load the parameters of a model, or its adapters, from ``model/`` of a checkpoint."""
    if adapter_base(folder / MODEL) is not None:
        fill(model, read_adapter(folder / MODEL))
        return
    kind = json.loads((folder / MODEL / "config.json").read_text())["model_type"]
    if kind != model.config.model_type:
        raise _different_model(folder)
    read = type(model).from_pretrained(str(folder / MODEL), dtype=torch.float32)
    weights = {name: value.detach() for name, value in read.named_parameters()}
    shapes = {name: value.shape for name, value in weights.items()}
    if shapes != {name: value.shape for name, value in model.named_parameters()}:
        raise _different_model(folder)
    fill(model, weights)


def _different_model(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} contains a different model than model.path: restore the model.path of the run"
    )


@torch.no_grad()
def fill(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy full tensors into the named parameters, each rank into its shard."""
    for name, value in whole.items():
        parameter = model.get_parameter(name)
        if isinstance(parameter, DTensor):
            mine = distribute_tensor(
                value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.to_local().copy_(mine.to_local())
        else:
            parameter.copy_(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's warning about saving from a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
        yield


class HostCopies:
    """Host-memory copies of the trained parameters, which the optimizer updates instead of them.

    The moments live there too: of the 12 bytes per parameter beside the gradient, 4 stay on the device.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._trained = trained
        self.copies = {name: nn.Parameter(host_copy(value)) for name, value in trained.items()}

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Copy gradients to the host before the block, and the updated parameters back after it."""
        for name, copy in self.copies.items():
            gradient: Tensor | None = self._trained[name].grad
            copy.grad = None if gradient is None else gradient.to("cpu")
        yield
        with torch.no_grad():
            for name, copy in self.copies.items():
                copy.grad = None
                self._trained[name].copy_(copy)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters from the device."""
        for name, copy in self.copies.items():
            copy.copy_(self._trained[name])
