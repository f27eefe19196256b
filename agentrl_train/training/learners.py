"""Builds the learner and the critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_train.config import ModelSection, TrainSection
from agentrl_train.config.sections import CriticSection
from agentrl_train.critics.networks import Critic, PrivilegedCritic, TwinCritic, ValueCritic
from agentrl_train.errors import ConfigError
from agentrl_train.learner import Learner, Place
from agentrl_train.loss import value_loss
from agentrl_train.models.loading import copy_of, load_policy
from agentrl_train.placement.ranks import LeadLearner, Ranks
from agentrl_train.types import Threads


@contextmanager
def make_learner(
    model: PreTrainedModel, *, ranks: Ranks | None, device: str, **options: Any
) -> Iterator[Learner]:
    """Yield the learner of a run with these ``options``; the other ranks stop on exit.

    Raises:
        ConfigError: the model does not support the configuration.
    """
    if ranks is None:
        with as_config_errors():
            place = Place(device=torch.device(device))
            learner = Learner(model, place=place, **options)
        yield learner
    else:
        with as_config_errors():
            lead = LeadLearner(model, ranks=ranks, **options)
        with closing(lead):
            yield lead


def make_critic(
    settings: CriticSection | None,
    *,
    credit: str,
    train: TrainSection,
    source: ModelSection,
    temperature: float,
    device: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks | None = None,
    threads: Threads | None = None,
) -> Critic | None:
    """Return the critic of a run, or None without ``[critic]``. It is on rank 0 alone.

    Args:
        settings: ``[critic]``.
        credit: kind of credit, which decides what the critic learns.
        train: optimizer and memory of the learner, which the critic shares but for its rates.
        source: settings of the policy.
        temperature: sampling temperature of the run.
        device: device of a critic without ranks.
        model: the initial policy, before it is given adapters; the critic begins as a copy of it.
        tokenizer: tokenizer of the policy.
        ranks: the learner processes, whose first one has the critic.
        threads: CPU threads of the learner.

    Raises:
        ConfigError: the model of the critic cannot be loaded, or has another vocabulary.
    """
    if settings is None:
        return None
    device = device if ranks is None else str(ranks.device)
    if settings.model is None and any(value.is_meta for value in model.parameters()):
        model, _ = load_policy(source.path, dtype=source.dtype, revision=source.revision)
    if settings.model is not None:
        model, own = load_policy(settings.model, device=device)
        if own.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"critic.model = {settings.model!r} has another vocabulary than the policy, whose tokens it "
                "reads: use a model of the same family, or leave it out"
            )
    kind: Callable[..., Critic] = partial(
        ValueCritic, objective=partial(value_loss, clip=settings.clip or None)
    )
    if credit == "archer":
        kind = partial(TwinCritic, target_rate=settings.target_rate)
    if credit == "sweet":
        kind = partial(PrivilegedCritic, temperature=temperature)
    rates = settings.model_dump(include={"learning_rate", "max_grad_norm"})
    with as_config_errors():
        return kind(
            copy_of(model),
            train=train.model_copy(update={"lora": None, "warmup_steps": 0, **rates}),
            place=Place(device=torch.device(device)),
            attention=source.attention,
            threads=threads,
        )


def limit_memory(share: float | None) -> None:
    """Limit what this learner process allocates on its GPU to a share; None is without a limit."""
    if share is not None:
        torch.cuda.set_per_process_memory_fraction(share)


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Raise errors about a model that does not support the configuration as ``ConfigError``."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error
