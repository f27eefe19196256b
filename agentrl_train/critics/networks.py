"""Critics: language models that evaluate states or turns for the policy.

They are ``Learner``s: packed rows, micro-batches, optimizer and update checks are the same. If the head
outputs values instead of logits, the value of a marked token is read from the hidden state before it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentrl_train.learner.learner import Learner, MetricSums
from agentrl_train.learner.logprobs import Scorer, hidden_before
from agentrl_train.learner.state import STATE, Snapshot, host_copy
from agentrl_train.loss import Loss, Objective, policy_loss, twin_loss, unbounded, value_loss
from agentrl_train.models.shards import open_shards
from agentrl_train.types import FloatArray, MicroBatch, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_STD = 0.02
"""Standard deviation of the weights of a head with several outputs, so that the outputs differ."""


class ValueScorer(Scorer):
    """A causal language model with a single output as its head."""

    def forward(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return the values before the N marked tokens of a micro-batch, [N], by rows, and zeros."""
        hidden, _ = hidden_before(self.model, micro)
        values = self.model.get_output_embeddings()(hidden).float().sum(-1)
        return values, torch.zeros_like(values)


class TwinScorer(Scorer):
    """A causal language model with four outputs as its head: V and Q of both twins."""

    def forward(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return V before the first, third ... marked token of each sequence and Q before the others.

        They are [N, 2], by rows, and zeros. Each sequence has an even number of marked tokens.
        """
        hidden, _ = hidden_before(self.model, micro)
        values, actions = self.model.get_output_embeddings()(hidden).float().split(2, dim=-1)
        is_state = torch.arange(len(hidden), device=hidden.device) % 2 == 0
        found = torch.where(is_state[:, None], values, actions)
        return found, torch.zeros_like(found)


class Critic(Learner):
    """A learner in one process. No engine reads its parameters, so they are part of its state."""

    def snapshot(self) -> Snapshot:
        """Return a copy of the training state, parameters included."""
        state = {name: host_copy(value) for name, value in (self._state() | self._parameters()).items()}
        return Snapshot(model=self.model, weights={}, state=state, group=None)

    @torch.no_grad()
    def _read_weights(self, folder: Path) -> None:
        with open_shards(folder / STATE) as shards:
            for name, value in self._parameters().items():
                shards.fill(name, value)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the state."""
        return {f"weights/{name}": value for name, value in self.model.named_parameters()}


class ValueCritic(Critic):
    """Learns the values of states.

    Its rows have values instead of log-probabilities: the ``logprobs`` of a row are the values before the
    update, and its ``advantages`` are the target returns. ``step`` fits the values to the targets.

    Args:
        model: the policy. Its head is replaced.
        objective: loss of the values.
        outputs: number of outputs of the head. A single output starts at 0.
        **options: other arguments of ``Learner``, except a loss and a mesh. A critic is in one process.
    """

    _scorer_type: type[Scorer] = ValueScorer

    def __init__(
        self, model: PreTrainedModel, *, objective: Objective = value_loss, outputs: int = 1, **options: Any
    ) -> None:
        give_head(model, outputs=outputs)
        super().__init__(model, loss=Loss(objective=objective), **options)

    def values(self, sequences: Sequence[TokenSequence]) -> list[FloatArray]:
        """Return the value before each sampled token of each sequence, [T], 0 where masked."""
        return self.logprobs(sequences)

    def _scorer_of(self, model: PreTrainedModel) -> Scorer:
        return self._scorer_type(model, temperature=self.temperature, part=self._part)


class TwinCritic(ValueCritic):
    """Learns twin values of states and of turns, with slowly updated target networks (ArCHer).

    Its rows are marked (``loss_mask``) alternately at the first token of a turn and at the first token after
    it. The values before these tokens are V(s) and Q(s, a). The ``logprobs`` and the ``advantages`` of a row
    are the targets of the first and of the second twin.

    Args:
        model: the policy. Its head is replaced by four outputs, drawn from a fixed seed.
        target_rate: share of the difference by which the target networks move in each update.
        **options: arguments of ``ValueCritic``.
    """

    _scorer_type = TwinScorer

    def __init__(self, model: PreTrainedModel, *, target_rate: float = 0.1, **options: Any) -> None:
        super().__init__(model, objective=twin_loss, outputs=4, **options)
        self._target = copy.deepcopy(model).requires_grad_(False).eval()
        self._target_scorer = self._scorer_of(self._target)
        self._target_rate = target_rate

    def values(self, sequences: Sequence[TokenSequence]) -> list[FloatArray]:
        """Return both values before each marked token of each sequence, [T, 2], 0 elsewhere."""
        return self._scores(self._scorer, sequences, shape=(2,))

    def target_values(self, sequences: Sequence[TokenSequence]) -> list[FloatArray]:
        """Return the values of the target networks in the same form."""
        return self._scores(self._target_scorer, sequences, shape=(2,))

    def _update(
        self, micro_batches: Sequence[MicroBatch], before: Sequence[Tensor | None], sums: MetricSums
    ) -> None:
        super()._update(micro_batches, before, sums)
        with torch.no_grad():
            for mine, other in zip(self._target.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(other, self._target_rate)

    def _parameters(self) -> dict[str, nn.Parameter]:
        targets = {f"target/{name}": value for name, value in self._target.named_parameters()}
        return super()._parameters() | targets


class PrivilegedCritic(Critic):
    """A language model that sees privileged information, and a reference without it (SWEET-RL).

    Args:
        model: initial policy. The reference does not change.
        **options: arguments of ``Learner``, except a mesh, a loss and a reference.
    """

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        reference = copy.deepcopy(model).requires_grad_(False)
        loss = Loss(objective=partial(policy_loss, region=unbounded))
        super().__init__(model, loss=loss, reference=reference, **options)

    def reference_logprobs(self, sequences: Sequence[TokenSequence]) -> list[FloatArray]:
        """Return each sequence's log-probabilities under the reference, [T], 0 where masked."""
        assert self._reference is not None
        return self._scores(self._reference, sequences)


def give_head(model: PreTrainedModel, *, outputs: int = 1) -> None:
    """Replace the head of a model by some outputs. A single output starts at 0, several are random."""
    old = model.get_output_embeddings()
    place = {"device": old.weight.device, "dtype": old.weight.dtype}
    head = nn.utils.skip_init(nn.Linear, old.weight.shape[1], outputs, **place)  # draws no random numbers
    nn.init.zeros_(head.bias)
    nn.init.zeros_(head.weight)
    if outputs > 1:
        drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            head.weight.copy_(HEAD_STD * drawn)
    model.set_output_embeddings(head)
