"""Composition root: builds a run from a configuration. The only module that knows every part."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl_train.actor import Actor
from agentrl_train.algorithm import reward_functions, signal_function
from agentrl_train.config import RunConfig
from agentrl_train.config.rollout import Stale
from agentrl_train.critics.critic_trainer import ByCritic, CriticTrainer
from agentrl_train.critics.networks import PrivilegedCritic, TwinCritic, ValueCritic
from agentrl_train.critics.preference_trainer import PreferenceTrainer
from agentrl_train.critics.turn_critic_trainer import TurnCriticTrainer
from agentrl_train.engine.pool import EnginePool
from agentrl_train.errors import ConfigError
from agentrl_train.models.adapters import adapter_base
from agentrl_train.models.loading import chat_format, load_policy, open_policy
from agentrl_train.models.stored import StoredModel
from agentrl_train.placement.environments import Served, environments
from agentrl_train.placement.launcher import Launcher, make_launcher
from agentrl_train.placement.ranks import LeadLearner, Ranks, release_memory
from agentrl_train.reward import close_judges
from agentrl_train.storage.checkpoint import Checkpoint, load_latest, read_replay
from agentrl_train.storage.journal import Journal
from agentrl_train.storage.run_dir import claim_run_dir, write_config
from agentrl_train.telemetry.metrics import MetricsLog
from agentrl_train.telemetry.progress import Progress
from agentrl_train.telemetry.sinks import open_sinks, traced
from agentrl_train.telemetry.throughput import Throughput, copy_bytes_per_s
from agentrl_train.telemetry.watchdog import Watchdog, in_thread
from agentrl_train.training.admission import Mixer, WorkWindow
from agentrl_train.training.curriculum import read_changes
from agentrl_train.training.evaluation import Evaluation, SessionShare, evaluate
from agentrl_train.training.factories import (
    join_ranks,
    make_critic,
    make_engine,
    make_learner,
    make_publisher,
    make_threads,
    threads_each,
)
from agentrl_train.training.loop import Loop
from agentrl_train.training.run import (
    CheckpointEvaluator,
    Evaluator,
    FailureLog,
    Outcome,
    Policy,
    Run,
    ServedPolicy,
)
from agentrl_train.training.step_trainer import StepTrainer, engine_asleep
from agentrl_train.training.template_check import check_sessions
from agentrl_train.types import UNTRACED, SamplingParams, TaskSource, Threads, Trace
from agentrl_train.weights import FLOAT32, Drift

SHUTDOWN_TIMEOUT_S = 30.0
"""Time for a run to end after a rank is lost."""
EVALUATION_SEED = 1_000_003
"""Seed of held-out draws, independent of the run's seed, so that runs are comparable."""


def served_environments(config: RunConfig) -> AbstractAsyncContextManager[Served]:
    """Return the context in which the environments of a run are served."""
    return environments(
        config.environments,
        max_sessions=config.engine.max_sessions,
        timeout_s=config.rollout.environment_timeout_s,
        idle_s=config.engine.completion_deadline_s,
        levels=config.rollout.curriculum.levels,
        stated=config.engine,
    )


@asynccontextmanager
async def policy(
    config: RunConfig,
    *,
    path: str,
    launcher: Launcher,
    served: Served,
    trace: Trace = UNTRACED,
    ranks: Ranks | None = None,
) -> AsyncIterator[Policy]:
    """Load the policy in ``path`` and start its engine and learner; stop the engine on leaving."""
    device = config.engine.device if ranks is None else None  # ranks read their own shards
    serving, training = make_threads(config, launcher=launcher)
    loading = _loaded(
        config, path=path, device=device, launcher=launcher, served=served, threads=serving, trace=trace
    )
    async with loading as (model, stored, ready):
        if config.learner_memory_fraction is not None and isinstance(ready.engine, EnginePool):
            # vLLM measures the free memory of its GPU at the start; the learner must not allocate meanwhile.
            first = SamplingParams(max_new_tokens=1)
            await asyncio.to_thread(ready.engine.probe, [0], sampling=first, policies=config.policies)
        # Before the policy has adapters.
        critic = make_critic(config, model=model, tokenizer=ready.tokenizer, ranks=ranks, threads=training)
        with make_learner(
            config, model=model, stored=stored, ranks=ranks, threads=training, trace=trace
        ) as learner:
            publisher = make_publisher(
                config,
                ready.engine,
                logprobs=learner.logprobs,
                tokenizer=ready.tokenizer,
                tolerance=tolerance(config),
            )
            yield Policy(
                tokenizer=ready.tokenizer,
                chat=ready.chat,
                engine=ready.engine,
                learner=learner,
                publisher=publisher,
                critic=critic,
            )


@asynccontextmanager
async def served_policy(
    config: RunConfig, *, path: str, launcher: Launcher, served: Served
) -> AsyncIterator[ServedPolicy]:
    """Load the policy in ``path`` and start its engine, without a learner; stop the engine on leaving."""
    threads, _ = make_threads(config, launcher=launcher)
    loading = _loaded(config, path=path, device=None, launcher=launcher, served=served, threads=threads)
    async with loading as (model, _, ready):
        if adapter_base(Path(path)) is not None:
            weights = dict(model.named_parameters())
            await asyncio.to_thread(ready.engine.publish, weights, policy_version=0, policies=config.policies)
        del model
        yield ready


@asynccontextmanager
async def _loaded(
    config: RunConfig,
    *,
    path: str,
    device: str | None,
    launcher: Launcher,
    served: Served,
    threads: Threads,
    trace: Trace = UNTRACED,
) -> AsyncIterator[tuple[PreTrainedModel, StoredModel | None, ServedPolicy]]:
    """Load a policy, check that its chat format carries the tasks, and start its engine.

    Without a device, the weights stay in their files, if they can be read from there.
    """
    torch.set_num_threads(threads_each(config))
    place: dict[str, Any] = {"dtype": config.model.dtype, "revision": config.model.revision}
    if device is None:
        model, tokenizer, stored = open_policy(path, **place)
    else:
        (model, tokenizer), stored = load_policy(path, device=device, **place), None
    chat = chat_format(config.model, model=model, tokenizer=tokenizer)
    await check_sessions(
        chat,
        served.clients,
        sources=[source for source in served.sources if source.task not in served.programs],
        sampling=config.engine,
        sub_agent=config.rollout.sub_agent,
    )
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
        yield model, stored, ServedPolicy(tokenizer=tokenizer, chat=chat, engine=engine)
    finally:
        await engine.close()


async def run_until_rank_lost(run: Coroutine[Any, Any, Outcome], lost: Coroutine[Any, Any, None]) -> Outcome:
    """Return the outcome of a run; raises if a rank of the learner is lost before it ends."""
    running, losing = asyncio.create_task(run), asyncio.create_task(lost)
    try:
        await asyncio.wait((running, losing), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.wait((running,), timeout=SHUTDOWN_TIMEOUT_S)
            losing.result()
        return await running
    finally:
        losing.cancel()


async def train(config: RunConfig, *, resume: bool = False) -> Outcome:
    """Train a policy from a configuration to the end, or until it is interrupted.

    Raises:
        TrainError: the run failed; the message says how to fix the problem.
    """
    folder = config.run_folder
    async with AsyncExitStack() as stack:
        changed = stack.enter_context(claim_run_dir(folder, config, resume=resume))
        checkpoint = load_latest(folder / "checkpoints") if resume else None
        launcher = stack.enter_context(make_launcher(config))
        stack.enter_context(launcher.ranks())
        ranks = stack.enter_context(join_ranks(config))
        served = await stack.enter_async_context(served_environments(config))
        recorded = stack.enter_context(traced(config))
        trace = stack.enter_context(Watchdog(trace=recorded))
        ready = await stack.enter_async_context(
            policy(config, path=config.model.path, launcher=launcher, served=served, trace=trace, ranks=ranks)
        )
        step = checkpoint.step if checkpoint else 0
        journal = Journal(folder / "journal", step=step)
        stack.callback(journal.close)
        saved = {group.group_id: group for group in journal.read(step)}
        saved |= {group.group_id: group for group in (checkpoint.groups if checkpoint else ())}
        log = make_log(config, checkpoint, recorded)
        stack.callback(log.close)
        for note in config.notes:
            log.note(note)
        if checkpoint:
            log.note(resumption(checkpoint, steps=config.run.steps, finished=len(saved), changed=changed))
        stack.push_async_callback(close_judges)
        slots = asyncio.Semaphore(config.engine.max_sessions)
        failures = FailureLog(
            folder, episodes=int(checkpoint.loop.get("failed_episodes", 0)) if checkpoint else 0
        )
        window = make_window(config, served, checkpoint, saved.keys())
        loop = Loop(
            actor=make_actor(config, served=served, policy=ready, slots=slots, trace=trace),
            window=window,
            journal=journal,
            steps=config.run.steps,
            group_size=config.rollout.group_size,
            seed=config.run.seed,
            stall_timeout_s=config.stall_timeout_s,
            run_timeout_s=config.run.run_timeout_s,
            policy_version=int(checkpoint.loop["policy_version"]) if checkpoint else 0,
            finished=[saved[group_id] for group_id in window.finished],
            **replacement(config),
            on_failure=failures,
            describe_slots=trace.table,
            trace=trace,
        )
        run = Run(
            config,
            loop=loop,
            policy=ready,
            trainer=make_trainer(
                config, policy=ready, checkpoint=checkpoint, inherited=saved.keys(), trace=trace
            ),
            log=log,
            failures=failures,
            evaluate=make_evaluator(config, served=served, policy=ready, slots=slots, trace=trace),
            evaluate_saved=saved_evaluator(config, served=served, policy=ready, slots=slots, trace=trace),
            tolerance=tolerance(config),
            checkpoint=checkpoint,
            throughput=Throughput(
                ready.engine.statistics, copy_bytes_per_s=copy_bytes_per_s(config.engine.device)
            ),
            trace=trace,
        )
        write_config(folder, config)
        return await run_until_rank_lost(run.run(), launcher.wait_lost())


def make_trainer(
    config: RunConfig,
    *,
    policy: Policy,
    checkpoint: Checkpoint | None,
    inherited: Collection[int],
    trace: Trace,
) -> StepTrainer:
    """Return the trainer of a run; ``inherited`` are the groups that were finished before a resume."""
    critic: ByCritic | None = None
    if policy.critic is not None and config.critic is not None:
        options: dict[str, Any] = {
            "settings": config.critic,
            "algorithm": config.algorithm,
            "train": config.train,
            "max_context": config.engine.max_context,
            "seed": config.run.seed,
        }
        if isinstance(policy.critic, TwinCritic):
            critic = TurnCriticTrainer(policy.critic, **options)
        elif isinstance(policy.critic, PrivilegedCritic):
            encode = partial(policy.tokenizer.encode, add_special_tokens=False)
            critic = PreferenceTrainer(policy.critic, encode=encode, **options)
        elif isinstance(policy.critic, ValueCritic):
            critic = CriticTrainer(policy.critic, **options)
    return StepTrainer(
        learner=policy.learner,
        publisher=policy.publisher,
        algorithm=config.algorithm,
        train=config.train,
        critic=critic,
        replay=config.algorithm.replay,
        distill=config.algorithm.distill,
        buffer=read_replay(checkpoint.folder) if checkpoint else None,
        max_context=config.engine.max_context,
        tolerance=tolerance(config),
        truncated=config.engine.truncates,
        seed=config.run.seed,
        bad_batches=config.run_folder / "bad_batches",
        inherited=() if config.engine.deterministic else inherited,
        turn=make_turn(config, policy=policy, trace=trace),
        trace=trace,
    )


def resumption(checkpoint: Checkpoint, *, steps: int, finished: int, changed: Sequence[str]) -> str:
    """Return the message printed when a run resumes."""
    text = f"resuming after step {checkpoint.step}, with {finished} finished groups that are not trained yet"
    if checkpoint.step >= steps:
        text = f"{checkpoint.step} steps are trained already, and run.steps = {steps}: raise it to train more"
    return "; ".join([text, *changed])


def replacement(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of ``Loop`` that replace groups without signal."""
    return {
        "has_signal": signal_function(config.algorithm, max_context=config.engine.max_context),
        "most_replaced": config.algorithm.dynamic_sampling * config.rollout.groups_per_step,
    }


def make_log(config: RunConfig, checkpoint: Checkpoint | None, trace: Trace) -> MetricsLog:
    """Return the metrics log, continued from the checkpoint if there is one."""
    step = checkpoint.step if checkpoint else 0
    elapsed_s = float(checkpoint.loop["seconds"]) if checkpoint else 0.0
    progress = Progress(total_steps=config.run.steps, first_step=step, elapsed_s=elapsed_s)
    return MetricsLog(
        config.run_folder,
        first_step=step,
        trajectories=config.metrics.trajectories,
        sinks=open_sinks(config, trace, notify=progress.note),
        progress=progress,
    )


def make_evaluator(
    config: RunConfig,
    *,
    served: Served,
    policy: ServedPolicy,
    slots: AbstractAsyncContextManager[None],
    weights: str = "current",
    trace: Trace = UNTRACED,
) -> Evaluator | None:
    """Return the held-out evaluation of a policy of the engine, or None if it is disabled."""
    if not config.eval.samples:
        return None
    actor = partial(
        make_actor,
        served=served,
        policy=policy,
        slots=slots,
        trace=trace,
        evaluation=True,
        weights=weights,
    )
    likeliest = config.model_copy(update={"eval": config.eval.model_copy(update={"temperature": 0.0})})
    return partial(
        evaluate,
        actor(config),
        greedy=actor(likeliest) if config.eval.greedy else None,
        samples=held_out_samples(served.held_out, config.eval.samples),
        split={task: source.split for task, source in served.held_out.items()},
        seed=EVALUATION_SEED,
        attempts=config.eval.attempts,
    )


def saved_evaluator(
    config: RunConfig, *, served: Served, policy: ServedPolicy, slots: asyncio.Semaphore, trace: Trace
) -> CheckpointEvaluator | None:
    """Return the held-out evaluation of checkpoints beside training, or None if it is disabled."""
    if "evaluation" not in config.policies:
        return None
    share = SessionShare(slots, most=config.sessions["evaluation"])
    play = make_evaluator(
        config, served=served, policy=policy, slots=share, weights="evaluation", trace=trace
    )
    assert play is not None

    def publish(model_folder: Path, step: int) -> None:
        model, _ = load_policy(str(model_folder), dtype=config.model.dtype, revision=config.model.revision)
        weights = dict(model.named_parameters())
        policy.engine.publish(weights, policy_version=step, policies=("evaluation",))

    async def evaluate_checkpoint(model_folder: Path, step: int) -> dict[str, Evaluation]:
        within_s, doing = config.train.step_timeout_s, f"publishing the weights to evaluate of step {step}"
        await in_thread(partial(publish, model_folder, step), within_s=within_s, doing=doing)
        return await play()

    return evaluate_checkpoint


def make_turn(
    config: RunConfig, *, policy: Policy, trace: Trace
) -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which the learner owns its devices; colocated engines sleep in it."""
    if config.placement.layout != "colocated":
        return nullcontext
    learner = policy.learner
    release = learner.release if isinstance(learner, LeadLearner) else release_memory
    return partial(engine_asleep, policy.engine, release=release, trace=trace)


def make_window(
    config: RunConfig,
    served: Served,
    checkpoint: Checkpoint | None,
    saved: Collection[int],
) -> WorkWindow:
    """Return the work window, restored from checkpoint and journal if the run is resumed.

    Raises:
        ConfigError: the configuration does not fit the run that is resumed.
    """
    distill = config.algorithm.distill
    sub_agent, tasks = config.rollout.sub_agent, {source.task for source in served.sources}
    named = {
        "rollout.max_turns": config.rollout.max_turns.keys(),
        "rollout.sub_agent.tasks": sub_agent.tasks if sub_agent else (),
        "algorithm.distill.teachers": distill.teachers.keys() - {"*"},
    }
    for key, names in named.items():
        if unknown := set(names) - tasks:
            raise ConfigError(f"{key} names {sorted(unknown)[0]!r}, which is not a task of this run")
    untaught = [one.task for one in served.sources if distill.teacher_of(one.task) is None]
    if distill.weight and untaught:
        raise ConfigError(
            f"algorithm.distill.teachers has no teacher of {untaught[0]!r}: name one, or one of '*'"
        )
    window = WorkWindow(
        Mixer(
            served.sources,
            seed=config.run.seed,
            harder=served.harder,
            changes=read_changes(config.run_folder),
        ),
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
    policy: ServedPolicy,
    slots: AbstractAsyncContextManager[None],
    trace: Trace = UNTRACED,
    evaluation: bool = False,
    weights: str = "current",
) -> Actor:
    """Return the actor of a run; for evaluation it samples from one policy only."""
    alone = config.rollout.model_copy(update={"stale": Stale(), "alternatives": 0})
    made = partial(
        Actor,
        engine=policy.engine,
        chat=policy.chat,
        clients=served.clients,
        programs=served.programs,
        slots=slots,
        policy=weights,
        trace=trace,
    )
    if evaluation:
        return made(sampling=config.evaluation_engine, rollout=alone)
    made = partial(made, rewards=reward_functions(config.reward))
    greedy = None
    if config.algorithm.baseline.name == "greedy":
        greedy = made(sampling=config.engine_at(0.0), rollout=alone)
    return made(sampling=config.engine, rollout=config.rollout, greedy=greedy)


def tolerance(config: RunConfig) -> Drift:
    """Return the tolerated difference in log-probability between engine and trainer.

    Below float32, and between different GPU kernels, single tokens differ by up to half a nat; there only the
    mean detects wrong weights.
    """
    dtypes = {config.model.dtype, config.engine.dtype, config.train.precision}
    if dtypes != {"float32"}:
        return Drift(worst=math.inf, mean=0.1)
    if config.engine.device != "cpu":
        return Drift(worst=math.inf, mean=0.01)
    return FLOAT32 if config.engine.kind == "torch" else Drift(worst=1e-3, mean=1e-3)


def held_out_samples(sources: Mapping[str, TaskSource], count: int) -> dict[str, list[int]]:
    """Return the indices of the evaluation samples: the first ``count`` of each split."""
    return {task: list(range(min(count, source.num_samples or count))) for task, source in sources.items()}
