"""Log-probabilities and entropies of tokens, and their gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from agentrl_train.learner import logprobs
from agentrl_train.learner.logprobs import score_tokens

requires_glibc = pytest.mark.skipif(sys.platform != "linux", reason="requires the allocator of glibc")

TEMPERATURE = 0.7
FAULTS = """
import resource, torch
from agentrl_train.models.architecture import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
for _ in range(6):
    before = faults()
    torch.ones(2**26, dtype=torch.uint8)
    print(faults() - before)
"""
"""A script that prints the page faults of tensors, each freed before the next."""
RETURNS = """
import sys, torch
from pathlib import Path
from agentrl_train.models.architecture import FreedMemory, keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

keep_freed_memory()
now = 0.0
freed = FreedMemory(clock=lambda: now)
held = [torch.ones(2**22, dtype=torch.uint8) for _ in range(int(sys.argv[1]))]
for now in map(float, sys.argv[2:]):
    tensors = [torch.ones(2**22, dtype=torch.uint8) for _ in range(100)]
    del tensors
    before = resident()
    freed.return_excess()
    print(before - resident())
"""
"""A script that holds so many tensors of 4 MB, and frees 100 in each step.

It prints how many MB are returned after the steps, which end at the given seconds.
"""


def plain(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both by definition, with PyTorch's own operations."""
    logprobs = (logits.double() / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("cached", [1, 3 * 50, 2**19])
def test_scores_and_gradients_match_a_softmax(monkeypatch, dtype, tolerance, cached):
    monkeypatch.setattr(logprobs, "CACHED_LOGITS", cached)
    torch.manual_seed(0)
    logits = (3 * torch.randn(8, 50)).to(dtype).requires_grad_()
    targets, weights = torch.randint(50, (8,)), torch.randn(2, 8)
    gradients = []
    for one in (plain(logits, targets), both(logits, targets)):
        (weights * torch.stack(one)).sum().backward()
        gradients.append(logits.grad)
        logits.grad = None
    assert torch.allclose(both(logits, targets)[0].double(), plain(logits, targets)[0], atol=1e-5)
    assert torch.allclose(both(logits, targets)[1].double(), plain(logits, targets)[1], atol=1e-5)
    assert torch.allclose(gradients[1], gradients[0], rtol=tolerance, atol=tolerance)


def both(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return score_tokens(logits, targets, temperature=TEMPERATURE, entropy_gradient=True)


def test_entropy_without_gradient_keeps_the_gradient_of_the_log_probability():
    logits = torch.randn(4, 9, requires_grad=True)
    targets = torch.arange(4)
    logprobs, entropy = score_tokens(logits, targets, temperature=1.0, entropy_gradient=False)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    expected = torch.eye(9)[targets] - logits.detach().softmax(-1)
    assert torch.allclose(logits.grad, expected, atol=1e-6)


@requires_glibc
def test_memory_of_freed_tensors_is_reused():
    faults = [int(one) for one in subprocess.check_output([sys.executable, "-c", FAULTS]).split()]
    assert min(faults[1:]) < faults[0] // 4  # the kernel can take pages from a waiting process


@requires_glibc
@pytest.mark.parametrize(
    ("held", "returned"), [(20, [True, False, False, True]), (200, [False, False, False, False])]
)
def test_freed_memory_is_returned_from_time_to_time_if_it_exceeds_the_memory_in_use(held, returned):
    command = [sys.executable, "-c", RETURNS, str(held), *("0", "5", "19", "20")]
    assert [int(one) > 200 for one in subprocess.check_output(command).split()] == returned
