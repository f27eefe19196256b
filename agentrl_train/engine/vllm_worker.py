"""Worker extension for vLLM: loads weights from shared memory and computes their fingerprint.

vLLM imports this module in every worker before it loads the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.layers.utils as layers
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from agentrl_train.engine.transfer import Fingerprint, fingerprint

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object


def _keep_plain_weights() -> None:
    """Make vLLM's CPU layers multiply by the parameters themselves.

    By default each layer multiplies by a packed copy. New weights then silently do not reach a head tied to
    the embedding, and other layers have no parameter left to load into.
    """
    layers.ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *shape: False


if current_platform.is_cpu():
    _keep_plain_weights()


class WeightReceiver(Worker):  # type: ignore[misc]  # vLLM need not be here when types are checked
    """Mixin of the vLLM worker, called through ``collective_rpc``."""

    def receive_weights_from(self, path: str) -> list[str]:
        """Load the safetensors file ``path`` in place; return the parameters it did not set.

        Kernels for experts keep them in a layout of their own, which has to be restored.
        """
        experts = [layer for layer in self._model.modules() if hasattr(layer, "w13_weight")]
        with set_current_vllm_config(self.vllm_config):
            if experts:
                initialize_layerwise_reload(self._model)
            loaded: set[str] = self._model.load_weights(_tensors(path))
            if experts:
                finalize_layerwise_reload(self._model, self.vllm_config.model_config)
                for layer in experts if current_platform.is_cpu() else ():
                    # vLLM does so after the first load only.
                    layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        return sorted(name for name, _ in self._model.named_parameters() if name not in loaded)

    def weight_fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the parameters that this worker samples with."""
        return fingerprint(self._model.named_parameters())

    @property
    def _model(self) -> Any:
        return self.model_runner.get_model()


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 (the file is no mapping)
            yield name, file.get_tensor(name)
