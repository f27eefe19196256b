"""The results of an evaluation and the comparison of two evaluations, as pure functions of records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import numpy as np
from pydantic import BaseModel, ConfigDict

from agentrl_env.evaluation.record import EpisodeRecord, EvaluationError, EvaluationRun
from agentrl_env.evaluation.statistics import (
    bootstrap_interval,
    effective_trials,
    mean,
    pass_at_k,
    pass_hat_k,
    sign_test,
    wilson_interval,
)

_MILLION = 1_000_000


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Estimate(_Frozen):
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Latency(_Frozen):
    """Seconds of a turn: percentiles."""

    p50: float
    p90: float
    p99: float
    max: float


class Tokens(_Frozen):
    """Tokens of the episodes with a result, as the endpoint counts them. None if it does not count them."""

    input: int | None
    output: int | None
    cached: int | None
    thinking: int | None
    input_per_episode: float | None
    output_per_episode: float | None
    cost: float | None
    """Cost in the currency of the prices. None without prices or counts."""


class Summary(_Frozen):
    """The results of one evaluation. Failed episodes are counted in ``failed`` and nowhere else."""

    task: str
    split: str
    model: str
    samples: int
    attempts: int
    planned: int
    episodes: int
    """Number of episodes with a result."""
    failed: int
    """Number of episodes whose last attempt failed because of the endpoint, the server or the environment."""
    failures: dict[str, int]
    """Number of failed episodes by reason, most frequent first."""
    failed_after: dict[str, dict[str, int]]
    """Number of failed episodes by reason and by number of turns, such as "4–7". Failures of long episodes
    bias the success towards short episodes."""
    success: Estimate | None
    """Share of successes with its Wilson interval for the effective number of independent attempts."""
    reward: Estimate | None
    """Mean reward with its bootstrap interval over samples."""
    pass_at: dict[int, float]
    """k -> probability that at least one of k attempts at a sample succeeds, over samples with k results."""
    pass_hat: dict[int, float]
    """k -> probability that all of k attempts succeed (pass^k)."""
    ends: dict[str, int]
    turns: float | None
    metrics: dict[str, float]
    """Means of the task's metrics over the episodes that have them."""
    tokens: Tokens
    model_latency: Latency | None
    environment_latency: Latency | None
    repeated_requests: int
    repeated_episodes: int
    """Number of episodes that were started more than once."""


class SampleDifference(_Frozen):
    """Results of both runs on one sample, as means over attempts."""

    index: int | str
    first: float
    second: float


class Comparison(_Frozen):
    """Two evaluations on the samples with results in both. Differences are second minus first."""

    task: str
    split: str
    models: tuple[str, str]
    samples: int
    left_out: int
    """Number of samples with a result in only one of the runs."""
    first: float
    """Mean success over the samples."""
    second: float
    difference: Estimate
    """Difference of success with its paired bootstrap interval over samples."""
    reward_difference: Estimate
    better: int
    """Number of samples on which the second run succeeds more often."""
    worse: int
    p_value: float
    """Two-sided p-value of the exact sign test over samples. With one attempt it is McNemar's exact test."""
    changed: tuple[SampleDifference, ...]
    """Samples whose success has changed, greatest losses first."""


def summarize(
    run: EvaluationRun, *, price_input: float | None = None, price_output: float | None = None
) -> Summary:
    """Return the results of an evaluation, which can be unfinished.

    Args:
        run: The evaluation.
        price_input: Price of a million prompt tokens.
        price_output: Price of a million tokens written by the model.
    """
    counted, failed = run.counted, [e for e in run.episodes.values() if e.failed is not None]
    groups = list(_by_sample(counted).values())
    wins = [[episode.success for episode in group] for group in groups]
    turns = [turn for episode in counted for turn in episode.turns]
    names = dict.fromkeys(name for episode in counted for name in episode.metrics)
    values = {name: [e.metrics[name] for e in counted if name in e.metrics] for name in names}
    settings = run.settings
    return Summary(
        task=settings.task,
        split=settings.split,
        model=settings.model,
        samples=len(settings.indices),
        attempts=settings.attempts,
        planned=len(settings.indices) * settings.attempts,
        episodes=len(counted),
        failed=len(failed),
        failures=dict(Counter(map(_reason, failed)).most_common()),
        failed_after=_lengths(failed),
        success=_share(wins),
        reward=_mean_of_groups(groups, lambda episode: episode.reward),
        pass_at=_pass(wins, settings.attempts, pass_at_k),
        pass_hat=_pass(wins, settings.attempts, pass_hat_k),
        ends=dict(Counter(episode.end for episode in counted).most_common()),
        turns=mean([len(episode.turns) for episode in counted]),
        metrics={name: fmean(found) for name, found in values.items()},
        tokens=_tokens(counted, price_input, price_output),
        model_latency=_latency([turn.model_s for turn in turns]),
        environment_latency=_latency([turn.environment_s for turn in turns]),
        repeated_requests=sum(turn.repeats for turn in turns),
        repeated_episodes=sum(episode.tries > 1 for episode in run.episodes.values()),
    )


def compare(first: EvaluationRun, second: EvaluationRun) -> Comparison:
    """Return the paired comparison of two evaluations of one task.

    Raises EvaluationError if their tasks or splits differ, they have no sample in common, or a sample was a
    different problem in each.
    """
    one, two = first.settings, second.settings
    if (one.task, one.split) != (two.task, two.split):
        raise EvaluationError(
            f"{one.task}/{one.split} and {two.task}/{two.split} have no samples in common; "
            "compare evaluations of one task and split"
        )
    groups, others = _by_sample(first.counted), _by_sample(second.counted)
    both = [index for index in groups if index in others]
    if not both:
        raise EvaluationError("the evaluations have no common sample with a result in both")
    for index in both:
        if len({episode.seed for episode in (*groups[index], *others[index])}) > 1:
            raise EvaluationError(f"sample {index} was played with different seeds and cannot be compared")
    wins = [(_mean_success(groups[index]), _mean_success(others[index])) for index in both]
    rewards = [_mean_reward(others[index]) - _mean_reward(groups[index]) for index in both]
    changes = [after - before for before, after in wins]
    rows = [
        SampleDifference(index=index, first=before, second=after)
        for index, (before, after) in zip(both, wins, strict=True)
        if before != after
    ]
    return Comparison(
        task=one.task,
        split=one.split,
        models=(one.model, two.model),
        samples=len(both),
        left_out=len({*one.indices, *two.indices}) - len(both),
        first=fmean(before for before, _ in wins),
        second=fmean(after for _, after in wins),
        difference=_bootstrap(changes),
        reward_difference=_bootstrap(rewards),
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
        p_value=sign_test(changes),
        changed=tuple(sorted(rows, key=lambda row: row.second - row.first)),
    )


def _lengths(failed: Iterable[EpisodeRecord]) -> dict[str, dict[str, int]]:
    """Return the number of failed episodes by reason and by number of turns, in ranges that double."""
    found: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for episode in failed:
        found[_reason(episode)][len(episode.turns).bit_length()] += 1
    return {
        reason: {_range(bits): counts[bits] for bits in sorted(counts)} for reason, counts in found.items()
    }


def _range(bits: int) -> str:
    """Return the range of numbers with so many bits: 0, 1, 2–3, 4–7 ..."""
    first, last = 1 << bits >> 1, (1 << bits) - 1
    return f"{first}–{last}" if last > first else str(last)


def _reason(episode: EpisodeRecord) -> str:
    return f"{episode.failed}: {episode.error}"


def _by_sample(episodes: Iterable[EpisodeRecord]) -> dict[int | str, list[EpisodeRecord]]:
    groups: dict[int | str, list[EpisodeRecord]] = defaultdict(list)
    for episode in episodes:
        groups[episode.index].append(episode)
    return dict(groups)


def _mean_success(episodes: Sequence[EpisodeRecord]) -> float:
    return fmean(episode.success for episode in episodes)


def _mean_reward(episodes: Sequence[EpisodeRecord]) -> float:
    return fmean(episode.reward for episode in episodes)


def _share(wins: Sequence[Sequence[bool]]) -> Estimate | None:
    trials = sum(map(len, wins))
    if not trials:
        return None
    share, worth = sum(map(sum, wins)) / trials, effective_trials(wins)
    low, high = wilson_interval(share * worth, worth)
    return Estimate(value=share, low=low, high=high)


def _mean_of_groups(
    groups: Sequence[Sequence[EpisodeRecord]], value: Callable[[EpisodeRecord], float]
) -> Estimate | None:
    return _bootstrap([fmean(map(value, group)) for group in groups]) if groups else None


def _bootstrap(values: Sequence[float]) -> Estimate:
    low, high = bootstrap_interval(values)
    return Estimate(value=fmean(values), low=low, high=high)


def _pass(
    wins: Sequence[Sequence[bool]], attempts: int, estimate: Callable[[int, int, int], float]
) -> dict[int, float]:
    """Return an estimate for each power of two up to the number of attempts, and for this number."""
    ks = [2**power for power in range(attempts.bit_length()) if 2**power < attempts] + [attempts]
    found = {k: [estimate(len(group), sum(group), k) for group in wins if len(group) >= k] for k in ks}
    return {k: fmean(values) for k, values in found.items() if values}


def _latency(seconds: Sequence[float | None]) -> Latency | None:
    measured = [value for value in seconds if value is not None]
    if not measured:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(measured, [50, 90, 99]))
    return Latency(p50=p50, p90=p90, p99=p99, max=max(measured))


def _tokens(
    episodes: Sequence[EpisodeRecord], price_input: float | None, price_output: float | None
) -> Tokens:
    def total(name: str) -> int | None:
        values = [getattr(turn.usage, name) for episode in episodes for turn in episode.turns]
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    read, written = total("input"), total("output")
    priced = price_input is not None or price_output is not None
    cost = None
    if priced and read is not None and written is not None:
        cost = (read * (price_input or 0.0) + written * (price_output or 0.0)) / _MILLION
    return Tokens(
        input=read,
        output=written,
        cached=total("cached"),
        thinking=total("thinking"),
        input_per_episode=None if read is None else read / len(episodes),
        output_per_episode=None if written is None else written / len(episodes),
        cost=cost,
    )
