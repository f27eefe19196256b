"""Builds the learner and the critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_train.algorithm import objective_function
from agentrl_train.config import AlgorithmSection, EngineSection, ModelSection, TrainSection
from agentrl_train.config.credit import Archer, CriticCredit, GaeCredit
from agentrl_train.config.sections import Decay
from agentrl_train.critics.networks import Critic, PrivilegedCritic, TwinCritic, ValueCritic
from agentrl_train.errors import ConfigError
from agentrl_train.learner import Learner, Place
from agentrl_train.loss import Loss, value_loss
from agentrl_train.models.architecture import Threads, require_context
from agentrl_train.models.loading import copy_of, load_policy, open_teacher
from agentrl_train.placement.ranks import LeadLearner, Ranks

CRITIC_GRAD_NORM = 1.0


@contextmanager
def make_learner(
    model: PreTrainedModel, *, ranks: Ranks | None, engine: EngineSection, **options: Any
) -> Iterator[Learner]:
    """Yield the learner of a run with these ``options``; the other ranks stop on exit.

    Without ranks, it is on the device of the engine.

    Raises:
        ConfigError: the model does not support the configuration.
    """
    with as_config_errors():
        require_context(model.config, engine.max_context)
    if ranks is None:
        with as_config_errors():
            place = Place(device=torch.device(engine.device))
            learner = Learner(model, place=place, **options)
        yield learner
    else:
        with as_config_errors():
            lead = LeadLearner(model, ranks=ranks, **options)
        with closing(lead):
            yield lead


def loss_options(
    algorithm: AlgorithmSection, *, source: ModelSection, model: PreTrainedModel, adapters: bool
) -> dict[str, Any]:
    """Return the arguments of ``Learner`` for the loss, and the models that the loss compares with."""
    teacher = partial(open_teacher, policy=source.path, revision=source.revision, dtype=source.dtype)
    return {
        "loss": Loss(
            objective=objective_function(algorithm),
            recompute=algorithm.recomputes,
            entropy_coefficient=algorithm.entropy_coefficient,
            kl_coefficient=algorithm.kl.coefficient,
            kl_estimator=algorithm.kl.estimator,
        ),
        "reference": copy_of(model) if algorithm.kl.coefficient and not adapters else None,
        "teachers": {path: teacher(path) for path in sorted(set(algorithm.distill.teachers.values()))},
    }


def make_critic(
    settings: CriticCredit | None,
    *,
    train: TrainSection,
    source: ModelSection,
    temperature: float,
    device: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks | None = None,
    threads: Threads | None = None,
) -> Critic | None:
    """Return the critic of a run, or None without credit by a critic. It exists only on rank 0.

    Args:
        settings: credit by a critic, which determines the targets of the critic.
        train: optimizer and memory settings of the learner. The critic uses them with its own learning rates.
        source: settings of the policy.
        temperature: sampling temperature of the run.
        device: device of a critic without ranks.
        model: the initial policy, before it gets adapters. The critic starts as a copy of it.
        tokenizer: tokenizer of the policy.
        ranks: the learner processes. The first one has the critic.
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
                f"algorithm.credit.model = {settings.model!r} has another vocabulary than the policy, "
                "whose tokens it reads: use a model of the same family, or leave it out"
            )
    kind: Callable[..., Critic] = partial(PrivilegedCritic, temperature=temperature)
    if isinstance(settings, GaeCredit):
        kind = partial(ValueCritic, objective=partial(value_loss, clip=settings.clip or None))
    elif isinstance(settings, Archer):
        kind = partial(TwinCritic, target_rate=settings.target_rate)
    rates = {
        "learning_rate": settings.learning_rate,
        "warmup_steps": 0,
        "decay": Decay(),
        "max_grad_norm": CRITIC_GRAD_NORM,
    }
    with as_config_errors():
        return kind(
            copy_of(model),
            train=train.model_copy(update={"lora": None, **rates}),
            place=Place(device=torch.device(device)),
            attention=source.attention,
            threads=threads,
        )


def limit_memory(share: float | None) -> None:
    """Limit the GPU memory of this learner process to a share; None sets no limit."""
    if share is not None:
        torch.cuda.set_per_process_memory_fraction(share)


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Raise errors about a model that does not support the configuration as ``ConfigError``."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error
