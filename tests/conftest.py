"""Settings of all tests."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# The duration of an example depends on the machine rather than on the code.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=30, **COMMON)
settings.register_profile("thorough", max_examples=300, **COMMON)
settings.load_profile("quick")

gc.disable()  # modules and collected tests stay until the end


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection, whose duration grows with all objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace lone surrogates, which some tests log, so that reports can be sent between processes."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "replace").decode()) for name, text in report.sections]
    return report
