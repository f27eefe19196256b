"""Passes of a GPU: attention by pages, and decode passes with fixed shapes.

The passes run on a CPU here, where a pass is computed again in place of a replay. ``attend_by_pages`` is
``varlen_attn`` by its documentation. Tensors of the device "meta" show that nothing reads a result on the
host during a capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl_train.engine import gpu
from agentrl_train.engine.cache import ATTENTION, MOST, Pages, SlotCache
from agentrl_train.engine.gpu import CompiledLayers, DecodeGraphs, Shape, agrees, can_be_paged
from agentrl_train.engine.scheduler import Scheduler, sample
from agentrl_train.types import SamplingParams
from tests.architectures import tiny
from tests.train.engine.test_cache import assert_same, one_thread, play

FAMILIES = ["Qwen3", "Gemma-2", "gpt-oss", "DeepSeek-V3"]
SAMPLINGS = (
    SamplingParams(max_new_tokens=16),
    SamplingParams(max_new_tokens=9, temperature=0.0),
    SamplingParams(max_new_tokens=16, temperature=0.5),
)
__all__ = ["one_thread"]


def attend_by_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Return the attention of each sequence, whose queries are its last tokens."""
    assert key.shape[1] % 256 == 0
    assert {one.dtype for one in (cu_seq_q, cu_seq_k, seqused_k, block_table)} == {torch.int32}
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert max_q >= int(cu_seq_q.diff().max())
    assert max_k >= int(seqused_k.max())
    assert window_size[1] == 0
    left = window_size[0] if window_size[0] >= 0 else math.inf
    results = []
    for i, (begin, end) in enumerate(zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)):
        used = int(seqused_k[i])
        keys, values = (one[block_table[i].long()].flatten(0, 1)[:used] for one in (key, value))
        queries = torch.arange(used - (end - begin), used)[:, None]
        seen = (torch.arange(used) <= queries) & (queries - torch.arange(used) <= left)
        repeats = query.shape[1] // key.shape[2]
        keys, values = (one.repeat_interleave(repeats, dim=1).transpose(0, 1) for one in (keys, values))
        asked = query[begin:end].transpose(0, 1)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = (asked @ keys.transpose(1, 2) * factor).masked_fill(~seen, -torch.inf)
        results.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(results)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_pages)


def with_graphs(scheduler: Scheduler, *, compiled: bool = False) -> None:
    scheduler._graphs = DecodeGraphs(scheduler.model, scheduler._cache, sample=sample, compiled=compiled)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("most", [0, MOST])
def test_fixed_shapes_change_no_token_and_no_logprob(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    model = tiny(name)
    plain, _ = play(monkeypatch, model, most=most, samplings=SAMPLINGS)
    shapes = set[Shape]()

    def changed(scheduler: Scheduler) -> None:
        with_graphs(scheduler)
        assert scheduler._graphs is not None
        monkeypatch.setattr(scheduler._graphs, "_captured", Recorded(shapes))

    monkeypatch.setattr(gpu, "SHORTEST_VIEW", 32)
    fixed, _ = play(monkeypatch, model, most=most, samplings=SAMPLINGS, changed=changed)
    assert {shape.columns for shape in shapes} >= {64, 100 + 1}
    assert {shape.width for shape in shapes} >= ({1, 4, 8} if most else {1})
    assert_same(fixed, plain)


class Recorded(dict):  # type: ignore[type-arg]
    """A dictionary that records its keys."""

    def __init__(self, keys: set[Shape]) -> None:
        self._keys = keys

    def __setitem__(self, key: Shape, value: object) -> None:
        self._keys.add(key)
        super().__setitem__(key, value)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(max_new_tokens=16, top_k=20), SamplingParams(max_new_tokens=16, min_p=0.1)]
)
def test_truncated_samples_are_drawn_from_the_logits_of_fixed_shapes(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    model, samplings = tiny("Qwen3"), (sampling, *SAMPLINGS)
    plain, _ = play(monkeypatch, model, most=MOST, samplings=samplings)
    fixed, _ = play(monkeypatch, model, most=MOST, samplings=samplings, changed=with_graphs)
    assert_same(fixed, plain)


@pytest.mark.parametrize("name", ["Qwen3", "Mistral-v0.1"])
@pytest.mark.parametrize("changed", [lambda scheduler: None, with_graphs])
def test_pages_change_no_token_and_no_logprob(
    monkeypatch: pytest.MonkeyPatch, pages: None, name: str, changed: Callable[[Scheduler], None]
) -> None:
    model = tiny(name)
    plain, _ = play(monkeypatch, model, most=MOST, samplings=SAMPLINGS)
    paged, _ = play(monkeypatch, model, most=MOST, samplings=SAMPLINGS, paged=True, changed=changed)
    assert_same(paged, plain)


class OnDevice(TorchDispatchMode):
    """Requires that no operation copies data from the host: a graph would repeat the copy of old data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {one.device.type for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)}
        assert devices <= {"meta"}, func
        return result


@pytest.mark.parametrize(
    ("name", "paged"),
    [
        *(("Qwen3", paged) for paged in (False, True)),
        *(("Mistral-v0.1", paged) for paged in (False, True)),
        *((name, False) for name in ("SmolLM2", "Gemma-2", "gpt-oss", "DeepSeek-V3")),
    ],
)
def test_decode_pass_never_waits_for_its_device(
    monkeypatch: pytest.MonkeyPatch, name: str, paged: bool
) -> None:
    if paged:
        monkeypatch.setattr(Pages, "attend", lambda pages, query, key, value, **_: torch.empty_like(query))
    model = tiny(name).bfloat16().to("meta")
    model.set_attn_implementation(ATTENTION)
    slots = SlotCache(model, num_slots=4, max_context=300, paged=paged)
    shape = Shape(slots=4, width=2, columns=slots.columns)
    inputs = torch.zeros(4 * shape.tokens + shape.slots, dtype=torch.float64, device="meta")
    with torch.inference_mode(), OnDevice():
        logits, drawn = DecodeGraphs(model, slots, sample=sample, compiled=False)._compute(inputs, shape)
    assert logits.shape[0] == drawn.shape[1] == shape.tokens


def test_pages_are_used_if_they_agree(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pages: None
) -> None:
    model = attending(tiny("Qwen3"))
    assert agrees(model)
    assert not caplog.records
    shifted = partial(attend_shifted, by=1)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", shifted)
    assert not agrees(model)
    assert "other results" in caplog.text


def attend_shifted(query: Tensor, *args: Any, seqused_k: Tensor, by: int, **options: Any) -> Tensor:
    """Return the attention to fewer keys, as of a kernel that counts them differently."""
    return attend_by_pages(query, *args, seqused_k=seqused_k - by * (seqused_k > 4).int(), **options)


@pytest.mark.parametrize("name", ["Gemma-2", "gpt-oss"])
def test_bounded_scores_and_sinks_are_computed_without_pages(name: str, pages: None) -> None:
    assert not agrees(attending(tiny(name)))


def attending(model: Any) -> Any:
    model.set_attn_implementation(ATTENTION)
    return model


def test_trial_of_pages_reports_exhausted_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*args: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        agrees(attending(tiny("Qwen3")))


def fail_to_capture(*args: Any) -> Tensor:
    raise RuntimeError("operation not permitted when stream is capturing")


def compute_nothing(graphs: DecodeGraphs, inputs: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    logits = torch.zeros(shape.tokens, graphs._model.config.vocab_size)
    return logits, torch.zeros(2, shape.tokens, dtype=torch.float64)


@pytest.mark.parametrize(
    ("compute", "reason"), [(fail_to_capture, "not permitted"), (compute_nothing, "the logits differ")]
)
def test_model_that_cannot_be_captured_is_decoded_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compute: Any, reason: str
) -> None:
    model = tiny("Qwen3")
    plain, _ = play(monkeypatch, model, most=MOST)
    monkeypatch.setattr(DecodeGraphs, "_compute", compute)
    same, _ = play(monkeypatch, model, most=MOST, changed=with_graphs)
    assert_same(same, plain)
    assert [reason in record.message for record in caplog.records] == [True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler about its own code
@pytest.mark.parametrize("name", ["Qwen3", "SmolLM2", "Gemma-2"])
def test_compiled_layers_change_no_token_and_no_logprob(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    model, calls = tiny(name), []
    plain, _ = play(monkeypatch, model, most=MOST, samplings=SAMPLINGS)
    used = CompiledLayers.used
    monkeypatch.setattr(CompiledLayers, "used", lambda layers: calls.append(layers) or used(layers))
    compiled, _ = play(
        monkeypatch, model, most=MOST, samplings=SAMPLINGS, changed=partial(with_graphs, compiled=True)
    )
    assert calls
    assert not [record for record in caplog.records if record.name.startswith("agentrl")]
    assert_same(compiled, plain)


def test_layers_that_cannot_be_compiled_are_captured_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_compiler(*args: Any, **options: Any) -> None:
        raise RuntimeError("no C compiler")

    model = tiny("Qwen3")
    plain, _ = play(monkeypatch, model, most=MOST)
    monkeypatch.setattr(torch, "compile", without_compiler)
    schedulers = list[Scheduler]()
    same, _ = play(
        monkeypatch,
        model,
        most=MOST,
        changed=lambda one: schedulers.append(one) or with_graphs(one, compiled=True),
    )
    assert schedulers[0]._graphs is not None
    assert schedulers[0]._graphs._captured
    assert_same(same, plain)
    assert ["without compiled layers" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("sessions", "guesses"), [(1, 6), (16, 6), (17, 3), (24, 3), (33, 1), (64, 1), (65, 0), (128, 0)]
)
def test_many_sessions_have_few_guesses(sessions: int, guesses: int) -> None:
    model = tiny("Qwen3")
    graphs = DecodeGraphs(model, SlotCache(model, num_slots=128, max_context=64), sample=sample)
    assert graphs.most_guesses(sessions) == guesses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in (*FAMILIES, "Mistral-v0.1")), ("SmolLM2", True)]
)
def test_graphs_of_a_gpu_change_no_token_and_no_logprob(
    monkeypatch: pytest.MonkeyPatch, name: str, compiled: bool
) -> None:
    model, means = tiny(name).to("cuda"), list[list[str]]()

    def without(scheduler: Scheduler) -> None:
        scheduler._graphs = None

    def replaying(scheduler: Scheduler) -> None:
        with_graphs(scheduler, compiled=compiled)
        assert scheduler._graphs is not None
        means.append(scheduler._graphs._means)

    plain, _ = play(monkeypatch, model, most=MOST, samplings=SAMPLINGS, changed=without)
    replayed, _ = play(monkeypatch, model, most=MOST, samplings=SAMPLINGS, changed=replaying)
    assert means == [[gpu.COMPILED, gpu.GRAPHS] if compiled else [gpu.GRAPHS]]
    assert_same(replayed, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_computes_attention_by_pages() -> None:
    model = attending(tiny("Qwen3")).to("cuda", torch.bfloat16)
    assert can_be_paged(model)
