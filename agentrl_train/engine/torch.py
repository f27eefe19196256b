"""An engine in this process: any Hugging Face causal LM in PyTorch, on a CPU or a GPU.

Continuous batching in a dedicated thread. Requests join while others decode, and the prefix of a session
stays cached between turns. New weights are loaded between two decode steps, even in the middle of
completions. Every token records the version that sampled it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_train.engine.cache import Drafts, cached_logprobs
from agentrl_train.engine.constraint import Grammars, Matcher
from agentrl_train.engine.scheduler import FIXED_ROWS, Scheduler
from agentrl_train.errors import (
    ConstraintError,
    EngineBroken,
    EngineError,
    EngineOutOfMemory,
    ran_out_of_memory,
)
from agentrl_train.models.architecture import (
    Threads,
    check_logprobs,
    has_masks,
    layer_kinds,
    pack_weights,
    packing_pays,
    probes,
    release_idle_threads,
    repack_weights,
    require_context,
)
from agentrl_train.types import UNTRACED, AllowedSets, Completion, SamplingParams, Trace

logger = logging.getLogger(__name__)
T = TypeVar("T")

TRACK = "engine/torch"
"""Trace track of idle gaps and weight updates."""
SHORTEST_IDLE_S = 1e-3
"""Shorter idle gaps are not traced."""
MAX_REBUILDS = 3
"""Consecutive cache rebuilds without a completion after which the engine fails."""


@dataclass(slots=True, kw_only=True)
class Request:
    """A completion request; ``done`` is called once, in the thread of the engine."""

    session_key: str
    context: Sequence[int]
    sampling: SamplingParams
    done: Callable[[Completion], None]
    failed: Callable[[ConstraintError], None] | None = None
    """Called instead of ``done`` if the constraint cannot be satisfied."""
    matcher: Matcher | None = None
    """Constraint for the tokens after ``token_ids``."""
    uniforms: np.ndarray = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Numbers of the sets that the tokens were drawn from."""
    sets: dict[bytes, int] = field(default_factory=dict)
    """Allowed sets of a constrained request, with their numbers from 1."""

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.sampling.seed)
        self.uniforms = generator.random(self.sampling.max_new_tokens, dtype=np.float32)

    def restart(self) -> None:
        """Discard the sampled tokens. The random numbers stay the same."""
        for sampled in (self.token_ids, self.logprobs, self.versions, self.places):
            sampled.clear()
        if self.matcher is not None:
            self.matcher.restart()

    def add(self, token: int, logprob: float, *, version: int, drawn_from: bytes) -> None:
        """Append a sampled token, drawn from the set of all tokens if ``drawn_from`` is empty."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if drawn_from:
            self.places.append(self.sets.setdefault(drawn_from, len(self.sets) + 1))

    def completion(self, *, finish_reason: str, policy: str) -> Completion:
        """Return the sampled tokens as a completion."""
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=finish_reason,
            policy=policy,
            allowed=AllowedSets(sets=tuple(self.sets), places=self.places) if self.matcher else None,
        )


class TorchEngine:
    """Serves completions from one or more policies of the same architecture.

    Args:
        models: policy name -> model; the engine owns these copies. "current" must be among them.
        stop_token_ids: tokens that end a completion; they are part of it.
        max_sequences: rows of the cache, which hold sequences that decode or wait between turns: one number
            for all policies, or a number for each policy.
        max_context: maximum number of tokens of one sequence.
        deadline_s: seconds in which a pass must be completed while a completion or weight update waits.
        threads: CPU threads, shared with other parts that compute; None keeps the default of PyTorch.
        tokenizer: compiles constraints. Without it, requests with a constraint are rejected.
        deterministic: completions depend, bit for bit, only on the weights and the request, on one machine
            and number of threads. Slower: no prefix caching, padded shapes.

    A failed forward pass loses no completion: the cache is rebuilt with the last published weights, for half
    as many sequences after an out-of-memory error, and every request restarts.

    Satisfies ``Engine``, ``WeightSync`` and ``Sleeper``.
    """

    def __init__(
        self,
        models: Mapping[str, PreTrainedModel],
        *,
        stop_token_ids: Sequence[int],
        max_sequences: int | Mapping[str, int],
        max_context: int,
        deadline_s: float = 600.0,
        threads: Threads | None = None,
        policy_version: int = 0,
        deterministic: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        trace: Trace = UNTRACED,
    ) -> None:
        for model in models.values():
            _require_supported(model, max_context)
        _require_known_attention(models["current"])
        if not deterministic and packing_pays(models["current"]):
            logger.info("packed weights are multiplied faster on this processor")
            for model in models.values():
                pack_weights(model)
        self.max_context = max_context
        self._deadline_s = deadline_s
        self._threads = threads or Threads()
        self._trace = trace
        self._grammars: Grammars | None = None
        if tokenizer is not None:
            size = models["current"].get_output_embeddings().weight.shape[0]
            self._grammars = Grammars(tokenizer, stop_token_ids=stop_token_ids, vocabulary=size)
        drafts = Drafts(stop_token_ids)
        rows = dict.fromkeys(models, max_sequences) if isinstance(max_sequences, int) else max_sequences
        self._replicas = {
            name: Scheduler(
                model,
                name=name,
                stop_token_ids=stop_token_ids,
                num_slots=rows[name],
                max_context=max_context,
                policy_version=policy_version,
                fixed_rows=independent_rows(model) if deterministic else 0,
                drafts=drafts,
            )
            for name, model in models.items()
        }
        self._devices = {name: next(model.parameters()).device for name, model in models.items()}
        self._asleep = False
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._closed = False
        self._failure: EngineError | None = None
        self._waiting: set[Future[Any]] = set()
        self._busy_s = 0.0
        self._progress = 0
        """Passes and commands completed."""
        self._rebuilds: dict[str, tuple[int, int]] = {}
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()
        release_idle_threads()

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        session_key: str,
        policy: str = "current",
    ) -> Completion:
        """Sample one completion after ``token_ids``.

        Raises:
            ConstraintError: the grammar of the request cannot be compiled or satisfied.
            EngineError: the context has no room for ``max_new_tokens``, the engine failed, or it makes no
                progress. Cancelling the call aborts the request.
        """
        sampling.check_room(token_ids, max_context=self.max_context)
        matcher = await self._matcher(sampling.grammar)
        future: Future[Completion] = Future()
        request = Request(
            session_key=session_key,
            context=list(token_ids),
            sampling=sampling,
            done=_resolver(future),
            failed=_rejecter(future),
            matcher=matcher,
        )
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        try:
            self._post(lambda: self._replicas[policy].submit(request))
            return await while_progress(
                asyncio.wrap_future(future),
                progress=lambda: self._progress,
                within_s=self._deadline_s,
            )
        except (EngineError, asyncio.CancelledError):
            self.release(session_key)
            raise

    async def _matcher(self, grammar: str) -> Matcher | None:
        if not grammar:
            return None
        if self._grammars is None:
            raise ConstraintError("this engine has no tokenizer, with which constraints are compiled")
        return await asyncio.to_thread(self._grammars.start, grammar)

    def release(self, session_key: str) -> None:
        """Drop the cache of a session; idempotent."""
        with contextlib.suppress(EngineError):  # a closed or failed engine caches nothing
            self._post(partial(self._abandon, session_key))

    def publish(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        policy_version: int,
        policies: Sequence[str] = ("current",),
    ) -> None:
        """Load weights between two decode steps and return once they are in use.

        Raises:
            EngineError: the engine failed or makes no progress.
        """

        def load() -> None:
            with self._trace.span(TRACK, f"load weights {policy_version}", policies=list(policies)):
                for name in policies:
                    self._replicas[name].load(state, policy_version=policy_version)
                    repack_weights(self._replicas[name].model)

        self._between_steps(load, doing="load new weights")

    def sleep(self) -> None:
        """Release device memory until ``wake``. Active requests then restart. Idempotent.

        Raises:
            EngineError: the engine failed or makes no progress.
        """
        self._between_steps(self._fall_asleep, doing="fall asleep")

    def wake(self) -> None:
        """Reclaim the device. Idempotent. Raises the errors of ``sleep``."""
        self._between_steps(self._wake_up, doing="wake up")

    def ping(self) -> None:
        """Return after the current step. Raises the errors of ``sleep``."""
        self._between_steps(lambda: None, doing="end a step")

    @property
    def max_sequences(self) -> int:
        """Return the number of sequences per policy that fit. Out-of-memory errors reduce it."""
        return min(replica.num_slots for replica in self._replicas.values())

    def statistics(self) -> dict[str, float]:
        """Return running totals.

        ``reprefilled_tokens`` are prefilled tokens that were cached before, under older weights or in a row
        that was evicted. ``abandoned_tokens`` were sampled for requests that were cancelled or restarted.
        """
        replicas = self._replicas.values()
        return {
            "sampled_tokens": float(sum(r.num_sampled for r in replicas)),
            "prefilled_tokens": float(sum(r.num_prefilled for r in replicas)),
            "reprefilled_tokens": float(sum(r.num_reprefilled for r in replicas)),
            "abandoned_tokens": float(sum(r.num_abandoned for r in replicas)),
            "busy_s": self._busy_s,
        }

    async def close(self) -> None:
        """Stop the engine; pending completions fail with ``EngineError``. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, 30.0)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._failure is not None:
                raise type(self._failure)(str(self._failure)) from self._failure
            if self._closed:
                raise EngineError("the engine was closed")
            self._inbox.append(command)
            self._wake.notify()

    def _between_steps(self, command: Callable[[], None], *, doing: str) -> None:
        """Run a command in the engine thread and wait for it."""
        done: Future[None] = Future()

        def run() -> None:
            command()
            done.set_result(None)

        self._waiting.add(done)
        try:
            self._post(run)
            before = self._progress
            while not wait((done,), timeout=self._deadline_s).done:
                if self._progress == before:
                    raise EngineError(f"the engine did not {doing} within {self._deadline_s:g} s")
                before = self._progress
            done.result()
        finally:
            self._waiting.discard(done)

    def _fall_asleep(self) -> None:
        if self._asleep:
            return
        self._asleep = True
        for name, replica in self._replicas.items():
            self._replicas[name] = replica.rebuilt(num_slots=replica.num_slots)
            _move(replica.model, torch.device("cpu"))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _wake_up(self) -> None:
        for name, replica in self._replicas.items():
            _move(replica.model, self._devices[name])
        self._asleep = False

    def _abandon(self, session_key: str) -> None:
        for replica in self._replicas.values():
            replica.abandon(session_key)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_commands():
                    if self._has_work():
                        self._run_passes()
            self._fail_waiting(EngineError("the engine was closed"))
        except EngineError as error:
            self._fail(error)
        except BaseException as error:  # thread boundary: waiting callers must get the error
            logger.exception("the engine thread failed")
            self._fail(EngineBroken(f"the engine failed: {error}"))

    def _run_passes(self) -> None:
        """Run one step of each policy that has work."""
        started = time.perf_counter()
        with self._threads.working():
            for name, replica in list(self._replicas.items()):
                if replica.busy:
                    self._step(name, replica)
        self._busy_s += time.perf_counter() - started

    def _step(self, name: str, replica: Scheduler) -> None:
        """Run one step; after an error, rebuild the scheduler and restart its requests."""
        try:
            replica.step()
        except EngineBroken:
            raise
        except Exception as error:
            slots = replica.num_slots
            if ran_out_of_memory(error):
                if slots == 1:
                    raise EngineOutOfMemory(
                        f"the engine has no memory for one sequence of {self.max_context} tokens: "
                        "lower engine.max_context, or use a smaller model"
                    ) from error
                slots //= 2
                logger.warning(
                    "the engine is out of memory and continues with %d concurrent sequences", slots
                )
            else:
                self._count_failure(name, replica, error)
                logger.warning("the engine failed (%s); its requests are restarted", error, exc_info=error)
        else:
            self._progress += 1
            return
        # Outside the handler, so that the traceback no longer references tensors.
        self._replicas[name] = replica.rebuilt(num_slots=slots)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _count_failure(self, name: str, replica: Scheduler, error: Exception) -> None:
        completed, times = self._rebuilds.get(name, (-1, 0))
        times = times + 1 if completed == replica.num_completed else 1
        self._rebuilds[name] = (replica.num_completed, times)
        if times > MAX_REBUILDS:
            raise EngineBroken(f"the engine failed {times} times in a row: {error}") from error

    def _fail(self, error: EngineError) -> None:
        self._failure = error
        self._fail_waiting(error)

    def _take_commands(self) -> bool:
        """Run posted commands, waiting while the engine is idle; return False once closed."""
        slept = time.monotonic()
        if not (self._inbox or self._has_work()):
            release_idle_threads()
        with self._wake:
            while not (self._inbox or self._closed or self._has_work()):
                self._wake.wait(1.0)
            commands, self._inbox = self._inbox, []
            if self._closed:
                return False
        if time.monotonic() - slept > SHORTEST_IDLE_S:
            self._trace.mark(TRACK, "idle", since=slept)
        for command in commands:
            command()
            self._progress += 1
        return True

    def _has_work(self) -> bool:
        return not self._asleep and any(replica.busy for replica in self._replicas.values())

    def _fail_waiting(self, error: EngineError) -> None:
        for future in list(self._waiting):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)


async def while_progress(work: Awaitable[T], *, progress: Callable[[], object], within_s: float) -> T:
    """Await ``work`` for as long as an engine makes progress.

    Args:
        work: the awaitable. It is cancelled if this call raises.
        progress: returns a value that changes with each unit of progress, such as a count of passes.
        within_s: the wait ends after this many seconds without progress, or at most twice as many.

    Raises:
        EngineError: ``progress`` returned the same value for ``within_s``.
    """
    task = asyncio.ensure_future(work)
    try:
        before = progress()
        while not (await asyncio.wait((task,), timeout=within_s))[0]:
            now = progress()
            if now == before:
                raise EngineError(f"the engine made no progress for {within_s:g} s")
            before = now
        return task.result()
    finally:
        if task.cancel():
            await asyncio.wait((task,))


def _resolver(future: Future[Completion]) -> Callable[[Completion], None]:
    def done(completion: Completion) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled concurrently
            future.set_result(completion)

    return done


def _rejecter(future: Future[Completion]) -> Callable[[EngineError], None]:
    def failed(error: EngineError) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled concurrently
            future.set_exception(error)

    return failed


def _move(model: PreTrainedModel, device: torch.device) -> None:
    module: torch.nn.Module = model  # transformers' own ``to`` loses its types in a decorator
    with torch.inference_mode(False):  # new weights cannot be copied into inference tensors
        module.to(device)


def _require_supported(model: PreTrainedModel, max_context: int) -> None:
    if not has_masks(model):
        kinds = ", ".join(sorted(layer_kinds(model)))
        raise EngineError(
            f"engine.kind = 'torch' does not support models with layers of type {kinds}: "
            "set engine.kind = 'vllm'"
        )
    try:
        require_context(model.config, max_context)
    except ValueError as error:
        raise EngineError(str(error)) from error


@torch.inference_mode()
def _require_known_attention(model: PreTrainedModel) -> None:
    """Raise ``EngineError`` if a model with its own attention has other log-probabilities."""
    sequences, used = probes(model), model.config._attn_implementation
    try:
        check_logprobs(model, zip(sequences, cached_logprobs(model, sequences), strict=True))
    except Exception as error:  # a model with an attention of its own can fail in any way
        if ran_out_of_memory(error):
            return  # the first pass handles it
        raise EngineError(
            f"engine.kind = 'torch' does not support {type(model).__name__} ({error}): set engine.kind = "
            "'vllm', or use a model of another architecture"
        ) from error
    finally:
        model.set_attn_implementation(used)


@torch.inference_mode()
def independent_rows(model: PreTrainedModel, *, wanted: int = FIXED_ROWS) -> int:
    """Return how many rows can share a pass: ``wanted`` if position and neighbours change no bit, else 1.

    Each token of a batch is tried at every position.
    """
    device = next(model.parameters()).device
    vocabulary = model.get_output_embeddings().weight.shape[0]
    tokens = torch.arange(wanted, device=device) * 7919 % vocabulary
    head = model.get_output_embeddings()

    def logits(shift: int) -> torch.Tensor:
        hidden = model.base_model(input_ids=tokens.roll(shift)[:, None], use_cache=False)[0]
        rolled: torch.Tensor = head(hidden[:, -1]).log_softmax(-1)
        return rolled.roll(-shift, dims=0)

    first = logits(0)
    same = all(torch.equal(first, logits(shift)) for shift in range(1, wanted))
    return wanted if same else 1
