"""An engine with scripted completions, and checks of the training data made from them."""

import asyncio
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest
import torch

from agentrl_env import Message
from agentrl_train.batch import pack, sequences
from agentrl_train.learner import Learner
from agentrl_train.types import Completion, SamplingParams, TrajectoryGroup
from tests.tiny_models import make_model
from tests.train.fakes import CHAT

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a context and of the completion after it."""


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = []
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
    return pytest.mark.skipif(
        bool(missing), reason=f"{missing} of the extra [agents] is not installed; run make bridges"
    )


class Speaker:
    """An engine whose completions come from a function, with the log-probabilities of a real model.

    It ignores grammars, because the function already returns the required form. The function receives the
    number of the session, counted from 0, and the number of the call within it, counted from 1.
    """

    def __init__(self, say: Callable[[int, int], Message]) -> None:
        self.say = say
        self.model = make_model().eval()
        self.version = 0
        self.sampled: list[Span] = []
        """Context and completion of each call."""
        self._calls: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    async def generate(
        self, token_ids: Sequence[int], *, sampling: SamplingParams, session_key: str, policy: str = "current"
    ) -> Completion:
        await asyncio.sleep(0)
        session = session_key.rpartition("/")[0] or session_key
        number = self._numbers.setdefault(session, len(self._numbers))
        count = self._calls[session] = self._calls.get(session, 0) + 1
        ids = CHAT.completion(self.say(number, count))
        self.sampled.append((tuple(token_ids), tuple(ids)))
        with torch.no_grad():
            logits = self.model(torch.tensor([[*token_ids, *ids]])).logits[0, len(token_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        return Completion(
            token_ids=ids,
            logprobs=logprobs.tolist(),
            versions=[self.version] * len(ids),
            finish_reason="stop",
            policy=policy,
        )

    def release(self, session_key: str) -> None:
        return None

    async def close(self) -> None:
        return None


def train_on_what_was_sampled(
    learner: Learner, engine: Speaker, group: TrajectoryGroup, *, max_tokens: int
) -> None:
    """Train on a group of two episodes, and compare the batch token by token with the engine's record."""
    before = {key: value.clone() for key, value in engine.model.state_dict().items()}
    rows = sequences([group], [[1.0, -1.0]])
    trained: list[Span] = []
    for row in rows:
        ends = np.flatnonzero(np.diff(row.loss_mask, append=0.0) < 0) + 1
        starts = np.flatnonzero(np.diff(row.loss_mask, prepend=0.0) > 0)
        ids = row.token_ids.tolist()
        trained += [(tuple(ids[:a]), tuple(ids[a:b])) for a, b in zip(starts, ends, strict=True)]
        assert (row.versions[row.loss_mask > 0] == engine.version).all()
    assert sorted(trained) == sorted(engine.sampled)
    for row, recomputed in zip(rows, learner.logprobs(rows), strict=True):
        sampled = row.loss_mask > 0
        np.testing.assert_allclose(recomputed[sampled], row.logprobs[sampled], atol=1e-4)
    metrics = learner.step(pack(rows, max_tokens=max_tokens))
    assert np.isfinite(metrics["loss"])
    assert any(not torch.equal(before[key], value) for key, value in engine.model.state_dict().items())
