"""One replica of a policy: an engine's process, supervised, and the weights it is to hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pacing import Pace
from agentrl_train.engine.process import EngineLink, EngineLost, EngineProcess, Spawn
from agentrl_train.engine.transfer import DeviceWeights, SharedWeights, Weights
from agentrl_train.engine.wire import Frame
from agentrl_train.errors import EngineError, TrainError, WeightMismatch
from agentrl_train.types import Completion, SamplingParams

if TYPE_CHECKING:
    from agentrl_train.engine.native import NativeTransfer

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Times in a row that an engine may be lost, with no completion between, before it is given up."""
LOOK_S = 0.25


class PoolReplica:
    """Keeps one engine up. All of it belongs to one event loop.

    Args:
        options: what the engine's process is told.
        name: for messages.
        policy: name of the policy that it samples from.
        python: the interpreter it runs in.
        start_s: longest time to start.
        liveness_s: longest silence.
        weights: returns what it is to hold, or None for the model that it starts with.
        spawn: where its process runs.
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
        self.pace = Pace(most=options.max_sessions)
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
        self._native: tuple[EngineLink, NativeTransfer] | None = None
        self._failures = 0
        self._began = False
        self._before: dict[str, float] = {}
        self._changing = asyncio.Lock()
        self._up: asyncio.Future[EngineLink] = asyncio.get_running_loop().create_future()
        self._process: EngineLink | None = None
        self._supervision = asyncio.create_task(self._supervise(), name=f"engine {name}")

    @property
    def ready(self) -> bool:
        """Whether requests are answered right away."""
        up = self._up
        return up.done() and up.exception() is None and not up.result().lost.done()

    @property
    def process_id(self) -> int | None:
        """Number of the engine's process, if it is up."""
        return self._up.result().process_id if self.ready else None

    def total(self, name: str) -> float:
        """Return a running total over all of the replica's processes."""
        now = self._process.beat.get(name, 0.0) if self._process else 0.0
        return float(self._before.get(name, 0.0) + now)

    async def generate(
        self, token_ids: Sequence[int], *, sampling: SamplingParams, session_key: str
    ) -> Completion:
        """Sample one completion.

        Raises:
            EngineLost: the engine died over it; another try will find another one.
            EngineError: no engine comes up any more, or it refused.
        """
        async with self.pace:
            engine = await self._engine()
            answer = await engine.ask(
                "generate",
                session=session_key,
                token_ids=list(token_ids),
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                seed=sampling.seed,
            )
        self._failures = 0
        return Completion(
            token_ids=answer["token_ids"],
            logprobs=answer["logprobs"],
            versions=answer["versions"],
            finish_reason=answer["finish_reason"],
            policy=self._policy,
        )

    async def take(self, weights: Weights, *, pause: str) -> None:
        """Return once the engine samples with these weights, whichever process it runs in by then.

        Raises:
            EngineError: no engine comes up any more.
            WeightMismatch: the engine holds other weights after all.
        """
        while self._held is not weights:
            engine = await self._engine()
            async with self._changing:
                try:
                    await self._push(engine, weights, pause=pause)
                except EngineLost as error:
                    logger.info("%s takes weights again: %s", self.name, error)

    async def sleep(self) -> None:
        """Give the devices' memory back; an engine that is lost meanwhile is not started before ``wake``.

        Raises:
            EngineError: no engine comes up any more.
        """
        if self._awake.is_set():
            engine = await self._engine()  # one that is only starting would take the memory a little later
            self._awake.clear()
            with contextlib.suppress(EngineLost):
                await engine.load("sleep")

    async def wake(self) -> None:
        """Return once the engine is awake, or another one is up.

        Raises:
            EngineError: no engine comes up any more.
        """
        if not self._awake.is_set():
            self._awake.set()
            slept = self._process if self.ready else None
            engine = await self._engine()
            if engine is slept:
                with contextlib.suppress(EngineLost):
                    await engine.load("wake")

    async def close(self) -> None:
        """Stop the engine; requests under way fail."""
        self._supervision.cancel()
        await asyncio.wait([self._supervision])
        if self._process is not None:
            await self._process.stop()

    async def _engine(self) -> EngineLink:
        lost = self._up.done() and self._up.exception() is None and not self.ready
        return await asyncio.shield(self._waiting_room() if lost else self._up)

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
        """Send weights by vLLM's own transfer; its blocking end runs in a thread that may be left behind."""
        from agentrl_train.engine.native import NativeTransfer

        loop = asyncio.get_running_loop()

        def step(name: str, info: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(engine.load("transfer", step=name, info=info), loop).result()

        def send() -> None:
            if self._native is None or self._native[0] is not engine:
                ends = NativeTransfer(
                    step,
                    transfer=self._options.transfer,
                    workers=self._options.tensor_parallel,
                    weights=weights,
                )
                self._native = engine, ends
            self._native[1].send(weights)

        await engine.load("pause", pause=pause)
        sending = asyncio.create_task(_in_a_thread_to_leave(send))
        either: list[asyncio.Future[Any]] = [sending, engine.lost]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if engine.lost.done() and self._options.transfer == "nccl":
            # The collective that it died in stays on the learner's GPU, before all that would follow.
            sending.cancel()
            raise EngineError("it was lost while it took weights by NCCL: go on with --resume")
        try:
            await sending
        except (EngineLost, TrainError):
            raise
        except Exception as error:  # the border: vLLM and NCCL raise what they like
            raise EngineError(f"the weight transfer failed: {error}") from error
        return await engine.load(
            "resume", fingerprint=weights.fingerprint, policy_version=weights.policy_version
        )

    async def _supervise(self) -> None:
        """Start the engine, give it its weights, and do so again each time it is lost."""
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
            except Exception as error:  # whatever it is, those who wait for the engine must hear of it
                logger.exception("engine %s could not be started", self.name)
                reason = f"{type(error).__name__}: {error}"
            await process.stop()  # before it is forgotten: closing must find it
            self._before |= {name: self.total(name) for name in process.beat if name != "event"}
            self._process, self._held = None, None
            self._failures += 1
            if not self._began or self._failures >= MOST_FAILURES:
                break
            logger.warning("engine %s was lost and is started again: %s", self.name, reason)
            self.restarts += 1
        self._waiting_room().set_exception(EngineError(f"engine {self.name} is given up: {reason}"))

    async def _start(self, process: EngineLink) -> None:
        await process.start(within_s=self._start_s)
        async with self._changing:
            if (weights := self._weights()) is not None:
                try:
                    async with asyncio.timeout(self._start_s):
                        await self._push(process, weights, pause="keep")
                except TimeoutError:
                    raise EngineError(f"it did not take its weights within {self._start_s:g} s") from None
            self._began = True
            self._waiting_room().set_result(process)

    async def _watch(self, process: EngineLink) -> str:
        """Look after an engine until it is lost; return why."""
        while not process.lost.done():
            await asyncio.wait([process.lost], timeout=LOOK_S)
            process.check()
            self.pace.observe(kv_usage=process.beat["kv_usage"])
        return process.lost.result()

    def _waiting_room(self) -> asyncio.Future[EngineLink]:
        """Return what callers wait on while no engine is up."""
        if self._up.done():
            self._up = asyncio.get_running_loop().create_future()
        return self._up


async def _in_a_thread_to_leave(work: Callable[[], None]) -> None:
    """Run blocking work in a daemon thread: where a peer dies within NCCL, it never returns."""
    loop, done = asyncio.get_running_loop(), Future[None]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # the border of the thread
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="weight transfer", daemon=True).start()
    await asyncio.wrap_future(done, loop=loop)
