"""Tensors written by some ranks are read by any other number of ranks."""

import json
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from agentrl_train.errors import CheckpointError
from agentrl_train.models.shards import ORIGINS, open_shards, raise_together, write_shards


def write_part(folder: Path, rank: int, name: str, part: torch.Tensor, origin: list[int]) -> None:
    save_file(
        {name: part.contiguous()},
        folder / f"rank-{rank:05d}.safetensors",
        metadata={ORIGINS: json.dumps({name: origin})},
    )


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 4), cuts=st.sets(st.integers(1, 8), max_size=3))
def test_parts_join_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, cuts: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    edges = [0, *sorted(cut for cut in cuts if cut < rows), rows]
    for rank, (begin, end) in enumerate(pairwise(edges)):
        write_part(folder, rank, "x", whole[begin:end], [begin, 0])
    read = torch.full_like(whole, -1.0)
    with open_shards(folder) as shards:
        shards.fill("x", read)
    assert torch.equal(read, whole)


def test_tensors_of_any_shape_are_read_as_written(tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(7), "empty": torch.zeros(0), "rng": torch.get_rng_state()}
    write_shards(tmp_path, tensors, rank=0)
    with open_shards(tmp_path) as shards:
        assert sorted(shards.names) == sorted(tensors)
        for name, value in tensors.items():
            read = torch.zeros_like(value)
            shards.fill(name, read)
            assert torch.equal(read, value)


@pytest.mark.parametrize("like", [torch.zeros(5, 2), torch.zeros(4), torch.zeros(4, 2, 1)])
def test_tensor_of_another_shape_is_refused(tmp_path: Path, like: torch.Tensor) -> None:
    write_part(tmp_path, 0, "x", torch.zeros(4, 2), [0, 0])
    with open_shards(tmp_path) as shards, pytest.raises(CheckpointError, match="does not have all of x"):
        shards.fill("x", like)


def test_lost_part_is_reported(tmp_path: Path) -> None:
    write_part(tmp_path, 0, "x", torch.zeros(2, 2), [0, 0])
    with open_shards(tmp_path) as shards, pytest.raises(CheckpointError, match="does not have all of x"):
        shards.fill("x", torch.zeros(4, 2))


def test_state_of_another_format_is_rejected_and_never_executed(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)  # type: ignore[return-value]

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(CheckpointError, match="start a new run"), open_shards(tmp_path):
        pass
    (tmp_path / "rank-00000.safetensors").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(CheckpointError, match="cannot be read"), open_shards(tmp_path):
        pass
    assert not (tmp_path / "ran").exists()


def test_failure_to_write_names_rank_and_reason() -> None:
    raise_together(None, None)
    with pytest.raises(RuntimeError, match=r"rank 0 could not write its checkpoint \(OSError: disk full"):
        raise_together(OSError("disk full"), None)
