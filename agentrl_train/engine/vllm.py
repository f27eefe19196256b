"""The process of one vLLM engine: ``AsyncLLM`` behind a socket that the trainer holds the other end of.

``python -m agentrl_train.engine.vllm DESCRIPTOR OPTIONS`` is started by ``engine.process``. It ends with
its trainer: a closed socket ends it, and everything it started. It runs in an environment that holds vLLM,
which need not be the trainer's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from agentrl_train.engine.answering import answer_frames, connect
from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.transfer import mismatch
from agentrl_train.engine.wire import Frame

PREFILL_TOKENS = 4096
"""Most tokens of one step on a CPU, where prompts are never split (see ``engine_arguments``)."""


class Tally(StatLoggerBase):  # type: ignore[misc]  # vLLM need not be here when types are checked
    """Running totals of what the engine did, filled in by vLLM after each of its steps."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.sampled = self.prefilled = self.preempted = 0
        self.busy_s = 0.0
        self.kv_usage = 0.0
        self._since: float | None = None

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Count one step."""
        now = time.monotonic()
        if self._since is not None:
            self.busy_s += now - self._since
        if scheduler_stats is not None:
            self.kv_usage = scheduler_stats.kv_cache_usage
            working = scheduler_stats.num_running_reqs + scheduler_stats.num_waiting_reqs
            self._since = now if working else None
        if iteration_stats is not None:
            self.sampled += iteration_stats.num_generation_tokens
            self.prefilled += iteration_stats.prompt_token_stats.computed
            self.preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Say nothing: the trainer hears of it by the first beat."""

    def frame(self) -> Frame:
        """Return the totals."""
        return {
            "sampled": self.sampled,
            "prefilled": self.prefilled,
            "preempted": self.preempted,
            "busy_s": self.busy_s,
            "kv_usage": self.kv_usage,
        }


def engine_arguments(options: ServingOptions) -> AsyncEngineArgs:
    """Return vLLM's arguments: tokens in, tokens out, and nothing drawn from files of defaults."""
    chosen: dict[str, Any] = {}
    if options.device == "cpu":
        # Compiling takes longer than it saves here. On a CPU, vLLM cannot rewind a request's own random
        # stream, which it does after each part of a prompt: prompts stay whole.
        whole = max(PREFILL_TOKENS, options.max_context)
        chosen |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": whole,
        }
    if options.kv_gib is not None:
        chosen["kv_cache_memory_bytes"] = int(options.kv_gib * 2**30)
    if options.transfer != "memory":
        chosen["weight_transfer_config"] = WeightTransferConfig(backend=options.transfer)
    return AsyncEngineArgs(
        model=options.model,
        dtype=options.dtype,
        max_model_len=options.max_context,
        max_num_seqs=options.max_sessions,
        tensor_parallel_size=options.tensor_parallel,
        gpu_memory_utilization=options.memory_fraction,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        worker_extension_cls="agentrl_train.engine.worker.WeightReceiver",
        enable_sleep_mode=options.sleeps,
        **chosen,
    )


class Server:
    """What a trainer may ask of the engine."""

    def __init__(self, engine: AsyncLLM, tally: Tally, options: ServingOptions) -> None:
        self._engine = engine
        self._tally = tally
        self._stop = list(options.stop_token_ids)
        self._version = options.policy_version

    async def begin(self) -> None:
        """Mark what is sampled with the version of the weights that the engine starts with."""
        await self._engine.update_weight_version(str(self._version))

    async def beat(self) -> Frame:
        """Return running totals, once the engine has answered."""
        await self._engine.get_weight_version()
        return self._tally.frame()

    async def answer(self, frame: Frame) -> Frame:
        """Answer a request; raises ``EngineDeadError`` if the engine is dead."""
        try:
            answered: Frame = await getattr(self, f"_{frame['op']}")(frame)
        except EngineDeadError:
            raise
        except Exception as error:  # the border: whatever is wrong with a request is its sender's to hear
            answered = {"error": f"{type(error).__name__}: {error}"}
        return answered

    async def _generate(self, frame: Frame) -> Frame:
        parameters = SamplingParams(
            max_tokens=frame["max_new_tokens"],
            temperature=frame["temperature"],
            seed=frame["seed"],
            stop_token_ids=self._stop,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The salt keeps what one version of the weights has cached from requests of the next.
        prompt = {"prompt_token_ids": frame["token_ids"], "cache_salt": str(self._version)}
        final: RequestOutput | None = None
        async for output in self._engine.generate(prompt, parameters, str(frame["id"])):
            final = output
        assert final is not None
        return completion(final.outputs[0])

    async def _push(self, frame: Frame) -> Frame:
        """Exchange the weights while requests are frozen ("keep") or after they have ended ("wait")."""
        await self._engine.pause_generation(mode=frame["pause"], clear_cache=True)
        unset = await self._engine.collective_rpc("receive_weights_from", args=(frame["path"],))
        if names := sorted({name for names in unset for name in names}):
            return {"mismatch": f"{len(names)} parameters were not in the push, {names[0]} first"}
        return await self._resume(frame)

    async def _pause(self, frame: Frame) -> Frame:
        await self._engine.pause_generation(mode=frame["pause"], clear_cache=True)
        return {}

    async def _sleep(self, frame: Frame) -> Frame:
        """Free the KV cache and keep the weights on the host: not every policy gets new ones each step."""
        await self._engine.sleep(level=1, mode="keep")
        return {}

    async def _wake(self, frame: Frame) -> Frame:
        await self._engine.wake_up()
        return {}

    async def _transfer(self, frame: Frame) -> Frame:
        """Do one step of vLLM's own weight transfer; the trainer's end of it drives the steps."""
        match frame["step"]:
            case "init":
                await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(frame["info"]))
            case "start":
                await self._engine.start_weight_update()
            case "update":
                await self._engine.update_weights(WeightTransferUpdateRequest(frame["info"]))
            case "finish":
                await self._engine.finish_weight_update()
        return {}

    async def _resume(self, frame: Frame) -> Frame:
        """Put the weights in force, if they are what the trainer sent; otherwise nothing is sampled."""
        held = await self._engine.collective_rpc("weight_fingerprint")
        if len(held) == 1 and (wrong := mismatch(sent=frame["fingerprint"], held=held[0])):
            return {"mismatch": wrong}
        self._version = frame["policy_version"]
        await self._engine.update_weight_version(str(self._version))
        await self._engine.resume_generation()
        return {}


def completion(output: CompletionOutput) -> Frame:
    """Return what the trainer needs of vLLM's output."""
    assert output.logprobs is not None
    token_ids = list(output.token_ids)
    versions = [0] * len(token_ids)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
    return {
        "token_ids": token_ids,
        "logprobs": [place[token].logprob for place, token in zip(output.logprobs, token_ids, strict=True)],
        "versions": versions,
        "finish_reason": output.finish_reason,
    }


async def main(descriptor: int, options: ServingOptions) -> None:
    """Start the engine and serve the trainer at the other end of ``descriptor``."""
    tally = Tally()
    reader, writer = await connect(descriptor)
    engine = AsyncLLM.from_engine_args(engine_arguments(options), stat_loggers=[lambda *_: tally])
    try:
        server = Server(engine, tally, options)
        await server.begin()
        await answer_frames(reader, writer, answer=server.answer, beat=server.beat)
    finally:
        engine.shutdown(timeout=1.0)


if __name__ == "__main__":
    try:
        asyncio.run(main(int(sys.argv[1]), ServingOptions(**json.loads(sys.argv[2]))))
    except BaseException:
        traceback.print_exc()
    finally:
        # What vLLM started is in this process's group: nothing of it may outlive the trainer.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        sys.stderr.flush()
        os._exit(0)  # nothing is left to save, and vLLM's threads take seconds to end
