"""An engine without a model, in a process that can be killed. The seed determines each completion.

``python -m tests.chaos.scripted`` answers lines ``{"id", "seed", "longest"}`` with ``{"id", "token_ids"}``.
Its tokens have version -1 (no policy), so their log-probabilities are not compared with the trainer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_train.errors import EngineError
from agentrl_train.types import Completion, SamplingParams

FIRST_BYTE, NUM_BYTES, STOP = 5, 256, 2
"""Token ids of the tests' tokenizer."""
SLOWEST_S = 0.05
ANSWER_S = 10.0


class ScriptedEngine:
    """Implements ``MeasuredEngine`` and ``WeightSync``. The next call replaces a dead process."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[list[int]]] = {}
        self._numbers = itertools.count()
        self._sampled, self._begun = 0, time.monotonic()

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        session_key: str,
        policy: str = "current",
    ) -> Completion:
        """Return a completion from the process. Raises ``EngineError`` if it died or is too slow."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        request = {"id": number, "seed": sampling.seed, "longest": sampling.max_new_tokens}
        try:
            stdin = (await self._running()).stdin
            assert stdin is not None
            stdin.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(ANSWER_S):
                await stdin.drain()
                ids = await answer
        except (OSError, TimeoutError) as error:
            raise EngineError(f"the scripted engine gave no completion: {error!r}") from error
        finally:
            self._waiting.pop(number, None)
        self._sampled += len(ids)
        return Completion(
            token_ids=ids,
            logprobs=[-5.5] * len(ids),
            versions=[-1] * len(ids),
            finish_reason="stop" if ids[-1] == STOP else "length",
            policy=policy,
        )

    def release(self, session_key: str) -> None:
        """Do nothing, because the engine has no session state."""

    def publish(
        self, state: Mapping[str, Any], *, policy_version: int, policies: Sequence[str] = ("current",)
    ) -> None:
        """Do nothing, because the engine has no weights."""

    def statistics(self) -> Mapping[str, float]:
        """Return running totals."""
        busy_s = time.monotonic() - self._begun
        return {"sampled_tokens": float(self._sampled), "prefilled_tokens": 0.0, "busy_s": busy_s}

    async def close(self) -> None:
        """Kill the process."""
        if self._process is not None and self._reading is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _running(self) -> Process:
        async with self._starting:
            process = self._process
            if process is None or process.returncode is not None or process.stdout is None:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tests.chaos.scripted", stdin=PIPE, stdout=PIPE, stderr=DEVNULL
                )
                self._process, self._reading = process, asyncio.create_task(self._read(process))
            return process

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer = json.loads(line)
            waiting = self._waiting.get(answer["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(answer["token_ids"])
        await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineError("the scripted engine died"))


async def serve() -> None:
    """Answer requests until the end of the input."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)

    async def answer(request: dict[str, int]) -> None:
        draw = random.Random(request["seed"])
        await asyncio.sleep(draw.random() * SLOWEST_S)
        ids = [FIRST_BYTE + draw.randrange(NUM_BYTES) for _ in range(draw.randrange(1, request["longest"]))]
        print(json.dumps({"id": request["id"], "token_ids": [*ids, STOP]}), flush=True)

    async with asyncio.TaskGroup() as group:
        while line := await reader.readline():
            group.create_task(answer(json.loads(line)))


if __name__ == "__main__":
    asyncio.run(serve())
