"""Check the API of vLLM's NCCL transfer, without a GPU."""

import subprocess

import pytest

pytestmark = pytest.mark.vllm

PARTS = """
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from agentrl_train.engine.nccl_transfer import _Client, _Source, _endpoint
from agentrl_train.engine.transfer import DeviceWeights

weights = DeviceWeights({"a.0.weight": torch.ones(2, 3)}, dtype=torch.bfloat16, policy_version=1)
source, asked = _Source(weights), []
assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [("a.0.weight", torch.bfloat16, (2, 3))]
assert [name for name, _ in source] == ["a.0.weight"]
assert weights.fingerprint == {"0": 6 * 0x3F80}
assert _endpoint(workers=2).backend == "nccl"
assert "nccl" in WeightTransferTrainerFactory._registry
assert _endpoint(workers=2).world_size == 3
client = _Client(lambda step, info: asked.append((step, sorted(info))))
client.init_weight_transfer_engine({"packed": True})
client.start_weight_update()
client.update_weights({"names": ["a"]})
client.finish_weight_update()
print(asked)
"""


def test_nccl_sender_is_compatible_with_vllm(python: str) -> None:
    done = subprocess.run([python, "-c", PARTS], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = [
        ("init", ["packed"]),
        ("start", []),
        ("update", ["names"]),
        ("finish", []),
    ]
    assert done.stdout.splitlines()[-1] == str(expected)
