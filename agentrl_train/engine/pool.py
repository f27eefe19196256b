"""A pool of supervised engine processes with session affinity and in-flight weight updates.

This module does not import vLLM, which can be installed in another environment. ``engine.vllm`` runs in the
process of each replica, and ``engine.vllm_worker`` in the workers of vLLM. A torch engine runs another module
(``ServingOptions.module``). A replica that exits or misses its heartbeats is killed and restarted with the
last published weights, and its requests are retried.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.process import EngineLost, EngineProcess, Spawn
from agentrl_train.engine.replica_supervisor import ReplicaSupervisor
from agentrl_train.engine.torch import while_progress
from agentrl_train.engine.transfer import DeviceWeights, SharedWeights, Weights
from agentrl_train.errors import EngineError
from agentrl_train.models.checkpoint_names import CheckpointNames
from agentrl_train.types import Completion, SamplingParams

logger = logging.getLogger(__name__)

Push = Literal["in_flight", "drained"]
_Result = TypeVar("_Result")


class EnginePool:
    """Serves completions from one or more policies of the same architecture.

    Args:
        options: options of every replica process.
        policies: names of the policies; each has its own replicas.
        replicas: engines per policy: one number for all, or a number for each policy.
        deadline_s: deadline of a weight update, and of any progress while a completion waits.
        start_s: deadline for an engine to start.
        liveness_s: heartbeat timeout after which an engine is killed and restarted.
        push: "in_flight" pauses requests during a weight update and resumes them with the new weights;
            "drained" lets them finish first.
        python: interpreter of the engine processes.
        spawn: creates the engine processes.
        names: converts the names of published weights to the names of a checkpoint; None keeps the names.

    Satisfies ``Engine``, ``WeightSync`` and ``Sleeper``. The engines start in the background; the first
    call waits.
    """

    def __init__(
        self,
        options: ServingOptions,
        *,
        policies: Sequence[str] = ("current",),
        replicas: int | Mapping[str, int] = 1,
        deadline_s: float = 600.0,
        start_s: float = 300.0,
        liveness_s: float = 60.0,
        push: Push = "in_flight",
        python: str = sys.executable,
        spawn: Spawn = EngineProcess,
        names: CheckpointNames | None = None,
    ) -> None:
        self.max_context = options.max_context
        self._dtype = getattr(torch, options.dtype)
        self._transfer = options.transfer
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._pause = "keep" if push == "in_flight" else "wait"
        self._published: dict[str, Weights] = {}
        self._affinity: dict[tuple[str, str], ReplicaSupervisor] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-pool", daemon=True)
        self._thread.start()
        self._replicas: dict[str, list[ReplicaSupervisor]] = {}
        self._spawn = spawn
        self._names = names
        engines = dict.fromkeys(policies, replicas) if isinstance(replicas, int) else replicas
        self._submit(self._open(options, engines, python=python, liveness_s=liveness_s)).result()

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
            ConstraintError: the engine cannot follow the grammar of the request.
            EngineError: the context has no room for ``max_new_tokens``, no engine starts any more, or the
                engine of the session makes no progress. Cancelling the call aborts the request.
        """
        sampling.check_room(token_ids, max_context=self.max_context)
        choose = partial(self._replica_of, session_key, policy)
        call = self._submit(self._retry_until_answered(choose, list(token_ids), sampling, session_key))
        return await asyncio.wrap_future(call)

    def release(self, session_key: str) -> None:
        """Drop the affinity of a session; idempotent. Its cached prefix is evicted when space is needed."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._release, session_key)

    def publish(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        policy_version: int,
        policies: Sequence[str] = ("current",),
    ) -> None:
        """Update the weights of every replica of these policies; return once they are in use.

        Raises:
            EngineError: an engine does not start any more, or missed its deadline.
            WeightMismatch: an engine holds other weights after the update.
        """
        kind = SharedWeights if self._transfer == "memory" else DeviceWeights
        exact: Collection[str] = ()
        if self._names is not None:
            state, exact = self._names(state), self._names.buffers
        weights = kind(state, dtype=self._dtype, policy_version=policy_version, exact=exact)
        self._submit(self._publish(weights, policies)).result()

    def probe(
        self, token_ids: Sequence[int], *, sampling: SamplingParams, policies: Sequence[str]
    ) -> list[Completion]:
        """Return a completion of every replica of these policies. Blocking, like ``publish``."""
        return self._submit(self._probe(list(token_ids), sampling, policies)).result()

    def sleep(self) -> None:
        """Release device memory until ``wake``; requests wait. Blocking, like ``publish``.

        Raises:
            EngineError: an engine missed its deadline.
        """
        self._submit(self._each(ReplicaSupervisor.sleep, "fall asleep")).result()

    def wake(self) -> None:
        """Reclaim the devices; raises like ``sleep``."""
        self._submit(self._each(ReplicaSupervisor.wake, "wake up")).result()

    def statistics(self) -> dict[str, float]:
        """Return running totals: sampled tokens, prefilled tokens, seconds busy (mean of the replicas)."""
        replicas = self._all
        return {
            "sampled_tokens": sum(r.total("sampled") for r in replicas),
            "prefilled_tokens": sum(r.total("prefilled") for r in replicas),
            "busy_s": sum(r.total("busy_s") for r in replicas) / len(replicas),
        }

    @property
    def limits(self) -> list[int]:
        """Current concurrency limit of each engine."""
        return [int(replica.concurrency.limit) for replica in self._all]

    @property
    def restarts(self) -> int:
        """Number of engine restarts."""
        return sum(replica.restarts for replica in self._all)

    async def close(self) -> None:
        """Stop all engines; pending completions fail with ``EngineError``. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    @property
    def _all(self) -> list[ReplicaSupervisor]:
        return [replica for group in self._replicas.values() for replica in group]

    def _submit(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Schedule a coroutine on the event loop of the pool."""
        if self._closed:
            work.close()
            raise EngineError("the engine was closed")
        return asyncio.run_coroutine_threadsafe(self._track(work), self._loop)

    # The methods below run on the event loop of the pool.

    async def _track(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a call that ``close`` cancels."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._closed:
                raise EngineError("the engine was closed") from None
            raise
        finally:
            self._calls.discard(task)

    async def _open(
        self,
        options: ServingOptions,
        engines: Mapping[str, int],
        *,
        python: str,
        liveness_s: float,
    ) -> None:
        share = options.tensor_parallel if options.devices else 0
        for policy, replicas in engines.items():
            self._replicas[policy] = []
            for number in range(replicas):
                first = len(self._all) * share
                self._replicas[policy].append(
                    ReplicaSupervisor(
                        replace(options, devices=options.devices[first : first + share]),
                        name=f"{policy} {number}",
                        policy=policy,
                        python=python,
                        start_s=self._start_s,
                        liveness_s=liveness_s,
                        weights=partial(self._published.get, policy),
                        spawn=self._spawn,
                    )
                )

    async def _close(self) -> None:
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*(replica.close() for replica in self._all))
        for weights in set(self._published.values()):
            weights.close()

    async def _retry_until_answered(
        self,
        choose: Callable[[], ReplicaSupervisor],
        token_ids: list[int],
        sampling: SamplingParams,
        session_key: str,
    ) -> Completion:
        """Send a request, and retry it if its engine is lost."""
        replica = choose()

        async def answer() -> Completion:
            nonlocal replica
            while True:
                try:
                    return await replica.generate(token_ids, sampling=sampling, session_key=session_key)
                except EngineLost as error:
                    logger.info("a request of engine %s is retried: %s", replica.name, error)
                replica = choose()

        def progress() -> tuple[str, float, float]:
            return replica.name, replica.total("sampled"), replica.total("prefilled")

        return await while_progress(answer(), progress=progress, within_s=self._deadline_s)

    def _replica_of(self, session_key: str, policy: str) -> ReplicaSupervisor:
        """Return the replica that caches the session's prefix, or else the one with the fewest sessions."""
        replica = self._affinity.get((session_key, policy))
        if replica is None or not replica.ready:
            sessions = Counter(other.name for other in self._affinity.values())
            replica = min(self._replicas[policy], key=lambda r: (not r.ready, sessions[r.name]))
            self._affinity[session_key, policy] = replica
        return replica

    def _release(self, session_key: str) -> None:
        for policy in self._replicas:
            self._affinity.pop((session_key, policy), None)

    async def _publish(self, weights: Weights, policies: Sequence[str]) -> None:
        before = set(self._published.values())
        self._published.update(dict.fromkeys(policies, weights))
        limit = self._start_s + self._deadline_s
        try:
            async with asyncio.timeout(limit), asyncio.TaskGroup() as updates:
                for policy in policies:
                    for replica in self._replicas[policy]:
                        updates.create_task(replica.update(weights, pause=self._pause))
        except TimeoutError:
            raise EngineError(f"the engine did not load new weights within {limit:g} s") from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for old in before - set(self._published.values()):
                old.close()

    async def _each(self, call: Callable[[ReplicaSupervisor], Coroutine[Any, Any, None]], doing: str) -> None:
        limit = self._start_s + self._deadline_s
        try:
            async with asyncio.timeout(limit):
                await asyncio.gather(*(call(replica) for replica in self._all))
        except TimeoutError:
            raise EngineError(f"the engine did not {doing} within {limit:g} s") from None

    async def _probe(
        self, token_ids: list[int], sampling: SamplingParams, policies: Sequence[str]
    ) -> list[Completion]:
        replicas = [replica for policy in policies for replica in self._replicas[policy]]
        return await asyncio.gather(
            *(self._retry_until_answered(_always(one), token_ids, sampling, "probe") for one in replicas)
        )


def _always(replica: ReplicaSupervisor) -> Callable[[], ReplicaSupervisor]:
    return lambda: replica
