"""vLLM keeps the contract of engines, as the torch engine does."""

import pytest

from tests.engine_contract import EngineContract

pytestmark = pytest.mark.vllm


class TestVllmPool(EngineContract):
    """The fixture ``subject`` is the folder's: one engine serves all of these."""
