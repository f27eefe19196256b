"""Weight transfer from GPU to GPU over NCCL, with vLLM's sender.

The only module of the trainer process that imports vLLM; it is imported only if NCCL is configured.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from agentrl_train.engine.transfer import DeviceWeights

Step = Callable[[str, dict[str, Any]], None]
"""Runs one step of the transfer on the engine and returns when it is done."""


class NcclTransfer:
    """The sending side of the transfer to one engine. Blocking: runs in a dedicated thread.

    Args:
        step: runs a step on the engine.
        workers: number of GPUs of the engine.
        weights: the first weights. Later weights must have the same names and shapes.
    """

    def __init__(self, step: Step, *, workers: int, weights: DeviceWeights) -> None:
        self._source = _Source(weights)
        self._sender = WeightTransferTrainerFactory.trainer_init(
            _endpoint(workers=workers), client=_Client(step), source=self._source
        )

    def send(self, weights: DeviceWeights) -> None:
        """Send one version of the weights; return when the engine has loaded it."""
        self._source.weights = weights
        self._sender.send_weights()


def _endpoint(*, workers: int) -> TrainerInitInfo:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=port, world_size=1 + workers)


class _Source(WeightSource):  # type: ignore[misc]  # vLLM need not be here when types are checked
    def __init__(self, weights: DeviceWeights) -> None:
        self.weights = weights

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name=name, dtype=value.dtype, shape=tuple(value.shape))
            for name, value in self.weights.state.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.weights.state.items())


class _Client:
    """Forwards the calls of vLLM's sender to the engine (its ``VLLMWeightSyncClient``)."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._step("init", init_info)

    def start_weight_update(self) -> None:
        self._step("start", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._step("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._step("finish", {})
