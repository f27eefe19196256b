"""The schedule of faults, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

WEIGHTS = {
    "kill server": 8,
    "pause server": 6,
    "drain server": 4,
    "kill controller": 6,
    "pause controller": 5,
    "drain controller": 3,
    "kill redis": 3,
    "pause redis": 3,
    "kill worker": 3,
    "kill workers": 2,
    "cut clients": 5,
    "cut links": 5,
    "cut redis": 3,
    "cut clients in a frame": 3,
    "cut links in a frame": 3,
    "half-close clients": 2,
    "half-close links": 2,
    "stall clients": 3,
    "stall links": 4,
    "stall redis": 2,
    "silence clients": 2,
    "silence links": 3,
    "delay clients": 2,
    "delay links": 2,
    "delay redis": 2,
    "refuse clients": 2,
    "refuse links": 2,
    "refuse redis": 2,
    "roll servers": 1,
}
"""Relative frequency of each fault."""
FIRST_S = 3.0
"""Time of the first fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of the ``which``-th target of a kind. ``share`` is the fraction of affected connections."""

    at: float
    kind: str
    which: int
    seconds: float
    share: float


def draw(seed: int, seconds: float) -> Iterator[Fault]:
    """Yield the faults of a run, in order."""
    rng = random.Random(seed)
    at = FIRST_S
    while at < seconds:
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        yield Fault(
            at=at,
            kind=kind,
            which=rng.randrange(1000),
            seconds=rng.choice([0.5, 1.0, 2.0, 4.0, 8.0, 12.0]),
            share=rng.choice([0.2, 0.5, 1.0]),
        )
        at += rng.uniform(0.5, 5.0)
