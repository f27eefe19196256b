"""Constrained decoding in the torch engine: sets, guesses, failures."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentrl_train.engine.constraint import Grammars
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.errors import ConstraintError
from agentrl_train.types import AllowedSets, Completion, SamplingParams
from tests.tiny_models import make_model, make_tokenizer

pytest.importorskip("llguidance")

TOKENIZER = make_tokenizer()
STOP = 2
GRAMMAR = 'start: "the answer is " /[0-9]{2,6}/ (" and " /[a-c]{1,8}/)?'
PROMPT = list(range(20, 50))


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(
        {"current": make_model()},
        stop_token_ids=[STOP],
        tokenizer=TOKENIZER,
        max_sequences=3,
        max_context=200,
    )
    yield engine
    await engine.close()


async def complete(
    engine: TorchEngine,
    key: str,
    *,
    grammar: str = GRAMMAR,
    prompt: list[int] = PROMPT,
    **options: float,
) -> Completion:
    sampling = SamplingParams(**{"max_new_tokens": 40, "seed": 5, "grammar": grammar} | options)  # type: ignore[arg-type]
    return await engine.generate(prompt, sampling=sampling, session_key=key)


def sets(completion: Completion) -> list[bytes]:
    """Return the allowed set at each token."""
    held = completion.allowed
    assert held is not None
    return [held.sets[place - 1] for place in held.places]


async def test_guesses_and_shared_prefixes_change_neither_tokens_nor_sets(engine: TorchEngine) -> None:
    first = await complete(engine, "a")
    passes = engine._progress
    again = await complete(engine, "b")
    assert engine._progress - passes < len(again.token_ids)  # earlier text is guessed
    assert again.token_ids == first.token_ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    matcher = Grammars(TOKENIZER, stop_token_ids=[STOP], vocabulary=261).start(GRAMMAR)
    for token, held in zip(first.token_ids, sets(first), strict=True):
        assert held == matcher.allowed()
        matcher.advance(token)
    assert sets(again) == sets(first)
    assert len(first.allowed.sets) < len(first.token_ids)  # type: ignore[union-attr]


async def test_constrained_and_free_requests_share_passes(engine: TorchEngine) -> None:
    alone = [await complete(engine, "a"), await complete(engine, "b", grammar="", prompt=PROMPT[::-1])]
    both = await asyncio.gather(complete(engine, "c"), complete(engine, "d", grammar="", prompt=PROMPT[::-1]))
    assert [one.token_ids for one in both] == [one.token_ids for one in alone]
    assert both[1].allowed is None


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 2.0}]
)
async def test_constraint_holds_at_any_temperature_and_truncation(
    engine: TorchEngine, options: dict[str, float]
) -> None:
    done = await complete(engine, "a", **options)
    assert done.finish_reason == "stop"
    assert TOKENIZER.decode(done.token_ids).startswith("the answer is ")


async def test_invalid_or_inexpressible_grammar_fails_only_its_request() -> None:
    engine = TorchEngine(
        {"current": make_model(vocabulary=8)},
        stop_token_ids=[STOP],
        tokenizer=make_tokenizer("ab"),
        max_sequences=2,
        max_context=200,
    )
    written = "start: /[ab]{9}/"
    other = asyncio.create_task(complete(engine, "other", grammar=written, prompt=[5, 6]))
    with pytest.raises(ConstraintError, match="nonsense"):
        await complete(engine, "a", grammar="start: nonsense", prompt=[5])
    with pytest.raises(ConstraintError, match="cannot be kept"):
        await complete(engine, "b", grammar="start: /[ab]{3}x/", prompt=[5])
    assert len((await other).token_ids) == 10
    assert len((await complete(engine, "b", grammar=written, prompt=[5])).token_ids) == 10
    await engine.close()


async def test_sets_of_a_completion_are_recomputed_from_its_tokens(engine: TorchEngine) -> None:
    grammars = Grammars(TOKENIZER, stop_token_ids=[STOP], vocabulary=261)
    done = await complete(engine, "a")
    assert done.finish_reason == "stop"
    assert grammars.start(GRAMMAR).sets_of(done.token_ids).plain() == done.allowed.plain()  # type: ignore[union-attr]
    with pytest.raises(ConstraintError, match="token 7 is not allowed"):
        grammars.start(GRAMMAR).sets_of([*done.token_ids[:3], 7])


def test_sets_round_trip_through_json() -> None:
    held = AllowedSets(sets=(b"\x01\xff", b"\x00\x02"), places=(1, 0, 2, 1))
    assert AllowedSets.of_plain(held.plain()) == held
    assert AllowedSets.of_plain(held.first(2).plain()).places == (1, 0)
