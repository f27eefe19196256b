"""The engine contract, for the torch engine."""

from collections.abc import AsyncIterator

import pytest

from agentrl_train.engine.torch import TorchEngine
from tests.engine_contract import MAX_CONTEXT, POLICIES, STOP, EngineContract, Subject, contract_model


class TestTorchEngine(EngineContract):
    @pytest.fixture
    async def subject(self) -> AsyncIterator[Subject]:
        engine = TorchEngine(
            {policy: contract_model(0) for policy in POLICIES},
            stop_token_ids=[STOP],
            max_sequences=16,
            max_context=MAX_CONTEXT,
            deadline_s=60.0,
        )
        yield Subject(engine, tolerance=1e-4)
        await engine.close()
