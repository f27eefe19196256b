"""Composition root: a configuration becomes objects and a run. The one file that knows them all."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from functools import partial
from typing import Any

import torch

from agentrl_train.actor import Actor, Play
from agentrl_train.engine.chat import ChatFormat
from agentrl_train.errors import ConfigError
from agentrl_train.runtime.admission import Mixer, TaskSource, WorkWindow
from agentrl_train.runtime.checkpoint import Checkpoint, load_latest
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.engines import make_engine, make_publisher
from agentrl_train.runtime.environments import Served, environments
from agentrl_train.runtime.evaluation import evaluate
from agentrl_train.runtime.folder import claimed, write_config
from agentrl_train.runtime.journal import Journal
from agentrl_train.runtime.learners import all_ranks, learner_of
from agentrl_train.runtime.loop import Loop, Pace
from agentrl_train.runtime.models import load_policy
from agentrl_train.runtime.placement.colocated import learners_turn
from agentrl_train.runtime.placement.launcher import Launcher
from agentrl_train.runtime.placement.launchers import launcher_of
from agentrl_train.runtime.ranks import LeadLearner, Ranks, release_memory
from agentrl_train.runtime.run import Cadence, Evaluator, Outcome, Policy, Run
from agentrl_train.runtime.telemetry.metrics import MetricsLog
from agentrl_train.runtime.telemetry.progress import Progress
from agentrl_train.runtime.telemetry.sinks import open_sinks, traced
from agentrl_train.runtime.telemetry.throughput import Throughput, copy_bytes_per_s
from agentrl_train.runtime.trainer import Recipe, StepTrainer
from agentrl_train.runtime.watchdog import Watchdog
from agentrl_train.types import UNTRACED, Trace
from agentrl_train.weights import FLOAT32, Drift

ENDING_S = 30.0
"""Longest that a run takes to end once a process that it needs is lost."""
EVALUATION_SEED = 1_000_003
"""Held-out draws do not depend on the run's seed, so that runs can be compared."""


def threads_each(config: RunConfig) -> int:
    """Return the threads of the engine and of the learner: half of all where both run at the same time."""
    threads = config.run.threads or os.cpu_count() or 1
    return threads if config.rollout.max_staleness == 0 else max(1, threads // 2)


@asynccontextmanager
async def policy(
    config: RunConfig,
    *,
    path: str,
    launcher: Launcher,
    trace: Trace = UNTRACED,
    ranks: Ranks | None = None,
) -> AsyncIterator[Policy]:
    """Load the policy in ``path`` and start its engine; stop the engine on leaving."""
    device, threads = config.engine.device, threads_each(config)
    torch.set_num_threads(threads)
    model, tokenizer = load_policy(path, device=device)
    chat = ChatFormat(tokenizer)
    engine = make_engine(
        config,
        model=model,
        path=path,
        stop_token_ids=chat.stop_token_ids,
        threads=threads,
        trace=trace,
        launcher=launcher,
    )
    try:
        with learner_of(config, model=model, ranks=ranks, trace=trace) as learner:
            publisher = make_publisher(
                config,
                engine,
                logprobs=learner.logprobs,
                vocabulary=len(tokenizer),
                tolerance=tolerance(config),
            )
            yield Policy(tokenizer=tokenizer, chat=chat, learner=learner, engine=engine, publisher=publisher)
    finally:
        await engine.close()


async def unless(run: Coroutine[Any, Any, Outcome], lost: Coroutine[Any, Any, None]) -> Outcome:
    """Return how a run ended, unless a process that it needs is lost before; that raises."""
    running, losing = asyncio.create_task(run), asyncio.create_task(lost)
    try:
        await asyncio.wait((running, losing), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.wait((running,), timeout=ENDING_S)
            losing.result()
        return await running
    finally:
        losing.cancel()


async def train(config: RunConfig, *, resume: bool = False) -> Outcome:
    """Train a policy from a configuration to the end, or until it is interrupted.

    Raises:
        TrainError: whatever is wrong, in one sentence.
    """
    folder = config.run_folder
    async with AsyncExitStack() as stack:
        changed = stack.enter_context(claimed(folder, config, resume=resume))
        checkpoint = load_latest(folder / "checkpoints") if resume else None
        launcher = stack.enter_context(launcher_of(config))
        stack.enter_context(launcher.ranks())
        ranks = stack.enter_context(all_ranks(config))
        served = await stack.enter_async_context(
            environments(config.environments, max_sessions=config.engine.max_sessions)
        )
        recorded = stack.enter_context(traced(config))
        trace = stack.enter_context(Watchdog(quiet_s=config.run.quiet_seconds, trace=recorded))
        ready = await stack.enter_async_context(
            policy(config, path=config.model.path, launcher=launcher, trace=trace, ranks=ranks)
        )
        step = checkpoint.step if checkpoint else 0
        journal = Journal(folder / "journal", step=step)
        stack.callback(journal.close)
        saved = {group.group_id: group for group in journal.read(step)}
        saved |= {group.group_id: group for group in (checkpoint.groups if checkpoint else ())}
        log = make_log(config, checkpoint, recorded)
        stack.callback(log.close)
        if checkpoint:
            log.note(resumption(checkpoint, steps=config.run.steps, finished=len(saved), changed=changed))
        places = asyncio.Semaphore(config.engine.max_sessions)
        run = Run(
            folder=folder,
            policy=ready,
            trainer=StepTrainer(
                learner=ready.learner,
                publisher=ready.publisher,
                recipe=make_recipe(config),
                bad_batches=folder / "bad_batches",
                inherited=() if config.engine.deterministic else saved.keys(),
                turn=make_turn(config, policy=ready, trace=trace),
                trace=trace,
            ),
            journal=journal,
            log=log,
            evaluate=make_evaluator(config, served=served, policy=ready, places=places, trace=trace),
            cadence=make_cadence(config),
            checkpoint=checkpoint,
            throughput=Throughput(
                ready.engine.statistics, copy_bytes_per_s=copy_bytes_per_s(config.engine.device)
            ),
            trace=trace,
        )
        write_config(folder, config)
        run.loop = Loop(
            actor=make_actor(config, served=served, policy=ready, places=places, trace=trace),
            window=(window := make_window(config, served.sources, checkpoint, saved.keys())),
            journal=journal,
            train=run.train_step,
            pace=make_pace(config),
            policy_version=int(checkpoint.loop["policy_version"]) if checkpoint else 0,
            finished=[saved[group_id] for group_id in window.finished],
            failed=run.count_failed,
            slots=trace.table,
            trace=trace,
        )
        return await unless(run.run(), launcher.lost())


def resumption(checkpoint: Checkpoint, *, steps: int, finished: int, changed: Sequence[str]) -> str:
    """Return what is to be said of a run that goes on."""
    told = f"goes on after step {checkpoint.step}, with {finished} finished groups that are not trained yet"
    if checkpoint.step >= steps:
        told = f"has trained {checkpoint.step} steps, and run.steps = {steps} asks for no more"
    return "; ".join([told, *changed])


def make_log(config: RunConfig, checkpoint: Checkpoint | None, trace: Trace) -> MetricsLog:
    """Return the log of a run, from the checkpoint on or from the beginning."""
    step = checkpoint.step if checkpoint else 0
    elapsed_s = float(checkpoint.loop["seconds"]) if checkpoint else 0.0
    progress = Progress(total_steps=config.run.steps, first_step=step, elapsed_s=elapsed_s)
    return MetricsLog(
        config.run_folder,
        first_step=step,
        trajectories=config.metrics.trajectories,
        sinks=open_sinks(config, trace, tell=progress.note),
        progress=progress,
    )


def make_evaluator(
    config: RunConfig,
    *,
    served: Served,
    policy: Policy,
    places: asyncio.Semaphore,
    trace: Trace = UNTRACED,
) -> Evaluator | None:
    """Return what plays the held-out samples with the current policy, or None if it is off."""
    if not config.eval.samples:
        return None
    return partial(
        evaluate,
        make_actor(config, served=served, policy=policy, places=places, trace=trace, evaluation=True),
        samples=held_out_samples(served.held_out, config.eval.samples),
        split={task: source.split for task, source in served.held_out.items()},
        seed=EVALUATION_SEED,
        attempts=config.eval.attempts,
    )


def make_turn(
    config: RunConfig, *, policy: Policy, trace: Trace
) -> Callable[[], AbstractContextManager[None]]:
    """Return what the learner's turn at the devices is, which it may share with the engine."""
    if config.placement.layout == "separated":
        return nullcontext
    learner = policy.learner
    release = learner.release if isinstance(learner, LeadLearner) else release_memory
    return partial(learners_turn, policy.engine, release=release, trace=trace)


def make_cadence(config: RunConfig) -> Cadence:
    """Return what happens how often."""
    return Cadence(
        steps=config.run.steps,
        seed=config.run.seed,
        checkpoint_every=config.checkpoint.every,
        rebalance_after=rebalance_after(config),
        keep=config.checkpoint.keep,
        evaluate_every=config.eval.every,
        temperature=config.engine.temperature,
        tolerance=tolerance(config),
        step_s=config.train.step_seconds,
        checkpoint_s=config.checkpoint.seconds,
    )


def rebalance_after(config: RunConfig) -> int:
    """Return how many draws after a checkpoint tasks share anew, 0 for never: it must be on the disk by then.

    It is when the next one begins, before which no more than a full interval of groups are drawn.
    """
    if config.rollout.balance == "groups":
        return 0
    return 2 * config.checkpoint.every * config.rollout.groups_per_step


def make_window(
    config: RunConfig,
    sources: Sequence[TaskSource],
    checkpoint: Checkpoint | None,
    saved: Collection[int],
) -> WorkWindow:
    """Return the work window where the checkpoint and the journal left it, or at its beginning.

    Raises:
        ConfigError: the configuration does not fit the run that is resumed.
    """
    window = WorkWindow(
        Mixer(sources, seed=config.run.seed),
        groups_per_step=config.rollout.groups_per_step,
        max_staleness=config.rollout.max_staleness,
        window=config.rollout.window,
        total_steps=config.run.steps,
    )
    try:
        window.restore(checkpoint.loop["window"] if checkpoint else None, finished=saved)
    except ValueError as error:
        raise ConfigError(f"the run cannot be resumed: {error}") from error
    return window


def make_actor(
    config: RunConfig,
    *,
    served: Served,
    policy: Policy,
    places: asyncio.Semaphore,
    trace: Trace = UNTRACED,
    evaluation: bool = False,
) -> Actor:
    """Return the actor of a run; for evaluation it samples from the current policy alone."""
    return Actor(
        engine=policy.engine,
        chat=policy.chat,
        clients=served.clients,
        play=Play(
            max_new_tokens=config.engine.max_new_tokens,
            max_context=config.engine.max_context,
            temperature=config.engine.temperature,
            stale_fraction=0.0 if evaluation else config.rollout.stale_fraction,
            episode_s=config.rollout.episode_seconds,
            retries=config.rollout.environment_retries,
            patience_s=config.rollout.environment_patience_seconds,
        ),
        places=places,
        trace=trace,
    )


def make_recipe(config: RunConfig) -> Recipe:
    """Return the choices of a training step."""
    return Recipe(
        baseline=config.advantage.baseline,
        scale=config.advantage.scale,
        task_normalization=config.advantage.task_normalization,
        invalid_call_penalty=config.advantage.invalid_call_penalty,
        truncation_penalty=config.advantage.truncation_penalty,
        aggregation=config.train.aggregation,
        minibatches=config.train.minibatches,
        micro_batch_tokens=config.train.micro_batch_tokens,
        constant_tokens=config.engine.max_context,
        skip_zero_advantages=config.train.kl_coef == 0,
        tolerance=tolerance(config),
        skip_bad_updates=config.train.on_bad_update == "skip",
        seed=config.run.seed,
    )


def make_pace(config: RunConfig) -> Pace:
    """Return how far and how fast the loop runs."""
    minutes, rollout = config.run.minutes, config.rollout
    longest_s = rollout.episode_seconds * (rollout.environment_retries + 1)
    return Pace(
        steps=config.run.steps,
        group_size=rollout.group_size,
        seed=config.run.seed,
        minimum_siblings=min(2, rollout.group_size),
        stall_s=longest_s + rollout.environment_patience_seconds + 60.0,
        limit_s=60.0 * minutes if minutes else None,
    )


def tolerance(config: RunConfig) -> Drift:
    """Return the differences in log-probability that rounding explains.

    Below float32, and between different kernels on a GPU, single tokens of many are off by half a nat: there
    the mean is what tells wrong weights from right ones.
    """
    exact = config.engine.dtype == "float32" and config.train.precision == "float32"
    if not exact or config.engine.device != "cpu":
        return Drift(worst=math.inf, mean=0.1)
    return FLOAT32 if config.engine.kind == "torch" else Drift(worst=1e-3, mean=1e-3)


def held_out_samples(sources: Mapping[str, TaskSource], count: int) -> dict[str, list[int]]:
    """Return the indices of the samples a policy is judged on: the first ``count`` of each split."""
    return {task: list(range(min(count, source.num_samples or count))) for task, source in sources.items()}
