"""Checkpoint state of the learner, which is copied, written in the background, and loaded by any ranks.

``model/`` is a Hugging Face folder (a PEFT folder for LoRA) and the only copy of the parameters. ``learner/``
holds the update count and the random state, and ``learner/optimizer/`` the optimizer with a file for each
rank (``shards``). All files are safetensors, so loading them cannot run code.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl_train.config import LoraSection
from agentrl_train.errors import CheckpointError
from agentrl_train.learner.lora import save_adapter
from agentrl_train.models.adapters import has_adapter, read_adapter
from agentrl_train.models.shards import open_shards, raise_together, write_shards
from agentrl_train.models.stored import StoredModel, fill, safetensors_files, tensors_of
from agentrl_train.storage.checkpoint import OPTIMIZER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

MODEL, STATE = "model", "learner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A host-memory copy of the training state. Training can continue while it is written."""

    model: PreTrainedModel
    """Writes the model folder. Its parameters are not read."""
    weights: Mapping[str, Tensor]
    """All parameters, or the adapters' parameters, on the writing rank. Empty on the other ranks."""
    lora: LoraSection | None = None
    state: Mapping[str, Tensor]
    """This rank's shards of everything else."""
    group: dist.ProcessGroup | None
    """Process group of the ranks that write together."""
    announce: Callable[[Path], None] | None = None
    """Called first, to make the other ranks write into the same folder."""

    def write(self, folder: Path) -> None:
        """Write ``model/`` and ``learner/`` into a folder. Every rank of the group must call this.

        Raises ``RuntimeError`` with the original error as its cause.
        """
        if self.announce is not None:
            self.announce(folder)
        failure: Exception | None = None
        try:
            if self.weights and self.lora is not None:
                save_adapter(folder / MODEL, self.model, self.lora, self.weights)
            elif self.weights:
                self.model.save_pretrained(str(folder / MODEL), state_dict=dict(self.weights))
            rank = 0 if self.group is None else dist.get_rank(self.group)
            for place, tensors in self._places().items():
                write_shards(folder / place, tensors, rank=rank)
        except Exception as error:  # the other ranks wait for it
            failure = error
        raise_together(failure, self.group)

    def _places(self) -> dict[Path, dict[str, Tensor]]:
        """Return the tensors of the state by folder."""
        places: dict[Path, dict[str, Tensor]] = {Path(STATE): {}, Path(STATE, OPTIMIZER): {}}
        for name, value in self.state.items():
            of_optimizer = name.startswith(f"{OPTIMIZER}/")
            places[Path(STATE, OPTIMIZER) if of_optimizer else Path(STATE)][name] = value
        return places


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory. A sharded tensor stays sharded."""
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
) -> None:
    """Fill the optimizer and ``others`` from ``learner/`` of a checkpoint of any number of ranks.

    If the checkpoint has no optimizer state, the optimizer starts empty.
    """
    with open_shards(folder / STATE) as shards:
        for key, value in others.items():
            shards.fill(key, value)
    optimizer.state.clear()
    if not (folder / STATE / OPTIMIZER).is_dir():
        logger.warning(
            "%s has no optimizer state, which only the newest checkpoint keeps: the moments start at zero",
            folder,
        )
        return
    found: dict[str, Tensor] = {}
    with open_shards(folder / STATE / OPTIMIZER) as shards:
        for key in shards.names:
            _, name, what = key.split("/")
            if name not in updated:
                raise _different_model(folder)
            like = updated[name].detach()
            found[key] = torch.zeros((), device=like.device) if what == "step" else torch.zeros_like(like)
            shards.fill(key, found[key])
    for key, value in found.items():
        _, name, what = key.split("/")
        optimizer.state[updated[name]][what] = value


@torch.no_grad()
def read_weights(folder: Path, model: PreTrainedModel) -> None:
    """Load the parameters of a model, or its adapters, from ``model/`` of a checkpoint."""
    if has_adapter(folder / MODEL):
        fill(model, read_adapter(folder / MODEL))
        return
    kind = json.loads((folder / MODEL / "config.json").read_text())["model_type"]
    if kind != model.config.model_type:
        raise _different_model(folder)
    files = safetensors_files(folder / MODEL)
    stored = StoredModel(folder / MODEL, files=files, dtype=torch.float32)
    if stored.shapes() != {name: value.shape for name, value in tensors_of(model).items()}:
        raise _different_model(folder)
    stored.load_into(model)


def _different_model(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} contains a different model than model.path: restore the model.path of the run"
    )


class HostCopies:
    """Host-memory copies of the trained parameters, which the optimizer updates instead.

    The moments are also in host memory. Of the 12 bytes per parameter, without the gradient, only 4 stay on
    the device.
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
