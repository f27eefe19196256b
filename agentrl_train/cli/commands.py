"""Implementation of the commands after the configuration is loaded. Each returns an exit status."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from agentrl_env.evaluation.statistics import Estimated, mean_change
from agentrl_train.cli.evaluating import evaluate_and_record, evaluation_table
from agentrl_train.cli.recording import record
from agentrl_train.config import RunConfig, TrainSection
from agentrl_train.config.sections import Decay
from agentrl_train.errors import ConfigError
from agentrl_train.learner import Learner
from agentrl_train.learner.learning_rates import defaults_of
from agentrl_train.loss import Loss, sft_loss
from agentrl_train.models.architecture import context_limit
from agentrl_train.models.checkpoint_names import persistent_buffers
from agentrl_train.models.loading import DTYPES, chat_format, load_policy, save_policy
from agentrl_train.models.merging import MergeOptions, Method, merge_models
from agentrl_train.placement.environments import environments
from agentrl_train.placement.ranks import rank
from agentrl_train.sft import (
    ExpertEpisodes,
    expert_sequences,
    longest_episode,
    longest_turn,
    train_sft,
)
from agentrl_train.storage.atomic_io import run_folder_errors
from agentrl_train.storage.checkpoint import load_checkpoint, load_latest
from agentrl_train.telemetry.progress import Counter
from agentrl_train.template_check import check_sessions
from agentrl_train.training.learners import as_config_errors
from agentrl_train.training.trainer import Trainer
from agentrl_train.types import TokenSequence

SIGNAL_EXIT = 128
"""Exit status of a run that a signal stopped cleanly, plus the number of the signal (SIGTERM: 143)."""


def run(trainer: Trainer) -> int:
    """Train a policy and print the results. A rank other than 0 executes the commands of rank 0."""
    if rank() > 0:
        trainer.train()
        return 0
    console = Console()
    with _stopped_by_signals(trainer) as received:
        outcome = trainer.train()
    number = received[0] if received else signal.SIGINT
    if outcome is None:
        console.print("Stopped before the first step")
        return SIGNAL_EXIT + number
    if outcome.summary is None:
        command = f"agentrl-train run {shlex.quote(str(outcome.folder / 'config.toml'))} --resume"
        console.print(f"Stopped after step {outcome.step}; continue with: {command}", soft_wrap=True)
        return SIGNAL_EXIT + number
    measured = [row[name] for row in outcome.summary["tasks"].values() for name in ("before", "after")]
    if any(share is not None for share in measured):
        console.print(summary_table(outcome.summary))
    console.print(f"report: {outcome.folder / 'report.html'}", soft_wrap=True)
    return 0


@contextmanager
def _stopped_by_signals(trainer: Trainer) -> Iterator[list[int]]:
    """Stop the run on a signal, and yield the list that receives it. A second signal ends the process."""
    received: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: object) -> None:
        received.append(number)
        restore()
        trainer.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        restore()


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of 80 columns with success before and after training, and greedy success if measured."""
    tasks: Mapping[str, Mapping[str, Any]] = summary["tasks"]
    ways = {"sampled": ("before", "after")}
    if any(row.get("after_greedy") is not None for row in tasks.values()):
        ways["greedy"] = ("before_greedy", "after_greedy")
    table = Table(title=f"success on held-out samples, {summary['seconds']:.0f} s")
    for heading in ("task", "tokens"):
        table.add_column(heading)
    for heading in ("before", "after", "change", "episodes"):
        table.add_column(heading, justify="right")
    rows = {name: [row] for name, row in tasks.items()}
    if len(tasks) > 1:
        rows["mean"] = list(tasks.values())
    for name, averaged in rows.items():
        episodes = f"{averaged[0]['episodes']:.0f}" if len(averaged) == 1 else ""
        for way, names in ways.items():
            first = way == "sampled"
            cells = _changes(averaged, *names)
            table.add_row(name if first else "", way, *cells, episodes if first else "")
        table.add_section()
    return table


def _changes(rows: Sequence[Mapping[str, Any]], *names: str) -> Iterator[str | Text]:
    """Yield the mean success of some tasks before and after training, and its change."""
    before, after = ([_estimate(row, name) for row in rows] for name in names)
    for found in (before, after):
        yield "-" if None in found else f"{fmean(one[0] for one in found if one):.1%}"
    yield _change([one for one in before if one], [one for one in after if one], len(rows))


def _estimate(row: Mapping[str, Any], name: str) -> Estimated | None:
    """Return a share with its 95 % interval, or None if it was not measured."""
    share = row.get(name)
    if share is None:
        return None
    low, high = row.get(f"{name}_interval") or (share, share)
    return share, low, high


def _change(before: Sequence[Estimated], after: Sequence[Estimated], number: int) -> str | Text:
    """Return a change in points with its 95 % interval. It is dim if the interval includes 0."""
    if not len(before) == len(after) == number:
        return "-"
    points, low, high = (100 * one for one in mean_change(before, after))
    return Text(f"{points:+.1f} [{low:+.0f}, {high:+.0f}]", style="dim" if low <= 0 <= high else "")


def evaluate_policy(trainer: Trainer, *, model: str | None, output: Path | None = None) -> int:
    """Evaluate a policy on the held-out samples and print success, its 95 % interval and pass@k.

    Args:
        trainer: trainer of the run.
        model: a model on the hub, a model folder, a checkpoint, or a run folder for its newest checkpoint;
            None for the newest checkpoint of this run, or ``model.path`` without one.
        output: folder of the episodes, by default in ``evaluations/`` of the run folder.
    """
    newest = load_latest(trainer.folder / "checkpoints") if model is None else None
    if newest is not None:
        path, choice = str(newest.model_folder), "the newest checkpoint; --model evaluates another"
    elif model is not None:
        path, choice = policy_path(model), "--model"
    else:
        path, choice = trainer.config.model.path, "model.path; the run has no checkpoint"
    console = Console()
    console.print(f"evaluating {path} ({choice})", soft_wrap=True)
    console.print(evaluation_table(evaluate_and_record(trainer, path=path, output=output).tasks))
    return 0


def sft(config: RunConfig, *, output: Path) -> int:
    """Fine-tune a policy on expert episodes and save it in ``output``."""
    with _new_model_folder(output):
        asyncio.run(_sft(config, output=output))
    Console().print(f"model: {output}", soft_wrap=True)
    return 0


def record_rollouts(config: RunConfig, **options: Any) -> int:
    """Serve a model to agent programs until a signal, and record their rollouts."""
    console = Console()
    token = os.environ.get("AGENTRL_TOKEN", "").strip() or None
    announce = partial(console.print, soft_wrap=True, highlight=False)
    asyncio.run(record(config, token=token, announce=announce, **options))
    return 0


def merge(source: Path, *, output: Path, dtype: str) -> int:
    """Write the policy of a checkpoint as a model folder, with adapters merged."""
    with _new_model_folder(output):
        save_policy(str(_model_folder(source)), output, dtype=dtype)
    Console().print(f"model: {output}", soft_wrap=True)
    return 0


def merge_several(
    sources: Sequence[Path],
    *,
    base: str | None,
    output: Path,
    method: Method,
    options: MergeOptions,
    dtype: str | None,
) -> int:
    """Merge the policies of several runs, checkpoints or model folders into one model folder."""
    folders = [_model_folder(source) for source in sources]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("merging", total=None)
        merge_models(
            folders,
            base=base,
            output=output,
            method=method,
            options=options,
            dtype=dtype,
            on_tensor=lambda name: progress.update(bar, advance=1, description=name),
        )
    Console().print(f"model: {output}", soft_wrap=True)
    return 0


@contextmanager
def _new_model_folder(output: Path) -> Iterator[None]:
    """Create the folder of a new model before the work starts, and remove it if the work wrote nothing.

    Raises:
        ConfigError: the folder already has a model, or cannot be written.
    """
    if (output / "config.json").exists():
        raise ConfigError(f"{output} already contains a model: choose another folder")
    existed = output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()
    except OSError as error:
        raise ConfigError(f"{output} cannot be written ({error.strerror}): choose another folder") from error
    try:
        yield
    finally:
        if not existed:
            with suppress(OSError):  # it has files
                output.rmdir()


def policy_path(model: str) -> str:
    """Return the model folder of a run (its newest checkpoint) or a checkpoint. Other names are unchanged."""
    return str(_model_folder(Path(model))) if os.path.isdir(model) else model


def _model_folder(source: Path) -> Path:
    """Return the model folder of a run (its newest checkpoint), a checkpoint or a model folder."""
    if (source / "checkpoints").is_dir():
        checkpoint = load_latest(source / "checkpoints")
        if checkpoint is None:
            raise ConfigError(f"{source} has no checkpoint yet")
        return checkpoint.model_folder
    if (source / "manifest.json").is_file():
        return load_checkpoint(source).model_folder
    return source


async def _sft(config: RunConfig, *, output: Path) -> None:
    cores = config.run.threads or os.cpu_count() or 1  # only the learner runs
    torch.set_num_threads(cores)
    model, tokenizer = load_policy(
        config.model.path,
        device=config.engine.device,
        dtype=config.model.dtype,
        revision=config.model.revision,
    )
    async with environments(
        config.environments, max_sessions=config.engine.max_sessions, oracle=True
    ) as served:
        chat = chat_format(config.model, model=model, tokenizer=tokenizer)
        await check_sessions(chat, served.clients, sources=served.sources)
        episodes = await expert_sequences(
            served.clients,
            chat,
            sources={source.task: source for source in served.sources},
            count=config.sft.traces,
            max_sessions=config.engine.max_sessions,
        )
    sequences = episodes.sequences
    shares = ", ".join(f"{task} {share:.0%}" for task, share in episodes.success.items())
    console = Console()
    console.print(f"{len(sequences)} expert episodes; success: {shares}", soft_wrap=True)
    for warning in (*expert_warnings(episodes), *limit_warnings(config, sequences)):
        console.print(f"warning: {warning}", soft_wrap=True)
    learner = imitate(config, model=model, sequences=sequences)
    dtype = DTYPES[config.model.dtype]
    weights = {name: value.to(dtype) for name, value in learner.weights().items()}
    with run_folder_errors(output, option="--output"):
        model.save_pretrained(output, state_dict=weights | persistent_buffers(model))
        tokenizer.save_pretrained(output)


def expert_warnings(episodes: ExpertEpisodes) -> Iterator[str]:
    """Yield a warning for each task with an expert that failed or never succeeded."""
    for task, failures in episodes.failures.items():
        if failures:
            yield f"omitted {len(failures)} expert episodes of {task} that failed, first: {failures[0]}"
    for task, share in episodes.success.items():
        if not share:
            yield f"the expert of {task} never succeeded, so the policy imitates failures: correct the expert"


def limit_warnings(config: RunConfig, sequences: Sequence[TokenSequence]) -> Iterator[str]:
    """Yield a warning for each limit of the engine that turns or episodes of the experts exceed."""
    engine = config.engine
    for part, longest, name, limit in (
        ("turn", longest_turn(sequences), "max_new_tokens", engine.max_new_tokens),
        ("episode", longest_episode(sequences), "max_context", engine.max_context),
    ):
        if longest > limit:
            yield (
                f"the longest {part} of the experts has {longest} tokens, but engine.{name} = {limit} cuts "
                f"{part}s off: set it to at least {longest}"
            )


def imitate(
    config: RunConfig,
    *,
    model: PreTrainedModel,
    sequences: Sequence[TokenSequence],
    console: Console | None = None,
) -> Learner:
    """Train a model, or adapters in it, on the episodes of experts, and return its learner.

    Raises:
        ConfigError: no layer matches ``train.lora.targets``, or an episode exceeds the model's context.
    """
    settings = config.sft
    episode, limit = longest_episode(sequences), context_limit(model.config)
    if limit is not None and episode > limit:
        raise ConfigError(
            f"the longest episode of the experts has {episode} tokens, but the model supports at most "
            f"{limit}: use a model with a longer context, or shorten the episodes of the task"
        )
    rates = defaults_of(model.num_parameters(), lora=config.train.lora is not None)
    kept = {"precision", "activation_checkpointing", "offload_optimizer", "lora"}
    train = TrainSection(
        learning_rate=rates.imitation_rate if settings.learning_rate == "auto" else settings.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        warmup_steps=min(20, settings.steps // 10),
        decay=Decay(to=0.05, over=0.4),
        max_grad_norm=1.0,
        **config.train.model_dump(include=kept),
    )
    with as_config_errors():
        learner = Learner(
            model,
            train,
            total_steps=settings.steps,
            loss=Loss(objective=sft_loss),
            attention=config.model.attention,
        )
    with closing(Counter("updates", console=console)) as counter:

        def report(step: int, metrics: Mapping[str, float]) -> None:
            speed = metrics["tokens"] / metrics["seconds"]
            counter.show(step, settings.steps, f"loss {metrics['loss']:.4f}", f"{speed:,.0f} tokens/s")

        counter.show(0, settings.steps)
        train_sft(
            learner,
            sequences,
            steps=settings.steps,
            batch_size=settings.batch_size,
            micro_batch_tokens=config.train.micro_batch_tokens,
            seed=config.run.seed,
            report=report,
        )
    return learner
