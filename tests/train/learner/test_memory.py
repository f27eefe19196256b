"""Memory of an update, counted on the meta device for the shape of a large model."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl_train.config import LoraSection
from agentrl_train.learner.learner import _enable_checkpointing
from agentrl_train.learner.lora import add_adapters, is_adapter

GIB = 2**30
SMALL_GPU = 24 * GIB
CONTEXT = 1 * GIB
"""GPU memory that CUDA itself uses."""
LOGITS = 2**26
"""Entries in a chunk of logits, the default of ``Learner``."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors created by operations. Weights do not count."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: Any = WeakIdKeyDictionary()
        self._weights = [value.untyped_storage() for value in model.parameters()]
        for storage in self._weights:
            self._seen[storage] = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, list | tuple) else [made]:
            if isinstance(one, torch.Tensor):
                self._count(one.untyped_storage())
        self.peak = max(self.peak, self.now)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._seen:
            self._seen[storage] = True
            self.now += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self.now -= size


def qwen_7b(dtype: torch.dtype, **options: Any) -> Qwen2ForCausalLM:
    """Return Qwen2.5 7 B without weights."""
    config = Qwen2Config(
        **{
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        }
        | options,
        dtype=dtype,
    )
    with torch.device("meta"):
        return Qwen2ForCausalLM._from_config(config, dtype=dtype)


def state_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of parameters, gradients and AdamW's two moments."""
    parameters = dict(model.named_parameters())
    trained = sum(value.nbytes for value in parameters.values() if value.requires_grad)
    return sum(value.nbytes for value in parameters.values()) + 3 * trained


def activation_bytes(model: Qwen2ForCausalLM, *, rows: int, length: int) -> int:
    """Return the peak of activations in a forward and backward pass of the body, with checkpointing."""
    model.train()
    _enable_checkpointing(model)
    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device="meta")  # of packed rows
    with LiveBytes(model) as live:
        hidden = model.model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)[0]
        hidden.sum().backward()
        del hidden
    return live.peak


def test_adapters_of_seven_billion_parameters_fit_a_gpu_of_24_gib() -> None:
    model = qwen_7b(torch.bfloat16)
    add_adapters(model, LoraSection(rank=16, alpha=32.0))
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert all(is_adapter(name) and value.dtype == torch.float32 for name, value in trained.items())
    assert sum(value.numel() for value in trained.values()) == 40_370_176
    state = state_bytes(model)
    assert 14 * GIB < state < 15 * GIB
    for name, value in list(model.named_parameters()):
        if is_adapter(name):
            owner, _, leaf = name.rpartition(".")
            meta = torch.nn.Parameter(value.to("meta"))
            setattr(model.get_submodule(owner), leaf, meta)
    activations = activation_bytes(model, rows=2, length=2048)
    logits = 5 * 4 * LOGITS  # float32: logits and their gradient, and up to three more copies on a GPU
    assert activations > 0.5 * GIB
    assert state + activations + logits + CONTEXT < SMALL_GPU


def test_all_parameters_of_seven_billion_do_not_fit() -> None:
    assert state_bytes(qwen_7b(torch.float32)) > 4 * SMALL_GPU
