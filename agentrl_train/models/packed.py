"""Linear layers with weights in the processor's own layout, for an engine on a CPU.

A pass that decodes has few rows. The plain product of a row-major weight then spends much of its time on
rearranging the weight, again in every pass. oneDNN rearranges it once for each version of the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

ROWS = 32
"""Rows of the passes that the layout is made for; others can use it too."""
SMALLEST = 2**16
"""Weights of the smallest layer that is packed."""
SMALLEST_MODEL = 2**24
"""Least number of weights in linear layers to try packing. The weights of smaller models stay in caches."""
TRIED = 2**22
"""Weights of the product that is measured, more than the caches of a core hold."""
GAIN = 1.15
"""Times that a packed product must be faster."""


class PackedLinear(nn.Linear):
    """A linear layer with a packed copy of its weight. ``repack`` follows each change of the weight."""

    packed: Tensor

    def repack(self) -> None:
        """Pack the present weight."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), ROWS)

    def forward(self, input: Tensor) -> Tensor:
        """Return the product, [..., outputs]."""
        return _product(input, self.packed, self.bias)


def pack(model: nn.Module) -> None:
    """Pack the linear layers of a model on a CPU, which takes the memory of their weights once more."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= SMALLEST:
            module.__class__ = PackedLinear
    repack(model)


def repack(model: nn.Module) -> None:
    """Pack the weights of a model anew, as far as they are packed."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.repack()


def packing_pays(model: nn.Module) -> bool:
    """Measure, within a second, whether this processor multiplies the packed layers of a model faster."""
    weights = [module.weight.detach() for module in model.modules() if type(module) is nn.Linear]
    if sum(weight.numel() for weight in weights) < SMALLEST_MODEL or not _supported(weights[0]):
        return False
    largest = max(weights, key=Tensor.numel)
    weight = largest[: max(1, TRIED // largest.shape[1])].contiguous()
    rows = torch.randn(ROWS, weight.shape[1], dtype=weight.dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    except RuntimeError:  # bfloat16 on a processor that does not multiply it
        return False
    plain_s = _fastest(lambda: nn.functional.linear(rows, weight))
    return plain_s > GAIN * _fastest(lambda: _product(rows, packed, None))


def _product(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
    return result


def _supported(weight: Tensor) -> bool:
    operations = ("_linear_pointwise", "_reorder_linear_weight")
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in operations)
    )


def _fastest(product: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some products, which other load disturbs least."""
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
