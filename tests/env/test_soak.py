"""A soak test of a few seconds, and its statistics."""

import pytest

from tests.soak import Sample, Soak, run


async def test_no_session_is_lost_or_leaked_under_churn():
    soak = await run(500, 3.0, sample_s=1.0)
    assert soak.failed == []
    assert (soak.lost, soak.doubled, soak.leaked, soak.left) == (0, 0, 0, 0)
    assert soak.opened > 500
    assert soak.steps > soak.opened - 500
    assert [sample.open for sample in soak.samples] == [500] * len(soak.samples)
    files = [sample.files for sample in soak.samples]
    assert max(files) - min(files) <= 20
    assert soak.samples[-1].tasks > 0


def sample(at, rss_mb=100.0, tasks=10):
    return Sample(at=at, rss_mb=rss_mb, files=20, threads=2, tasks=tasks, open=500)


def test_only_growth_after_the_warm_up_counts():
    soak = Soak(500, 1, seconds=600.0)
    soak.samples = [sample(at, rss_mb=min(at, 150)) for at in range(0, 601, 10)]
    assert soak.flat
    assert soak.slope("rss_mb") == pytest.approx(0)
    soak.samples = [sample(at, rss_mb=100 + at / 60) for at in range(0, 601, 10)]
    assert soak.slope("rss_mb") == pytest.approx(1.0)
    assert not soak.flat
    soak.samples = [sample(at, tasks=10 + at // 60) for at in range(0, 601, 10)]
    assert not soak.flat
