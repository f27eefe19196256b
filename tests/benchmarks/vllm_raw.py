"""Raw vLLM for ``tests.benchmarks.vllm``, run by the interpreter with vLLM. Each line of input is one pass.

A line is ``[prompts, lengths]``. The answer is the time of ``AsyncLLM`` for all prompts at once, in seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.vllm import engine_arguments


async def main(options: ServingOptions) -> None:
    """Answer each line until the end of the input."""
    engine = AsyncLLM.from_engine_args(engine_arguments(options))
    print("ready", flush=True)
    number = 0

    async def complete(name: str, prompt: list[int], length: int, seed: int) -> None:
        parameters = SamplingParams(
            max_tokens=length,
            seed=seed,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for _ in engine.generate({"prompt_token_ids": prompt}, parameters, name):
            pass

    while line := await asyncio.to_thread(sys.stdin.readline):
        prompts, lengths = json.loads(line)
        number += 1
        started = time.perf_counter()
        await asyncio.gather(
            *(
                complete(f"{number}-{i}", prompt, length, i)
                for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            )
        )
        print(f"seconds {time.perf_counter() - started}", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(ServingOptions(**json.loads(sys.argv[1]))))
