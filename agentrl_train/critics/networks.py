"""Critics: language models that judge states or turns, beside the policy.

They are ``Learner``s: packed rows, micro-batches, optimizer and update checks are the same. Where the head
has values in place of the vocabulary, that of a marked token is read from the hidden state before it.
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
"""Standard deviation of the weights of a head with several outputs, so that these differ."""


class ValueScorer(Scorer):
    """A causal language model whose head has one output."""

    def forward(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return the values before the N marked tokens of a micro-batch, [N], by rows, and zeros."""
        hidden, _ = hidden_before(self.model, micro)
        values = self.model.get_output_embeddings()(hidden).float().sum(-1)
        return values, torch.zeros_like(values)


class TwinScorer(Scorer):
    """A causal language model whose head has four outputs: V of both twins, and Q of both."""

    def forward(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return V before the first, third ... marked token of each sequence and Q before the others.

        They are [N, 2], by rows, with zeros. Each sequence has an even number of marked tokens.
        """
        hidden, _ = hidden_before(self.model, micro)
        values, actions = self.model.get_output_embeddings()(hidden).float().split(2, dim=-1)
        is_state = torch.arange(len(hidden), device=hidden.device) % 2 == 0
        found = torch.where(is_state[:, None], values, actions)
        return found, torch.zeros_like(found)


class Critic(Learner):
    """A learner in one process whose parameters no engine reads: they are part of its state."""

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

    Its rows have values in place of log-probabilities: the ``logprobs`` of a row are the values before the
    update, its ``advantages`` the returns that they are to become. ``step`` fits them.

    Args:
        model: policy whose head is replaced.
        objective: loss of the values.
        outputs: outputs of the head. A single one begins at 0.
        **options: other arguments of ``Learner``, but for a loss and a mesh: a critic is in one process.
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
    """Learns twin values of states and of turns, towards those of target networks that follow (ArCHer).

    Its rows are marked (``loss_mask``) where a turn begins and where it has ended, alternately: the values
    before these tokens are V(s) and Q(s, a). The ``logprobs`` and the ``advantages`` of a row are what the
    values of the first and of the second twin are to become.

    Args:
        model: policy whose head is replaced by four outputs, drawn from a fixed seed.
        target_rate: share of the difference by which the target networks follow in an update.
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
        """Return the same of the target networks."""
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
    """A language model that sees privileged information, beside a reference without it (SWEET-RL).

    Args:
        model: initial policy; the reference stays as it is.
        **options: arguments of ``Learner``, but for a mesh, a loss and a reference.
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
    """Replace the head of a model by one with some outputs: a single one begins at 0, several are random."""
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
