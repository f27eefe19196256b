"""Guessed tokens and shared prefixes change the engine's work but not its samples."""

import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_train.engine import cache
from agentrl_train.engine.cache import (
    BLOCK,
    CAPACITY,
    CONTEXT,
    MOST,
    Drafts,
    Group,
    PrefixIndex,
    shared_prefix,
)
from agentrl_train.engine.scheduler import Scheduler
from agentrl_train.engine.torch import Request
from agentrl_train.types import Completion, SamplingParams
from tests.architectures import tiny
from tests.tiny_models import make_model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because the models are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Completions = dict[tuple[str, int], Completion]
TOKENS = st.lists(st.integers(0, 3), max_size=60)


def play(
    monkeypatch: pytest.MonkeyPatch,
    model: torch.nn.Module,
    *,
    most: int,
    samplings: Sequence[SamplingParams] = (SamplingParams(max_new_tokens=16, top_k=20),),
    paged: bool | None = None,
    changed: Callable[[Scheduler], None] = lambda scheduler: None,
) -> tuple[Completions, int]:
    """Play pairs of equal sessions with shared openings. Return the completions and the number of passes.

    New weights are loaded in the middle of completions.

    Args:
        monkeypatch: limits the number of guesses.
        model: the policy.
        most: most guesses in a pass.
        samplings: parameters of the sessions, in turn.
        paged: as in ``Scheduler``.
        changed: changes the scheduler before it is used.
    """
    monkeypatch.setattr("agentrl_train.engine.cache.MOST", most)
    scheduler = Scheduler(
        deepcopy(model), name="current", stop_token_ids=[2], num_slots=5, max_context=100, paged=paged
    )
    changed(scheduler)
    draw, done, passes = random.Random(1), {}, 0
    opening = [draw.randrange(5, 60) for _ in range(40)]
    contexts = {f"{n} {wave}": [*opening[: 20 + 3 * n], 5 + n] for wave in "ab" for n in range(6)}
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with torch.inference_mode():
        for turn in range(2):
            for key, context in contexts.items():
                request = Request(
                    session_key=key,
                    context=context,
                    sampling=replace(samplings[int(key[0]) % len(samplings)], seed=100 * turn + int(key[0])),
                    done=lambda completion, at=(key, turn): done.update({at: completion}),
                )
                scheduler.submit(request)
            while scheduler.busy:
                scheduler.step()
                passes += 1
                if passes == 40:
                    scheduler.load(weights, policy_version=1)
            for key, context in contexts.items():
                contexts[key] = [*context, *done[key, turn].token_ids, 7, 8]
    return done, passes


def assert_same(found: Completions, expected: Completions) -> None:
    assert found.keys() == expected.keys()
    for at, completion in expected.items():
        assert found[at].token_ids == completion.token_ids
        assert np.abs(np.array(found[at].logprobs) - np.array(completion.logprobs)).max() < 1e-4


@pytest.mark.parametrize("name", ["Qwen3", "Gemma-2", "gpt-oss", "DeepSeek-V3"])
def test_slots_that_grow_change_no_token(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, columns = tiny(name), set[int]()
    plain, _ = play(monkeypatch, model, most=MOST)
    prepare = Group.prepare

    def prepared(group: Group, device: torch.device, *, allocated: int) -> None:
        prepare(group, device, allocated=allocated)
        columns.add(group.columns - group.length)

    monkeypatch.setattr(Group, "prepare", prepared)
    monkeypatch.setattr(cache, "attends_by_products", lambda value: True)
    monkeypatch.setattr(cache, "COLUMNS", 8)
    grown, _ = play(monkeypatch, model, most=MOST)
    assert 0 in columns
    assert max(columns) > 0
    assert_same(grown, plain)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma-2", "gpt-oss", "DeepSeek-V3"])
def test_guesses_change_no_token_and_no_logprob(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = tiny(name)
    plain, passes = play(monkeypatch, model, most=0)
    guessed, fewer = play(monkeypatch, model, most=MOST)
    assert fewer < 0.8 * passes
    assert_same(guessed, plain)


SAMPLING = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 2**32),
)
REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(3, 6), min_size=CONTEXT, max_size=20), SAMPLING), min_size=1, max_size=5
)


@settings(max_examples=30, deadline=None)
@given(requests=REQUESTS, learned=st.lists(st.lists(st.integers(2, 6), max_size=20), max_size=4))
def test_no_guess_changes_a_sample(
    requests: Sequence[tuple[list[int], SamplingParams]], learned: Sequence[Sequence[int]]
) -> None:
    """Right and wrong guesses leave tokens and log-probabilities unchanged."""
    outcomes: list[dict[int, Completion]] = []
    for guesses in (False, True):
        drafts = Drafts([2])
        if guesses:
            for tokens in learned:
                drafts.learn([], tokens)
        else:
            drafts.guess = lambda *context, most: []  # type: ignore[method-assign]
        scheduler = Scheduler(
            REPEATING, name="current", stop_token_ids=[2], num_slots=3, max_context=64, drafts=drafts
        )
        done: dict[int, Completion] = {}
        outcomes.append(done)
        with torch.inference_mode():
            for number, (context, sampling) in enumerate(requests):
                scheduler.submit(
                    Request(
                        session_key=str(number),
                        context=context,
                        sampling=sampling,
                        done=partial(done.__setitem__, number),
                    )
                )
            while scheduler.busy:
                scheduler.step()
    without, with_guesses = outcomes
    assert without.keys() == with_guesses.keys() == set(range(len(requests)))
    for number, plain in without.items():
        guessed = with_guesses[number]
        assert guessed.token_ids == plain.token_ids
        assert guessed.finish_reason == plain.finish_reason
        assert np.allclose(guessed.logprobs, plain.logprobs, atol=1e-4)


def repeating() -> torch.nn.Module:
    """Return a model that prefers tokens 2 to 6, so that guesses are sometimes right."""
    model = tiny("Qwen3", tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[7:] *= 0.01
    return model


REPEATING = repeating()


def test_stale_policy_guesses_from_completions_of_the_current_policy() -> None:
    engine = Drafts([2])
    current, stale = (
        Scheduler(make_model(), name=name, stop_token_ids=[2], num_slots=1, max_context=128, drafts=engine)
        for name in ("current", "stale")
    )
    passes = []
    with torch.inference_mode():
        for scheduler in (current, stale):
            sampling = SamplingParams(max_new_tokens=40, temperature=0.0)
            scheduler.submit(
                Request(session_key="a", context=[5, 6, 7, 8, 9], sampling=sampling, done=lambda _: None)
            )
            passes.append(0)
            while scheduler.busy:
                scheduler.step()
                passes[-1] += 1
    assert passes[1] < 0.8 * passes[0]


def test_session_with_the_longest_common_prefix_shares_it() -> None:
    """All sessions start with the same system prompt, and each task continues differently."""
    scheduler = Scheduler(make_model(), name="current", stop_token_ids=[2], num_slots=24, max_context=256)
    system = list(range(10, 60))
    tasks = [[*system, *(100 + (7 * n + i) % 100 for i in range(60))] for n in range(3)]
    done: list[Completion] = []
    with torch.inference_mode():
        for sibling in range(8):
            for number, task in enumerate(tasks):
                sampling = SamplingParams(max_new_tokens=2, seed=sibling)
                scheduler.submit(
                    Request(
                        session_key=f"{number} {sibling}", context=task, sampling=sampling, done=done.append
                    )
                )
        while scheduler.busy:
            scheduler.step()
    assert len(done) == 24
    own = sum(len(task) - len(system) for task in tasks)
    assert scheduler.num_prefilled <= len(system) + own + 24


@given(a=TOKENS, b=TOKENS)
def test_longest_prefix_is_shared(a: Sequence[int], b: Sequence[int]) -> None:
    length = shared_prefix(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


@given(contexts=st.lists(st.lists(st.integers(0, 1), max_size=3 * BLOCK), max_size=6))
def test_index_finds_all_contexts_with_a_common_prefix(contexts: Sequence[Sequence[int]]) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for owner, context in enumerate(contexts):
        index.add(owner, context)
    for owner, context in enumerate(contexts):
        blocks = {o: shared_prefix(c, context) // BLOCK for o, c in enumerate(contexts) if o != owner}
        found = list(index.alike(owner, context))
        assert sorted(found) == sorted(other for other, count in blocks.items() if count)
        assert [blocks[other] for other in found] == sorted((blocks[o] for o in found), reverse=True)
        index.discard(owner)
        assert owner not in index.alike(-1, context)
        index.add(owner, context)


def test_table_of_guesses_is_bounded_and_forgets_the_oldest() -> None:
    drafts = Drafts({2})
    drafts.learn([1] * CONTEXT, [9, 9, 2])
    assert drafts.guess([1] * CONTEXT, [], most=5) == [9, 9]
    assert drafts.guess([0, *[1] * CONTEXT], [9], most=5) == [9]
    for number in range(2 * CAPACITY // 100):
        drafts.learn([], [number * 100 + i for i in range(100 + CONTEXT)])
    assert drafts.guess([1] * CONTEXT, [], most=5) == []
    last = 2 * CAPACITY // 100 * 100 - 100
    assert drafts.guess([], list(range(last, last + CONTEXT)), most=2) == [last + CONTEXT, last + CONTEXT + 1]
