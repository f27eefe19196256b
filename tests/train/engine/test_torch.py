import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentrl_train.engine import scheduler
from agentrl_train.engine.constraint import Truncation
from agentrl_train.engine.scheduler import SINGLE_BLOCK, Scheduler, draw, sample
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.errors import EngineBroken, EngineError
from agentrl_train.types import Completion, SamplingParams
from agentrl_train.weights import FOREIGN, Publisher, StaleWeights
from tests.architectures import LONGROPE, tiny
from tests.tiny_models import make_model


def reference_logprobs(
    model: PreTrainedModel, context: Sequence[int], completion: Completion, temperature: float = 1.0
) -> torch.Tensor:
    ids = torch.tensor([[*context, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(context) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(context) :, None])[:, 0]


def make_engine(models: dict[str, PreTrainedModel] | None = None, **options: object) -> TorchEngine:
    settings = {"stop_token_ids": [2], "max_sequences": 4, "max_context": 128, "deadline_s": 60.0}
    models = models or {"current": make_model(), "stale": make_model()}
    return TorchEngine(models, **{**settings, **options})


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    engine = make_engine()
    yield engine
    await engine.close()


async def sampled(engine: TorchEngine, count: int) -> None:
    while engine.statistics()["sampled_tokens"] < count:  # noqa: ASYNC110 (the engine is a thread)
        await asyncio.sleep(0.001)


def prompt(number: int, length: int = 20) -> list[int]:
    return [(number * 31 + i * 7) % 250 + 5 for i in range(length)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_match_model_over_several_turns(engine: TorchEngine, temperature: float) -> None:
    async def session(number: int) -> float:
        context, worst = prompt(number, 5 + 3 * number), 0.0
        for turn in range(3):
            sampling = SamplingParams(max_new_tokens=6 + number % 3, temperature=temperature, seed=turn)
            completion = await engine.generate(context, sampling=sampling, session_key=str(number))
            expected = reference_logprobs(make_model(), context, completion, temperature)
            worst = max(worst, float((expected - torch.tensor(completion.logprobs)).abs().max()))
            context = [*context, *completion.token_ids, *prompt(turn, 4)]
        return worst

    assert max(await asyncio.gather(*(session(n) for n in range(9)))) < 1e-4


async def test_sample_does_not_depend_on_batch(engine: TorchEngine) -> None:
    async def draw(key: str, number: int) -> Sequence[int]:
        sampling = SamplingParams(max_new_tokens=12, seed=number)
        return (await engine.generate(prompt(number), sampling=sampling, session_key=key)).token_ids

    alone = [await draw(f"alone {n}", n) for n in range(6)]
    together = await asyncio.gather(*(draw(f"together {n}", n) for n in range(6)))
    assert alone == together


async def test_prefix_is_cached_between_turns_and_dropped_on_weight_update(
    engine: TorchEngine,
) -> None:
    sampling = SamplingParams(max_new_tokens=3)
    context = prompt(1, 40)
    first = await engine.generate(context, sampling=sampling, session_key="a")
    context = [*context, *first.token_ids, *prompt(2, 5)]
    before = engine.statistics()["prefilled_tokens"]
    second = await engine.generate(context, sampling=sampling, session_key="a")
    assert engine.statistics()["prefilled_tokens"] - before < 10
    context = [*context, *second.token_ids, *prompt(3, 5)]
    engine.publish(dict(make_model(seed=1).named_parameters()), policy_version=1)
    third = await engine.generate(context, sampling=sampling, session_key="a")
    assert set(third.versions) == {1}
    expected = reference_logprobs(make_model(seed=1), context, third)
    assert float((expected - torch.tensor(third.logprobs)).abs().max()) < 1e-4


async def test_reprefilled_tokens_are_counted(engine: TorchEngine) -> None:
    sampling, context = SamplingParams(max_new_tokens=3), prompt(1, 40)
    first = await engine.generate(context, sampling=sampling, session_key="a")
    assert engine.statistics()["reprefilled_tokens"] == 0.0
    cached = len(context) + len(first.token_ids) - 1  # the keys of the last token are not computed yet
    context = [*context, *first.token_ids, *prompt(2, 9)]
    engine.publish(dict(make_model(seed=1).named_parameters()), policy_version=1)
    before = engine.statistics()["prefilled_tokens"]
    await engine.generate(context, sampling=sampling, session_key="a")
    totals = engine.statistics()
    assert totals["prefilled_tokens"] - before == len(context) - 1
    assert totals["reprefilled_tokens"] == cached
    engine.release("a")
    await engine.generate(context, sampling=sampling, session_key="a")
    assert engine.statistics()["reprefilled_tokens"] == cached


async def test_evicted_row_counts_as_reprefilled(engine: TorchEngine) -> None:
    sampling = SamplingParams(max_new_tokens=2)
    first = await engine.generate(prompt(0, 30), sampling=sampling, session_key="0")
    for number in range(1, 5):  # the engine has four rows
        await engine.generate(prompt(number, 30), sampling=sampling, session_key=str(number))
    assert engine.statistics()["reprefilled_tokens"] == 0.0
    await engine.generate([*prompt(0, 30), *first.token_ids, 7], sampling=sampling, session_key="0")
    assert engine.statistics()["reprefilled_tokens"] == 30 + len(first.token_ids) - 1


async def test_abandoned_tokens_are_counted() -> None:
    engine = make_engine(max_context=1024, stop_token_ids=[])
    sampling = SamplingParams(max_new_tokens=900)
    running = asyncio.create_task(engine.generate(prompt(1), sampling=sampling, session_key="a"))
    await sampled(engine, 5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await engine.generate(prompt(2), sampling=SamplingParams(max_new_tokens=2), session_key="b")
    totals = engine.statistics()
    await engine.close()
    assert totals["abandoned_tokens"] == totals["sampled_tokens"] - 2 >= 5


async def test_siblings_share_prefilled_opening(engine: TorchEngine) -> None:
    sampling = [SamplingParams(max_new_tokens=4, seed=n) for n in range(4)]
    opening = prompt(1, 60)
    done = await asyncio.gather(
        *(engine.generate(opening, sampling=sampling[n], session_key=str(n)) for n in range(4))
    )
    assert engine.statistics()["prefilled_tokens"] < 2 * len(opening)
    engine.publish(dict(make_model(seed=1).named_parameters()), policy_version=1)
    contexts = [[*opening, *first.token_ids, *prompt(n, 5)] for n, first in enumerate(done)]
    again = await asyncio.gather(
        *(engine.generate(contexts[n], sampling=sampling[n], session_key=str(n)) for n in range(4))
    )
    for context, completion, version in [
        *((opening, completion, 0) for completion in done),
        *((context, completion, 1) for context, completion in zip(contexts, again, strict=True)),
    ]:
        expected = reference_logprobs(make_model(seed=version), context, completion)
        assert float((expected - torch.tensor(completion.logprobs)).abs().max()) < 1e-4


async def test_weights_change_within_completion_and_tokens_record_version() -> None:
    engine = make_engine(max_context=1024, stop_token_ids=[])
    context, params = prompt(1), SamplingParams(max_new_tokens=900)
    running = asyncio.create_task(engine.generate(context, sampling=params, session_key="a"))
    await sampled(engine, 5)
    weights = dict(make_model(seed=1).named_parameters())
    await asyncio.to_thread(engine.publish, weights, policy_version=1)
    completion = await running
    await engine.close()
    switch = list(completion.versions).index(1)
    assert list(completion.versions) == [0] * switch + [1] * (900 - switch)
    old = reference_logprobs(make_model(), context, completion)[:switch]
    new = reference_logprobs(make_model(seed=1), context, completion)[switch:]
    logprobs = torch.tensor(completion.logprobs)
    assert float((torch.cat([old, new]) - logprobs).abs().max()) < 1e-4


async def test_policies_have_separate_weights_and_completions_name_policy(
    engine: TorchEngine,
) -> None:
    engine.publish(dict(make_model(seed=1).named_parameters()), policy_version=1)
    sampling = SamplingParams(max_new_tokens=5)
    stale = await engine.generate(prompt(1), sampling=sampling, session_key="a", policy="stale")
    current = await engine.generate(prompt(1), sampling=sampling, session_key="a")
    assert (stale.policy, set(stale.versions)) == ("stale", {0})
    assert (current.policy, set(current.versions)) == ("current", {1})
    expected = reference_logprobs(make_model(), prompt(1), stale)
    assert float((expected - torch.tensor(stale.logprobs)).abs().max()) < 1e-4


async def test_stale_policy_can_keep_the_weights_of_an_untrained_model(engine: TorchEngine) -> None:
    foreign = StaleWeights(weights=dict(make_model(seed=7).named_parameters()), version=FOREIGN)
    publisher = Publisher(engine, stale=lambda _: foreign)
    for version, everywhere in ((3, True), (4, False)):
        weights = dict(make_model(seed=version).named_parameters())
        publisher.publish(weights, policy_version=version, everywhere=everywhere)
    sampling = SamplingParams(max_new_tokens=5)
    for policy, version, seed in (("stale", FOREIGN, 7), ("current", 4, 4)):
        found = await engine.generate(prompt(1), sampling=sampling, session_key=policy, policy=policy)
        assert (found.policy, set(found.versions)) == (policy, {version})
        expected = reference_logprobs(make_model(seed=seed), prompt(1), found)
        assert float((expected - torch.tensor(found.logprobs)).abs().max()) < 1e-4


async def test_sessions_beyond_capacity_wait(engine: TorchEngine) -> None:
    sampling = SamplingParams(max_new_tokens=4)
    done = await asyncio.gather(
        *(engine.generate(prompt(n), sampling=sampling, session_key=str(n)) for n in range(30))
    )
    assert len(done) == 30


async def test_cancelled_request_releases_its_row() -> None:
    engine = make_engine(max_sequences=1, max_context=1024, stop_token_ids=[])
    long = SamplingParams(max_new_tokens=900)
    task = asyncio.create_task(engine.generate(prompt(1), sampling=long, session_key="a"))
    await sampled(engine, 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    short = SamplingParams(max_new_tokens=2)
    done = await engine.generate(prompt(2), sampling=short, session_key="b")
    assert len(done.token_ids) == 2
    await engine.close()


async def test_completion_of_a_hanging_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, released = threading.Event(), threading.Event()

    def hang(scheduler: Scheduler) -> None:
        hangs.set()
        released.wait()

    monkeypatch.setattr(Scheduler, "step", hang)
    engine = make_engine(deadline_s=0.01)
    with pytest.raises(EngineError, match=r"the engine made no progress for 0\.01 s"):
        await engine.generate(prompt(1), sampling=SamplingParams(max_new_tokens=8), session_key="a")
    assert hangs.is_set()
    with pytest.raises(EngineError, match=r"the engine did not end a step within 0\.01 s"):
        engine.ping()
    monkeypatch.undo()
    released.set()
    await engine.close()


async def test_every_pass_of_the_engine_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    async def spy(
        work: Awaitable[Completion], *, progress: Callable[[], int], **options: object
    ) -> Completion:
        counts.append(progress())
        try:
            return await work
        finally:
            counts.append(progress())

    monkeypatch.setattr("agentrl_train.engine.torch.while_progress", spy)
    engine = make_engine(stop_token_ids=[])
    await engine.generate(prompt(1), sampling=SamplingParams(max_new_tokens=9), session_key="a")
    await engine.close()
    before, after = counts
    assert after - before >= 8


async def test_context_without_room_is_rejected(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match="no room"):
        await engine.generate(prompt(1, 125), sampling=SamplingParams(max_new_tokens=4), session_key="a")


async def test_close_fails_pending_requests() -> None:
    engine = make_engine(max_context=1024, stop_token_ids=[])
    task = asyncio.create_task(
        engine.generate(prompt(1), sampling=SamplingParams(max_new_tokens=1000), session_key="a")
    )
    await asyncio.sleep(0.02)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task


async def test_closed_engine_rejects_requests() -> None:
    engine = make_engine()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(prompt(1), sampling=SamplingParams(max_new_tokens=2), session_key="a")
    engine.release("a")


async def test_missing_parameter_breaks_engine_with_error() -> None:
    engine = make_engine()
    with pytest.raises(EngineError, match="lack"):
        await asyncio.to_thread(engine.publish, {}, policy_version=1)
    with pytest.raises(EngineError, match="failed"):
        await engine.generate(prompt(1), sampling=SamplingParams(max_new_tokens=2), session_key="a")


async def test_weights_that_are_not_numbers_fail_the_engine_without_a_retry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model()
    next(model.parameters()).data[7, 3] = torch.nan
    engine = make_engine(models={"current": model})
    for temperature in (1.0, 0.0):
        params = SamplingParams(max_new_tokens=4, temperature=temperature)
        with pytest.raises(EngineBroken, match="the weights contain NaN or infinite values, or overflow"):
            await engine.generate([5, 6, 7], sampling=params, session_key="a")
    await engine.close()
    assert "restarted" not in caplog.text


async def test_published_weights_that_are_not_numbers_fail_running_completions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, step = make_engine(), Scheduler.step

    def step_and_wait_for_weights(scheduler: Scheduler) -> None:
        step(scheduler)
        while scheduler.policy_version < 3 and not engine._inbox:
            time.sleep(0.001)

    monkeypatch.setattr(Scheduler, "step", step_and_wait_for_weights)
    params = SamplingParams(max_new_tokens=8)
    running = asyncio.create_task(engine.generate(prompt(1), sampling=params, session_key="a"))
    await sampled(engine, 1)
    state = {name: value * torch.nan for name, value in make_model().named_parameters()}
    engine.publish(state, policy_version=3)
    with pytest.raises(EngineError, match="log-probabilities at version 3 are not numbers"):
        await running
    await engine.close()


async def test_other_architecture_is_supported() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    engine = TorchEngine({"current": deepcopy(model)}, stop_token_ids=[2], max_sequences=2, max_context=64)
    completion = await engine.generate(prompt(1), sampling=SamplingParams(max_new_tokens=10), session_key="a")
    expected = reference_logprobs(model, prompt(1), completion)
    assert float((expected - torch.tensor(completion.logprobs)).abs().max()) < 1e-4
    await engine.close()


def test_context_longer_than_model_supports_is_rejected() -> None:
    with pytest.raises(EngineError, match="at most 1024"):
        make_engine(max_context=4096)


def test_longrope_is_limited_to_its_original_context() -> None:
    model = tiny("Phi-3 long", max_position_embeddings=128, **LONGROPE)
    with pytest.raises(EngineError, match=r"at most 32 tokens \(with more, LongRoPE .* is 33: lower it"):
        make_engine({"current": model}, max_context=33)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), temperature=st.floats(0.1, 3.0))
def test_samples_follow_reported_distribution(seed: int, temperature: float) -> None:
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
    count = 20_000
    uniforms = (torch.arange(count) + 0.5) / count
    tokens, logprobs = sample(
        logits.expand(count, -1), temperatures=torch.full((count,), temperature), uniforms=uniforms
    )
    expected = (logits[0] / temperature).softmax(-1)
    shares = torch.bincount(tokens, minlength=8) / count
    assert float((shares - expected).abs().max()) < 1e-3
    assert torch.allclose(logprobs.exp(), expected[tokens], atol=1e-6)


def test_rows_are_sampled_alike_in_any_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    requested = [
        SamplingParams(max_new_tokens=1, temperature=t, top_k=k) for t in (0.0, 0.5, 1.0) for k in (0, 3)
    ]
    arguments = {
        "temperatures": torch.tensor([one.temperature for one in requested]),
        "uniforms": torch.rand(len(requested), generator=generator),
        "truncation": Truncation.of(requested, torch.device("cpu")),
        "allowed": torch.rand(len(requested), 40, generator=generator) < 0.7,
    }
    logits = torch.randn(len(requested), 40, generator=generator)
    together = sample(logits, **arguments)
    monkeypatch.setattr(scheduler, "CACHED_LOGITS", 80)
    apart = sample(logits, **arguments)
    assert torch.equal(together[0], apart[0])
    assert torch.equal(together[1], apart[1])


def test_temperature_zero_is_greedy() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.0, 0.0]])
    tokens, _ = sample(logits, temperatures=torch.zeros(2), uniforms=torch.tensor([0.99, 0.99]))
    assert tokens.tolist() == [1, 0]


@given(
    size=st.integers(SINGLE_BLOCK + 1, 3 * SINGLE_BLOCK),
    seed=st.integers(0, 1000),
    kept=st.sampled_from([1, 2, 50, 5000]),
    uniform=st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-24]) | st.floats(0, 1, exclude_max=True, width=32),
)
@settings(deadline=None, max_examples=60)
def test_draw_from_many_weights_matches_their_cumulative_sum(
    size: int, seed: int, kept: int, uniform: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(1, size, generator=generator) ** 8
    weights[0, torch.randperm(size, generator=generator)[kept:]] = 0
    drawn, total = draw(weights, torch.tensor([[uniform]], dtype=torch.float64))
    index, cumulative = int(drawn), weights[0].double().cumsum(0)
    assert weights[0, index] > 0
    assert float(total) == pytest.approx(float(cumulative[-1]), rel=1e-5)
    rounding, target = 1e-5 * float(cumulative[-1]), uniform * float(cumulative[-1])
    assert float(cumulative[index]) >= target - rounding
    assert float(cumulative[index] - weights[0, index]) <= target + rounding


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
async def test_logprobs_match_model_on_gpu_across_turns_and_weight_updates() -> None:
    engine = TorchEngine(
        {"current": make_model().to("cuda")}, stop_token_ids=[2], max_sequences=4, max_context=128
    )

    async def session(number: int) -> float:
        context, worst = prompt(number, 5 + 3 * number), 0.0
        for turn in range(3):
            done = await engine.generate(
                context, sampling=SamplingParams(max_new_tokens=6, seed=turn), session_key=str(number)
            )
            assert len(set(done.versions)) == 1
            expected = reference_logprobs(make_model(seed=done.versions[0]), context, done)
            worst = max(worst, float((expected - torch.tensor(done.logprobs)).abs().max()))
            context = [*context, *done.token_ids, *prompt(turn, 4)]
        return worst

    assert max(await asyncio.gather(*(session(n) for n in range(9)))) < 1e-3
    engine.publish(dict(make_model(seed=1).to("cuda").named_parameters()), policy_version=1)
    assert max(await asyncio.gather(*(session(n) for n in range(9)))) < 1e-3
    await engine.close()
