"""One engine in a Ray actor, which runs the engine process on the node that Ray chooses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.process import STOP_S, EngineLost, EngineProcess
from agentrl_train.engine.rpc import Frame
from agentrl_train.errors import EngineError

HEARTBEAT_INTERVAL_S = 0.25


@ray.remote(num_cpus=0, max_restarts=0)
class EngineHost:
    """The actor. It returns errors of the engine as frames. Ray raises errors of the actor itself."""

    async def start(
        self, options: Mapping[str, Any], python: str, liveness_s: float, within_s: float
    ) -> Frame:
        """Start the engine process and return its pid."""
        self._process = EngineProcess(ServingOptions(**options), python=python, liveness_s=liveness_s)
        try:
            await self._process.start(within_s=within_s)
        except EngineError as error:
            await self._process.stop()
            return {"error": str(error)}
        return {"process_id": self._process.process_id}

    async def ask(self, operation: str, fields: Mapping[str, Any]) -> Frame:
        """Forward a request."""
        return await _as_frame(self._process.ask(operation, **fields))

    async def load(self, operation: str, fields: Mapping[str, Any]) -> Frame:
        """Forward a request that blocks the engine."""
        return await _as_frame(self._process.load(operation, **fields))

    async def push(self, weights: np.ndarray, fields: Mapping[str, Any]) -> Frame:
        """Write weights from Ray's object store to an anonymous memory file and load them from there."""
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        try:
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(weights.data)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            return await _as_frame(self._process.load("push", **{**fields, "path": path}))
        finally:
            os.close(descriptor)

    async def beat(self) -> Frame:
        """Return the last heartbeat of the engine, or the reason why it is lost."""
        self._process.check()
        if self._process.lost.done():
            return {"lost": self._process.lost.result()}
        return self._process.beat

    async def stop(self) -> None:
        """Stop the engine and its child processes."""
        await self._process.stop()


async def _as_frame(answer: Awaitable[Frame]) -> Frame:
    try:
        return await answer
    except EngineLost as error:
        return {"lost": str(error)}
    except EngineError as error:
        return {"error": str(error)}


class WeightStore:
    """Puts each version of the weights into Ray's object store once for all engines. Keeps the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[tuple[str, int], Any] | None = None

    def reference(self, path: str, policy_version: int) -> Any:
        """Return the object reference of a weight file. Blocking."""
        with self._lock:
            # The path alone is not a key, because descriptor numbers are reused.
            if self._last is None or self._last[0] != (path, policy_version):
                self._last = (path, policy_version), ray.put(np.fromfile(path, dtype=np.uint8))
            return self._last[1]


class RayEngine:
    """An engine in a Ray actor; implements ``EngineLink``.

    Args:
        options: options of the engine.
        python: interpreter of the engine process.
        liveness_s: heartbeat timeout.
        actor_options: returns the options of the actor when it starts.
        on_stop: called once the actor is stopped.
        weights: transfers weights.
    """

    def __init__(
        self,
        options: ServingOptions,
        *,
        python: str,
        liveness_s: float,
        actor_options: Callable[[], Mapping[str, Any]],
        on_stop: Callable[[], None],
        weights: WeightStore,
    ) -> None:
        self._options = options
        self._python = python
        self._liveness_s = liveness_s
        self._actor_options = actor_options
        self._on_stop = on_stop
        self._weights = weights
        self._host: Any = None
        self._last_heartbeat = time.monotonic()
        self._monitor: asyncio.Task[None] | None = None
        self.process_id = 0
        self.beat: Frame = {}
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, *, within_s: float) -> None:
        """Start the actor and wait until its engine is ready.

        Raises:
            EngineError: the engine or its actor did not start.
        """
        self._host = EngineHost.options(**self._actor_options()).remote()  # type: ignore[attr-defined]
        started = self._host.start.remote(asdict(self._options), self._python, self._liveness_s, within_s)
        try:
            async with asyncio.timeout(within_s):
                answer = await started
                self.beat = await self._host.beat.remote()
        except TimeoutError:
            raise EngineError(f"the engine did not start within {within_s:g} s on Ray") from None
        except RayError as error:
            raise EngineError(f"the actor of the engine did not start: {_reason(error)}") from error
        if "error" in answer:
            raise EngineError(answer["error"])
        self.process_id = answer["process_id"]
        self._last_heartbeat = time.monotonic()
        self._monitor = asyncio.create_task(self._receive_heartbeats())

    async def ask(self, operation: str, **fields: Any) -> Frame:
        """Send a request and return its answer; cancellation aborts the request.

        Raises:
            EngineLost: the engine or its actor is lost.
            EngineError: the engine rejected the request.
        """
        return await self._answer(self._host.ask.remote(operation, fields))

    async def load(self, operation: str, **fields: Any) -> Frame:
        """Send a request that blocks the engine. Weights are sent through Ray's object store."""
        if operation != "push":
            return await self._answer(self._host.load.remote(operation, fields))
        weights = await asyncio.to_thread(self._weights.reference, fields["path"], fields["policy_version"])
        return await self._answer(self._host.push.remote(weights, fields))

    def check(self) -> None:
        """Mark the engine as lost if its actor exceeded the heartbeat timeout."""
        if (silence := time.monotonic() - self._last_heartbeat) > self._liveness_s:
            self._lose(f"its actor sent no heartbeat for {silence:.0f} s")

    async def stop(self) -> None:
        """Stop the engine and its actor; idempotent."""
        if self._host is None:
            return
        host, self._host = self._host, None
        if self._monitor is not None:
            self._monitor.cancel()
        try:
            if not self.lost.done():
                with contextlib.suppress(RayError, TimeoutError):
                    async with asyncio.timeout(2 * STOP_S):
                        await host.stop.remote()
        finally:
            self._lose("it was stopped")
            ray.kill(host)
            self._on_stop()

    async def _receive_heartbeats(self) -> None:
        while not self.lost.done():
            try:
                frame = await self._host.beat.remote()
            except RayError as error:
                self._lose(f"its actor is lost: {_reason(error)}")
                return
            self._last_heartbeat = time.monotonic()
            if "lost" in frame:
                self._lose(frame["lost"])
            else:
                self.beat = frame
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def _answer(self, reference: Any) -> Frame:
        answer = asyncio.ensure_future(reference)
        try:
            await asyncio.wait([answer, self.lost], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineLost(self.lost.result())
            frame: Frame = answer.result()
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayError as error:
            self._lose(f"its actor is lost: {_reason(error)}")
            raise EngineLost(self.lost.result()) from error
        finally:
            answer.cancel()
        if "lost" in frame:
            self._lose(frame["lost"])
            raise EngineLost(frame["lost"])
        if "error" in frame:
            raise EngineError(frame["error"])
        return frame

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)


def _reason(error: BaseException) -> str:
    """Return the last line of Ray's message, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
