"""Constrained decoding on vLLM, compared with a renormalized reference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agentrl_train.engine.constraint import Grammars, unpack_sets
from agentrl_train.engine.pool import EnginePool
from agentrl_train.errors import ConstraintError
from agentrl_train.types import Completion, SamplingParams
from tests.engine_contract import STOP, VOCABULARY, contract_model
from tests.tiny_models import make_tokenizer

pytestmark = pytest.mark.vllm

TOKENIZER = make_tokenizer()
GRAMMAR = 'start: "the answer is " /[0-9]{2,6}/ (" and " /[a-c]{1,8}/)?'
PROMPT = list(range(20, 50))


async def complete(engine: EnginePool, key: str, *, grammar: str = GRAMMAR, **options: float) -> Completion:
    sampling = SamplingParams(**{"max_new_tokens": 40, "seed": 5, "grammar": grammar} | options)  # type: ignore[arg-type]
    return await engine.generate(PROMPT, sampling=sampling, session_key=key)


@torch.no_grad()
def renormalized(token_ids: list[int], *, seed: int, temperature: float) -> list[float]:
    """Return a model's log-probabilities, renormalized over the allowed tokens."""
    logits = contract_model(seed)(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    held = Grammars(TOKENIZER, stop_token_ids=[STOP], vocabulary=VOCABULARY).start(GRAMMAR).sets_of(token_ids)
    allowed = unpack_sets([held.sets[place - 1] for place in held.places], VOCABULARY)
    scores = (logits / temperature).masked_fill(~allowed, -torch.inf).log_softmax(-1)
    return scores.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def test_constraints_hold_on_vllm_with_exact_logprobs_and_fail_separately(
    start_engine: Callable[..., EnginePool], tmp_path: Path
) -> None:
    contract_model(0).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    engine = start_engine(model=tmp_path)

    async def played() -> list[float]:
        worst = []
        for temperature in (1.0, 0.5):
            requests = (
                complete(engine, "a", temperature=temperature),
                complete(engine, "b", temperature=temperature, seed=6),
                complete(engine, "free", grammar="", temperature=temperature),
            )
            first, second, free = await asyncio.gather(*requests)
            assert free.allowed is None
            for one in (first, second):
                assert one.finish_reason == "stop"
                assert TOKENIZER.decode(one.token_ids).startswith("the answer is ")
                wanted = renormalized(list(one.token_ids), seed=version, temperature=temperature)
                differences = [abs(a - b) for a, b in zip(one.logprobs, wanted, strict=True)]
                worst.append(max(differences))
        greedy = await complete(engine, "greedy", temperature=0.0)
        assert TOKENIZER.decode(greedy.token_ids).startswith("the answer is ")
        with pytest.raises(ConstraintError, match="nonsense"):
            await complete(engine, "bad", grammar="start: nonsense")
        return worst

    try:
        version = 0
        worst = asyncio.run(played())
        engine.publish(dict(contract_model(1).named_parameters()), policy_version=1)
        version = 1
        worst += asyncio.run(played())
    finally:
        asyncio.run(engine.close())
    print(f"largest difference: {max(worst):.1e}")
    assert max(worst) < 5e-5  # two float32 implementations differ


@pytest.mark.extended
def test_constraint_that_tokens_cannot_express_fails_only_its_request(
    start_engine: Callable[..., EnginePool], tmp_path: Path
) -> None:
    contract_model(0).save_pretrained(tmp_path)
    make_tokenizer("ab").save_pretrained(tmp_path)
    engine = start_engine(model=tmp_path)

    async def played() -> None:
        with pytest.raises(ConstraintError, match="cannot be kept"):
            await complete(engine, "b", grammar="start: /[ab]{3}x/")
        done = await complete(engine, "b", grammar="start: /[ab]{9}/")
        assert len(done.token_ids) == 10

    try:
        asyncio.run(played())
    finally:
        asyncio.run(engine.close())


@pytest.mark.extended
def test_speculating_engine_rejects_grammars_and_serves_other_requests(
    start_engine: Callable[..., EnginePool],
) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    engine = start_engine(args={"speculative_config": speculative})

    async def played() -> None:
        with pytest.raises(ConstraintError, match=r"remove engine\.vllm\.args\.speculative_config"):
            await complete(engine, "a")
        assert (await complete(engine, "a", grammar="")).allowed is None

    try:
        asyncio.run(played())
    finally:
        asyncio.run(engine.close())
