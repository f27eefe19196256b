"""The learner: one optimizer update per batch, accumulated over micro-batches.

The ``Loss`` (``loss.py``) is an argument: ``policy_loss`` is for reinforcement learning, ``sft_loss`` for
supervised fine-tuning. The same class runs on one device or many. With a mesh every rank makes the same
calls, holds a shard of the parameters and does a share of the work.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from agentrl_train.config import TrainSection
from agentrl_train.errors import BadUpdate, GradientSpike, LossNotFinite
from agentrl_train.learner.agreement import check_attention, check_head
from agentrl_train.learner.learning_rates import learning_rate_of
from agentrl_train.learner.logprobs import (
    WHOLE,
    Part,
    Scorer,
    attends_to_segments,
    one_row,
    padding_free,
    rows_to_score,
    sampled_units,
    select_sampled,
    set_attention,
    shares_prefixes,
)
from agentrl_train.learner.lora import adapters_off, add_adapters, is_adapter, merged
from agentrl_train.learner.sequence_parallel import use_sequence_parallel
from agentrl_train.learner.sharding import GatheredWeights, Place, buckets, deal, full, shard
from agentrl_train.learner.state import (
    HostCopies,
    Snapshot,
    host_copy,
    optimizer_state,
    read_state,
    read_weights,
)
from agentrl_train.loss import Loss, Tokens, entropy_bonus, kl_penalty
from agentrl_train.models.architecture import Threads, keep_freed_memory, release_idle_threads
from agentrl_train.models.checkpoint_names import persistent_buffers
from agentrl_train.models.loading import auto_dtype
from agentrl_train.models.stored import StoredModel, allocate
from agentrl_train.types import UNTRACED, Batch, FloatArray, MicroBatch, TokenSequence, Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def lr_fraction(
    update: int,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    final_lr_fraction: float = 0.1,
    decay_fraction: float = 1.0,
    lr_decay: Literal["linear", "cosine"] = "linear",
) -> float:
    """Return the learning rate multiplier of update number ``update``, from 0.

    It rises linearly to 1 over ``warmup_steps``, stays constant, and decays to ``final_lr_fraction``
    over the last ``decay_fraction`` of the updates after the warm-up. Without ``total_steps`` it does not
    decay.
    """
    if update < warmup_steps:
        return (update + 1) / warmup_steps
    if total_steps is None:
        return 1.0
    decay = max(1.0, decay_fraction * (total_steps - warmup_steps))
    done = min(1.0, max(0.0, (update + 1 - (total_steps - decay)) / decay))
    if lr_decay == "cosine":
        done = (1.0 - math.cos(math.pi * done)) / 2.0
    return 1.0 - done * (1.0 - final_lr_fraction)


Reduce = Callable[[Tensor, str], Tensor]
"""``(values, "sum" | "max") -> values of all ranks``."""
TRACK = "trainer/steps"
"""Trace track of the parts of an update."""
HISTORY = 50
"""Number of recent norms that form the median."""
MIN_HISTORY = 10
"""Number of norms needed before a norm can be rejected."""


class SpikeGuard:
    """Rejects a gradient norm of more than ``factor`` times the recent median. 0 disables it.

    Rejected norms also count in the median, so that a lasting change of level is accepted after a while.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=HISTORY)

    def state(self) -> Tensor:
        """Return the recent norms, for a checkpoint."""
        padding = [float("nan")] * (HISTORY - len(self._norms))
        return torch.tensor([*self._norms, *padding], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """Restore ``state()``."""
        self._norms.clear()
        self._norms.extend(norm for norm in state.tolist() if norm == norm)

    def __call__(self, norm: float) -> None:
        """Check the norm of an update before it is applied; raises ``GradientSpike``."""
        typical = median(self._norms) if len(self._norms) >= MIN_HISTORY else None
        self._norms.append(norm)
        if self._factor and typical is not None and norm > self._factor * typical:
            raise GradientSpike(
                f"the gradient norm {norm:.3g} is more than train.spike_factor = {self._factor:g} times the "
                f"recent median {typical:.3g}. The update was not applied."
            )


class MetricSums:
    """Sums of micro-batch statistics (maxima for names ending in ``_max``) and means over updates."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._updates: dict[str, list[float]] = {}
        self._tokens = 0

    def add(self, stats: Mapping[str, Tensor], tokens: int) -> None:
        """Add the statistics of one micro-batch."""
        self._tokens += tokens
        for name, value in stats.items():
            old = self._sums.get(name, torch.zeros_like(value))
            self._sums[name] = torch.maximum(old, value) if name.endswith("_max") else old + value

    def add_update(self, **values: float) -> None:
        """Add values of one update that are the same on every rank."""
        for name, value in values.items():
            self._updates.setdefault(name, []).append(value)

    def metrics(self, reduce: Reduce) -> dict[str, float]:
        """Return means over updates and over the tokens of all ranks."""
        means = {name: float(np.mean(values)) for name, values in self._updates.items()}
        maxima = [name for name in self._sums if name.endswith("_max")]
        others = [name for name in self._sums if name not in maxima]
        totals = reduce(_vector([self._tokens, *(self._sums[name] for name in others)]), "sum")
        largest = reduce(_vector([self._sums[name] for name in maxima]), "max")
        tokens, *sums = totals.tolist()
        shares = {name: value / max(1, tokens) for name, value in zip(others, sums, strict=True)}
        return means | shares | dict(zip(maxima, largest.tolist(), strict=True))


def _sizes(batches: Sequence[Batch]) -> dict[str, float]:
    """Return the counts of a step: updates, sequences, tokens and slots."""
    return {
        "updates": float(len(batches)),
        "sequences": float(sum(batch.num_sequences for batch in batches)),
        "loss_tokens": float(sum(batch.num_loss_tokens for batch in batches)),
        "tokens": float(sum(batch.num_tokens for batch in batches)),
        "slots": float(sum(batch.num_slots for batch in batches)),
    }


def _vector(values: Sequence[Tensor | int]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


class Learner:
    """Trains any Hugging Face causal language model on packed batches.

    ``packs_rows`` is True if the model supports several sequences per row, ``shares_prefixes`` if sequences
    with a common prefix are computed as a tree.

    Args:
        model: the policy. Its trained parameters stay in float32. Dropout is disabled.
        train: optimizer, precision and memory. ``train.lora`` trains adapters only.
        total_steps: steps of the run, over which the learning rate decays; None keeps it constant.
        loss: the objective and its regularization; ``policy_loss`` alone by default.
        temperature: divides the logits, as during sampling.
        attention: "sdpa" is PyTorch's attention, one sequence after another. "eager" takes one sequence per
            row. Other names select a flash-attn that transformers supports.
        place: device of this process and the ranks that share the work; the model's own device by default.
        reference: model of the KL penalty. With adapters, the policy without them is the reference.
        teachers: name -> frozen model that ``logprobs`` can score with, and its weights if it is on the meta
            device.
        stored: weights of ``model`` and ``reference`` if these are on the meta device. Each rank reads its
            shards.
        threads: CPU threads, shared with other parts that compute.
        trace: records forward, backward and optimizer. On a GPU, it records when they were queued.

    Raises:
        ValueError: the logits of the model differ from ``read_logits``, its attention is not known here, it
            cannot be sharded, or a KL penalty has no reference.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        train: TrainSection | None = None,
        *,
        total_steps: int | None = None,
        loss: Loss | None = None,
        temperature: float = 1.0,
        attention: str = "sdpa",
        place: Place | None = None,
        reference: PreTrainedModel | None = None,
        teachers: Mapping[str, tuple[PreTrainedModel, StoredModel | None]] = MappingProxyType({}),
        stored: StoredModel | None = None,
        threads: Threads | None = None,
        trace: Trace = UNTRACED,
    ) -> None:
        train, loss = train or TrainSection(), loss or Loss()
        place = place or Place(device=model.device)
        train = train.model_copy(update={"precision": precision_of(train, model, place)})
        self._learning_rate = learning_rate_of(train, model)
        self.model = model
        self.settings = train
        self.temperature = temperature
        self.device = place.device
        self.objective = loss.objective
        self.num_updates = 0
        self._loss_terms = loss
        self._total_updates = None if total_steps is None else total_steps * train.minibatches
        self._span = partial(trace.span, TRACK)
        self._threads = threads or Threads()
        self._mesh = place.mesh
        self._group = place.storage
        self._data, self._part = _mesh_position(place.mesh)
        self._guard = SpikeGuard(train.spike_factor)
        self._attention = attention
        if loss.kl_coefficient and reference is None and train.lora is None:
            raise ValueError("kl_coefficient needs a reference model, or adapters that can be switched off.")
        if train.lora is not None:
            add_adapters(model, train.lora)
        disable_dropout(model)
        if place.device.type == "cpu":
            keep_freed_memory()
        self._scorer = self._prepare(model, stored)
        self.packs_rows = attends_to_segments(model)
        self.shares_prefixes = shares_prefixes(model) and self._part == WHOLE
        self._reference = None if reference is None else self._prepare(reference, stored)
        self._teachers = {name: self._prepare(*teacher) for name, teacher in teachers.items()}
        self._updated = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._host = HostCopies(self._updated) if train.offload_optimizer else None
        if self._host is not None:
            self._updated = self._host.copies
        self._optimizer = torch.optim.AdamW(
            _parameter_groups(self._updated.values(), train.weight_decay),
            lr=self._learning_rate,
            betas=train.betas,
            fused=True,
        )
        if train.activation_checkpointing:
            _enable_checkpointing(model)

    def step(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Apply one optimizer update per batch and return metrics averaged over them.

        Raises ``BadUpdate`` instead of applying an update that would corrupt the parameters.
        """
        started, sums = time.perf_counter(), MetricSums()
        shares = [self._share(batch.micro_batches) for batch in batches]
        if attends_to_segments(self.model):
            shares = [[padding_free(micro) for micro in share] for share in shares]
        with self._threads.working():
            before = [[self._logprobs_before(micro) for micro in share] for share in shares]
            self.model.train(self.settings.activation_checkpointing)
            for share, old in zip(shares, before, strict=True):
                self._update(share, old, sums)
        release_idle_threads()
        return sums.metrics(self._reduce) | _sizes(batches) | {"seconds": time.perf_counter() - started}

    def logprobs(self, sequences: Sequence[TokenSequence], teacher: str | None = None) -> list[FloatArray]:
        """Return each sequence's log-probabilities under the current parameters, [T], 0 where masked.

        With a ``teacher``, that model computes them. Sequences share rows, as in ``step``, so that a
        comparison with an engine covers packing.
        """
        return self._scores(self._scorer if teacher is None else self._teachers[teacher], sequences)

    @torch.no_grad()
    def _scores(
        self, scorer: Scorer, sequences: Sequence[TokenSequence], *, shape: Sequence[int] = ()
    ) -> list[FloatArray]:
        """Return the scores of each sequence's sampled tokens, [T, *shape], 0 where masked."""
        self.model.eval()
        index, count = self._data
        lengths = [len(one) for one in sequences]
        rows = rows_to_score(scorer.model, sequences, part=self._part, ranks=count)
        micros = [one_row(*(sequences[number] for number in row)) for row in rows]
        scored = torch.zeros(sum(lengths), *shape)
        places = torch.arange(sum(lengths)).split(lengths)
        for turn, micro in enumerate(self._share(micros)):
            with self._threads.working():
                scores = self._forward(scorer, micro)[0].float().cpu()
            if (number := turn * count + index) < len(rows):
                place = torch.cat([places[one] for one in rows[number]])
                scored[select_sampled(place[None], micro, self._part)] = scores
        release_idle_threads()
        return [row.numpy() for row in self._reduce(scored, "sum").cpu().split(lengths)]

    def weights(self) -> Mapping[str, Tensor]:
        """Return name -> parameter, detached; tied parameters appear once.

        They share memory with the model. Parameters of a sharded model are gathered when they are read, and
        every rank must make the same calls of ``gather``.
        """
        if self._mesh is None and self.settings.lora is None:
            return {name: value.detach() for name, value in self.model.named_parameters()}
        return GatheredWeights(self.weight_buckets(), self.gather)

    def weight_buckets(self) -> list[list[str]]:
        """Return the names of all parameters, in the buckets that ``gather`` takes."""
        named = self.model.named_parameters()
        sizes = {name: value.numel() * value.element_size() for name, value in named if not is_adapter(name)}
        return buckets(sizes)

    def gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the full tensors of some parameters."""
        return self._gather(names)

    def _gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        with torch.inference_mode(False), torch.no_grad():  # an engine can read in inference mode
            return {name: merged(self.model, name) for name in names}

    def snapshot(self) -> Snapshot:
        """Return a copy of the training state, to be written while training continues."""
        writes = self._mesh is None or dist.get_rank() == 0
        lora = self.settings.lora
        weights: dict[str, Tensor] = {}
        for name, value in self.model.named_parameters():
            if lora is None or is_adapter(name):
                whole = full(value.detach())
                weights |= {name: host_copy(whole)} if writes else {}
        if lora is None and writes:
            buffers = persistent_buffers(self.model)
            weights |= {name: host_copy(value) for name, value in buffers.items()}
        state = {name: host_copy(value) for name, value in self._state().items()}
        return Snapshot(model=self.model, weights=weights, lora=lora, state=state, group=self._group)

    def load(self, folder: Path) -> None:
        """Restore the state of a snapshot in ``folder``, on any number of ranks.

        On a CPU with the same number of ranks, training continues bit for bit.
        """
        self._read_weights(folder)
        others = {
            "num_updates": torch.zeros((), dtype=torch.int64),
            "rng": torch.get_rng_state(),
            "norms": self._guard.state(),
        }
        if self._host is not None:
            self._host.refresh()
        read_state(folder, self._updated, self._optimizer, others=others)
        self.num_updates = int(others["num_updates"])
        torch.set_rng_state(others["rng"])
        self._guard.restore(others["norms"])

    def _read_weights(self, folder: Path) -> None:
        read_weights(folder, self.model)

    def _state(self) -> dict[str, Tensor]:
        return {
            **optimizer_state(self._updated, self._optimizer),
            "num_updates": torch.tensor(self.num_updates),
            "rng": torch.get_rng_state(),
            "norms": self._guard.state(),
        }

    def _update(
        self, micro_batches: Sequence[MicroBatch], before: Sequence[Tensor | None], sums: MetricSums
    ) -> None:
        total = torch.zeros((), device=self.device)
        for micro, old in zip(micro_batches, before, strict=True):
            with self._span("forward", slots=micro.token_ids.numel()):
                loss = self._loss(micro, old, sums)
            with self._span("backward"):
                loss.backward()
            total += loss.detach()
        total = self._reduce(total, "sum")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        norm = norm if self._mesh is None else full(norm)
        try:
            self._check_update(float(total), float(norm))
        except BadUpdate:
            self.model.zero_grad(set_to_none=True)
            raise
        rate = self._learning_rate * self._lr_fraction()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with self._span("optimizer"), self._host.updating() if self._host is not None else nullcontext():
            self._optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.num_updates += 1
        sums.add_update(loss=float(total), grad_norm=float(norm), learning_rate=rate)

    def _lr_fraction(self) -> float:
        train = self.settings
        return lr_fraction(
            self.num_updates,
            train.warmup_steps * train.minibatches,
            self._total_updates,
            train.decay.to,
            train.decay.over,
            train.decay.name,
        )

    def _check_update(self, loss: float, norm: float) -> None:
        if not math.isfinite(loss + norm):
            raise LossNotFinite(
                f"update {self.num_updates + 1}: loss {loss}, gradient norm {norm}; "
                "the parameters were not changed. Lower the learning rate or inspect the batch."
            )
        self._guard(norm)

    def _loss(self, micro: MicroBatch, old: Tensor | None, sums: MetricSums) -> Tensor:
        logprobs, entropy = self._forward(self._scorer, micro)
        behaviour, advantages, weights, ages = (
            select_sampled(values, micro, self._part).to(self.device)
            for values in (micro.logprobs, micro.advantages, micro.weights, micro.ages)
        )
        sequences, turns = (numbers.to(self.device) for numbers in sampled_units(micro, self._part))
        terms = self._loss_terms
        loss, stats = self.objective(
            Tokens(
                logprobs=logprobs,
                behaviour=behaviour,
                advantages=advantages,
                weights=weights,
                old=old,
                ages=ages,
                sequences=sequences,
                turns=turns,
            )
        )
        stats = stats | {"entropy": entropy.detach().sum()}
        if terms.entropy_coefficient:
            loss = loss - terms.entropy_coefficient * entropy_bonus(entropy, weights)
        if terms.kl_coefficient:
            reference = self._reference_logprobs(micro)
            penalty = kl_penalty(logprobs, reference, weights, estimator=terms.kl_estimator)
            loss = loss + terms.kl_coefficient * penalty
            stats["kl_reference"] = kl_penalty(logprobs.detach(), reference, torch.ones_like(weights))
        sums.add(stats, logprobs.numel())
        return loss

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor:
        """Return log-probabilities under the initial policy: with adapters, the model without them."""
        if self._reference is not None:
            return self._forward(self._reference, micro)[0]
        with adapters_off(self.model):
            return self._forward(self._scorer, micro)[0]

    @torch.no_grad()
    def _logprobs_before(self, micro: MicroBatch) -> Tensor | None:
        """Return the log-probabilities before the update, or None if the objective does not use them."""
        if not self._loss_terms.recompute:
            return None
        self.model.eval()
        return self._forward(self._scorer, micro)[0]

    def _forward(self, scorer: Scorer, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        self._threads.share()
        # A sharded model is already gathered in bfloat16.
        lowered = self.settings.precision == "bfloat16" and self._mesh is None
        entropy_gradient = self._loss_terms.entropy_coefficient > 0
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=lowered):
            scored: tuple[Tensor, Tensor] = scorer(micro, entropy_gradient=entropy_gradient)
        return scored

    def _prepare(self, model: PreTrainedModel, stored: StoredModel | None) -> Scorer:
        """Move a model to its device, or shard it over the mesh; read what is ``stored``."""
        module: nn.Module = model  # transformers' own ``to`` loses its types in a decorator
        if self._mesh is None and stored is None:
            module.to(self.device)
        module.eval()
        scorer = self._scorer_of(model)
        if self._part != WHOLE and self._mesh is not None:
            use_sequence_parallel(model, self._mesh.get_group("sequence"))
        else:
            set_attention(model, self._attention)
        if self._mesh is not None:
            shard(scorer, model, self._mesh, precision=self.settings.precision)
        if stored is not None:
            allocate(scorer, self.device)
            stored.load_into(model)
        if self._mesh is None:
            check_attention(model)
        return scorer

    def _scorer_of(self, model: PreTrainedModel) -> Scorer:
        check_head(model)
        return Scorer(model, temperature=self.temperature, part=self._part)

    def _share(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return the micro-batches of this rank."""
        return micro_batches if self._mesh is None else deal(micro_batches, *self._data)

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        """Return the sum or the maximum over all ranks."""
        if self._mesh is None or not values.numel():
            return values
        values = values.to(self.device)
        dist.all_reduce(values, op=dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
        return values


def precision_of(train: TrainSection, model: PreTrainedModel, place: Place) -> str:
    """Return the compute dtype of a learner.

    With "auto", several ranks use float32, because they can be on different processors.
    """
    if train.precision != "auto":
        return train.precision
    return auto_dtype(model, str(place.device)) if place.mesh is None else "float32"


def _mesh_position(mesh: DeviceMesh | None) -> tuple[Part, Part]:
    """Return this rank's share of the micro-batches and its slice of the rows."""
    if mesh is None:
        return WHOLE, WHOLE
    data, sequence = (
        (mesh.get_local_rank(name), mesh.size(number)) for number, name in enumerate(("data", "sequence"))
    )
    return data, sequence


def _enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; the method name depends on the version of transformers."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable()


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout probabilities to 0, so that an unchanged policy also has ratio 1 in train mode.

    Activation checkpointing needs train mode. Models keep probabilities in layers and in plain attributes.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _parameter_groups(updated: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters in two groups: matrices decay, vectors (norms, biases) do not."""
    parameters = list(updated)
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
