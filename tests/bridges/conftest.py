"""Fixtures of the tests with real peers."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def leftovers() -> Iterator[None]:
    """Collect what a test leaves behind: connections that a peer keeps open are its own, not the next one's."""
    yield
    gc.collect()
