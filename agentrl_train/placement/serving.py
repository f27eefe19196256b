"""The process of one torch engine: the counterpart of ``engine.vllm``, with the same protocol.

``python -m agentrl_train.placement.serving DESCRIPTOR OPTIONS`` is started by ``engine.process`` and
exits when the socket is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import fields

from safetensors import safe_open

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.rpc import Frame, answer_frames, connect
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.engine.transfer import fingerprint, mismatch
from agentrl_train.errors import ConstraintError, EngineBroken, EngineError, EngineOutOfMemory
from agentrl_train.models.architecture import Threads
from agentrl_train.models.loading import copy_of, load_policy
from agentrl_train.types import SamplingParams


class Server:
    """Handles the requests of the trainer."""

    def __init__(self, options: ServingOptions) -> None:
        """Load the model."""
        model, tokenizer = load_policy(options.model, device=options.device, revision=options.revision)
        self._model = copy_of(model, dtype=options.dtype)
        self._engine = TorchEngine(
            {"current": self._model},
            stop_token_ids=options.stop_token_ids,
            tokenizer=tokenizer,
            max_sequences=options.max_sessions,
            max_context=options.max_context,
            deadline_s=options.deadline_s,
            threads=Threads(options.threads),
            policy_version=options.policy_version,
            deterministic=options.deterministic,
        )

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.close()

    async def beat(self) -> Frame:
        """Return running totals after the current step."""
        await asyncio.to_thread(self._engine.ping)
        totals = self._engine.statistics()
        return {
            "sampled": totals["sampled_tokens"],
            "prefilled": totals["prefilled_tokens"],
            "preempted": 0,
            "busy_s": totals["busy_s"],
            "kv_usage": 0.0,
        }

    async def answer(self, frame: Frame) -> Frame:
        """Answer a request. Errors that the engine survives are returned in the answer."""
        try:
            result: Frame = await getattr(self, f"_{frame['op']}")(frame)
        except (EngineBroken, EngineOutOfMemory):
            raise
        except EngineError as error:
            result = {"error": str(error), "constraint": isinstance(error, ConstraintError)}
        return result

    async def _generate(self, frame: Frame) -> Frame:
        sampling = SamplingParams(**{field.name: frame[field.name] for field in fields(SamplingParams)})
        done = await self._engine.generate(
            frame["token_ids"], sampling=sampling, session_key=frame["session"]
        )
        return {
            "token_ids": list(done.token_ids),
            "logprobs": list(done.logprobs),
            "versions": list(done.versions),
            "finish_reason": done.finish_reason,
            "allowed": done.allowed.plain() if done.allowed else None,
        }

    async def _push(self, frame: Frame) -> Frame:
        """Load weights between two decode steps. Return a ``mismatch`` if their fingerprint differs."""
        with safe_open(frame["path"], framework="pt", device="cpu") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        await asyncio.to_thread(self._engine.publish, state, policy_version=frame["policy_version"])
        wrong = mismatch(sent=frame["fingerprint"], held=fingerprint(self._model.named_parameters()))
        return {"mismatch": wrong} if wrong else {}

    async def _sleep(self, frame: Frame) -> Frame:
        await asyncio.to_thread(self._engine.sleep)
        return {}

    async def _wake(self, frame: Frame) -> Frame:
        await asyncio.to_thread(self._engine.wake)
        return {}


async def main(descriptor: int, options: ServingOptions) -> None:
    """Serve the socket ``descriptor``."""
    reader, writer = await connect(descriptor)
    server = Server(options)
    try:
        await answer_frames(reader, writer, answer=server.answer, beat=server.beat)
    except ExceptionGroup as errors:
        # The trainer reads the reason from the last line of the output.
        if (broken := errors.subgroup(EngineError)) is None:
            raise
        sys.exit(f"EngineError: {broken.exceptions[0]}")
    finally:
        await server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), ServingOptions(**json.loads(sys.argv[2]))))
