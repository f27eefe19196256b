"""Speed of a model on this machine: prefill, decode and update, measured within seconds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl_train.batch import pack
from agentrl_train.config import EngineSection, TrainSection
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.learner import Learner
from agentrl_train.models.architecture import context_limit
from agentrl_train.models.loading import copy_of, with_dtype
from agentrl_train.planning.tokens import StepTokens
from agentrl_train.types import SamplingParams, TokenSequence

BUDGET_S = 20.0
"""Time limit of a measurement in seconds."""
TRIED = 32
"""Tokens of the first pass. Its duration determines the sizes of the other passes."""
DECODED = 128
"""Largest number of tokens to decode."""
UPDATE_COST = 5.0
"""Largest ratio of the time of a token in an update to its time in a prefill."""
PRODUCT = 512
"""Width of the matrices that are multiplied to compare dtypes."""
SHORTEST_ROW = 64
"""Tokens of the smaller of the two measured updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed of engine and learner."""

    prefill: float
    """Tokens per second."""
    decode: float
    """Sampled tokens per second, of all sessions together."""
    sessions: int
    """Sessions that were decoded together."""
    update: float
    """Tokens per second of an update."""
    update_s: float
    """Seconds of an update that do not depend on its tokens, mostly for the optimizer."""
    seconds: float
    """Duration of the measurement."""

    def engine_s(self, step: StepTokens) -> float:
        """Return the seconds that the engine needs for a step."""
        return step.prefilled / self.prefill + step.sampled / self.decode

    def learner_s(self, step: StepTokens, *, updates: int) -> float:
        """Return the seconds that the learner needs for a step."""
        return updates * self.update_s + step.trained / self.update


def measure(
    model: PreTrainedModel,
    *,
    engine: EngineSection,
    train: TrainSection,
    sessions: int,
    context: int,
    budget_s: float = BUDGET_S,
) -> Rates:
    """Measure a loaded model. The measured update changes it.

    The engine runs in this process. Sizes are selected so that the measurement ends in time. On a slow
    machine there are fewer sessions and shorter contexts, which makes decoding look slower than it is.

    Args:
        model: the policy, with its weights.
        engine: settings of the engine.
        train: settings of the learner.
        sessions: concurrent episodes.
        context: typical length of a context when a turn starts.
        budget_s: seconds that the measurement can take.
    """
    started = time.perf_counter()
    context = min(context, context_limit(model.config) or context)
    prefill, decode, sessions = asyncio.run(
        _measure_engine(model, engine, sessions=sessions, context=context, budget_s=budget_s / 2)
    )
    left_s = budget_s - (time.perf_counter() - started)
    rate, fixed_s = _measure_update(model, train, prefill=prefill, length=context, budget_s=left_s)
    return Rates(
        prefill=prefill,
        decode=decode,
        sessions=sessions,
        update=rate,
        update_s=fixed_s,
        seconds=time.perf_counter() - started,
    )


async def _measure_engine(
    model: PreTrainedModel, engine: EngineSection, *, sessions: int, context: int, budget_s: float
) -> tuple[float, float, int]:
    """Return prefilled and decoded tokens per second, and the number of sessions."""
    rng = np.random.default_rng(0)
    vocabulary = model.config.get_text_config().vocab_size
    longest = context + TRIED + 2 * DECODED
    max_context = min(longest, context_limit(model.config) or longest)
    torch_engine = TorchEngine(
        {"current": copy_of(model, dtype=with_dtype(engine, model).dtype, device=engine.device)},
        stop_token_ids=(),
        max_sequences=sessions,
        max_context=max_context,
    )

    seeds = count()

    async def timed(prompts: list[list[int]], new: int) -> float:
        begin = time.perf_counter()
        await asyncio.gather(
            *(
                torch_engine.generate(
                    prompt,
                    sampling=SamplingParams(max_new_tokens=new, seed=next(seeds)),
                    session_key=str(number),
                )
                for number, prompt in enumerate(prompts)
            )
        )
        return time.perf_counter() - begin

    try:
        await timed([rng.integers(0, vocabulary, TRIED).tolist()], 1)
        token_s = await timed([rng.integers(0, vocabulary, TRIED).tolist()], 1) / TRIED
        tokens = max(TRIED, int(budget_s / 2 / token_s))
        sessions = max(1, min(sessions, tokens // TRIED))
        length = max(TRIED, min(context, max_context - 1 - DECODED, tokens // sessions))
        prompts = [rng.integers(0, vocabulary, length).tolist() for _ in range(sessions)]
        prefill = sessions * length / await timed(prompts, 1)
        pass_s = await timed(prompts, 2) / 2
        new = int(min(DECODED, max_context - 1 - length, max(4, budget_s / 4 / pass_s)))
        first_s, all_s = await timed(prompts, 1), await timed(prompts, 1 + new)
        return prefill, sessions * new / max(1e-9, all_s - first_s), sessions
    finally:
        await torch_engine.close()


def _measure_update(
    model: PreTrainedModel, train: TrainSection, *, prefill: float, length: int, budget_s: float
) -> tuple[float, float]:
    """Return the tokens per second of an update, and its fixed cost in seconds."""
    settings = train.model_copy(update={"learning_rate": 1e-12, "warmup_steps": 0})
    learner = Learner(model, settings)
    vocabulary = model.config.get_text_config().vocab_size

    def update(tokens: int) -> float:
        sizes = [min(length, tokens - begin) for begin in range(0, tokens, length)]
        batches = pack(
            [_episode(size, vocabulary, seed=number) for number, size in enumerate(sizes)],
            aggregation="token_mean",
            max_tokens=tokens,
            packed=learner.packs_rows,
            shared=learner.shares_prefixes,
        )
        # The first update of a size is slow, because it allocates memory and compiles kernels.
        return min(learner.step(batches)["seconds"] for _ in range(2))

    short_s = update(SHORTEST_ROW)
    affordable = (budget_s - 2 * short_s) / 4 * prefill / UPDATE_COST
    tokens = int(min(train.micro_batch_tokens, affordable))
    if tokens < 2 * SHORTEST_ROW:  # there is no time for a larger update
        return SHORTEST_ROW / short_s, 0.0
    long_s = update(tokens)
    token_s = (long_s - short_s) / (tokens - SHORTEST_ROW)
    if token_s <= 0:  # too small to tell apart
        return tokens / long_s, 0.0
    return 1 / token_s, max(0.0, short_s - SHORTEST_ROW * token_s)


def _episode(tokens: int, vocabulary: int, *, seed: int) -> TokenSequence:
    """Return a random episode. Half of its tokens are sampled."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(tokens) // 32 % 2).astype(np.float32)
    return TokenSequence(
        token_ids=rng.integers(0, vocabulary, tokens),
        loss_mask=mask,
        logprobs=mask * np.float32(-np.log(vocabulary)),
        versions=np.where(mask > 0, 0, -1),
        advantages=mask * rng.normal(size=tokens).astype(np.float32),
        task="random",
        group_id=seed,
    )


def product_rates(device: str) -> dict[str, float]:
    """Return the floating-point operations per second of a matrix product in each dtype."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.randn(PRODUCT, PRODUCT, device=device).to(dtype) for _ in range(2))
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            (left @ right).sum().item()  # waits for a GPU
            seconds.append(time.perf_counter() - begin)
        rates[str(dtype).removeprefix("torch.")] = 2.0 * PRODUCT**3 / min(seconds)
    return rates
