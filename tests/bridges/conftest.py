"""Fixtures for the tests with real peers."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def leftovers() -> Iterator[None]:
    """Collect garbage after each test, so that warnings about open connections belong to it."""
    yield
    gc.collect()
