"""Extensions of vLLM's worker: loads weights from shared memory, and keeps to the grammars of requests.

vLLM imports this module in every worker before it loads the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.layers.utils as layers
from safetensors import safe_open
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from agentrl_train.engine.constraint import Grammars, Matcher, unpack_sets
from agentrl_train.engine.transfer import Fingerprint, fingerprint
from agentrl_train.errors import ConstraintError

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

        Kernels for experts keep them in their own layout, which has to be restored.
        """
        experts = [layer for layer in self._model.modules() if hasattr(layer, "w13_weight")]
        with set_current_vllm_config(self.vllm_config):
            if experts:
                initialize_layerwise_reload(self._model)
            loaded: set[str] = self._model.load_weights(_tensors(path))
            if experts:
                finalize_layerwise_reload(self._model, self.vllm_config.model_config)
                for layer in experts if current_platform.is_cpu() else ():
                    # vLLM does this only after the first load.
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


class GrammarProcessor(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM need not be here
    """Leaves the tokens that the grammar of a request allows, before they are truncated and sampled."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._config = vllm_config
        self._grammars: Grammars | None = None

    def is_argmax_invariant(self) -> bool:
        """Return False: the most likely token may not be allowed."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> _Mask | None:
        """Return the mask of a request; None if it has no grammar."""
        if not params.extra_args:
            return None
        if self._grammars is None:
            self._grammars = Grammars.of_vllm(self._config.model_config, params.stop_token_ids)
        return _Mask(self._grammars.start(params.extra_args["grammar"]), stop=params.stop_token_ids)


class _Mask:
    """Masks the logits of one request.

    If no token is allowed it leaves the stop tokens: an exception would end the engine. The completion is
    refused once it is matched with the grammar again.
    """

    def __init__(self, matcher: Matcher, *, stop: Sequence[int]) -> None:
        self._matcher = matcher
        self._stop = list(stop)
        self._seen = 0

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        for token in output_ids[self._seen :]:
            self._matcher.advance(token)
        self._seen = len(output_ids)
        try:
            (allowed,) = unpack_sets([self._matcher.allowed()], logits.shape[-1])
        except ConstraintError:
            allowed = torch.zeros(logits.shape[-1], dtype=torch.bool)
            allowed[self._stop] = True
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)
