"""The process of one vLLM engine: serves ``AsyncLLM`` to the trainer over a socket.

``python -m agentrl_train.engine.vllm DESCRIPTOR OPTIONS`` is started by ``engine.process``. It exits,
with its child processes, when the socket is closed. It runs in an environment with vLLM, which can differ
from the environment of the trainer.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
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

from agentrl_train.engine.constraint import Grammars, Matcher
from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.rpc import Frame, answer_frames, connect
from agentrl_train.engine.transfer import Held, lost_push, mismatch
from agentrl_train.errors import ConstraintError, EngineBroken, not_numbers
from agentrl_train.types import SamplingParams as Requested

GRAMMAR_PROCESSOR = "agentrl_train.engine.vllm_worker:GrammarProcessor"
SPECULATIVE = "speculative_config"
"""Argument of vLLM with which it takes no processors of logits."""
PREFILL_TOKENS = 4096
"""Token budget of one step on a CPU, without chunked prompts (see ``engine_arguments``)."""


class EngineStats(StatLoggerBase):  # type: ignore[misc]  # vLLM need not be here when types are checked
    """Running totals that vLLM updates after each engine step."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all totals to zero."""
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
        """Do nothing: the first heartbeat signals readiness."""

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
    """Return the arguments of vLLM: token ids in and out, no generation defaults from the model folder."""
    chosen: dict[str, Any] = {}
    if options.device == "cpu":
        # Compilation does not pay off on a CPU. On CPUs, vLLM also cannot rewind the random stream of a
        # request after a chunk of its prompt, so prompts are not chunked.
        whole = max(PREFILL_TOKENS, options.max_context)
        chosen |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": whole,
        }
    if SPECULATIVE not in options.args:
        chosen["logits_processors"] = [GRAMMAR_PROCESSOR]
    if options.transfer != "memory":
        chosen["weight_transfer_config"] = WeightTransferConfig(backend=options.transfer)
    return AsyncEngineArgs(
        model=options.model,
        revision=options.revision,
        dtype=options.dtype,
        max_model_len=options.max_context,
        max_num_seqs=options.max_sessions,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        worker_extension_cls="agentrl_train.engine.vllm_worker.WeightReceiver",
        enable_sleep_mode=options.sleeps,
        **{"gpu_memory_utilization": 0.9, "enable_prefix_caching": True} | chosen | dict(options.args),
    )


class Server:
    """Handles the requests of the trainer."""

    def __init__(self, engine: AsyncLLM, stats: EngineStats, options: ServingOptions) -> None:
        self._engine = engine
        self._stats = stats
        self._stop = list(options.stop_token_ids)
        self._speculative = SPECULATIVE in options.args
        self._version = options.policy_version
        self._held: Held | None = None
        self._grammars: Grammars | None = None

    async def begin(self) -> None:
        """Set the version of the initial weights, and sample one token.

        The first request can compile kernels, which blocks the engine long enough to miss heartbeats.
        Therefore heartbeats start after this method has returned.
        """
        await self._engine.update_weight_version(str(self._version))
        await self._generate({"id": "warm-up", "token_ids": [0], **asdict(Requested(max_new_tokens=1))})
        self._stats.reset()

    async def beat(self) -> Frame:
        """Return running totals after a round trip to the engine."""
        await self._engine.get_weight_version()
        return self._stats.frame()

    async def answer(self, frame: Frame) -> Frame:
        """Answer a request; raises ``EngineDeadError`` if the engine is dead."""
        try:
            result: Frame = await getattr(self, f"_{frame['op']}")(frame)
        except EngineDeadError:
            raise
        except Exception as error:  # boundary: the error is returned to the trainer
            refused = isinstance(error, ConstraintError)
            text = str(error) if refused else f"{type(error).__name__}: {error}"
            result = {"error": text, "constraint": refused}
        return result

    async def _generate(self, frame: Frame) -> Frame:
        grammar = frame["grammar"]
        matcher = await asyncio.to_thread(self._matcher, grammar) if grammar else None
        parameters = SamplingParams(
            max_tokens=frame["max_new_tokens"],
            temperature=frame["temperature"],
            top_p=frame["top_p"],
            top_k=frame["top_k"],
            min_p=frame["min_p"],
            seed=frame["seed"],
            stop_token_ids=self._stop,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"grammar": grammar} if grammar else None,
        )
        # The salt separates the prefix caches of different weight versions.
        prompt = {"prompt_token_ids": frame["token_ids"], "cache_salt": str(self._version)}
        final: RequestOutput | None = None
        async for output in self._engine.generate(prompt, parameters, str(frame["id"])):
            final = output
        assert final is not None
        answer = completion(final.outputs[0])
        if not all(map(math.isfinite, answer["logprobs"])):
            raise EngineBroken(not_numbers("engine", self._version))
        if matcher is not None:
            answer["allowed"] = matcher.sets_of(answer["token_ids"]).plain()
        return answer

    def _matcher(self, grammar: str) -> Matcher:
        if self._speculative:
            raise ConstraintError(
                "vLLM cannot follow a grammar with speculative decoding: remove "
                f"engine.vllm.args.{SPECULATIVE}"
            )
        if self._grammars is None:
            self._grammars = Grammars.of_vllm(self._engine.model_config, self._stop)
        return self._grammars.start(grammar)

    async def _push(self, frame: Frame) -> Frame:
        """Update the weights while requests are paused ("keep") or after they finish ("wait")."""
        await self._engine.pause_generation(mode=frame["pause"], clear_cache=True)
        unset = await self._engine.collective_rpc("receive_weights_from", args=(frame["path"],))
        if names := sorted({name for names in unset for name in names}):
            return {"mismatch": f"{len(names)} parameters were not in the push, {names[0]} first"}
        return await self._resume(frame)

    async def _pause(self, frame: Frame) -> Frame:
        await self._engine.pause_generation(mode=frame["pause"], clear_cache=True)
        return {}

    async def _sleep(self, frame: Frame) -> Frame:
        """Free the KV cache and move the weights to host memory. Not every step pushes new weights."""
        await self._engine.sleep(level=1, mode="keep")
        return {}

    async def _wake(self, frame: Frame) -> Frame:
        await self._engine.wake_up()
        return {}

    async def _transfer(self, frame: Frame) -> Frame:
        """Execute one step of a weight transfer that the trainer drives."""
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
        """Resume with the new weights if their fingerprint matches; otherwise sampling stays paused."""
        pushed = frame["fingerprint"], await self._engine.collective_rpc("weight_fingerprint")
        if wrong := self._mismatch(pushed):
            return {"mismatch": wrong}
        self._held = pushed
        self._version = frame["policy_version"]
        await self._engine.update_weight_version(str(self._version))
        await self._engine.resume_generation()
        return {}

    def _mismatch(self, pushed: Held) -> str:
        """Describe how the workers' weights differ from the sent weights. Empty if they are equal.

        Shards are compared with the previous push, so only the canary checks the first push.
        """
        sent, held = pushed
        if len(held) == 1:
            return mismatch(sent=sent, held=held[0])
        return "" if self._held is None else lost_push(before=self._held, after=pushed)


def completion(output: CompletionOutput) -> Frame:
    """Return an output of vLLM as an answer frame."""
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
    """Start the engine and serve the socket ``descriptor``."""
    stats = EngineStats()
    reader, writer = await connect(descriptor)
    engine = AsyncLLM.from_engine_args(engine_arguments(options), stat_loggers=[lambda *_: stats])
    try:
        server = Server(engine, stats, options)
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
        # The child processes of vLLM are in this process group and must not outlive the trainer.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        sys.stderr.flush()
        os._exit(0)  # nothing is left to save, and the threads of vLLM take seconds to finish
