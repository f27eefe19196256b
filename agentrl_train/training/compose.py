"""Composition root: builds a run from a configuration. The only module that knows every part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl_train.actor import Actor
from agentrl_train.algorithm import reward_functions, signal_function
from agentrl_train.config import RunConfig
from agentrl_train.config.rollout import Stale
from agentrl_train.critics.trainer import critic_trainer
from agentrl_train.engine.pool import EnginePool
from agentrl_train.learner import Learner
from agentrl_train.models.adapters import check_lora, has_adapter
from agentrl_train.models.architecture import Threads
from agentrl_train.models.loading import chat_format, load_policy, open_policy
from agentrl_train.models.stored import StoredModel
from agentrl_train.placement.devices import Processes
from agentrl_train.placement.environments import Given, Served, environments
from agentrl_train.placement.launcher import Follower, Launcher, follower_devices, make_launcher
from agentrl_train.placement.ranks import (
    LeadLearner,
    Ranks,
    execute_commands,
    process_group,
    release_memory,
    world_size,
)
from agentrl_train.reward import close_judges
from agentrl_train.storage.checkpoint import Checkpoint, load_latest
from agentrl_train.storage.journal import Journal
from agentrl_train.storage.run_dir import claim_run_dir, write_config
from agentrl_train.telemetry.metrics import MetricsLog
from agentrl_train.telemetry.sinks import traced
from agentrl_train.telemetry.watchdog import Watchdog, die_with_parent, in_thread, same_python
from agentrl_train.template_check import check_sessions
from agentrl_train.training.admission import make_window
from agentrl_train.training.curriculum import Curriculum, read_changes
from agentrl_train.training.engines import make_engine, make_publisher, make_threads, threads_each, tolerance
from agentrl_train.training.evaluation import (
    Evaluation,
    EvaluationJournal,
    SessionShare,
    evaluate,
    held_out_samples,
)
from agentrl_train.training.held_out import CheckpointEvaluator, Evaluator, HeldOut, require_evaluator
from agentrl_train.training.learners import (
    as_config_errors,
    limit_memory,
    loss_options,
    make_critic,
    make_learner,
)
from agentrl_train.training.loop import DynamicSampling, Loop
from agentrl_train.training.observer import Observer
from agentrl_train.training.run import (
    FailureLog,
    Outcome,
    Policy,
    Run,
    ServedPolicy,
    make_log,
    resumption,
    run_until_rank_lost,
)
from agentrl_train.training.step_trainer import StepTrainer, engine_asleep
from agentrl_train.types import UNTRACED, Sampling, SamplingParams, Trace, TrajectoryGroup
from agentrl_train.weights import DriftCheck

EVALUATION_SEED = 1_000_003
"""Seed of held-out draws, independent of the run's seed, so that runs are comparable."""


def processes(config: RunConfig) -> Processes:
    """Return the processes of a run."""
    return Processes(
        placement=config.placement, engine=config.engine, train=config.train, replicas=config.replicas
    )


def open_launcher(config: RunConfig) -> AbstractContextManager[Launcher]:
    """Return the context of the launcher of a run; raises ``ConfigError``."""
    command = (*same_python(), "-m", "agentrl_train", "run")
    follower = Follower(command=command, config=config.to_toml(), run=partial(run_follower, config))
    return make_launcher(processes(config), follower)


def served_environments(
    config: RunConfig, given: Mapping[str, Given] = MappingProxyType({})
) -> AbstractAsyncContextManager[Served]:
    """Return the context that serves the environments of a run.

    ``given`` maps names in ``serve`` to environment classes and clients of this process.
    """
    return environments(
        config.environments,
        max_sessions=config.engine.max_sessions,
        timeout_s=config.rollout.environment_timeout_s,
        idle_s=config.engine.completion_deadline_s,
        levels=config.rollout.curriculum.levels,
        stated=config.engine.sampling,
        given=given,
    )


def threads_of(config: RunConfig, launcher: Launcher) -> tuple[Threads, Threads]:
    """Return the CPU threads of engine and learner."""
    apart = config.engine.kind == "vllm" or launcher.separate_engines
    return make_threads(config.run, config.rollout, apart=apart)


@asynccontextmanager
async def policy(
    config: RunConfig,
    *,
    path: str,
    launcher: Launcher,
    served: Served,
    trace: Trace = UNTRACED,
    ranks: Ranks | None = None,
    inherited: Collection[int] = (),
) -> AsyncIterator[Policy]:
    """Load the policy in ``path`` and start its engine and learner; stop the engine on leaving.

    ``inherited`` are the groups that were finished before a resume.
    """
    device = config.engine.device if ranks is None else None  # ranks read their own shards
    check_lora(config.train.lora, path)
    serving, training = threads_of(config, launcher)
    loading = _loaded(
        config, path=path, device=device, launcher=launcher, served=served, threads=serving, trace=trace
    )
    async with loading as (model, stored, ready):
        if config.learner_memory_fraction is not None and isinstance(ready.engine, EnginePool):
            # vLLM measures the free memory of its GPU at the start; the learner must not allocate meanwhile.
            first = SamplingParams(max_new_tokens=1)
            await asyncio.to_thread(ready.engine.probe, [0], sampling=first, policies=config.policies)
        # The critic starts as a copy of the policy without adapters.
        critic = make_critic(
            config.critic,
            train=config.train,
            source=config.model,
            temperature=config.engine.temperature,
            device=config.engine.device,
            model=model,
            tokenizer=ready.tokenizer,
            ranks=ranks,
            threads=training,
        )
        limit_memory(config.learner_memory_fraction)
        own = {"stored": stored, "threads": training, "trace": trace}
        options = learner_options(config, model=model) | own
        with make_learner(model, ranks=ranks, engine=config.engine, **options) as learner:
            accepted = tolerance(config.engine, config.model, learner.settings, model=model)
            publisher = make_publisher(
                ready.engine,
                config.rollout,
                dtype=config.model.dtype,
                temperature=config.engine.temperature,
                logprobs=learner.logprobs,
                tokenizer=ready.tokenizer,
                tolerance=accepted,
                checkpoints=config.run_folder / "checkpoints",
            )
            yield Policy(
                tokenizer=ready.tokenizer,
                chat=ready.chat,
                engine=ready.engine,
                prompts=ready.prompts,
                learner=learner,
                publisher=publisher,
                check=DriftCheck(
                    learner.logprobs,
                    tolerance=accepted,
                    truncated=config.engine.truncates,
                    inherited=() if config.engine.deterministic else inherited,
                ),
                critic=critic,
            )


@asynccontextmanager
async def served_policy(
    config: RunConfig, *, path: str, launcher: Launcher, served: Served
) -> AsyncIterator[ServedPolicy]:
    """Load the policy in ``path`` and start its engine, without a learner; stop the engine on leaving."""
    threads, _ = threads_of(config, launcher)
    loading = _loaded(config, path=path, device=None, launcher=launcher, served=served, threads=threads)
    async with loading as (model, _, ready):
        if has_adapter(Path(path)):
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
    """Load a policy, check that its chat format can represent the tasks, and start its engine.

    Without a device, the weights stay in their files, if they can be read from there.
    """
    torch.set_num_threads(threads_each(config.run, config.rollout))
    place: dict[str, Any] = {"dtype": config.model.dtype, "revision": config.model.revision}
    if device is None:
        model, tokenizer, stored = open_policy(path, **place)
    else:
        (model, tokenizer), stored = load_policy(path, device=device, **place), None
    chat = chat_format(config.model, model=model, tokenizer=tokenizer)
    prompts = await check_sessions(
        chat,
        served.clients,
        sources=[source for source in served.sources if source.task not in served.programs],
        sampling=config.engine.sampling,
        sub_agent=config.rollout.sub_agent,
    )
    engine = make_engine(
        processes(config),
        config.model,
        model=model,
        path=path,
        chat=chat,
        sessions=config.sessions,
        process_threads=threads_each(config.run, config.rollout),
        threads=threads,
        trace=trace,
        launcher=launcher,
    )
    try:
        yield model, stored, ServedPolicy(tokenizer=tokenizer, chat=chat, engine=engine, prompts=prompts)
    finally:
        await engine.close()


async def train(
    config: RunConfig,
    *,
    resume: bool = False,
    given: Mapping[str, Given] = MappingProxyType({}),
    observer: Observer,
) -> Outcome:
    """Train a policy from a configuration to the end, or until it is stopped.

    Raises:
        TrainError: the run failed; the message says how to fix the problem.
    """
    folder = config.run_folder
    async with AsyncExitStack() as stack:
        changed = stack.enter_context(claim_run_dir(folder, config.changes_since, resume=resume))
        checkpoint = load_latest(folder / "checkpoints") if resume else None
        launcher = stack.enter_context(open_launcher(config))
        stack.enter_context(launcher.ranks())
        ranks = stack.enter_context(join_ranks(config))
        served = await stack.enter_async_context(served_environments(config, given))
        recorded = stack.enter_context(traced(config.metrics, folder))
        trace = stack.enter_context(Watchdog(trace=recorded))
        step = checkpoint.step if checkpoint else 0
        journal = Journal(folder / "journal", step=step)
        stack.callback(journal.close)
        saved = {group.group_id: group for group in journal.read(step)}
        saved |= {group.group_id: group for group in (checkpoint.groups if checkpoint else ())}
        ready = await stack.enter_async_context(
            policy(
                config,
                path=config.model.path,
                launcher=launcher,
                served=served,
                trace=trace,
                ranks=ranks,
                inherited=saved.keys(),
            )
        )
        log = make_log(
            config.run,
            config.metrics,
            settings=config.model_dump(mode="json"),
            checkpoint=checkpoint,
            trace=recorded,
            silent=observer.silent,
        )
        stack.callback(log.close)
        for note in config.notes:
            log.note(note)
        if checkpoint:
            log.note(resumption(checkpoint, steps=config.run.steps, finished=len(saved), changed=changed))
        stack.push_async_callback(close_judges)
        run = make_run(
            config,
            served=served,
            policy=ready,
            journal=journal,
            checkpoint=checkpoint,
            saved=saved,
            log=log,
            observer=observer,
            trace=trace,
        )
        write_config(folder, config.to_toml())
        return await run_until_rank_lost(run.run(), launcher.wait_lost())


def make_run(
    config: RunConfig,
    *,
    served: Served,
    policy: Policy,
    journal: Journal,
    checkpoint: Checkpoint | None,
    saved: Mapping[int, TrajectoryGroup],
    log: MetricsLog,
    observer: Observer,
    trace: Watchdog,
) -> Run:
    """Return the run; ``saved`` are the groups that were finished before a resume, by number."""
    slots = asyncio.Semaphore(config.engine.max_sessions)
    failures = FailureLog(
        config.run_folder, episodes=int(checkpoint.loop.get("failed_episodes", 0)) if checkpoint else 0
    )
    window = make_window(
        config.run,
        config.rollout,
        algorithm=config.algorithm,
        served=served,
        changes=read_changes(config.run_folder),
        checkpoint=checkpoint,
        saved=saved,
    )
    loop = Loop(
        actor=make_actor(config, served=served, policy=policy, slots=slots, trace=trace),
        window=window,
        journal=journal,
        group_size=config.rollout.group_size,
        seed=config.run.seed,
        stall_timeout_s=config.stall_timeout_s,
        run_timeout_s=config.run.run_timeout_s,
        finished=[saved[group_id] for group_id in window.finished],
        dynamic_sampling=DynamicSampling(
            has_signal=signal_function(config.algorithm, max_context=config.engine.max_context),
            most=config.algorithm.dynamic_sampling * config.rollout.groups_per_step,
        ),
        on_failure=failures,
        describe_slots=trace.table,
        trace=trace,
    )
    evaluator = partial(make_evaluator, config, served=served, policy=policy, slots=slots, trace=trace)
    return Run(
        config.run,
        loop=loop,
        policy=policy,
        trainer=make_trainer(config, policy=policy, trace=trace),
        curriculum=Curriculum(config.rollout.curriculum, mixer=window.mixer, folder=config.run_folder),
        log=log,
        failures=failures,
        held_out=HeldOut(
            current=evaluator(),
            saved=saved_evaluator(config, served=served, policy=policy, slots=slots, trace=trace),
            every=config.eval.every,
            label=config.evaluation_digest(config.model.path),
            on=evaluator,
        ),
        checkpoints=config.checkpoint,
        resumed=checkpoint,
        observer=observer,
        trace=trace,
    )


async def evaluate_alone(
    config: RunConfig,
    *,
    path: str,
    samples: int | None = None,
    journal: EvaluationJournal | None = None,
    given: Mapping[str, Given] = MappingProxyType({}),
) -> dict[str, Evaluation]:
    """Evaluate the policy in ``path`` on the held-out samples, without a run.

    Raises:
        ConfigError: there are no samples to evaluate.
    """
    config = config.without_training
    with open_launcher(config) as launcher, launcher.single():
        async with (
            served_environments(config, given) as served,
            served_policy(config, path=path, launcher=launcher, served=served) as ready,
        ):
            slots = asyncio.Semaphore(config.engine.max_sessions)
            evaluator = make_evaluator(config, served=served, policy=ready, slots=slots, samples=samples)
            return await require_evaluator(evaluator)(journal=journal)


def follow(config: RunConfig) -> None:
    """Train along with rank 0 until it finishes, as another rank."""
    with follower_devices(processes(config)):
        run_follower(config)


def make_trainer(config: RunConfig, *, policy: Policy, trace: Trace) -> StepTrainer:
    """Return the trainer of a run."""
    return StepTrainer(
        policy.learner,
        policy.publisher,
        algorithm=config.algorithm,
        max_context=config.engine.max_context,
        critic=critic_trainer(
            policy.critic,
            settings=config.critic,
            algorithm=config.algorithm,
            train=config.train,
            max_context=config.engine.max_context,
            encode=partial(policy.tokenizer.encode, add_special_tokens=False),
            seed=config.run.seed,
        ),
        check=policy.check,
        seed=config.run.seed,
        bad_batches=config.run_folder / "bad_batches",
        turn=make_turn(config, policy=policy, trace=trace),
        trace=trace,
    )


def make_evaluator(
    config: RunConfig,
    *,
    served: Served,
    policy: ServedPolicy,
    slots: AbstractAsyncContextManager[None],
    weights: str = "current",
    samples: int | None = None,
    trace: Trace = UNTRACED,
) -> Evaluator | None:
    """Return the held-out evaluation of a policy of the engine, or None if it is disabled.

    ``samples`` is another number of samples per task than ``eval.samples``.
    """
    count = config.eval.samples if samples is None else samples
    if not count:
        return None
    actor = partial(
        make_actor, config, served=served, policy=policy, slots=slots, trace=trace, weights=weights
    )
    sampling = config.evaluation_sampling
    return partial(
        evaluate,
        actor(evaluation=sampling),
        greedy=actor(evaluation=sampling.at(0.0)) if config.eval.greedy else None,
        samples=held_out_samples(served.held_out, count),
        split={task: source.split for task, source in served.held_out.items()},
        seed=EVALUATION_SEED,
        attempts=config.eval.attempts,
    )


def saved_evaluator(
    config: RunConfig, *, served: Served, policy: ServedPolicy, slots: asyncio.Semaphore, trace: Trace
) -> CheckpointEvaluator | None:
    """Return the held-out evaluation of checkpoints alongside training, or None if it is disabled."""
    if "evaluation" not in config.policies:
        return None
    share = SessionShare(slots, most=config.sessions["evaluation"])
    made = partial(make_evaluator, config, served=served, policy=policy, slots=share, trace=trace)
    play = require_evaluator(made(weights="evaluation"))

    def publish(model_folder: Path, step: int) -> None:
        model, _ = load_policy(str(model_folder), dtype=config.model.dtype, revision=config.model.revision)
        weights = dict(model.named_parameters())
        policy.engine.publish(weights, policy_version=step, policies=("evaluation",))

    async def evaluate_saved(folder: Path, step: int, journal: EvaluationJournal) -> dict[str, Evaluation]:
        within_s, doing = config.train.step_timeout_s, f"publishing the weights of step {step} for evaluation"
        await in_thread(partial(publish, folder, step), within_s=within_s, doing=doing)
        return await play(journal=journal)

    return evaluate_saved


def make_turn(
    config: RunConfig, *, policy: Policy, trace: Trace
) -> Callable[[], AbstractContextManager[None]]:
    """Return the context that gives the learner its devices; colocated engines sleep inside it."""
    if config.placement.layout != "colocated":
        return nullcontext
    learner = policy.learner
    release = learner.release if isinstance(learner, LeadLearner) else release_memory
    return partial(engine_asleep, policy.engine, release=release, trace=trace)


def make_actor(
    config: RunConfig,
    *,
    served: Served,
    policy: ServedPolicy,
    slots: AbstractAsyncContextManager[None],
    trace: Trace = UNTRACED,
    evaluation: Sampling | None = None,
    weights: str = "current",
) -> Actor:
    """Return the actor of a run, or of an ``evaluation``, which samples from one policy only."""
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
    if evaluation is not None:
        return made(sampling=evaluation, rollout=alone)
    made = partial(made, rewards=reward_functions(config.reward))
    greedy = None
    if config.algorithm.baseline.name == "greedy":
        greedy = made(sampling=config.engine.sampling.at(0.0), rollout=alone)
    return made(sampling=config.engine.sampling, rollout=config.rollout, greedy=greedy)


@contextmanager
def join_ranks(config: RunConfig) -> Iterator[Ranks | None]:
    """Join the learner processes with this process as rank 0. Yields None for a single process.

    Raises:
        ConfigError: ``train.sequence_parallel`` does not divide the number of processes.
        RanksLost: the rendezvous failed.
    """
    if world_size() == 1:
        yield None
        return
    with _process_group(config) as ranks:
        yield ranks


def run_follower(config: RunConfig) -> None:
    """Run a rank other than 0 until rank 0 finishes.

    Raises:
        RanksLost: rank 0 or another rank failed or exited.
    """
    die_with_parent()
    check_lora(config.train.lora, config.model.path)
    torch.set_num_threads(config.run.threads or 1)
    with _process_group(config) as ranks:
        limit_memory(config.learner_memory_fraction)
        model, _, stored = open_policy(
            config.model.path, dtype=config.model.dtype, revision=config.model.revision
        )
        options = learner_options(config, model=model) | {"stored": stored}
        with as_config_errors():
            learner = Learner(model, place=ranks, **options)
        execute_commands(learner, ranks)


def learner_options(config: RunConfig, *, model: PreTrainedModel) -> dict[str, Any]:
    """Return the arguments of ``Learner`` that are the same on every rank."""
    adapters = config.train.lora is not None
    return loss_options(config.algorithm, source=config.model, model=model, adapters=adapters) | {
        "train": config.train.model_copy(update={"warmup_steps": config.warmup_steps}),
        "total_steps": config.run.steps,
        "temperature": config.engine.temperature,
        "attention": config.model.attention,
    }


def _process_group(config: RunConfig) -> AbstractContextManager[Ranks]:
    return process_group(
        device=config.engine.device,
        sequence_parallel=config.train.sequence_parallel,
        timeout_s=config.train.rank_timeout_s,
    )
