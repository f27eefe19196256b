"""The engine contract, for vLLM."""

import pytest

from tests.engine_contract import EngineContract

pytestmark = pytest.mark.vllm


class TestVllmPool(EngineContract):
    """Uses the fixture ``subject`` in ``conftest.py``, one engine for all tests."""
