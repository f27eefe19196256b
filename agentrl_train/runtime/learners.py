"""Which learner a configuration means: in this process alone, or spread over several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl_train.errors import ConfigError
from agentrl_train.learner import Learner, Lora
from agentrl_train.loss import policy_loss
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.models import copy_of, load_policy
from agentrl_train.runtime.ranks import LeadLearner, Ranks, die_with_parent, follow, joined, world_size
from agentrl_train.types import UNTRACED, Trace


@contextmanager
def all_ranks(config: RunConfig) -> Iterator[Ranks | None]:
    """Bring the learner's processes together, this one as rank 0; None if it is alone.

    Raises:
        ConfigError: the processes cannot be divided as the configuration says.
        RanksLost: they did not come together.
    """
    if world_size() == 1:
        yield None
        return
    with _joined(config) as ranks:
        yield ranks


@contextmanager
def learner_of(
    config: RunConfig, *, model: PreTrainedModel, ranks: Ranks | None, trace: Trace = UNTRACED
) -> Iterator[Learner]:
    """Make the learner of a run, which trains ``model``; the other ranks are let go at the end.

    Raises:
        ConfigError: the model cannot be trained as the configuration says.
    """
    options = learner_options(config, model=model) | {"trace": trace}
    if ranks is None:
        with _as_config_errors():
            alone = Learner(model, device=config.engine.device, **options)
        yield alone
    else:
        with _as_config_errors():
            lead = LeadLearner(model, ranks=ranks, **options)
        with closing(lead):
            yield lead


@contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def work(config: RunConfig) -> None:
    """Be a rank other than 0, until rank 0 is done.

    Raises:
        RanksLost: rank 0 or another rank failed or is gone.
    """
    die_with_parent()
    torch.set_num_threads(config.run.threads or 1)
    with _joined(config) as ranks:
        model, _ = load_policy(config.model.path)
        options = learner_options(config, model=model)
        with _as_config_errors():
            learner = Learner(
                model, mesh=ranks.mesh, device=ranks.device, storage_group=ranks.storage, **options
            )
        follow(learner, ranks)


def learner_options(config: RunConfig, *, model: PreTrainedModel) -> dict[str, Any]:
    """Return what every rank's learner is made with."""
    train = config.train
    return {
        "objective": partial(
            policy_loss,
            clip_low=train.clip_low,
            clip_high=train.clip_high,
            dual_clip=train.dual_clip or None,
        ),
        "learning_rate": train.learning_rate,
        "betas": train.betas,
        "weight_decay": train.weight_decay,
        "warmup_steps": train.warmup_steps * train.minibatches,
        "total_steps": config.run.steps * train.minibatches,
        "final_lr_fraction": train.final_lr_fraction,
        "max_grad_norm": train.max_grad_norm,
        "spike_factor": train.spike_factor,
        "temperature": config.engine.temperature,
        "precision": train.precision,
        "activation_checkpointing": train.activation_checkpointing,
        "attention": train.attention,
        "offload_optimizer": train.offload_optimizer,
        "lora": Lora(**train.lora.model_dump()) if train.lora else None,
        "reference": copy_of(model) if train.kl_coef else None,
        "kl_coefficient": train.kl_coef,
    }


def _joined(config: RunConfig) -> Any:
    return joined(
        device=config.engine.device,
        sequence_parallel=config.train.sequence_parallel,
        timeout_s=config.train.rank_seconds,
    )
