"""Settings for all tests."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# The duration of an example depends on the machine, not on the code.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=30, **COMMON)
settings.register_profile("thorough", max_examples=300, **COMMON)
settings.load_profile("quick")

gc.disable()  # modules and collected tests live until the end


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection, to speed up collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace lone surrogates in test logs, because reports with them cannot be sent between processes."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "replace").decode()) for name, text in report.sections]
    return report
