"""One engine in a Ray actor: the actor holds the engine's process, on whichever node it is placed."""

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

BEAT_S = 0.25


@ray.remote(num_cpus=0, max_restarts=0)
class EngineHost:
    """The actor. Its answers say what goes wrong with the engine; Ray says what goes wrong with it."""

    async def start(
        self, options: Mapping[str, Any], python: str, liveness_s: float, within_s: float
    ) -> Frame:
        """Start the engine's process and return its number."""
        self._process = EngineProcess(ServingOptions(**options), python=python, liveness_s=liveness_s)
        try:
            await self._process.start(within_s=within_s)
        except EngineError as error:
            await self._process.stop()
            return {"error": str(error)}
        return {"process_id": self._process.process_id}

    async def ask(self, operation: str, fields: Mapping[str, Any]) -> Frame:
        """Pass a request on."""
        return await _told(self._process.ask(operation, **fields))

    async def load(self, operation: str, fields: Mapping[str, Any]) -> Frame:
        """Pass on what stops the engine's steps."""
        return await _told(self._process.load(operation, **fields))

    async def push(self, weights: np.ndarray, fields: Mapping[str, Any]) -> Frame:
        """Give the engine weights that came through Ray's object store, as a file in this node's memory."""
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        try:
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(weights.data)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            return await _told(self._process.load("push", **{**fields, "path": path}))
        finally:
            os.close(descriptor)

    async def beat(self) -> Frame:
        """Return what the engine does, or why it is gone."""
        self._process.check()
        if self._process.lost.done():
            return {"lost": self._process.lost.result()}
        return self._process.beat

    async def stop(self) -> None:
        """End the engine and everything it started."""
        await self._process.stop()


async def _told(answer: Awaitable[Frame]) -> Frame:
    try:
        return await answer
    except EngineLost as error:
        return {"lost": str(error)}
    except EngineError as error:
        return {"error": str(error)}


class Carrier:
    """Puts weights into Ray's object store, once for all engines; the last version is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[tuple[str, int], Any] | None = None

    def reference(self, path: str, policy_version: int) -> Any:
        """Return the reference of what a file holds; blocking."""
        with self._lock:
            # The path alone says nothing: a descriptor's number is used again.
            if self._held is None or self._held[0] != (path, policy_version):
                self._held = (path, policy_version), ray.put(np.fromfile(path, dtype=np.uint8))
            return self._held[1]


class RayEngine:
    """An engine under way in an actor; see ``EngineLink``.

    Args:
        options: what the engine is told.
        python: the interpreter it runs in, on its node.
        liveness_s: longest silence.
        place: returns the actor's options for Ray; called at its start.
        leave: called once the actor is gone.
        carrier: brings weights.
    """

    def __init__(
        self,
        options: ServingOptions,
        *,
        python: str,
        liveness_s: float,
        place: Callable[[], Mapping[str, Any]],
        leave: Callable[[], None],
        carrier: Carrier,
    ) -> None:
        self._options = options
        self._python = python
        self._liveness_s = liveness_s
        self._place = place
        self._leave = leave
        self._carrier = carrier
        self._host: Any = None
        self._heard = time.monotonic()
        self._listening: asyncio.Task[None] | None = None
        self.process_id = 0
        self.beat: Frame = {}
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, *, within_s: float) -> None:
        """Place the actor and wait until its engine serves.

        Raises:
            EngineError: it did not come up.
        """
        self._host = EngineHost.options(**self._place()).remote()  # type: ignore[attr-defined]
        started = self._host.start.remote(asdict(self._options), self._python, self._liveness_s, within_s)
        try:
            async with asyncio.timeout(within_s):
                answer = await started
                self.beat = await self._host.beat.remote()
        except TimeoutError:
            raise EngineError(f"the engine did not start within {within_s:g} s in Ray's cluster") from None
        except RayError as error:
            raise EngineError(f"the engine's actor did not start: {_reason(error)}") from error
        if "error" in answer:
            raise EngineError(answer["error"])
        self.process_id = answer["process_id"]
        self._heard = time.monotonic()
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, operation: str, **fields: Any) -> Frame:
        """Send one request and return its answer; cancelled, it is taken back.

        Raises:
            EngineLost: the engine or its actor is gone.
            EngineError: the engine refused.
        """
        return await self._answer(self._host.ask.remote(operation, fields))

    async def load(self, operation: str, **fields: Any) -> Frame:
        """Ask for what stops the engine's steps; weights are brought to its node."""
        if operation != "push":
            return await self._answer(self._host.load.remote(operation, fields))
        weights = await asyncio.to_thread(self._carrier.reference, fields["path"], fields["policy_version"])
        return await self._answer(self._host.push.remote(weights, fields))

    def check(self) -> None:
        """Give the engine up if its actor has been silent for too long."""
        if (silence := time.monotonic() - self._heard) > self._liveness_s:
            self._lose(f"its actor was silent for {silence:.0f} s")

    async def stop(self) -> None:
        """End the engine and its actor; idempotent."""
        if self._host is None:
            return
        host, self._host = self._host, None
        if self._listening is not None:
            self._listening.cancel()
        try:
            if not self.lost.done():
                with contextlib.suppress(RayError, TimeoutError):
                    async with asyncio.timeout(2 * STOP_S):
                        await host.stop.remote()
        finally:
            self._lose("it was stopped")
            ray.kill(host)
            self._leave()

    async def _listen(self) -> None:
        while not self.lost.done():
            try:
                frame = await self._host.beat.remote()
            except RayError as error:
                self._lose(f"its actor is gone: {_reason(error)}")
                return
            self._heard = time.monotonic()
            if "lost" in frame:
                self._lose(frame["lost"])
            else:
                self.beat = frame
            await asyncio.sleep(BEAT_S)

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
            self._lose(f"its actor is gone: {_reason(error)}")
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
    """Return the line of Ray's message that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
