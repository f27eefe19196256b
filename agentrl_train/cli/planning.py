"""``agentrl-train plan``: memory, tokens and seconds of a run, before it starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean

import torch
from rich.console import Console
from transformers import PreTrainedModel

from agentrl_train.chat import ChatFormat
from agentrl_train.config import EngineSection, RunConfig
from agentrl_train.learner.learner import precision_of
from agentrl_train.learner.sharding import Place
from agentrl_train.models.loading import chat_format, load_policy, open_policy, with_dtype
from agentrl_train.placement.environments import environments
from agentrl_train.planning.measure import Rates, measure
from agentrl_train.planning.memory import (
    REMEDY,
    ModelSize,
    Need,
    available_memory,
    engine_memory,
    learner_memory,
    needs,
    remedies,
    size_of,
)
from agentrl_train.planning.tokens import (
    EPISODES,
    Lengths,
    StepTokens,
    measured_lengths,
    of_limits,
    step_tokens,
)
from agentrl_train.training.learners import as_config_errors

GB = 1e9
LEAST_CONTEXT = 64
"""Minimum length of the contexts of a measurement, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The figures of a run."""

    config: RunConfig
    """The configuration, with the dtypes that "auto" selects."""
    size: ModelSize
    engine: Mapping[str, float]
    """Bytes of the parts of the engine."""
    learner: Mapping[str, float]
    """Bytes of the parts of the learner."""
    needs: Sequence[Need]
    changes: Sequence[str]
    """Settings that make the run fit. Empty if it already fits, or if no known settings are enough."""
    lengths: Sequence[Lengths]
    step: StepTokens
    rates: Rates | None

    @property
    def fits(self) -> bool:
        """Return True if every place has enough memory."""
        return fits(self.needs)


def plan(config: RunConfig, *, measured: bool) -> int:
    """Print the plan of a run; return 1 if it does not fit into memory.

    Args:
        config: the configuration of the run.
        measured: True to measure the speed of the model.
    """
    found = make_plan(config, measured=measured)
    console = Console()
    for topic, text in lines(found):
        console.print(f"{topic:<9}{text}", soft_wrap=True, highlight=False, markup=False)
    return 0 if found.fits else 1


def make_plan(config: RunConfig, *, measured: bool) -> Plan:
    """Return the plan of a run.

    Raises:
        TrainError: the model or an environment of the run cannot be used.
    """
    source = config.model
    model, tokenizer, _ = open_policy(source.path, dtype=source.dtype, revision=source.revision)
    with as_config_errors():
        size = size_of(model, config.train.lora, remedy=REMEDY)
    config = _with_dtypes(config, model)
    chat = chat_format(source, model=model, tokenizer=tokenizer)
    lengths = asyncio.run(_lengths(config, chat))
    rollout = config.rollout
    places = memory_needs(config, size)
    return Plan(
        config=config,
        size=size,
        engine=engine_memory(size, config.engine, sessions=config.sessions),
        learner=_learner(config, size),
        needs=places,
        changes=change[1] if (change := fit_into_memory(config, size)) else (),
        lengths=lengths,
        step=step_tokens(lengths, groups=rollout.groups_per_step, group_size=rollout.group_size),
        rates=_measure(config, lengths) if measured and fits(places) else None,
    )


def _with_dtypes(config: RunConfig, model: PreTrainedModel) -> RunConfig:
    """Return a configuration with the dtypes that "auto" selects for a single learner process."""
    precision = precision_of(config.train, model, Place(device=torch.device(config.engine.device)))
    train = config.train.model_copy(update={"precision": precision})
    return config.model_copy(update={"engine": with_dtype(config.engine, model), "train": train})


def memory_needs(config: RunConfig, size: ModelSize) -> list[Need]:
    """Return the memory of each place of a run."""
    return needs(
        config.engine,
        layout=config.placement.layout,
        engine_parts=engine_memory(size, config.engine, sessions=config.sessions),
        learner_parts=_learner(config, size),
        available=available_memory(config.engine.device),
        gpus=torch.cuda.device_count(),
    )


def fits(places: Sequence[Need]) -> bool:
    """Return True if every place has enough memory."""
    return all(one.missing <= 0 for one in places)


def fit_into_memory(config: RunConfig, size: ModelSize) -> tuple[RunConfig, list[str]] | None:
    """Return a configuration that fits into memory and its changes, or None if no settings are enough.

    A configuration that fits is not changed. Settings that do not save memory are not listed.
    """
    places = memory_needs(config, size)
    chosen: dict[str, str] = {}
    known = remedies(config.model, config.engine, config.train, adaptable=size.adapters > 0)
    for setting, (model, engine, train) in known:
        if fits(places):
            break
        config = config.model_copy(update={"model": model, "engine": engine, "train": train})
        before, places = places, memory_needs(config, size)
        if any(now.missing < then.missing for now, then in zip(places, before, strict=True)):
            chosen[setting.partition(" = ")[0]] = setting
    return (config, list(chosen.values())) if fits(places) else None


def _learner(config: RunConfig, size: ModelSize) -> dict[str, float]:
    parts = learner_memory(
        size,
        config.train,
        dtype=config.model.dtype,
        tokens=max(config.train.micro_batch_tokens, config.engine.max_context),
        reference=config.algorithm.kl.coefficient > 0,
        on_cpu=config.engine.device == "cpu",
    )
    if config.critic is not None:
        parts["critic"] = 16.0 * size.parameters
    return parts


async def _lengths(config: RunConfig, chat: ChatFormat) -> list[Lengths]:
    async with environments(
        config.environments, max_sessions=config.engine.max_sessions, oracle=True
    ) as served:
        found = await measured_lengths(
            served.clients,
            chat,
            sources=[source for source in served.sources if source.task not in served.programs],
            sampling=config.engine.sampling,
            max_turns=config.rollout.max_turns,
        )
    programs = (
        of_limits(task, opening=0, turns=1, sampling=config.engine.sampling) for task in served.programs
    )
    return [*found, *programs]


def _measure(config: RunConfig, lengths: Sequence[Lengths]) -> Rates | None:
    """Return the speed of the engine in this process, or None for vLLM, which has another speed."""
    if config.engine.kind != "torch":
        return None
    source = config.model
    torch.set_num_threads(config.run.threads or os.cpu_count() or 1)
    model, _ = load_policy(
        source.path, device=config.engine.device, dtype=source.dtype, revision=source.revision
    )
    episodes = config.rollout.groups_per_step * config.rollout.group_size
    context = int(fmean(one.opening + (one.total - one.opening) / 2 for one in lengths))
    return measure(
        model,
        engine=config.engine,
        train=config.train,
        sessions=min(config.engine.max_sessions, episodes),
        context=max(LEAST_CONTEXT, context),
    )


def lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the topic and the text of each line of a plan."""
    config, size = plan.config, plan.size
    engine, train = config.engine, config.train
    yield (
        "model",
        f"{size.parameters / 1e6:,.1f} million parameters, {size.layers} layers, width {size.width}, "
        f"contexts of up to {size.max_context:,} tokens",
    )
    sessions = " + ".join(f"{count} {name}" for name, count in config.sessions.items())
    yield (
        "engine",
        f"{engine.kind}, {engine.dtype}, sessions: {sessions}, {engine.max_context:,} tokens each: "
        f"{_parts(plan.engine)}",
    )
    trained = f"LoRA of rank {train.lora.rank}, " if train.lora else ""
    tokens = max(train.micro_batch_tokens, engine.max_context)
    yield (
        "learner",
        f"{trained}{train.precision}, micro-batches of {tokens:,} tokens: {_parts(plan.learner)}",
    )
    for one in plan.needs:
        result = "fits" if one.missing <= 0 else f"does not fit, {one.missing / GB:.1f} GB are missing"
        yield (
            "memory",
            f"{one.place} needs {one.needed / GB:.1f} GB of {one.available / GB:.1f} GB available: {result}",
        )
    if not plan.fits:
        remedy = (
            f"set {', '.join(plan.changes)}" if plan.changes else "use a smaller model or a larger machine"
        )
        yield "change", remedy
    if engine.max_context > size.max_context:
        yield "change", f"set engine.max_context to at most {size.max_context}, the context of the model"
    for lengths in plan.lengths:
        yield "task", _task(lengths, engine)
    step = plan.step
    yield (
        "step",
        f"{step.episodes} episodes: {step.sampled:,.0f} tokens sampled, {step.prefilled:,.0f} prefilled, "
        f"{step.trained:,.0f} trained",
    )
    yield from _speed(plan)


def _task(one: Lengths, engine: EngineSection) -> str:
    """Return the line of a task."""
    if not one.by_expert:
        return f"{one.task}: no expert, so at most {one.turns:.0f} turns and {one.total:,.0f} tokens"
    text = (
        f"{one.task}: the expert takes {one.turns:.1f} turns, {one.sampled:.0f} of {one.total:.0f} tokens "
        f"sampled, longest turn {one.longest_turn}, longest episode {one.longest} (success "
        f"{one.success:.0%}, {EPISODES} episodes)"
    )
    if one.longest_turn > engine.max_new_tokens:
        text += f"; raise engine.max_new_tokens from {engine.max_new_tokens}"
    if one.longest > engine.max_context:
        text += f"; raise engine.max_context from {engine.max_context}"
    return text


def _speed(plan: Plan) -> Iterator[tuple[str, str]]:
    config, rates, step = plan.config, plan.rates, plan.step
    if rates is None:
        return
    yield (
        "speed",
        f"measured in {rates.seconds:.0f} s: {rates.prefill:,.0f} tokens/s prefilled, {rates.decode:,.0f} "
        f"sampled by {rates.sessions} sessions, {rates.update:,.0f} trained",
    )
    engine_s = rates.engine_s(step)
    learner_s = rates.learner_s(step, updates=config.train.minibatches)
    shared = config.engine.device == "cpu" or config.rollout.max_staleness == 0
    step_s = engine_s + learner_s if shared else max(engine_s, learner_s)
    total = timedelta(seconds=round(step_s * config.run.steps))
    yield (
        "time",
        f"{step_s:.1f} s a step: engine {engine_s:.1f} s, learner {learner_s:.1f} s; "
        f"{config.run.steps} steps take {total} without evaluations and environments",
    )


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value / GB:.2f} GB" for name, value in parts.items())
