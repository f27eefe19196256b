"""Step 1 of 9: dataset -> TaskSample. Selects the problem and the seed of an episode."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from agentrl_env.author_code import describe
from agentrl_env.errors import DefinitionError, InvalidRequest, UnknownSample
from agentrl_env.types import SplitInfo, TaskSample
from agentrl_env.wire import SEED_BITS

MAX_DEPTH = 100
"""Maximum nesting of a sample's data."""
MAX_IDS = 20_000
"""Maximum number of samples whose names are listed in the description of a split."""
_json_decoder = msgspec.json.Decoder(dict[str, Any])


class Samples(Protocol):
    """The return value of ``Environment.samples``. It is indexable, can be lazy, and can have ``len``."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return the data of one sample."""


class Source(Protocol):
    """The part of an Environment class that a data set uses."""

    name: str
    splits: tuple[str, ...]

    def samples(self, split: str, /) -> Samples:
        """Return the samples of a split."""


class EndlessSamples:
    """Endless samples without data. The seed determines the problem."""

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Return the empty data of any sample."""
        return {}


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the samples of a JSON Lines file, which has one object per line. Blank lines are ignored.

    Example::

        @classmethod
        def samples(cls, split):
            return read_jsonl(Path(__file__).with_name(f"{split}.jsonl"))

    Raises DefinitionError, which names the line, if the file cannot be read or a line is not a JSON object.
    """
    try:
        with open(path, "rb") as file:
            lines = file.read().removeprefix(BOM_UTF8).splitlines()
    except OSError as error:
        beside = f"; a file beside environment.py is Path(__file__).with_name({os.path.basename(path)!r})"
        hint = "" if os.path.isabs(path) else beside
        raise DefinitionError(f"cannot read {path}: {error.strerror or error}{hint}") from error
    samples = []
    for number, line in enumerate(lines, 1):
        try:
            samples += [_json_decoder.decode(line)] if line.strip() else []
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DefinitionError(f"{path}:{number} is not a JSON object: {error}") from error
    return samples


def derived_file(
    path: str | os.PathLike[str],
    *,
    sources: Iterable[str | os.PathLike[str]],
    write: Callable[[Path], None],
    version: int = 1,
) -> Path:
    """Return a file that is derived from other files, such as an index of a data set.

    The file is written again if the sources or their contents have changed. It stays valid in a copy of its
    folder, even on a read-only disk. ``<path>.sources`` records its sources.

    Args:
        path: The file.
        sources: The files from which it is derived.
        write: Writes the file to the given path in the same folder. The file is moved to ``path`` when it is
            complete, so several processes can write it concurrently, and an error leaves nothing behind.
        version: Version of the format. A file with another version is written again.

    Raises:
        DefinitionError: The file must be written, but its folder is not writable.
    """
    path, record = Path(path), Path(f"{os.fspath(path)}.sources")
    files = sorted(Path(source) for source in sources)
    now: dict[str, Any] = {"version": version, "files": {file.name: _stamp(file) for file in files}}
    if path.exists() and _is_made_of(_read_record(record), files, now):
        return path
    for file in files:
        now["files"][file.name]["digest"] = _digest(file)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        unfinished.touch(exist_ok=False)
    except OSError as error:
        raise DefinitionError(
            f"{path} is missing or outdated and cannot be written ({error.strerror or error}): let the first "
            "start write to its folder, or create it in a copy of the folder"
        ) from error
    try:
        write(unfinished)
        record.unlink(missing_ok=True)
        unfinished.replace(path)
        unfinished.write_text(json.dumps(now))
        unfinished.replace(record)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _read_record(path: Path) -> dict[str, Any]:
    """Return the record of a file's sources, or an empty dict if it is unknown."""
    with suppress(OSError, msgspec.DecodeError):
        return _json_decoder.decode(path.read_bytes())
    return {}


def _stamp(file: Path) -> dict[str, Any]:
    status = file.stat()
    return {"size": status.st_size, "modified_ns": status.st_mtime_ns}


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


def _is_made_of(record: Mapping[str, Any], files: Iterable[Path], now: Mapping[str, Any]) -> bool:
    """Return True if a record matches the files. Only files with a changed modification time are read."""
    known = record.get("files")
    if record.get("version") != now["version"] or not isinstance(known, dict):
        return False
    return known.keys() == now["files"].keys() and all(
        _same_content(file, known[file.name], now["files"][file.name]) for file in files
    )


def _same_content(file: Path, known: Any, now: Mapping[str, Any]) -> bool:
    if not isinstance(known, dict) or known.get("size") != now["size"]:
        return False
    return known.get("modified_ns") == now["modified_ns"] or known.get("digest") == _digest(file)


def stable_seed(*parts: object) -> int:
    """Return a seed derived from a hash of ``parts``, the same in every process."""
    text = json.dumps(parts, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - SEED_BITS)


class Dataset:
    """The splits of one environment class, each loaded once."""

    def __init__(self, environment: Source) -> None:
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
                    "index: return a list, or an object with __getitem__",
                    self._environment.samples,
                )
            if isinstance(samples, Mapping):
                self._check_names(name, samples)
            self._splits[name] = samples
        return self._splits[name]

    def _check_names(self, split: str, samples: Mapping[Any, Any]) -> None:
        """Raise DefinitionError if the keys of a split are not the names of samples."""
        what = f"samples({split!r}) of task {self._task!r} is a dict"
        if set(self._environment.splits) <= set(samples):
            raise DefinitionError(
                f"{what} of all splits; return the samples of one: ...[split]", self._environment.samples
            )
        for name in samples:
            if not isinstance(name, str):
                raise DefinitionError(
                    f"{what} with the key {name!r}, but names of samples are text and numbers are positions: "
                    "return a list, or {str(id): sample for id, sample in ...}",
                    self._environment.samples,
                )

    def info(self) -> dict[str, SplitInfo]:
        """Return the size of every split, None for an endless one, and the names of the samples."""
        return {name: _describe(self.split(name)) for name in self._environment.splits}

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
            index: Index of the sample. By default the seed picks a sample, at random without a seed. If
                samples have names, text is a sample's name and a number is its position.
            seed: Seed of the episode. By default a hash of (task, split, index), so that siblings have the
                same problem.
            data: Data to use instead of the dataset's.

        Raises:
            UnknownSample: The split or the index does not exist.
            InvalidRequest: The given data is not JSON.
            DefinitionError: The data of the dataset is not JSON.
        """
        samples = self.split(split)
        if data is not None:
            chosen = dict(data)
            key: object = index if index is not None else chosen
        else:
            if index is None:
                index = _pick(samples, secrets.randbits(31) if seed is None else seed, split)
            elif isinstance(index, int) and isinstance(samples, Mapping) and 0 <= index < len(samples):
                index = str(next(islice(samples, index, None)))
            chosen = self._data(samples, split, index)
            key = index
        try:
            chosen = plain_json(chosen)
        except ValueError as error:
            problem = f"cannot be sent as JSON: it {error}"
            if data is not None:
                raise InvalidRequest(f"sample {problem}") from None
            what = f"samples({split!r})[{index!r}] of task {self._task!r}"
            raise DefinitionError(f"{what} {problem}", self._environment.samples) from None
        if seed is None:
            seed = stable_seed(self._task, split, key)
        return TaskSample(task=self._task, split=split, index=index, seed=seed, data=chosen)

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
                raise DefinitionError(
                    f"{what} raised {describe(error, self._environment.samples)}"
                ) from error
            raise UnknownSample(f"task {self._task!r}, split {split!r}: no index {index!r}") from error
        if not isinstance(data, Mapping):
            raise DefinitionError(
                f"samples({split!r})[{index!r}] of task {self._task!r} is a "
                f"{type(data).__name__}; it must be a dict",
                self._environment.samples,
            )
        return dict(data)


def plain_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data as a receiver of its JSON gets it. Tuples become lists.

    Raises ValueError, with the place of the first value that JSON cannot represent or would change.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError

    try:
        received = json.loads(json.dumps(data, allow_nan=False, ensure_ascii=False, default=plain).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(_not_json(data) or f"is not JSON: {error}") from error
    if received != data and (problem := _not_json(data)):
        raise ValueError(problem)
    return received  # type: ignore[no-any-return]


def _not_json(value: Any, path: str = "", depth: int = 0) -> str:
    """Return the place and kind of the first value that JSON cannot represent, or "" if there is none."""
    if depth > MAX_DEPTH:
        return f"is nested deeper than {MAX_DEPTH} values"
    where = path or "its top"
    if isinstance(value, Mapping | list | tuple):
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    return f"has the key {key!r:.80} at {where}; keys are text in JSON"
                if problem := _not_json(key, path, depth):
                    return problem
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        found = (_not_json(item, f"{path}[{key!r}]", depth + 1) for key, item in items)
        return next(filter(None, found), "")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return f"holds text with a lone surrogate at {where}, which UTF-8 cannot encode"
    except (TypeError, ValueError):
        what = repr(value) if isinstance(value, float) else f"a {type(value).__name__}"
        return f"holds {what} at {where}; use dicts, lists, text, finite numbers, booleans or None"
    return ""


def _length(samples: Samples) -> int | None:
    return len(samples) if isinstance(samples, Sized) else None


def _describe(samples: Samples) -> SplitInfo:
    named = isinstance(samples, Mapping) and len(samples) <= MAX_IDS
    return SplitInfo(num_samples=_length(samples), ids=tuple(map(str, samples)) if named else None)  # type: ignore[call-overload]


def empty_split(split: str) -> str:
    """Return the error message for a split without samples."""
    return f"split {split!r} has no samples; samples({split!r}) must return some, or splits must not name it"


def _pick(samples: Samples, seed: int, split: str) -> int | str:
    size = _length(samples)
    if size is None:
        return seed
    if size == 0:
        raise UnknownSample(empty_split(split))
    chosen = int(np.random.default_rng(seed).integers(size))
    return chosen if not isinstance(samples, Mapping) else str(list(samples)[chosen])
