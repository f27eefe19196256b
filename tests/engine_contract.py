"""Tests of the behaviour common to all engines. Subclasses of ``EngineContract`` run them on an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl_train.errors import EngineError
from agentrl_train.types import Completion, MeasuredEngine, SamplingParams, WeightSync

VOCABULARY, STOP, MAX_CONTEXT = 261, 2, 512
POLICIES = ("current", "stale")


def contract_model(seed: int) -> Qwen3ForCausalLM:
    """Return a random Qwen3 with grouped heads and tied embeddings, in sizes that every engine supports."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


@lru_cache(maxsize=64)
def _reference(seed: int) -> Qwen3ForCausalLM:
    return contract_model(seed)


class ServingEngine(MeasuredEngine, WeightSync, Protocol):
    """The interfaces of an engine that a run needs."""


@dataclass
class Subject:
    """An engine under test, with the weights of each of its policies."""

    engine: ServingEngine
    tolerance: float
    version: int = 0
    held: dict[tuple[str, int], int] = field(default_factory=lambda: {(policy, 0): 0 for policy in POLICIES})

    async def generate(
        self, context: Sequence[int], *, key: str, policy: str = "current", **sampling: float
    ) -> Completion:
        params = SamplingParams(**{"max_new_tokens": 6, **sampling})  # type: ignore[arg-type]
        return await self.engine.generate(context, sampling=params, session_key=key, policy=policy)

    async def publish(self, seed: int, *policies: str) -> int:
        """Publish the weights of ``contract_model(seed)`` and return their version."""
        self.version += 1
        for policy in policies or POLICIES:
            self.held[policy, self.version] = seed
        weights = dict(contract_model(seed).named_parameters())
        await asyncio.to_thread(
            self.engine.publish, weights, policy_version=self.version, policies=policies or POLICIES
        )
        return self.version

    def difference(self, context: Sequence[int], done: Completion, *, temperature: float = 1.0) -> float:
        """Return the largest difference from the log-probabilities of the model with each token's version."""
        told, versions = np.array(done.logprobs), np.array(done.versions)
        worst = 0.0
        for version in set(done.versions):
            model = _reference(self.held[done.policy, version])
            expected = reference_logprobs(model, context, done, temperature)
            worst = max(worst, float(np.abs(expected - told)[versions == version].max()))
        return worst


def reference_logprobs(
    model: PreTrainedModel, context: Sequence[int], done: Completion, temperature: float
) -> np.ndarray:
    ids = torch.tensor([[*context, *done.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(context) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(context) :, None])[:, 0].numpy()


def kept_tokens(
    logits: np.ndarray, *, top_p: float = 1.0, top_k: float = 0, min_p: float = 0.0
) -> dict[int, float]:
    """Return the tokens that truncated sampling keeps, with their probabilities."""
    shares = np.exp(logits - logits.max())
    kept = {int(token): float(shares[token]) for token in np.argsort(-shares) if shares[token] >= min_p}
    kept = dict(list(kept.items())[: int(top_k) or None])
    total, before, nucleus = sum(kept.values()), 0.0, {}
    for token, share in kept.items():
        if before < top_p * total:
            nucleus[token] = share / total
        before += share
    return nucleus


def prompt(number: int, length: int = 20) -> list[int]:
    return [(number * 31 + i * 7) % 250 + 5 for i in range(length)]


async def sampled(engine: MeasuredEngine, count: float) -> None:
    """Wait until the engine has sampled ``count`` tokens in total."""
    async with asyncio.timeout(600):
        while engine.statistics()["sampled_tokens"] < count:  # noqa: ASYNC110 (it counts elsewhere)
            await asyncio.sleep(0.005)


class EngineContract:
    """Subclasses define the fixture ``subject``, an engine that stops at token 2 and holds 512 tokens."""

    async def test_completion_has_one_entry_per_token_and_a_finish_reason(self, subject: Subject) -> None:
        done = await asyncio.gather(
            *(subject.generate(prompt(n), key=f"lists {n}", max_new_tokens=40, seed=n) for n in range(12))
        )
        for completion in done:
            count = len(completion.token_ids)
            assert len(completion.logprobs) == len(completion.versions) == count
            stopped = completion.token_ids[-1] == STOP
            assert STOP not in completion.token_ids[:-1]
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert stopped or count == 40
        assert {completion.policy for completion in done} == {"current"}

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    async def test_logprobs_match_the_model_across_turns_and_sessions(
        self, subject: Subject, temperature: float
    ) -> None:
        async def session(number: int) -> float:
            context, worst = prompt(number, 5 + 3 * number), 0.0
            for turn in range(3):
                done = await subject.generate(
                    context,
                    key=f"turns {temperature} {number}",
                    temperature=temperature,
                    seed=100 * number + turn,
                )
                worst = max(worst, subject.difference(context, done, temperature=temperature))
                context = [*context, *done.token_ids, *prompt(turn, 4)]
            return worst

        assert max(await asyncio.gather(*(session(n) for n in range(9)))) < subject.tolerance

    async def test_temperature_zero_is_greedy(self, subject: Subject) -> None:
        context = prompt(3)
        greedy, other = await asyncio.gather(
            subject.generate(context, key="greedy", temperature=0.0),
            subject.generate(context, key="beside", seed=5),
        )
        model = contract_model(subject.held["current", subject.version])
        ids = torch.tensor([[*context, *greedy.token_ids]])
        with torch.no_grad():
            likeliest = model(ids).logits[0, len(context) - 1 : -1].argmax(-1)
        assert list(greedy.token_ids) == likeliest.tolist()
        assert subject.difference(context, greedy) < subject.tolerance
        assert subject.difference(context, other) < subject.tolerance

    @pytest.mark.parametrize(
        "limits", [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.3}, {"top_p": 0.8, "top_k": 20, "min_p": 0.05}]
    )
    async def test_logprobs_of_truncated_sampling_are_renormalized_over_the_kept_tokens(
        self, subject: Subject, limits: dict[str, float]
    ) -> None:
        context = prompt(4)
        done = await subject.generate(
            context, key=f"truncated {limits}", max_new_tokens=40, temperature=1.3, seed=3, **limits
        )
        model = _reference(subject.held["current", subject.version])
        ids = torch.tensor([[*context, *done.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(context) - 1 : -1] / 1.3
        for token, told, row in zip(done.token_ids, done.logprobs, logits.double().numpy(), strict=True):
            kept = kept_tokens(row, **limits)
            assert token in kept
            assert len(kept) < VOCABULARY
            expected = row[token] - np.log(np.exp(row[list(kept)]).sum())
            assert abs(told - expected) < subject.tolerance

    async def test_sampling_depends_on_the_seed_and_not_on_the_batch(self, subject: Subject) -> None:
        async def draw(key: str, number: int) -> Sequence[int]:
            done = await subject.generate(
                prompt(number), key=f"{key} {number}", max_new_tokens=12, seed=number
            )
            return list(done.token_ids)

        alone = [await draw("alone", n) for n in range(6)]
        assert alone == await asyncio.gather(*(draw("together", n) for n in range(6)))

    async def test_shorter_limit_samples_the_beginning_of_the_same_completion(self, subject: Subject) -> None:
        whole = await subject.generate(prompt(5), key="whole", max_new_tokens=30, seed=11)
        part = await subject.generate(prompt(5), key="part", max_new_tokens=7, seed=11)
        assert list(part.token_ids) == list(whole.token_ids[:7])
        assert np.allclose(part.logprobs, whole.logprobs[:7], atol=subject.tolerance)

    async def test_new_weights_are_in_use_when_publish_returns(self, subject: Subject) -> None:
        context = prompt(1, 40)
        first = await subject.generate(context, key="grows", seed=1)
        context = [*context, *first.token_ids, *prompt(2, 5)]
        version = await subject.publish(seed=version_seed(subject))
        done = await subject.generate(context, key="grows", seed=2)
        assert set(done.versions) == {version}
        assert subject.difference(context, done) < subject.tolerance

    async def test_tokens_carry_their_version_when_weights_change_during_generation(
        self, subject: Subject
    ) -> None:
        done: list[Completion] = []
        for attempt in range(10):  # a busy machine may give the engine no time between two publications
            done = await generate_during_publications(subject, first_seed=8 * attempt)
            for number, completion in enumerate(done):
                assert list(completion.versions) == sorted(completion.versions)
                assert subject.difference(prompt(number), completion) < subject.tolerance
            if any(len(set(completion.versions)) > 1 for completion in done):
                return
        pytest.fail(f"no completion has two versions: {[set(completion.versions) for completion in done]}")

    async def test_policies_have_their_own_weights(self, subject: Subject) -> None:
        both = await subject.publish(seed=version_seed(subject))
        newer = await subject.publish(version_seed(subject), "current")
        stale = await subject.generate(prompt(1), key="cross", policy="stale", seed=1)
        current = await subject.generate(prompt(1), key="cross", seed=1)
        assert (stale.policy, set(stale.versions)) == ("stale", {both})
        assert (current.policy, set(current.versions)) == ("current", {newer})
        assert subject.difference(prompt(1), stale) < subject.tolerance
        assert subject.difference(prompt(1), current) < subject.tolerance

    @pytest.mark.parametrize("length", [0, MAX_CONTEXT - 5, MAX_CONTEXT + 1])
    async def test_context_without_room_is_rejected(self, subject: Subject, length: int) -> None:
        with pytest.raises(EngineError, match="no room"):
            await subject.generate(prompt(1, length), key="long")

    async def test_generation_fills_the_context_to_its_last_token(self, subject: Subject) -> None:
        context = prompt(1, MAX_CONTEXT - 6)
        done = await subject.generate(context, key="full", seed=1)
        assert subject.difference(context, done) < subject.tolerance

    async def test_release_is_idempotent_and_does_not_affect_other_sessions(self, subject: Subject) -> None:
        running = asyncio.create_task(subject.generate(prompt(1), key="other", max_new_tokens=60, seed=1))
        for key in ("never seen", "never seen", "lists 1"):
            subject.engine.release(key)
        again = await subject.generate(prompt(1), key="lists 1", seed=1)
        assert again.token_ids
        assert (await running).token_ids

    async def test_cancelled_call_stops_generating(self, subject: Subject) -> None:
        before = subject.engine.statistics()["sampled_tokens"]
        long = [
            asyncio.create_task(
                subject.generate(prompt(n), key=f"cancelled {n}", max_new_tokens=490, seed=n + 7)
            )
            for n in range(16)
        ]
        await sampled(subject.engine, before + 16)
        for task in long:
            task.cancel()
        ended = await asyncio.gather(*long, return_exceptions=True)
        assert any(isinstance(end, asyncio.CancelledError) for end in ended)
        done = await subject.generate(prompt(2), key="after", max_new_tokens=2, seed=1)
        assert len(done.token_ids) <= 2

    async def test_statistics_count_tokens_and_busy_time(self, subject: Subject) -> None:
        before = subject.engine.statistics()
        done = await subject.generate(prompt(77, 30), key="counted", seed=1)
        await sampled(subject.engine, before["sampled_tokens"] + len(done.token_ids))
        after = subject.engine.statistics()
        assert after["prefilled_tokens"] - before["prefilled_tokens"] >= 14
        assert after["busy_s"] > before["busy_s"]


def version_seed(subject: Subject) -> int:
    """Return a seed for unpublished weights."""
    return subject.version + 1


async def generate_during_publications(subject: Subject, *, first_seed: int) -> list[Completion]:
    """Return eight long completions, sampled while new weights are published again and again."""
    running = [
        asyncio.create_task(
            subject.generate(prompt(n), key=f"long {n}", max_new_tokens=490, seed=first_seed + n)
        )
        for n in range(8)
    ]
    pause_s = 0.01  # it grows, so that engines of any speed sample between two publications
    while not all(task.done() for task in running):
        await subject.publish(seed=version_seed(subject))
        await asyncio.sleep(pause_s)
        pause_s = min(0.3, 2 * pause_s)
    return [task.result() for task in running]
