"""``agentrl-train init``: a configuration that works for a model, tasks and this machine."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from agentrl_env.client import EnvClient
from agentrl_train.chat import ChatFormat
from agentrl_train.cli.planning import GB, fit_into_memory, memory_needs
from agentrl_train.config import RunConfig, load_config
from agentrl_train.config.loading import validate_table
from agentrl_train.config.toml import literal
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.errors import ConfigError
from agentrl_train.learner.learning_rates import defaults_of
from agentrl_train.models.loading import LARGE_MODEL, chat_format, copy_of, load_policy, open_policy
from agentrl_train.placement.environments import Served, environments
from agentrl_train.planning.defaults import (
    FASTER,
    FEW_IMITATION_STEPS,
    IMITATION_STEPS,
    MANY_VALID_CALLS,
    Limits,
    limits_of,
)
from agentrl_train.planning.measure import product_rates
from agentrl_train.planning.memory import REMEDY, ModelSize, size_of
from agentrl_train.planning.tokens import EPISODES, Lengths, measured_lengths
from agentrl_train.storage.atomic_io import run_folder_errors
from agentrl_train.template_check import check_sessions
from agentrl_train.tool_calls import PROMPTED
from agentrl_train.training.learners import as_config_errors
from agentrl_train.types import Sampling, TaskSource

SYNTAXES = (None, *PROMPTED)
"""Values of ``model.tool_parser`` to try: the syntax of the template, and tools as text."""
COMPLETIONS = 4
"""Number of sampled completions of each task to try a syntax."""
UNLIMITED = Sampling(max_context=2**30)
"""Limits that every opening fits, to find out its length."""
COLUMN = 40
"""Column of the comments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A syntax of tool calls to try with a model."""

    tool_parser: str | None
    """Value of ``model.tool_parser``."""
    name: str
    """Name of the syntax."""
    lengths: Sequence[Lengths]
    limits: Limits
    valid: float | None = None
    """Share of sampled turns with a call of a known tool; None if not tried."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, and the reason for its value."""

    key: str
    value: Any
    reason: str = ""


def init(
    model: str, tasks: Sequence[str], *, output: Path | None, lora: bool = False, measured: bool = True
) -> int:
    """Write a configuration for a model and tasks, and print the next commands.

    Args:
        model: a value of ``model.path``.
        tasks: targets to serve, or addresses of running servers.
        output: the file; by default named after the model, in the working directory.
        lora: True to train adapters even if all weights fit into memory.
        measured: True to sample a few completions of the model.

    Raises:
        TrainError: the model or a task cannot be used, or the file exists.
    """
    name = _name_of(model)
    output = output or Path(f"{name}.toml")
    if output.exists():
        raise ConfigError(f"{output} already exists: choose another file with --output")
    with run_folder_errors(output.parent, option="--output"):
        output.parent.mkdir(parents=True, exist_ok=True)
    config = _first_config(model, tasks, name=name, lora=lora)
    policy, _, _ = open_policy(config.model.path)
    with as_config_errors():
        size = size_of(policy, config.train.lora, remedy=REMEDY)
    trial = asyncio.run(_best_trial(config, size, measured=measured))
    text = make_text(config, size, trial, folder=output.absolute().parent)
    with run_folder_errors(output.parent, option="--output"):
        output.write_text(text, encoding="utf-8")
    load_config(output)
    console = Console()
    for line in _next_steps(output, name=name, imitates=_imitates(trial)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return 0


def _name_of(model: str) -> str:
    """Return the name of a run from the source of its model."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model.removeprefix("package:")).name).strip("-._").lower()
    return name.removesuffix(".gguf") or "run"


def _first_config(model: str, tasks: Sequence[str], *, name: str, lora: bool) -> RunConfig:
    """Return a valid configuration before anything is measured."""
    on_gpu = torch.cuda.is_available()
    urls = [one for one in tasks if one.startswith(("http://", "https://"))]
    targets = [one for one in tasks if one not in urls]
    table = {
        "run": {"name": name, "steps": 100},
        "model": {"path": model},
        "environments": [{"serve": targets}] * bool(targets) + [{"url": url} for url in urls],
        "engine": {"device": "cuda" if on_gpu else "cpu"},
        "train": {"lora": {"rank": REMEDY.rank, "alpha": REMEDY.alpha}} if lora else {},
    }
    return validate_table(table, base=Path.cwd(), failure="no configuration can be written; please correct")


async def _best_trial(config: RunConfig, size: ModelSize, *, measured: bool) -> Trial:
    """Return the syntax with the most valid calls.

    If several have as many, return that of the template, or else the one with the fewest tokens. Without a
    measurement, return the first that works.
    """
    model, tokenizer = load_policy(config.model.path) if measured else open_policy(config.model.path)[:2]
    trials: list[Trial] = []
    problem: ConfigError | None = None
    async with environments(
        config.environments, max_sessions=config.engine.max_sessions, oracle=True
    ) as served:
        for syntax in SYNTAXES:
            settings = config.model.model_copy(update={"tool_parser": syntax})
            try:
                chat = chat_format(settings, model=model, tokenizer=tokenizer)
                prompts = await check_sessions(
                    chat, served.clients, sources=served.sources, sampling=UNLIMITED
                )
                if chat.syntax in {one.name for one in trials}:
                    continue
                openings = {one.task: len(one.token_ids) for one in prompts}
                trial = await _trial(
                    syntax, chat, served, openings=openings, model=model, size=size, measured=measured
                )
                trials.append(trial)
            except ConfigError as error:
                problem = problem or error
                continue
            if not measured or (trials[-1].valid or 0.0) >= MANY_VALID_CALLS:
                break
    if not trials:
        assert problem is not None
        raise problem
    return max(trials, key=_rank)


def _rank(trial: Trial) -> tuple[float, bool, float]:
    return trial.valid or 0.0, trial.tool_parser is None, -sum(one.total for one in trial.lengths)


async def _trial(
    tool_parser: str | None,
    chat: ChatFormat,
    served: Served,
    *,
    openings: Mapping[str, int],
    model: PreTrainedModel,
    size: ModelSize,
    measured: bool,
) -> Trial:
    """Return the lengths of the tasks with a chat format, and the share of valid calls.

    ``openings`` are the tokens of the first opening of each task.

    Raises:
        ConfigError: the format cannot be used with the tasks, or an opening leaves no room for a turn.
    """
    lengths = await measured_lengths(
        served.clients,
        chat,
        sources=served.sources,
        sampling=Sampling(max_context=min(2048, size.max_context)),
        max_turns={},
    )
    by_expert = [one for one in lengths if one.by_expert]
    limits = limits_of(
        [one.longest_turn for one in by_expert],
        [one.longest for one in by_expert],
        max_context=size.max_context,
        opening=max([*openings.values(), *(one.opening for one in lengths)]),
    )
    for task, tokens in openings.items():
        if tokens + limits.max_new_tokens > limits.max_context:
            raise ConfigError(
                f"the opening of {task} takes {tokens} tokens and a turn up to {limits.max_new_tokens}, but "
                f"the model supports at most {limits.max_context}: choose a model with a longer context"
            )
    valid = None
    if measured:
        valid = await _valid_calls(chat, served.clients, served.sources, model=model, limits=limits)
    return Trial(tool_parser=tool_parser, name=chat.syntax, lengths=lengths, limits=limits, valid=valid)


async def _valid_calls(
    chat: ChatFormat,
    clients: Mapping[str, EnvClient],
    sources: Sequence[TaskSource],
    *,
    model: PreTrainedModel,
    limits: Limits,
) -> float:
    """Return the share of first turns with calls of the tools, or with text if a task has no tools."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = TorchEngine(
        {"current": copy_of(model, device=device)},
        stop_token_ids=chat.stop_token_ids,
        max_sequences=COMPLETIONS * len(sources),
        max_context=limits.max_context,
    )
    sampling = Sampling(max_context=limits.max_context, max_new_tokens=limits.max_new_tokens)

    async def valid(source: TaskSource, seed: int) -> bool:
        client = clients[source.task]
        session = await client.open(source.task, split=source.split, index=0)
        await session.close()
        prompt = chat.opening(session.messages, session.tools)
        completion = await engine.generate(
            prompt, sampling=sampling.request(prompt, seed=seed), session_key=f"{source.task}/{seed}"
        )
        message = chat.parse(completion.token_ids, turn=1, tools=session.tools, prompt=prompt).message
        names = {tool.function.name for tool in session.tools}
        calls = message.tool_calls or ()
        return bool(calls) == bool(names) and all(call.function.name in names for call in calls)

    try:
        found = await asyncio.gather(*(valid(one, seed) for one in sources for seed in range(COMPLETIONS)))
    finally:
        await engine.close()
    return sum(found) / len(found)


def _imitates(trial: Trial) -> bool:
    """Return True if every task has an expert to imitate."""
    return all(one.by_expert for one in trial.lengths)


def make_text(config: RunConfig, size: ModelSize, trial: Trial, *, folder: Path) -> str:
    """Return the configuration as TOML, with a comment for every choice.

    Args:
        config: model and tasks.
        size: shapes of the model.
        trial: the syntax of calls, lengths and limits.
        folder: folder of the file, which paths are relative to.

    Raises:
        ConfigError: no known setting makes the run fit into memory.
    """
    dtype, reason = _dtype(config.engine.device, size)
    limits = {
        "max_context": trial.limits.max_context,
        "max_new_tokens": trial.limits.max_new_tokens,
    }
    config = config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"dtype": dtype, **limits}),
            "train": config.train.model_copy(update={"precision": dtype}),
        }
    )
    found = fit_into_memory(config, size)
    if found is None:
        raise ConfigError(
            f"{config.model.path} with {_count(size)} does not fit into the memory of this machine: choose a "
            "smaller model"
        )
    config, changes = found
    sections = {
        "run": _run_settings(config),
        "model": _model_settings(config, trial, folder=folder),
        **_environment_settings(config, folder=folder),
        "engine": _engine_settings(config, trial, reason=reason),
        "rollout": [Setting("groups_per_step", 8), Setting("group_size", 8, "more siblings if most agree")],
        "train": _train_settings(config, size, reason=reason),
        "sft": _sft_settings(config, size, trial) if _imitates(trial) else [],
        "eval": _eval_settings(config, size),
    }
    heading = [
        f"Written by `agentrl-train init` for {_count(size)} on {_machine(config)}.",
        *(f"To fit into memory: {change}" for change in changes),
        *(_describe_lengths(one) for one in trial.lengths),
    ]
    return _write(heading, sections)


def _dtype(device: str, size: ModelSize) -> tuple[str, str]:
    """Return the dtype to compute in, and the reason."""
    if device != "cpu":
        return "bfloat16", "a GPU"
    rates = product_rates(device)
    measured = ", ".join(f"{name} {rate / 1e9:.3g} GFLOP/s" for name, rate in rates.items())
    faster = rates["bfloat16"] > FASTER * rates["float32"] and size.parameters > LARGE_MODEL
    return ("bfloat16" if faster else "float32"), f"measured: {measured}"


def _count(size: ModelSize) -> str:
    return f"{size.parameters / 1e6:.3g} million parameters"


def _machine(config: RunConfig) -> str:
    return "a GPU" if config.engine.device != "cpu" else f"{os.cpu_count()} CPU cores"


def _describe_lengths(one: Lengths) -> str:
    """Return the comment about the lengths of a task."""
    if not one.by_expert:
        return (
            f"{one.task}: has no expert; openings of {one.opening:.0f} tokens, up to {one.turns:.0f} turns."
        )
    return (
        f"{one.task}: {EPISODES} expert episodes of {one.turns:.1f} turns and {one.total:.0f} tokens on "
        f"average, {one.longest} at most; the longest turn has {one.longest_turn}; success {one.success:.0%}."
    )


def _run_settings(config: RunConfig) -> Iterator[Setting]:
    yield Setting("name", config.run.name)
    yield Setting("steps", config.run.steps)


def _model_settings(config: RunConfig, trial: Trial, *, folder: Path) -> Iterator[Setting]:
    reason = f"calls as {trial.name}"
    if trial.valid is not None:
        reason += f"; {trial.valid:.0%} of {COMPLETIONS * len(trial.lengths)} sampled turns are valid calls"
    yield Setting("path", _relative(config.model.path, folder), "" if trial.tool_parser else reason)
    if trial.tool_parser:
        yield Setting("tool_parser", trial.tool_parser, reason)
    if config.model.dtype != "float32":
        yield Setting("dtype", config.model.dtype, "frozen weights, to fit into memory")


def _environment_settings(config: RunConfig, *, folder: Path) -> dict[str, list[Setting]]:
    """Return a section for each server. Trailing spaces make equal names different."""
    tables = [
        Setting("serve", [_relative(target, folder) for target in one.serve])
        if one.serve
        else Setting("url", one.url)
        for one in config.environments
    ]
    return {"environments" + " " * number: [one] for number, one in enumerate(tables)}


def _engine_settings(config: RunConfig, trial: Trial, *, reason: str) -> Iterator[Setting]:
    engine = config.engine
    experts = [one for one in trial.lengths if one.by_expert]
    longest = max((one.longest_turn for one in experts), default=0)
    episode = max((one.longest for one in experts), default=0)
    yield Setting("device", engine.device)
    yield Setting("dtype", engine.dtype, reason)
    yield Setting("max_sessions", engine.max_sessions)
    yield Setting(
        "max_context",
        engine.max_context,
        f"the longest expert episode has {episode} tokens" if experts else "no expert to measure",
    )
    yield Setting(
        "max_new_tokens",
        engine.max_new_tokens,
        f"the longest expert turn has {longest} tokens" if experts else "no expert to measure",
    )
    yield Setting("temperature", engine.temperature, "1.2 if entropy stays below 0.05 after imitation")


def _train_settings(config: RunConfig, size: ModelSize, *, reason: str) -> Iterator[Setting]:
    train = config.train
    values = defaults_of(size.parameters, lora=train.lora is not None)
    kind = "adapters" if train.lora else "all weights"
    yield Setting("learning_rate", values.learning_rate, f"{kind} of {_count(size)}")
    yield Setting("warmup_steps", 5)
    yield Setting("max_grad_norm", values.max_grad_norm)
    yield Setting("precision", train.precision, reason)
    needed = ", ".join(
        f"{one.place} needs {one.needed / GB:.1f} of {one.available / GB:.1f} GB"
        for one in memory_needs(config, size)
    )
    yield Setting("micro_batch_tokens", train.micro_batch_tokens, needed)
    if train.activation_checkpointing:
        yield Setting("activation_checkpointing", True, "to fit into memory")
    if train.lora:
        yield Setting("lora", {"rank": train.lora.rank, "alpha": train.lora.alpha})


def _sft_settings(config: RunConfig, size: ModelSize, trial: Trial) -> Iterator[Setting]:
    values = defaults_of(size.parameters, lora=config.train.lora is not None)
    many = trial.valid is not None and trial.valid >= MANY_VALID_CALLS
    steps = FEW_IMITATION_STEPS if many else IMITATION_STEPS
    valid = "not tried" if trial.valid is None else f"{trial.valid:.0%}"
    yield Setting("steps", steps, f"valid calls before: {valid}")
    yield Setting("traces", 96, "expert episodes per task")
    yield Setting("batch_size", 16)
    yield Setting("learning_rate", values.imitation_rate)


def _eval_settings(config: RunConfig, size: ModelSize) -> Iterator[Setting]:
    short = config.engine.device == "cpu" and size.parameters > LARGE_MODEL
    yield Setting("samples", 50 if short else 200, "per task")
    yield Setting("greedy", True)


def _relative(path: str, folder: Path) -> str:
    """Return a path relative to the folder of the file if both are below the working directory."""
    file, colon, name = path.partition(":")
    if not all(Path(one).is_relative_to(Path.cwd()) for one in (file, folder)):
        return path
    return os.path.relpath(file, folder) + colon + name


def _write(heading: Sequence[str], sections: Mapping[str, Any]) -> str:
    """Return a TOML file with a comment at the top; empty sections are omitted."""
    lines = [f"# {line}" for line in heading]
    for name, settings in sections.items():
        if rows := list(settings):
            table = name.strip()
            lines += ["", "[[environments]]" if table == "environments" else f"[{table}]"]
        for one in rows:
            setting = f"{one.key} = {literal(one.value)}"
            lines.append(f"{setting + '  ':<{COLUMN}}# {one.reason}" if one.reason else setting)
    return "\n".join(lines) + "\n"


def _next_steps(output: Path, *, name: str, imitates: bool) -> Iterator[str]:
    file = shlex.quote(str(output))
    yield f"wrote {output}"
    yield f"agentrl-train plan {file}"
    if imitates:
        # --output is relative to the working directory, and a path in --set to the file.
        model = Path("models", f"{name}-sft")
        yield f"agentrl-train sft {file} -o {shlex.quote(str(output.parent / model))}"
        yield f"agentrl-train run {file} --set model.path={model}"
    else:
        yield f"agentrl-train run {file}"
