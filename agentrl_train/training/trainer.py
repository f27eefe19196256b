"""``Trainer``: runs from Python, in a script, a notebook or under torchrun.

A run has an event loop in its own thread. Callbacks and the body of ``for step in trainer`` run in the
caller's thread, between two steps, while admitted groups continue to play::

    caller's thread   for step in trainer:  <- step 1 -   ...   <- step 2 -   ...
    run's thread      train 1, log, save ----> wait -> train 2 ----> wait -> train 3

This module does not import torch, so that a wrong setting is reported at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from agentrl_env.client import EnvClient
from agentrl_train.config import RunConfig
from agentrl_train.config.loading import validate_table
from agentrl_train.config.toml import apply_override, merge, read_toml, set_value
from agentrl_train.errors import CallbackFailed, ConfigError, TrainError
from agentrl_train.training.observer import Observer

if TYPE_CHECKING:
    from agentrl_train.training.evaluation import EvaluationJournal, Evaluations
    from agentrl_train.training.run import Outcome, Run
    from agentrl_train.types import Step, Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metrics = Mapping[str, float]
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
_unnamed: set[Path] = set()
"""Run folders of this process's trainers without a name. They exist only after the first start."""


class Trainer:
    """Trains a policy on environments; see ``docs/how-to/python-api.md``.

    Iterate over the steps, or call ``train``. Leaving the loop early, with ``break``, an exception or Ctrl-C,
    ends the run after the step in progress with a checkpoint; iterating again continues it.

    Under torchrun every rank runs the same script. Ranks other than 0 train along with rank 0 while it
    iterates: they yield no step, ``evaluate`` returns an empty result there, and ``save`` writes nothing.

    Args:
        config: TOML file of the run, or a loaded configuration; the other arguments change it.
        model: Hugging Face folder, name on the hub, or a pair of a model and its tokenizer.
        environments: a list of ``Environment`` classes, targets, URLs, ``EnvClient`` objects or tables as in
            a file, or one of them alone.
        algorithm: name of a preset, or the table ``[algorithm]``, in which a function can be given as such.
        steps: steps of the whole run.
        reward: function of a ``Trajectory``, or several, whose scores are added to the environment's reward;
            or the table ``[reward]`` with functions, for other weights.
        settings: any other setting by its dotted key, such as ``{"train.learning_rate": 1e-4}``.
        on_step: called with each ``Step``; returns further metrics to log, under new names, or None.
        on_episode: called with each episode of a step before ``on_step``; returns metrics, which are averaged
            over the step, or None.
        on_evaluation: called with the ``Evaluations`` of each held-out evaluation.
        resume: continue from the newest checkpoint of the run.

    Raises:
        ConfigError: a setting is invalid.
    """

    def __init__(
        self,
        config: str | Path | RunConfig | None = None,
        *,
        model: str | Path | tuple[Any, Any] | None = None,
        environments: Any = (),
        algorithm: str | Mapping[str, Any] | None = None,
        steps: int | None = None,
        reward: Callable[..., Any] | Sequence[Any] | Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | Sequence[str] = NO_SETTINGS,
        on_step: Callable[[Step], Metrics | None] | None = None,
        on_episode: Callable[[Trajectory], Metrics | None] | None = None,
        on_evaluation: Callable[[Evaluations], object] | None = None,
        resume: bool = False,
    ) -> None:
        self._given: dict[str, Any] = {}
        self._on_step, self._on_episode, self._on_evaluation = on_step, on_episode, on_evaluation
        self._resume = resume
        self._playing: _Playing | None = None
        if isinstance(config, RunConfig):
            self.config = config
        else:
            table = {} if config is None else read_toml(Path(config))
            if algorithm is not None:
                named = {"preset": algorithm} if isinstance(algorithm, str) else dict(algorithm)
                table["algorithm"] = named
            if reward is not None:
                table["reward"] = _reward_table(reward)
            alone = isinstance(environments, str) or not isinstance(environments, Sequence)
            if sources := [environments] if alone else environments:
                table["environments"] = [self._environment(source) for source in sources]
            if steps is not None:
                set_value(table, "run.steps", steps, given="steps")
            _apply(table, settings)
            run = table.setdefault("run", {})
            run.setdefault("name", _next_name(Path(run.get("folder", "runs")), latest=resume))
            if model is not None:
                merge(table, {"model": {"path": _model_path(model, run)}})
            base = Path.cwd() if config is None else Path(config).resolve().parent
            source = "the settings are" if config is None else f"{config} is"
            self.config = validate_table(table, base=base, failure=f"{source} invalid; please correct")
        _warn_of_spinning_threads(self.config)

    @classmethod
    def from_config(
        cls, path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = NO_SETTINGS, **options: Any
    ) -> Trainer:
        """Return the trainer of a TOML file.

        Args:
            path: the file.
            overrides: settings by dotted key, or a list of ``section.key=value`` as on the command line.
            options: other arguments of ``Trainer``.
        """
        return cls(path, settings=overrides, **options)

    @property
    def folder(self) -> Path:
        """Folder of the run, with its metrics, checkpoints and report."""
        return self.config.run_folder

    def __iter__(self) -> Iterator[Step]:
        """Yield each step once it is trained; the terminal shows no progress meanwhile."""
        return self._steps(self._resume, silent=True)

    def train(self, *, resume: bool | None = None) -> Outcome | None:
        """Train to the end, with progress in the terminal, and return the outcome.

        The outcome's ``summary`` is None if ``stop`` ended the run. The outcome itself is None if ``stop``
        was called before the run had started.

        Raises:
            TrainError: the run failed; the message describes how to fix the problem.
        """
        steps = self._steps(self._resume if resume is None else resume, silent=False)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                outcome: Outcome | None = end.value
                return outcome

    def stop(self) -> None:
        """End the run after the step in progress, resumable; callable from callbacks and signal handlers."""
        if self._playing is not None:
            self._playing.stop()

    def evaluate(
        self,
        samples: int | None = None,
        *,
        model: str | None = None,
        journal: EvaluationJournal | None = None,
    ) -> Evaluations:
        """Evaluate the policy on held-out samples: before, between, or after the steps.

        Args:
            samples: samples per task, by default ``eval.samples``.
            model: another model folder or name on the hub; only without a run in progress.
            journal: keeps the episodes on disk as they end, and continues an interrupted evaluation; only
                without a run in progress.

        Raises:
            TrainError: the evaluation failed.
        """
        from agentrl_train.placement.ranks import rank
        from agentrl_train.training.compose import evaluate_alone
        from agentrl_train.training.evaluation import Evaluations

        if samples is not None and samples < 1:
            raise ConfigError(f"evaluate got samples = {samples}: give at least 1 sample per task")
        if rank() > 0:
            return Evaluations(step=None, tasks={})
        if self._playing is not None and model is None and journal is None:
            return self._playing.call(lambda run: run.evaluate(samples))
        path, step = (model, None) if model is not None else self._policy()
        tasks = _Thread(
            partial(
                evaluate_alone,
                self.config,
                path=path,
                samples=samples,
                journal=journal,
                given=self._given,
            )
        ).result()
        return Evaluations(step=step, tasks=tasks)

    def save(self, path: str | Path) -> None:
        """Write the policy as a Hugging Face folder, with adapters merged; before, between or after steps.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        from agentrl_train.models.loading import save_policy
        from agentrl_train.placement.ranks import rank

        if rank() > 0:
            return
        if self._playing is None:
            save_policy(self._policy()[0], Path(path))
            return
        copy = self.folder / ".saving"
        try:
            self._playing.call(lambda run: run.save(copy))
            save_policy(str(copy / "model"), Path(path))
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def _policy(self) -> tuple[str, int]:
        """Return the newest checkpoint's model and step, or the model that the run starts from."""
        from agentrl_train.storage.checkpoint import load_latest

        newest = load_latest(self.folder / "checkpoints")
        return (self.config.model.path, 0) if newest is None else (str(newest.model_folder), newest.step)

    def _environment(self, source: Any) -> dict[str, Any]:
        """Return the table of an environment, and remember its class or client by the name in the table."""
        if isinstance(source, Mapping):
            return dict(source)
        if isinstance(source, str | Path):
            url = str(source).startswith(("http://", "https://"))
            return {"url": source} if url else {"serve": [_absolute(str(source))]}
        if isinstance(source, EnvClient):
            name = f"EnvClient:{len(self._given)}"
        elif isinstance(source, type):
            name = f"{source.__module__}:{source.__qualname__}"
            if self._given.get(name, source) is not source:  # classes that one function made
                name = f"{name}:{len(self._given)}"
        else:
            raise ConfigError(
                f"environments holds {source!r}: give Environment classes, targets, URLs or EnvClient objects"
            )
        self._given[name] = source
        return {"serve": [name]}

    def _steps(self, resume: bool, *, silent: bool) -> Generator[Step, None, Outcome | None]:
        from agentrl_train.models.architecture import share_freed_memory
        from agentrl_train.placement.ranks import rank

        share_freed_memory()
        if rank() > 0:
            from agentrl_train.training.compose import follow

            follow(self.config)
            return None
        if self._playing is not None:
            raise TrainError("this trainer is running already: leave its other loop first")
        playing = self._playing = _Playing(self.config, resume=resume, given=self._given, silent=silent)
        try:
            while (question := playing.question()) is not None:
                if question.about == "finished":
                    yield question.value
                question.answer(self._answer(question))
            return playing.outcome()
        finally:
            playing.close()
            self._playing = None
            self._resume = self._resume or playing.started_run

    def _answer(self, question: _Question) -> Any:
        """Call the callbacks that a question is for."""
        if question.about == "evaluated":
            _call(self._on_evaluation, "on_evaluation", question.value)
        if question.about != "trained":
            return None
        from agentrl_train.telemetry.metrics import COLUMNS

        step: Step = question.value
        found: dict[str, list[float]] = {}
        for group in step.groups:
            for episode in group.trajectories:
                for name, value in _call(self._on_episode, "on_episode", episode).items():
                    found.setdefault(name, []).append(value)
        means = {name: fmean(values) for name, values in found.items()}
        more = {**means, **_call(self._on_step, "on_step", step)}
        if taken := sorted(more.keys() & {*step.metrics, *COLUMNS}):
            raise CallbackFailed(
                f"a callback returned the metric {taken[0]!r}, which the run itself logs; the run ended with "
                "a checkpoint: give the metric another name, then continue with resume=True"
            )
        return more


class _Thread(Generic[T]):
    """A coroutine on an event loop in its own thread, for callers with and without a running event loop."""

    def __init__(self, main: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.loop = asyncio.new_event_loop()
        self._main = main
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False
        self._result: Future[T] = Future()
        # A daemon: an iterator that is never closed must not keep the interpreter alive.
        self._thread = threading.Thread(target=self._work, name="agentrl-train", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Wait and return the result; an exception here, such as Ctrl-C, cancels the coroutine."""
        try:
            return self._result.result()
        finally:
            self.cancel()
            self._thread.join()

    def cancel(self) -> None:
        """Cancel the coroutine; idempotent."""
        self.soon(self._cancel)

    def soon(self, call: Callable[[], object]) -> None:
        """Make a call on the event loop, unless it is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call)

    def when_ended(self, call: Callable[[], object]) -> None:
        """Make a call when the result is known, even if the event loop broke."""
        self._result.add_done_callback(lambda result: call())

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _work(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                value = runner.run(self._run())
        except asyncio.CancelledError:
            self._result.set_exception(CancelledError())
        except BaseException as error:  # thread boundary: the caller must get the error
            self._result.set_exception(error)
        else:
            self._result.set_result(value)

    async def _run(self) -> T:
        self._task = asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        return await self._main()


class _Question(NamedTuple):
    """A value that the run hands to the caller's thread, and the function that answers it."""

    about: str
    value: Any
    answer: Callable[[Any], object]


class _Playing(Observer):
    """A run in progress; an ``Observer`` that forwards its calls to the caller's thread."""

    def __init__(self, config: RunConfig, *, resume: bool, given: Mapping[str, Any], silent: bool) -> None:
        self.silent = silent
        self.started_run = False
        self._run: Run | None = None
        self._stopping = False
        self._ended = False
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._current: _Question | None = None
        self._thread = _Thread(partial(self._train, config, resume=resume, given=given))
        self._thread.when_ended(lambda: self._questions.put(None))

    def question(self) -> _Question | None:
        """Wait for the next question of the run; None once it has ended."""
        question = self._current = self._questions.get()
        self._ended = question is None
        return question

    def outcome(self) -> Outcome | None:
        """Return the outcome of a run that has ended, or None if it was stopped before it had started."""
        try:
            return self._thread.result()
        except CancelledError:
            return None

    def call(self, function: Callable[[Run], Coroutine[Any, Any, T]]) -> T:
        """Call a coroutine function on the run's event loop, between two steps."""
        if self._run is None:
            raise TrainError("the run has not started yet")
        future = asyncio.run_coroutine_threadsafe(function(self._run), self._thread.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self) -> None:
        """End the run after the step in progress, or immediately if it has not started."""
        self._thread.soon(self._stop)

    def close(self) -> None:
        """Stop the run and wait until everything is closed; Ctrl-C meanwhile cancels the step in progress."""
        self.stop()
        while not self._ended:
            try:
                if self._current is not None:
                    self._current.answer({})
                self.question()
            except KeyboardInterrupt:
                self._thread.cancel()
        self._thread.join()

    def _stop(self) -> None:
        self._stopping = True
        if self._run is None:
            self._thread.cancel()
        else:
            self._run.stop()

    async def _train(self, config: RunConfig, *, resume: bool, given: Mapping[str, Any]) -> Outcome:
        try:
            from agentrl_train.training.compose import train

            return await train(config, resume=resume, given=given, observer=self)
        finally:
            self._run = None

    def started(self, run: Run) -> None:
        """Keep the run, to call it between steps."""
        self._run, self.started_run = run, True
        if self._stopping:
            run.stop()

    async def trained(self, step: Step) -> Metrics:
        """Return the metrics of the callbacks."""
        metrics: Metrics = await self._ask("trained", step)
        return metrics

    async def evaluated(self, evaluations: Evaluations) -> None:
        """Call the callbacks."""
        await self._ask("evaluated", evaluations)

    async def finished(self, step: Step) -> None:
        """Wait until the caller requests the next step."""
        await self._ask("finished", step)

    async def _ask(self, about: str, value: Any) -> Any:
        loop = asyncio.get_running_loop()
        answered = loop.create_future()

        def settle(answer: Any) -> None:
            if not answered.done():
                answered.set_result(answer)

        self._questions.put(
            _Question(about, value, lambda answer: self._thread.soon(partial(settle, answer)))
        )
        return await answered


def _warn_of_spinning_threads(config: RunConfig) -> None:
    """Log a warning if PyTorch was loaded before ``agentrl_train`` could keep idle threads from spinning."""
    limited = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
    if config.run.threads != 1 and not limited:
        logger.warning(
            "PyTorch was imported before agentrl_train, so idle threads spin while others need the core, and "
            "a step can take ten times as long: import agentrl_train first, or set GOMP_SPINCOUNT=3000"
        )


def _call(callback: Callable[[Any], Any] | None, name: str, value: Any) -> Metrics:
    """Call a callback and return its metrics; raises ``CallbackFailed``, which names it."""
    if callback is None:
        return {}
    try:
        found = callback(value)
        metrics = found if isinstance(found, Mapping) else {}
        return {str(key): float(one) for key, one in metrics.items()}
    except Exception as error:  # the code of a user raises anything
        function = getattr(callback, "__qualname__", repr(callback))
        raise CallbackFailed(
            f"the callback {name} ({function}) failed: {type(error).__name__}: {error}; the run ended with a "
            "checkpoint: correct the callback, then continue with resume=True"
        ) from error


def _reward_table(reward: Any) -> dict[str, Any]:
    table = reward if isinstance(reward, Mapping) else {"functions": reward}
    functions = table.get("functions", ())
    whole = isinstance(functions, list | tuple)
    return {**table, "functions": functions if whole else [functions]}


def _apply(table: dict[str, Any], settings: Mapping[str, Any] | Sequence[str]) -> None:
    """Set values of a table by their dotted keys."""
    if not isinstance(settings, Mapping):
        for override in [settings] if isinstance(settings, str) else settings:
            apply_override(table, override)
        return
    for key, value in settings.items():
        set_value(table, key, value, given=f"settings[{key!r}]")


def _next_name(folder: Path, *, latest: bool) -> str:
    """Return the name of a run without one: run-1, run-2 ..., or the latest of them to resume."""
    numbers = [int(one.name[4:]) for one in folder.glob("run-*") if one.name[4:].isdecimal()]
    last = max(numbers, default=0)
    if latest and last:
        return f"run-{last}"
    while (new := (folder / f"run-{last + 1}").resolve()) in _unnamed:
        last += 1
    _unnamed.add(new)
    return new.name


def _absolute(source: str) -> str:
    """Resolve a path, or that of a function or class, against the working directory if it exists there."""
    file, colon, name = source.rpartition(":") if ".py:" in source else (source, "", "")
    path = Path(file).expanduser()
    return f"{path.resolve()}{colon}{name}" if path.exists() else source


def _model_path(model: Any, run: Mapping[str, Any]) -> str:
    """Return the path of a model; a pair of model and tokenizer is written into the run folder."""
    if not isinstance(model, tuple):
        return _absolute(str(model))
    from agentrl_train.placement.ranks import rank
    from agentrl_train.storage.checkpoint import steps

    folder = Path(run.get("folder", "runs")) / run["name"]
    initial = folder / "initial"
    failed = rank() == 0 and not steps(folder / "checkpoints")  # a start that had another model
    if failed or not initial.exists():
        for part in model:
            part.save_pretrained(str(initial))
    return str(initial.resolve())
