"""Step 1 of 9: dataset -> TaskSample. Selects the problem and the seed of an episode."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pydantic_core import PydanticSerializationError

from agentrl_env.errors import DefinitionError, UnknownSample
from agentrl_env.types import SplitInfo, TaskSample
from agentrl_env.wire import SEED_BITS

if TYPE_CHECKING:
    from agentrl_env.environment import Environment


class Samples(Protocol):
    """Return value of ``Environment.samples``: indexable, lazy, with or without ``len``."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return the data of one sample."""


class EndlessSamples:
    """Endless samples without data: the seed determines the problem."""

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Return the empty data of any sample."""
        return {}


def stable_seed(*parts: object) -> int:
    """Return a seed derived from a hash of ``parts``, the same in every process."""
    text = json.dumps(parts, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - SEED_BITS)


class Dataset:
    """The splits of one environment class, each loaded once."""

    def __init__(self, environment: type[Environment]) -> None:
        self._environment = environment
        self._task = environment.name
        self._splits: dict[str, Samples] = {}

    def split(self, name: str) -> Samples:
        """Return one split. Raises UnknownSample, and DefinitionError for samples without an index."""
        if name not in self._environment.splits:
            known = ", ".join(self._environment.splits)
            raise UnknownSample(f"task {self._task!r} has no split {name!r}; it has: {known}")
        if name not in self._splits:
            samples = self._environment.samples(name)
            if not hasattr(samples, "__getitem__"):
                raise DefinitionError(
                    f"samples({name!r}) of task {self._task!r} is a {type(samples).__name__}, which has no "
                    "index: return a list, or an object with __getitem__"
                )
            self._splits[name] = samples
        return self._splits[name]

    def info(self) -> dict[str, SplitInfo]:
        """Return the size of every split; None for an endless one."""
        return {name: SplitInfo(num_samples=_length(self.split(name))) for name in self._environment.splits}

    def sample(
        self,
        split: str = "train",
        index: int | str | None = None,
        seed: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> TaskSample:
        """Return one sample.

        Args:
            split: Split of the dataset.
            index: Index of the sample; by default the seed picks one, at random without a seed.
            seed: Seed of the episode; by default a hash of (task, split, index), so that siblings have the
                same problem.
            data: Data to use instead of the dataset's.

        Raises:
            UnknownSample: There is no such split or index.
            DefinitionError: The data is not JSON.
        """
        samples = self.split(split)
        if data is not None:
            chosen = dict(data)
            key: object = index if index is not None else chosen
        else:
            if index is None:
                index = _pick(samples, secrets.randbits(31) if seed is None else seed, split)
            chosen = self._data(samples, split, index)
            key = index
        if seed is None:
            seed = stable_seed(self._task, split, key)
        sample = TaskSample(task=self._task, split=split, index=index, seed=seed, data=chosen)
        try:
            sample.model_dump_json()
        except PydanticSerializationError as error:
            raise DefinitionError(
                f"samples({split!r})[{index!r}] of task {self._task!r} cannot be sent as JSON: {error}"
            ) from None
        return sample

    def _data(self, samples: Samples, split: str, index: int | str) -> dict[str, Any]:
        size = _length(samples)
        if size == 0:
            raise UnknownSample(empty_split(split))
        if isinstance(index, int) and (index < 0 or (size is not None and index >= size)):
            limit = f" (it has {size} samples)" if size is not None else ""
            raise UnknownSample(f"task {self._task!r}, split {split!r}: no index {index}{limit}")
        try:
            data = samples[index]
        except (LookupError, TypeError) as error:
            if size is not None and isinstance(index, int) and not isinstance(samples, Mapping):
                what = f"samples({split!r})[{index}] of task {self._task!r}"
                raise DefinitionError(f"{what} raised {type(error).__name__}: {error}") from error
            raise UnknownSample(f"task {self._task!r}, split {split!r}: no index {index!r}") from error
        if not isinstance(data, Mapping):
            raise DefinitionError(
                f"samples({split!r})[{index!r}] of task {self._task!r} is a "
                f"{type(data).__name__}; it must be a dict"
            )
        return dict(data)


def _length(samples: Samples) -> int | None:
    return len(samples) if isinstance(samples, Sized) else None


def empty_split(split: str) -> str:
    """Return the sentence that refuses a split without samples."""
    return f"split {split!r} has no samples; samples({split!r}) must return some, or splits must not name it"


def _pick(samples: Samples, seed: int, split: str) -> int | str:
    size = _length(samples)
    if size is None:
        return seed
    if size == 0:
        raise UnknownSample(empty_split(split))
    chosen = int(np.random.default_rng(seed).integers(size))
    return chosen if not isinstance(samples, Mapping) else str(list(samples)[chosen])
