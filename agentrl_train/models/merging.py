"""Merges several models of one architecture into one, tensor by tensor, without a GPU and without data.

Every method except the average starts from the changes of training, ``D_j = W_j - W_0``, with the base model
``W_0``. The arithmetic is float32. The rules are pure functions of the differences. They can iterate over the
differences several times, and hold one difference and their own sums in memory. The memory therefore depends
on the largest tensor, and not on the size or number of the models.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from agentrl_train.errors import ConfigError
from agentrl_train.models.adapters import require_whole_model
from agentrl_train.models.sources import local_model
from agentrl_train.models.stored import safetensors_files
from agentrl_train.storage.atomic_io import run_folder_errors, sync_file, sync_folder

Method = Literal["ram", "ram-plus", "ram-plus-tl", "average", "ties", "dare"]
METHODS: tuple[Method, ...] = get_args(Method)
CHANGED = 1e-5
"""A weight counts as changed from this difference on."""
Differences = Callable[[], Iterator[Tensor]]
"""Starts a pass over the experts' differences from the base, float32, in the order of the experts."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Constants of the methods. The defaults are those of their authors."""

    ram_plus_scale: float = 1.2
    """``ram-plus``: R, the largest factor of weights that only one expert changed."""
    tl_rate: float = 0.1
    """``ram-plus-tl``: r."""
    tl_limit: float = 0.2
    """``ram-plus-tl``: alpha."""
    density: float = 0.2
    """``ties``: share of each tensor's differences to keep. The largest are kept."""
    drop: float = 0.9
    """``dare``: probability of dropping a difference."""
    seed: int = 0
    """``dare``: seed of the draws."""

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"the density {self.density:g} of ties is not above 0 and at most 1")
        if not 0 <= self.drop < 1:
            raise ConfigError(f"the probability {self.drop:g} of dare is not at least 0 and below 1")


def average(differences: Differences) -> Tensor:
    """Return the mean difference."""
    total, count = _sum(differences())
    return total / count


def changed_counts(differences: Differences) -> tuple[Tensor, Tensor]:
    """Return the number of weights that each expert changed together with others, and alone."""
    together = _changed_by(differences)
    shared, unique = [], []
    for difference in differences():
        own = difference.abs() > CHANGED
        unique.append(int((own & (together == 1)).sum()))
        shared.append(int(own.sum()) - unique[-1])
    return torch.tensor(shared), torch.tensor(unique)


def ram_plus_factors(shared: Tensor, unique: Tensor, *, scale: float) -> list[float]:
    """Return each expert's factor ``1 + (R - 1) min(1, rho)``, ``rho = shared / unique`` of the whole model.

    This is the version of the authors' code (arXiv 2601.13572). An expert without unique weights needs no
    factor.
    """
    return [1.0 + (scale - 1.0) * min(1.0, _ratio(s, u)) for s, u in _pairs(shared, unique)]


def ram_plus_tl_factors(shared: Tensor, unique: Tensor, *, rate: float, limit: float) -> list[float]:
    """Return each expert's factor ``1 + r min(rho, alpha)``, ``rho`` of one tensor (mergekit's version)."""
    return [1.0 + rate * min(_ratio(s, u), limit) for s, u in _pairs(shared, unique)]


def ram(differences: Differences, factors: Sequence[float]) -> Tensor:
    """Return the mean difference of weights that several experts changed, or the only difference otherwise.

    Reinforced Agent Merging (arXiv 2601.13572).

    Args:
        differences: The experts' differences.
        factors: Each expert's factor for weights that only it changed; 1 for RAM.
    """
    by = _changed_by(differences)
    merged = torch.zeros_like(by, dtype=torch.float32)
    for difference, factor in zip(differences(), factors, strict=True):
        kept = torch.where(difference.abs() > CHANGED, difference, 0.0)
        merged += torch.where(by == 1, factor * kept, kept)
    return merged / by.clamp(min=1)


def ties(differences: Differences, *, density: float) -> Tensor:
    """Return the mean of the differences that agree with the elected sign, after trimming each tensor.

    TIES-Merging (arXiv 2306.01708): keep the share ``density`` of the largest differences, elect the sign of
    the larger total, and average the differences with this sign.
    """
    total, _ = _sum(_trim(difference, density) for difference in differences())
    sign = total.sign()
    agreeing, count = torch.zeros_like(total), torch.zeros_like(total)
    for difference in differences():
        kept = _trim(difference, density)
        agrees = (kept.sign() == sign) & (sign != 0)
        agreeing += torch.where(agrees, kept, 0.0)
        count += agrees
    return agreeing / count.clamp(min=1)


def dare(differences: Differences, *, drop: float, seed: int, name: str = "") -> Tensor:
    """Return the mean of the differences after dropping a random share and scaling up the rest.

    DARE (arXiv 2311.03099). The draws depend on the seed, the tensor's name and the number of the expert.
    """

    def kept(number: int, difference: Tensor) -> Tensor:
        digest = hashlib.blake2b(f"{seed}/{number}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        keeps = torch.rand(difference.shape, generator=generator) >= drop
        return torch.where(keeps, difference / (1.0 - drop), 0.0)

    total, count = _sum(kept(number, one) for number, one in enumerate(differences()))
    return total / count


def _sum(tensors: Iterator[Tensor]) -> tuple[Tensor, int]:
    total, count = next(tensors).clone(), 1
    for tensor in tensors:
        total += tensor
        count += 1
    return total, count


def _changed_by(differences: Differences) -> Tensor:
    """Return for each weight how many experts changed it."""
    passes = differences()
    count = (next(passes).abs() > CHANGED).to(torch.int16)
    for difference in passes:
        count += difference.abs() > CHANGED
    return count


def _pairs(shared: Tensor, unique: Tensor) -> list[tuple[int, int]]:
    return list(zip(shared.tolist(), unique.tolist(), strict=True))


def _ratio(shared: int, unique: int) -> float:
    return shared / unique if unique else math.inf if shared else 0.0


def _trim(difference: Tensor, density: float) -> Tensor:
    size = difference.abs()
    kept = max(1, round(density * size.numel()))
    if kept == size.numel():
        return difference
    least = size.flatten().kthvalue(size.numel() - kept + 1).values
    return torch.where(size >= least, difference, 0.0)


class _Model:
    """The tensors of a model folder, or of a model on the hub, read one at a time."""

    def __init__(self, path: str | Path, stack: ExitStack) -> None:
        self.path = path = local_model(path)
        require_whole_model(path)
        try:
            self.files = [Path(file) for file in safetensors_files(path)]
            self.headers = {file: read_header(file) for file in self.files}
            opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in self.files}
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"the model {str(path)!r} cannot be read: {error}") from error
        if not self.files:
            raise ConfigError(f"{path} has no model.safetensors; only safetensors files can be merged")
        self._opened = {name: opened[file] for file, header in self.headers.items() for name in header}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor."""
        return {
            name: tuple(entry["shape"]) for header in self.headers.values() for name, entry in header.items()
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        tensor: Tensor = self._opened[name].get_tensor(name)
        return tensor


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return name, dtype and shape of each tensor of a safetensors file, in the order of its data."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return dict(sorted(header.items(), key=lambda entry: entry[1]["data_offsets"]))


def merge_models(
    experts: Sequence[str | Path],
    *,
    base: str | Path | None,
    output: Path,
    method: Method = "ram-plus",
    options: MergeOptions | None = None,
    dtype: str | None = None,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Write the merged model of several experts in a new folder.

    Files, layout, dtypes, configuration and tokenizer are those of the first expert.

    Args:
        experts: Model folders.
        base: The model that they were trained from. Only the average needs no base.
        output: The folder, which must not exist.
        method: The rule.
        options: Its constants.
        dtype: dtype of the weights, ``float32`` or ``bfloat16``; None keeps each tensor's.
        on_tensor: Called after each tensor.

    Raises:
        ConfigError: The models do not fit each other, or a path is not a model folder.
        RunFolderError: The folder cannot be written.
    """
    if base is None and method != "average":
        raise ConfigError(f"the method {method} needs --base, the model that the experts were trained from")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} already exists: choose another folder")
    with ExitStack() as stack:
        opened = [_Model(path, stack) for path in experts]
        origin = None if base is None else _Model(base, stack)
        for other in [*opened[1:], *([origin] if origin else [])]:
            _check_fit(opened[0], other)
        merger = _Merger(opened, origin, method, options or MergeOptions())
        temporary = output.with_name(f".{output.name}.tmp")
        try:
            with run_folder_errors(output, option="--output"):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                _copy_other_files(opened[0].files[0].parent, temporary, dtype)
                first = opened[0]
                sizes = [_write(file, first, temporary, merger, dtype, on_tensor) for file in first.files]
                _write_index(first.files[0].parent, temporary, sum(sizes))
                if output.is_dir():
                    output.rmdir()
                temporary.rename(output)
                sync_folder(output.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


class _Merger:
    """One method, applied to one tensor after another."""

    def __init__(
        self, experts: Sequence[_Model], base: _Model | None, method: Method, options: MergeOptions
    ) -> None:
        self._experts, self._base, self._method, self._options = experts, base, method, options
        self._factors = [1.0] * len(experts)
        if method == "ram-plus":  # its ratios depend on the whole model
            shared = unique = torch.zeros(len(experts), dtype=torch.int64)
            for name in experts[0].shapes:
                own = changed_counts(partial(self._differences, name, self._start(name)))
                shared, unique = shared + own[0], unique + own[1]
            self._factors = ram_plus_factors(shared, unique, scale=options.ram_plus_scale)

    def merged(self, name: str) -> Tensor:
        """Return a merged tensor in float32. Tensors that are not floating point are the first expert's."""
        first = self._experts[0].read(name)
        if not first.is_floating_point():
            self._check_equal(name, first)
            return first
        start = self._start(name)
        return start + self._rule(name, partial(self._differences, name, start))

    def _rule(self, name: str, differences: Differences) -> Tensor:
        options = self._options
        if self._method == "average":
            return average(differences)
        if self._method == "ties":
            return ties(differences, density=options.density)
        if self._method == "dare":
            return dare(differences, drop=options.drop, seed=options.seed, name=name)
        factors = self._factors
        if self._method == "ram-plus-tl":
            counts = changed_counts(differences)
            factors = ram_plus_tl_factors(*counts, rate=options.tl_rate, limit=options.tl_limit)
        return ram(differences, factors)

    def _start(self, name: str) -> Tensor:
        if self._base is None:
            return torch.zeros(self._experts[0].shapes[name])
        return self._base.read(name).float()

    def _differences(self, name: str, start: Tensor) -> Iterator[Tensor]:
        for expert in self._experts:
            difference = expert.read(name).float() - start
            if not bool(difference.isfinite().all()):
                raise ConfigError(f"{name} of {expert.path}, or of the base, has values that are not numbers")
            yield difference

    def _check_equal(self, name: str, first: Tensor) -> None:
        for expert in self._experts[1:]:
            if not torch.equal(expert.read(name), first):
                raise ConfigError(
                    f"cannot merge {name}: not a float tensor, and {expert.path} has a different value"
                )


def _check_fit(first: _Model, other: _Model) -> None:
    shapes, others = first.shapes, other.shapes
    for name in sorted(shapes.keys() | others.keys()):
        if shapes.get(name) != others.get(name):
            found = f"{name}: {shapes.get(name, 'missing')} and {others.get(name, 'missing')}"
            raise ConfigError(f"{first.path} and {other.path} are not models of one architecture ({found})")


def _write(
    file: Path,
    model: _Model,
    folder: Path,
    merger: _Merger,
    dtype: str | None,
    on_tensor: Callable[[str], None],
) -> int:
    """Write the merged tensors of a file in its order, one at a time, and return their size in bytes."""
    kept: Mapping[str, dict[str, Any]] = model.headers[file]
    wanted = {"float32": "F32", "bfloat16": "BF16"}[dtype] if dtype else None
    kinds = {name: wanted or e["dtype"] if e["dtype"] in _DTYPES else e["dtype"] for name, e in kept.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in kept.items():
        begin, size = end, _bytes(entry)
        if kinds[name] != entry["dtype"]:
            size = size * _DTYPES[kinds[name]].itemsize // _DTYPES[entry["dtype"]].itemsize
        end = begin + size
        header[name] = {"dtype": kinds[name], "shape": entry["shape"], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = folder / file.name
    with path.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name in kept:
            merged = merger.merged(name)
            if merged.is_floating_point():
                merged = merged.to(_DTYPES.get(kinds[name], model.read(name).dtype))
            opened.write(merged.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            on_tensor(name)
    sync_file(path)
    return end


def _bytes(entry: Mapping[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end - begin)


def _copy_other_files(source: Path, folder: Path, dtype: str | None) -> None:
    """Copy configuration and tokenizer, and write a new dtype into the configuration."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS) and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    config = folder / "config.json"
    if dtype and config.is_file():
        values = json.loads(config.read_text(encoding="utf-8"))
        values.pop("torch_dtype", None)
        config.write_text(json.dumps({**values, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _write_index(source: Path, folder: Path, size: int) -> None:
    """Write the index of several files with the new size. A single file has no index."""
    index = source / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        values = json.loads(index.read_text(encoding="utf-8"))
        values.setdefault("metadata", {})["total_size"] = size
        (folder / index.name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
