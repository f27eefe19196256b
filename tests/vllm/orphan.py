"""A trainer that starts an engine, prints its pid and waits to be killed."""

import asyncio
import signal
import sys

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pool import EnginePool
from agentrl_train.types import SamplingParams


async def main(python: str, model: str) -> None:
    options = ServingOptions(
        model=model, stop_token_ids=[2], max_sessions=4, max_context=64, args={"kv_cache_memory_bytes": 2**26}
    )
    engine = EnginePool(options, python=python)
    await engine.generate([5, 6, 7], sampling=SamplingParams(max_new_tokens=2), session_key="a")
    print(engine._all[0].process_id, flush=True)
    signal.pause()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
