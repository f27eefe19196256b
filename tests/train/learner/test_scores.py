"""Log-probabilities and entropies of tokens, and their gradients."""

from __future__ import annotations

import pytest
import torch

from agentrl_train.learner import logprobs
from agentrl_train.learner.logprobs import score_tokens

TEMPERATURE = 0.7


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
