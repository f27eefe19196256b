"""The deterministic engine. A completion depends only on the weights and its request."""

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl_train.engine.scheduler import FIXED_ROWS, Scheduler
from agentrl_train.engine.torch import TorchEngine, independent_rows
from agentrl_train.models.loading import copy_of
from agentrl_train.types import Completion, SamplingParams
from tests.tiny_models import make_model

NUM_SESSIONS, TURNS = 30, 2


def make_engine(*, deterministic: bool = True, slots: int = 24, dtype: str = "float32") -> TorchEngine:
    return TorchEngine(
        {"current": copy_of(make_model(), dtype=dtype)},
        stop_token_ids=[2],
        max_sequences=slots,
        max_context=256,
        deadline_s=60.0,
        deterministic=deterministic,
    )


def bits(completion: Completion) -> tuple[Sequence[int], Sequence[float]]:
    return tuple(completion.token_ids), tuple(completion.logprobs)


async def session(engine: TorchEngine, number: int, *, pauses: random.Random | None) -> list[object]:
    """Play some turns. Random ``pauses`` vary the composition of batches."""
    draw = random.Random(number)
    context = [draw.randrange(5, 250) for _ in range(draw.randrange(4, 60))]
    seen: list[object] = []
    for turn in range(TURNS):
        if pauses is not None:
            for _ in range(pauses.randrange(200)):
                await asyncio.sleep(0)
        sampling = SamplingParams(max_new_tokens=8 + number % 20, seed=1000 * number + turn)
        completion = await engine.generate(context, sampling=sampling, session_key=f"{number}")
        seen.append(bits(completion))
        context = [*context, *completion.token_ids, *(draw.randrange(5, 250) for _ in range(5))]
    engine.release(f"{number}")
    return seen


async def play(engine: TorchEngine, numbers: Sequence[int], seed: int | None) -> dict[int, list[object]]:
    pauses = None if seed is None else random.Random(seed)
    done = await asyncio.gather(*(session(engine, n, pauses=pauses) for n in numbers))
    return dict(zip(numbers, done, strict=True))


@pytest.mark.parametrize("slots", [3, 24])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_deterministic_completion_does_not_depend_on_concurrent_requests(
    slots: int, dtype: str
) -> None:
    engine = make_engine(slots=slots, dtype=dtype)
    numbers = list(range(NUM_SESSIONS))
    alone = {n: (await play(engine, [n], None))[n] for n in numbers[:6]}
    together = await play(engine, numbers, None)
    mixed_up = await play(engine, numbers[::-1], 5)
    await engine.close()
    assert together == mixed_up
    assert alone == {n: together[n] for n in alone}


async def test_deterministic_engine_samples_same_tokens_as_default_engine() -> None:
    engines = [make_engine(deterministic=value) for value in (True, False)]
    ours, theirs = [await play(engine, range(8), None) for engine in engines]
    for engine in engines:
        await engine.close()
    for number in range(8):
        for (ids, logprobs), (other_ids, others) in zip(ours[number], theirs[number], strict=True):
            assert ids == other_ids
            assert torch.tensor(logprobs) == pytest.approx(torch.tensor(others), abs=1e-5)


def test_rows_that_depend_on_their_neighbours_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    assert independent_rows(model) in (1, FIXED_ROWS)
    whole = model.base_model.forward

    def blurred(*args: object, **options: object) -> object:
        output = whole(*args, **options)
        output.last_hidden_state = output.last_hidden_state + 1e-6 * output.last_hidden_state[:1]
        return output

    monkeypatch.setattr(model.base_model, "forward", blurred)
    assert independent_rows(model) == 1


async def test_single_row_passes_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl_train.engine.torch.independent_rows", lambda model: 1)
    engine = make_engine()
    first, second = await play(engine, range(6), None), await play(engine, range(6), 3)
    await engine.close()
    assert first == second


@pytest.mark.parametrize("kind", ["gpt2", "gpt_bigcode"])
async def test_learned_positions_can_be_used_up_to_the_last(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    engine = TorchEngine(
        {"current": copy_of(model)},
        stop_token_ids=(),
        max_sequences=2,
        max_context=32,
        deterministic=True,
    )
    params = SamplingParams(max_new_tokens=29)
    completion = await engine.generate([5, 6, 7], sampling=params, session_key="a")
    await engine.close()
    ids = torch.tensor([[5, 6, 7, *completion.token_ids]])
    with torch.no_grad():
        expected = model(ids).logits[0, 2:-1].log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
    assert torch.tensor(completion.logprobs) == pytest.approx(expected, abs=1e-4)


async def test_failed_scheduler_is_rebuilt_and_every_request_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    undisturbed = await play(engine, range(12), None)
    steps, whole = iter(range(10**6)), Scheduler._run

    def breaks(self: Scheduler, *args: object, **options: object) -> None:
        if next(steps) % 90 == 89:
            raise RuntimeError("the forward pass breaks")
        whole(self, *args, **options)

    monkeypatch.setattr(Scheduler, "_run", breaks)
    assert await play(engine, range(12), None) == undisturbed
    await engine.close()
