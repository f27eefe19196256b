"""Fixtures of the tests with real peers."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def leftovers() -> Iterator[None]:
    """Collect what a test leaves behind: the warnings about open connections belong to it."""
    yield
    gc.collect()
