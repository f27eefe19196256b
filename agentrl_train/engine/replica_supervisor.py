"""Supervision of one engine process: restarts, the weights it must hold, and how many requests it gets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.process import EngineLink, EngineLost, EngineProcess, Spawn
from agentrl_train.engine.rpc import Frame
from agentrl_train.engine.transfer import DeviceWeights, SharedWeights, Weights
from agentrl_train.errors import EngineError, TrainError, WeightMismatch
from agentrl_train.types import AllowedSets, Completion, SamplingParams

if TYPE_CHECKING:
    from agentrl_train.engine.nccl_transfer import NcclTransfer

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Consecutive failures without a completion after which the supervisor stops restarting."""
POLL_INTERVAL_S = 0.25
HIGH, LOW = 0.95, 0.8
"""KV cache utilization above which the limit is cut, and below which it can grow."""
CUT, GROWTH = 0.7, 2.0


class ReplicaSupervisor:
    """Keeps one engine running, with the current weights. It belongs to one event loop.

    Args:
        options: options of the engine process.
        name: name of the engine in messages.
        policy: name of its policy.
        python: interpreter of the process.
        start_s: start deadline.
        liveness_s: heartbeat timeout.
        weights: returns the weights to hold, or None for the initial model.
        spawn: creates the process.
    """

    def __init__(
        self,
        options: ServingOptions,
        *,
        name: str,
        policy: str,
        python: str,
        start_s: float,
        liveness_s: float,
        weights: Callable[[], Weights | None],
        spawn: Spawn = EngineProcess,
    ) -> None:
        self.name = name
        self.restarts = 0
        self.concurrency = ConcurrencyLimit(most=options.max_sessions)
        self._policy = policy
        self._options = options
        self._python = python
        self._start_s = start_s
        self._liveness_s = liveness_s
        self._weights = weights
        self._spawn = spawn
        self._awake = asyncio.Event()
        self._awake.set()
        self._held: Weights | None = None
        self._native: tuple[EngineLink, NcclTransfer] | None = None
        self._failures = 0
        self._began = False
        self._before: dict[str, float] = {}
        self._changing = asyncio.Lock()
        self._up: asyncio.Future[EngineLink] = asyncio.get_running_loop().create_future()
        self._process: EngineLink | None = None
        self._supervision = asyncio.create_task(self._supervise(), name=f"engine {name}")

    @property
    def ready(self) -> bool:
        """Return True if the engine is running."""
        up = self._up
        return up.done() and up.exception() is None and not up.result().lost.done()

    @property
    def process_id(self) -> int | None:
        """Return the pid of the engine, or None if it is not running."""
        return self._up.result().process_id if self.ready else None

    def total(self, name: str) -> float:
        """Return a running total over all processes of the replica."""
        now = self._process.beat.get(name, 0.0) if self._process else 0.0
        return float(self._before.get(name, 0.0) + now)

    async def generate(
        self, token_ids: Sequence[int], *, sampling: SamplingParams, session_key: str
    ) -> Completion:
        """Sample one completion.

        Raises:
            EngineLost: the engine was lost; a retry uses another process.
            EngineError: no engine starts any more, or it rejected the request.
        """
        async with self.concurrency:
            engine = await self._engine()
            answer = await engine.ask(
                "generate",
                session=session_key,
                token_ids=list(token_ids),
                **asdict(sampling),
            )
        self._failures = 0
        return Completion(
            token_ids=answer["token_ids"],
            logprobs=answer["logprobs"],
            versions=answer["versions"],
            finish_reason=answer["finish_reason"],
            policy=self._policy,
            allowed=AllowedSets.of_plain(answer["allowed"]) if answer.get("allowed") else None,
        )

    async def update(self, weights: Weights, *, pause: str) -> None:
        """Return once the engine samples with these weights, across restarts.

        Raises:
            EngineError: no engine starts any more.
            WeightMismatch: the engine holds other weights after the update.
        """
        while self._held is not weights:
            engine = await self._engine()
            async with self._changing:
                try:
                    await self._push(engine, weights, pause=pause)
                except EngineLost as error:
                    logger.info("engine %s was lost and loads its weights again: %s", self.name, error)

    async def sleep(self) -> None:
        """Release device memory. An engine that is lost meanwhile is not restarted before ``wake``.

        Raises:
            EngineError: no engine starts any more.
        """
        if self._awake.is_set():
            engine = await self._engine()  # an engine still starting would allocate the memory later
            self._awake.clear()
            with contextlib.suppress(EngineLost):
                await engine.load("sleep")

    async def wake(self) -> None:
        """Return once the engine is awake or another one is running.

        Raises:
            EngineError: no engine starts any more.
        """
        if not self._awake.is_set():
            self._awake.set()
            slept = self._process if self.ready else None
            engine = await self._engine()
            if engine is slept:
                with contextlib.suppress(EngineLost):
                    await engine.load("wake")

    async def close(self) -> None:
        """Stop the engine; pending requests fail."""
        self._supervision.cancel()
        await asyncio.wait([self._supervision])
        if self._process is not None:
            await self._process.stop()

    async def _engine(self) -> EngineLink:
        lost = self._up.done() and self._up.exception() is None and not self.ready
        return await asyncio.shield(self._future_engine() if lost else self._up)

    async def _push(self, engine: EngineLink, weights: Weights, *, pause: str) -> None:
        if self._held is weights:
            return
        if isinstance(weights, SharedWeights):
            answer = await self._share(engine, weights, pause)
        else:
            answer = await self._transfer(engine, weights, pause)
        if "mismatch" in answer:
            raise WeightMismatch(
                f"engine {self.name} does not hold policy version {weights.policy_version}: "
                f"{answer['mismatch']}"
            )
        self._held = weights

    async def _share(self, engine: EngineLink, weights: SharedWeights, pause: str) -> Frame:
        return await engine.load(
            "push",
            path=weights.path,
            fingerprint=weights.fingerprint,
            policy_version=weights.policy_version,
            pause=pause,
        )

    async def _transfer(self, engine: EngineLink, weights: DeviceWeights, pause: str) -> Frame:
        """Send weights over NCCL; the blocking sender runs in a thread that can be abandoned."""
        from agentrl_train.engine.nccl_transfer import NcclTransfer

        loop = asyncio.get_running_loop()

        def step(name: str, info: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(engine.load("transfer", step=name, info=info), loop).result()

        def send() -> None:
            if self._native is None or self._native[0] is not engine:
                ends = NcclTransfer(
                    step,
                    workers=self._options.tensor_parallel,
                    weights=weights,
                )
                self._native = engine, ends
            self._native[1].send(weights)

        await engine.load("pause", pause=pause)
        sending = asyncio.create_task(_in_daemon_thread(send))
        either: list[asyncio.Future[Any]] = [sending, engine.lost]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if engine.lost.done():
            # The unfinished collective stays queued on the learner's GPU and blocks all later work.
            sending.cancel()
            raise EngineError(
                "the engine was lost during a weight transfer over NCCL: continue with --resume"
            )
        try:
            await sending
        except (EngineLost, TrainError):
            raise
        except Exception as error:  # boundary: vLLM and NCCL raise errors of any type
            raise EngineError(f"the weight transfer failed: {error}") from error
        return await engine.load(
            "resume", fingerprint=weights.fingerprint, policy_version=weights.policy_version
        )

    async def _supervise(self) -> None:
        """Start the engine with its weights, and restart it whenever it is lost."""
        while True:
            await self._awake.wait()
            process = self._process = self._spawn(
                self._options, python=self._python, liveness_s=self._liveness_s
            )
            try:
                await self._start(process)
                reason = await self._watch(process)
            except (TrainError, EngineLost) as error:
                reason = str(error)
            except Exception as error:  # boundary: waiting callers must see the error
                logger.exception("engine %s could not be started", self.name)
                reason = f"{type(error).__name__}: {error}"
            await process.stop()  # before the reference is dropped: close() needs it
            self._before |= {name: self.total(name) for name in process.beat if name != "event"}
            self._process, self._held = None, None
            self._failures += 1
            if not self._began or self._failures >= MOST_FAILURES:
                break
            logger.warning("engine %s was lost and is restarted: %s", self.name, reason)
            self.restarts += 1
        up = self._future_engine()
        up.set_exception(EngineError(f"engine {self.name} is not restarted any more: {reason}"))
        up.exception()  # marks the exception as retrieved: there may be no waiting request

    async def _start(self, process: EngineLink) -> None:
        await process.start(within_s=self._start_s)
        async with self._changing:
            if (weights := self._weights()) is not None:
                try:
                    async with asyncio.timeout(self._start_s):
                        await self._push(process, weights, pause="keep")
                except TimeoutError:
                    raise EngineError(f"it did not load its weights within {self._start_s:g} s") from None
            self._began = True
            self._future_engine().set_result(process)

    async def _watch(self, process: EngineLink) -> str:
        """Monitor the engine until it is lost; return the reason."""
        while not process.lost.done():
            await asyncio.wait([process.lost], timeout=POLL_INTERVAL_S)
            process.check()
            self.concurrency.observe(kv_usage=process.beat["kv_usage"], preemptions=self.total("preempted"))
        return process.lost.result()

    def _future_engine(self) -> asyncio.Future[EngineLink]:
        """Return the future that callers await while no engine is running."""
        if self._up.done():
            self._up = asyncio.get_running_loop().create_future()
        return self._up


async def _in_daemon_thread(work: Callable[[], None]) -> None:
    """Run blocking work in a daemon thread: a call into NCCL never returns if its peer dies."""
    loop, done = asyncio.get_running_loop(), Future[None]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # boundary of the thread
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="weight transfer", daemon=True).start()
    await asyncio.wrap_future(done, loop=loop)


def next_limit(limit: float, *, most: int, kv_usage: float, preempted: bool, saturated: bool) -> float:
    """Return the next limit: additive increase, multiplicative decrease (AIMD).

    Args:
        limit: the current limit.
        most: upper bound.
        kv_usage: share of the KV cache that running requests hold, 0 to 1.
        preempted: True if requests lost their cache since the last call. Between two observations the cache
            can fill and empty again.
        saturated: True if requests wait because of the limit. A limit that is not reached does not grow.
    """
    if preempted or kv_usage > HIGH:
        return max(1.0, limit * CUT)
    if saturated and kv_usage < LOW:
        return min(float(most), limit + GROWTH)
    return limit


class ConcurrencyLimit:
    """Admits requests in FIFO order up to a limit that follows the use of the KV cache (AIMD)."""

    def __init__(self, *, most: int) -> None:
        self.limit = float(most)
        self.active = 0
        self._most = most
        self._preemptions = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def load(self) -> int:
        """Number of active and waiting requests."""
        return self.active + len(self._waiting)

    def observe(self, *, kv_usage: float, preemptions: float) -> None:
        """Adjust the limit to the reported KV cache utilization and the running total of preemptions."""
        preempted, self._preemptions = preemptions > self._preemptions, preemptions
        self.limit = next_limit(
            self.limit,
            most=self._most,
            kv_usage=kv_usage,
            preempted=preempted,
            saturated=bool(self._waiting),
        )
        self._admit()

    async def __aenter__(self) -> None:
        """Wait for admission."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._leave()
            elif place in self._waiting:
                self._waiting.remove(place)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the admission."""
        self._leave()

    def _leave(self) -> None:
        self.active -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.active < int(self.limit):
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self.active += 1
