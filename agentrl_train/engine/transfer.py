"""Weights in transit to an engine process: in anonymous shared memory, or on a GPU."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate

import torch

Fingerprint = dict[str, int]
"""Layer number ("" outside the layers) -> sum of the bit patterns of its parameters."""

ENTRY_BYTES = 256
"""Upper bound for the header entry of one tensor in a safetensors file."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


def fingerprint(parameters: Iterable[tuple[str, torch.Tensor]]) -> Fingerprint:
    """Return per-layer checksums that do not depend on how an engine names, fuses or pads parameters.

    Sums of bit patterns do not change when tensors of a layer are joined or padded with zeros. They do not
    detect permutations within a layer, but the canary's log-probabilities do.
    """
    sums = _LayerSums()
    for name, parameter in parameters:
        sums.add(name, parameter)
    return sums.fingerprint()


class _LayerSums:
    """Sums of bit patterns, kept on the device of the parameters until all are added."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, parameter: torch.Tensor) -> None:
        """Add a parameter to the sum of its layer."""
        found = re.search(r"\.(\d+)\.", name)
        layer = found[1] if found else ""
        bits = parameter.detach().contiguous().view(_INTEGERS[parameter.element_size()])
        total = bits.sum(dtype=torch.int64)
        self._sums[layer] = self._sums[layer] + total if layer in self._sums else total

    def fingerprint(self) -> Fingerprint:
        """Return the sums, in one transfer to the host."""
        totals = list(self._sums.values())
        read = torch.stack([one.to(totals[0].device) for one in totals]).tolist() if totals else []
        return dict(zip(self._sums, read, strict=True))


def mismatch(*, sent: Fingerprint, held: Fingerprint) -> str:
    """Return a description of the layers that differ from the weights sent; empty if none does."""
    if held == sent:
        return ""
    wrong = [layer for layer, count in sent.items() if held.get(layer) != count]
    return f"the weights outside the layers or of layers {wrong} differ from those sent"


Held = tuple[Fingerprint, Sequence[Fingerprint]]
"""Fingerprints of the weights sent, and of the weights in each worker afterwards."""


def lost_push(*, before: Held, after: Held) -> str:
    """Describe the tensors that a push to a sharded engine did not change; empty if it changed all.

    The fingerprints of shards do not add up to the fingerprint of the sent weights, because engines replicate
    some parameters. But a layer changes on the workers if and only if it changed in the sent weights.
    """
    (sent_before, held_before), (sent, held) = before, after
    changed = {layer for layer, count in sent.items() if sent_before.get(layer) != count}
    pairs = list(zip(held_before, held, strict=True))
    wrong = [
        layer
        for layer in sent
        if any(old.get(layer) != new.get(layer) for old, new in pairs) != (layer in changed)
    ]
    if wrong:
        return f"the weights outside the layers or of layers {wrong} did not follow those sent"
    if changed and (stuck := [number for number, (old, new) in enumerate(pairs) if old == new]):
        return f"workers {stuck} still hold the weights of the push before"
    return ""


class SharedWeights:
    """One version of the weights in anonymous shared memory, as a safetensors file.

    The memory is freed when this process closes it or exits, and does not count towards ``/dev/shm``, which
    is small in containers.

    Args:
        state: name in a checkpoint -> parameter.
        dtype: dtype of the engine.
        policy_version: version of these weights.
        exact: names of tensors that keep their own dtype.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        policy_version: int,
        exact: Container[str] = (),
    ) -> None:
        self.policy_version = policy_version
        self._descriptor = os.memfd_create(f"weights-{policy_version}", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        sums = _LayerSums()
        heads: dict[str, torch.Tensor] = {}
        room = _header_room(state)
        with os.fdopen(self._descriptor, "wb", closefd=False) as file:
            file.seek(room)
            for name, value in state.items():  # only one pass, because reading a sharded model gathers it
                cast = value.detach().to(value.dtype if name in exact else dtype).contiguous()
                sums.add(name, cast)  # on its device, because a host is a hundred times slower than a GPU
                heads[name] = torch.empty_like(cast, device="meta")
                file.write(cast.cpu().view(-1).view(torch.uint8).numpy().data)
            file.seek(0)
            file.write(_header(heads, room=room))
        self.fingerprint = sums.fingerprint()

    def close(self) -> None:
        """Free the memory; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class DeviceWeights:
    """One version of the weights, copied on the learner's device, for transfers after a restart.

    Args as for ``SharedWeights``.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        policy_version: int,
        exact: Container[str] = (),
    ) -> None:
        self.policy_version = policy_version
        self.state = {
            name: value.detach().to(value.dtype if name in exact else dtype, copy=True)
            for name, value in state.items()
        }
        self.fingerprint = fingerprint(self.state.items())

    def close(self) -> None:
        """Free the memory; idempotent."""
        self.state = {}


Weights = SharedWeights | DeviceWeights


def _header_room(names: Iterable[str]) -> int:
    """Return an upper bound for the header size of a safetensors file, in multiples of eight."""
    return 1024 + sum(len(json.dumps(name)) + ENTRY_BYTES for name in names) // 8 * 8


def _header(tensors: Mapping[str, torch.Tensor], *, room: int) -> bytes:
    """Return the header, ``room`` bytes long, of a safetensors file with these tensors in order."""
    ends = list(accumulate((one.numel() * one.element_size() for one in tensors.values()), initial=0))
    entries = {
        name: {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [start, end]}
        for (name, one), start, end in zip(tensors.items(), ends, ends[1:], strict=False)
    }
    head = json.dumps(entries).encode().ljust(room - 8)
    return len(head).to_bytes(8, "little") + head
