"""Step 7 of 9: ``Batch`` -> gradient -> optimizer step.

One micro-batch at a time: packed rows go through the model's body; the head and the softmax run
only where a token was sampled, a chunk at a time, so that no tensor [tokens, vocabulary] is ever
whole. The objective (``loss.py``) is an argument: with ``policy_loss`` this is reinforcement
learning, with ``sft_loss`` supervised fine-tuning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl_train.errors import LossNotFinite
from agentrl_train.loss import (
    Objective,
    entropy_bonus,
    importance_weights,
    kl_penalty,
    policy_loss,
)
from agentrl_train.types import Batch, FloatArray, MicroBatch, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Learner:
    """Trains any Hugging Face causal language model on packed batches.

    ``model`` keeps its parameters in float32; ``precision="bfloat16"`` computes under autocast. The
    learning rate rises over ``warmup_steps`` updates and, if ``total_steps`` is given, falls
    linearly to ``final_lr_fraction`` of itself over the last ``decay_fraction`` of the rest.
    ``temperature`` divides the logits, as it did at sampling. A ``reference`` model with a
    ``kl_coefficient`` adds the k3 penalty; an ``importance_cap`` clips against log-probabilities
    recomputed at the start of ``step`` and weighs tokens by the truncated importance weight of
    those over the sampler's (decoupled PPO, arXiv 2110.00641). ``activation_checkpointing`` saves
    memory for a second forward pass; ``max_logits`` bounds the entries of a chunk of logits.
    ``packs_rows`` says whether the model can keep several sequences of a row apart. Raises
    ``ValueError`` for a model whose logits are not simply its head's output.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        objective: Objective = policy_loss,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        final_lr_fraction: float = 0.1,
        decay_fraction: float = 1.0,
        max_grad_norm: float = 1.0,
        temperature: float = 1.0,
        precision: Literal["float32", "bfloat16"] = "float32",
        device: str | torch.device = "cpu",
        entropy_coefficient: float = 0.0,
        reference: PreTrainedModel | None = None,
        kl_coefficient: float = 0.0,
        importance_cap: float | None = None,
        activation_checkpointing: bool = False,
        max_logits: int = 2**26,
    ) -> None:
        self.model = _placed(model, device)
        self.packs_rows = _packs_rows(model)
        self.device = torch.device(device)
        self.objective = objective
        self.num_updates = 0
        self._schedule = (warmup_steps, total_steps, final_lr_fraction, decay_fraction)
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self._temperature = temperature
        self._precision = precision
        self._entropy_coefficient = entropy_coefficient
        self._reference = _placed(reference, device) if reference is not None else None
        self._kl_coefficient = kl_coefficient
        self._importance_cap = importance_cap
        self._activation_checkpointing = activation_checkpointing
        self._max_logits = max_logits
        self._optimizer = torch.optim.AdamW(
            _parameter_groups(model, weight_decay), lr=learning_rate, betas=betas, fused=True
        )
        _check_head(model, self.device)
        if activation_checkpointing:
            _enable_checkpointing(model)

    def step(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Make one optimizer update a batch and return metrics, averaged over all of them.

        Raises ``LossNotFinite`` before an update that would spoil the parameters.
        """
        started = time.perf_counter()
        anchors = [[self._anchor(micro) for micro in batch.micro_batches] for batch in batches]
        # Dropout off, so that an unchanged policy has ratio 1; checkpointing needs train mode.
        self.model.train(self._activation_checkpointing)
        tally = _Tally()
        for batch, anchor in zip(batches, anchors, strict=True):
            self._update(batch, anchor, tally)
        return tally.metrics() | _sizes(batches) | {"seconds": time.perf_counter() - started}

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[FloatArray]:
        """Return each sequence's log-probabilities under the parameters of now, [T], 0 if masked.

        One sequence at a time, unpacked: the reference to hold an engine against.
        """
        self.model.eval()
        rows = []
        for one in sequences:
            row = torch.zeros(len(one))
            row[torch.from_numpy(one.loss_mask) > 0] = self._forward(self.model, _alone(one))[0].cpu()
            rows.append(row.numpy())
        return rows

    def weights(self) -> dict[str, Tensor]:
        """Return name -> parameter, detached, sharing memory; tied parameters come once."""
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next ``step`` depends on: model, optimizer, count, randomness."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_updates": self.num_updates,
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; on the CPU bit for bit."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_updates = int(state["num_updates"])
        torch.set_rng_state(state["rng"].cpu())

    def _update(self, batch: Batch, anchors: Sequence[Tensor | None], tally: _Tally) -> None:
        total = torch.zeros((), device=self.device)
        for micro, anchor in zip(batch.micro_batches, anchors, strict=True):
            loss = self._loss(micro, anchor, tally)
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        if not bool(torch.isfinite(total + norm)):
            self._optimizer.zero_grad(set_to_none=True)
            raise LossNotFinite(
                f"update {self.num_updates + 1}: loss {float(total)}, gradient norm {float(norm)}; "
                "the parameters were not changed. Lower the learning rate or look at the batch."
            )
        rate = self._learning_rate * lr_fraction(self.num_updates, *self._schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        tally.add_update(loss=float(total), grad_norm=float(norm), learning_rate=rate)

    def _loss(self, micro: MicroBatch, anchor: Tensor | None, tally: _Tally) -> Tensor:
        logprobs, entropy = self._forward(self.model, micro)
        behaviour, advantages, weights = (
            select_sampled(values, micro).to(self.device)
            for values in (micro.logprobs, micro.advantages, micro.weights)
        )
        corrected = weights
        if anchor is not None and self._importance_cap is not None:
            correction = importance_weights(anchor, behaviour, cap=self._importance_cap)
            corrected, behaviour = weights * correction, anchor
        loss, stats = self.objective(logprobs, behaviour, advantages, corrected)
        stats = stats | {"entropy": entropy.detach().sum()}
        if self._entropy_coefficient:
            loss = loss - self._entropy_coefficient * entropy_bonus(entropy, weights)
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._forward(self._reference, micro)
            loss = loss + self._kl_coefficient * kl_penalty(logprobs, reference, weights)
            stats["kl_reference"] = kl_penalty(logprobs.detach(), reference, torch.ones_like(weights))
        tally.add(stats, logprobs.numel())
        return loss

    @torch.no_grad()
    def _anchor(self, micro: MicroBatch) -> Tensor | None:
        """Return what the clip is anchored on if not the sampler's own log-probabilities."""
        if self._importance_cap is None:
            return None
        self.model.eval()
        return self._forward(self.model, micro)[0]

    def _forward(self, model: PreTrainedModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        lowered = self._precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=lowered):
            return sampled_logprobs(
                model,
                micro,
                temperature=self._temperature,
                max_logits=self._max_logits,
                entropy_gradient=self._entropy_coefficient > 0,
            )


def sampled_logprobs(
    model: PreTrainedModel,
    micro: MicroBatch,
    *,
    temperature: float = 1.0,
    max_logits: int = 2**26,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of a micro-batch's N sampled tokens, [N] each, by rows.

    Computed on the model's device. If the logits [N, vocabulary] have more than ``max_logits``
    entries they are made in chunks, in the forward and again in the backward pass.
    """
    device = next(model.parameters()).device
    token_ids = micro.token_ids.to(device)
    attention = _attention(micro, device) if _is_packed(micro, model) else {}
    hidden = model.base_model(input_ids=token_ids, use_cache=False, **attention)[0]
    predicts = (micro.loss_mask[:, 1:] > 0).to(device)
    hidden, targets = hidden[:, :-1][predicts], token_ids[:, 1:][predicts]
    head = model.get_output_embeddings()

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float() / temperature
        logprobs = logits.log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropy

    size = max(1, max_logits // head.weight.shape[0])
    if len(targets) <= size:
        return score(hidden, targets)
    chunks = [
        checkpoint(score, *chunk, use_reentrant=False)
        for chunk in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return torch.cat([one for one, _ in chunks]), torch.cat([one for _, one in chunks])


def select_sampled(values: Tensor, micro: MicroBatch) -> Tensor:
    """Return the entries [N] of ``values`` [rows, row length] at the sampled tokens, by rows."""
    return values[:, 1:][micro.loss_mask[:, 1:] > 0]


def lr_fraction(
    update: int,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    final_lr_fraction: float = 0.1,
    decay_fraction: float = 1.0,
) -> float:
    """Return which part of the learning rate update number ``update`` (from 0) uses.

    Rises to 1 over ``warmup_steps``, stays there, and falls linearly to ``final_lr_fraction`` at
    the last update, over the last ``decay_fraction`` of the updates after the warm-up. Without
    ``total_steps`` it does not fall.
    """
    if update < warmup_steps:
        return (update + 1) / warmup_steps
    if total_steps is None:
        return 1.0
    decay = max(1.0, decay_fraction * (total_steps - warmup_steps))
    done = min(1.0, max(0.0, (update + 1 - (total_steps - decay)) / decay))
    return 1.0 - done * (1.0 - final_lr_fraction)


class _Tally:
    """Sums of the stats of micro-batches (maxima for names in ``_max``) and means over updates."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._updates: dict[str, list[float]] = {}
        self._tokens = 0

    def add(self, stats: Mapping[str, Tensor], tokens: int) -> None:
        self._tokens += tokens
        for name, value in stats.items():
            old = self._sums.get(name, torch.zeros_like(value))
            self._sums[name] = torch.maximum(old, value) if name.endswith("_max") else old + value

    def add_update(self, **values: float) -> None:
        for name, value in values.items():
            self._updates.setdefault(name, []).append(value)

    def metrics(self) -> dict[str, float]:
        means = {name: float(np.mean(values)) for name, values in self._updates.items()}
        return means | {
            name: float(value) / (1 if name.endswith("_max") else max(1, self._tokens))
            for name, value in self._sums.items()
        }


def _sizes(batches: Sequence[Batch]) -> dict[str, float]:
    return {
        "updates": float(len(batches)),
        "sequences": float(sum(batch.num_sequences for batch in batches)),
        "loss_tokens": float(sum(batch.num_loss_tokens for batch in batches)),
        "tokens": float(sum(batch.num_tokens for batch in batches)),
        "slots": float(sum(batch.num_slots for batch in batches)),
    }


def _is_packed(micro: MicroBatch, model: PreTrainedModel) -> bool:
    """Return whether sequences share a row and have to be kept apart.

    Rows of one sequence need no mask: causal attention never looks at the padding behind, and
    without a mask faster kernels are used. Raises ``ValueError`` if the model cannot keep them
    apart.
    """
    packed = int(micro.segment_ids.max()) > 1
    if packed and not _packs_rows(model):
        raise ValueError(
            "this model has layers other than full attention, which cannot keep packed sequences "
            "apart; pack with packed=False, one sequence a row."
        )
    return packed


def _attention(micro: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """Return the block-causal mask [rows, 1, row length, row length] and the positions."""
    segments = micro.segment_ids.to(device)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return {"attention_mask": same.tril(), "position_ids": micro.position_ids.to(device)}


def _packs_rows(model: PreTrainedModel) -> bool:
    layer_types = getattr(model.config, "layer_types", None) or ["full_attention"]
    return set(layer_types) == {"full_attention"}


def _check_head(model: PreTrainedModel, device: torch.device) -> None:
    """Raise ``ValueError`` if the model does more to its logits than its head (capping, scaling)."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        plain = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False)[0])
    if not torch.allclose(whole.float(), plain.float(), rtol=1e-2, atol=1e-3):
        raise ValueError(
            f"{type(model).__name__} caps or scales its logits after the head, which the learner "
            "does not reproduce; train a model whose logits are the head's output."
        )


def _alone(one: TokenSequence) -> MicroBatch:
    """Return a sequence as a micro-batch of one row."""
    mask = torch.from_numpy(one.loss_mask)[None]
    return MicroBatch(
        token_ids=torch.from_numpy(one.token_ids)[None],
        position_ids=torch.arange(len(one))[None],
        segment_ids=torch.ones(1, len(one), dtype=torch.int64),
        loss_mask=mask,
        logprobs=torch.from_numpy(one.logprobs)[None],
        advantages=torch.from_numpy(one.advantages)[None],
        weights=mask,
    )


def _placed(model: PreTrainedModel, device: str | torch.device) -> PreTrainedModel:
    module: nn.Module = model  # transformers' own ``to`` loses its types in a decorator
    module.to(device).eval()
    return model


def _enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; the method's name depends on transformers' age."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable()


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters in two groups: matrices decay, vectors (norms, biases) do not."""
    parameters = [value for value in model.parameters() if value.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
