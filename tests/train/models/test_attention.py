"""Attention equals PyTorch's: all layouts of the keys, blocks of queries, and the kernels of a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from agentrl_train.models import architecture
from agentrl_train.models.architecture import BLOCK_QUERIES, FEW_QUERIES, attend

HEADS = pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (4, 4), (3, 1)])
LENGTHS = [
    (1, 9),
    (5, 5),
    (BLOCK_QUERIES, 2 * BLOCK_QUERIES),
    (BLOCK_QUERIES + 1, BLOCK_QUERIES + 1),
    (150, 333),
]


def tensors(heads: int, key_heads: int, queries: int, keys: int, *, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(queries + keys)
    shapes = [(heads, queries, 16), (key_heads, keys, 16), (key_heads, keys, 24)]
    return [torch.randn(2, *shape, dtype=torch.float64).to(dtype) for shape in shapes]


def causal_mask(queries: int, keys: int) -> Tensor:
    positions = torch.arange(keys - queries, keys)[:, None]
    mask = torch.zeros(queries, keys, dtype=torch.float64)
    return mask.masked_fill_(torch.arange(keys) > positions, -torch.inf)


def expected(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    inputs = [one.double() for one in (query, key, value)]
    return scaled_dot_product_attention(*inputs, attn_mask=mask, scale=scaling, enable_gqa=True)


@HEADS
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_blocks_of_queries_have_attention_and_gradients_of_a_causal_mask(
    heads: int,
    key_heads: int,
    queries: int,
    keys: int,
    scaling: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(architecture, "attends_by_products", lambda value: True)
    inputs = [one.requires_grad_() for one in tensors(heads, key_heads, queries, keys, dtype=torch.float64)]
    wanted = expected(*inputs, causal_mask(queries, keys), scaling)
    found = attend(*inputs, is_causal=True, scaling=scaling)
    torch.testing.assert_close(found, wanted)
    of_found = torch.randn_like(wanted)
    gradients = (torch.autograd.grad(one, inputs, of_found) for one in (found, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@HEADS
@pytest.mark.parametrize(("queries", "keys"), [(1, 40), (FEW_QUERIES, 90), (FEW_QUERIES + 1, 90)])
def test_layout_of_keys_does_not_change_attention(
    heads: int, key_heads: int, queries: int, keys: int
) -> None:
    query, key, value = tensors(heads, key_heads, queries, keys, dtype=torch.float64)
    by_column = key.transpose(2, 3).contiguous().transpose(2, 3)
    mask = causal_mask(queries, keys)
    for one in (key, by_column):
        found = attend(query, one, value, mask=mask.expand(2, 1, -1, -1))
        torch.testing.assert_close(found, expected(query, key, value, mask, None))
    torch.testing.assert_close(
        attend(query, by_column, value), expected(query, key, value, torch.zeros_like(mask), None)
    )


@pytest.mark.parametrize("cap", [{"softcap": 5.0}, {"sinks": torch.full((6,), -1e9, dtype=torch.float64)}])
def test_capped_attention_of_the_last_tokens_is_causal(cap: dict[str, object]) -> None:
    query, key, value = tensors(6, 2, 5, 12, dtype=torch.float64)
    masked = attend(query, key, value, mask=causal_mask(5, 12), **cap)  # type: ignore[arg-type]
    torch.testing.assert_close(attend(query, key, value, is_causal=True, **cap), masked)  # type: ignore[arg-type]


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_blocks_in_bfloat16_are_as_exact_as_the_type(queries: int, keys: int) -> None:
    inputs = [one.requires_grad_() for one in tensors(6, 2, queries, keys, dtype=torch.bfloat16)]
    wanted = expected(*inputs, causal_mask(queries, keys), None)
    found = attend(*inputs, is_causal=True)
    of_found = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(one, inputs, of_found.to(one.dtype)) for one in (found, wanted)]
    for ours, exact in ((found.detach(), wanted.detach()), *zip(*gradients, strict=True)):
        error = (ours.double() - exact.double()).norm() / exact.double().norm()
        assert float(error) < torch.finfo(torch.bfloat16).eps


@HEADS
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (5, 5), (150, 333)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_a_gpu_give_attention_and_gradients_of_a_causal_mask(
    heads: int, key_heads: int, queries: int, keys: int, masked: bool, dtype: torch.dtype
) -> None:
    inputs = [one.requires_grad_() for one in tensors(heads, key_heads, queries, keys, dtype=dtype)]
    mask = causal_mask(queries, keys)
    wanted = expected(*inputs, mask, 0.7)
    given = mask.to(dtype) if masked else None
    found = architecture._attend_on_gpu(*inputs, mask=given, is_causal=not masked, scaling=0.7)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
    of_found = torch.randn_like(wanted)
    ours = torch.autograd.grad(found, inputs, of_found.to(dtype))
    theirs = torch.autograd.grad(wanted, inputs, of_found)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.to(dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@HEADS
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_on_a_gpu_keeps_no_scores(
    heads: int, key_heads: int, queries: int, keys: int, masked: bool
) -> None:
    inputs = [one.to("cuda") for one in tensors(heads, key_heads, queries, keys, dtype=torch.bfloat16)]
    inputs[2] = inputs[2][..., :16]
    mask = causal_mask(queries, keys).to("cuda")
    wanted = expected(*inputs, mask, None)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):  # not by products
        found = attend(*inputs, mask=mask.bfloat16() if masked else None, is_causal=not masked)
    torch.testing.assert_close(found.double(), wanted, atol=0.1, rtol=0.1)
