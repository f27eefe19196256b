"""Distributed learner: rank 0 runs the loop, the other ranks execute its commands.

``placement`` or torchrun starts the processes, on one node or many. Rank 0 owns rollouts, window, journal and
metrics. Its ``LeadLearner`` is a ``Learner`` that first broadcasts every call to the others::

    rank 0    LeadLearner.step(batches)          -> ("step", batches) ->   own step
    rank 1    execute_commands(learner, ranks)   <- ("step", batches) <-   learner.step(batches)

A command is one byte tensor: JSON, followed by the raw bytes of the tensors in it. Every wait is bounded:
rank 0 broadcasts at least every quarter of ``timeout_s``, a collective takes at most ``timeout_s``, and a
lost rank closes its connections.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from agentrl_train.errors import BadUpdate, ConfigError, RanksLost, ran_out_of_memory
from agentrl_train.learner import Learner, Place, Snapshot
from agentrl_train.types import Batch, FloatArray, MicroBatch, TokenSequence

logger = logging.getLogger(__name__)

CHECKPOINT_TIMEOUT_S = 3600.0
"""Timeout of collectives while a checkpoint is written."""
RENDEZVOUS_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 5.0
"""On close, wait this long for a call in progress. After that the other ranks are not stopped."""
HEARTBEAT, STOP, SNAPSHOT, WRITE, RELEASE = "heartbeat", "stop", "snapshot", "write", "release"
FORWARDED = ("step", "logprobs", "gather", "load")
"""Methods of ``Learner`` that the other ranks execute by name."""
MESSAGE_TYPES = {kind.__name__: kind for kind in (Batch, MicroBatch, TokenSequence)}
"""Data classes that a command may contain."""
HEADER = struct.Struct("<Q")
"""Length of the JSON part of a command."""


def world_size() -> int:
    """Return ``WORLD_SIZE``, 1 by default."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return ``RANK``, 0 by default."""
    return int(os.environ.get("RANK", "0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks(Place):
    """The place of this rank, and its connection to rank 0."""

    commands: dist.ProcessGroup
    """CPU group for the commands of rank 0."""
    timeout_s: float

    def broadcast(self, name: str, *arguments: Any) -> None:
        """Broadcast a command from rank 0; raises ``RanksLost``."""
        message = torch.frombuffer(bytearray(encode([name, *arguments])), dtype=torch.uint8)
        try:
            dist.broadcast(torch.tensor([message.numel()]), src=0, group=self.commands)
            dist.broadcast(message, src=0, group=self.commands)
        except RuntimeError as error:
            raise ranks_lost(error) from error

    def receive(self) -> tuple[str, list[Any]]:
        """Return the name and arguments of the next command of rank 0; raises ``RanksLost``."""
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.broadcast(size, src=0, group=self.commands)
            message = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(message, src=0, group=self.commands)
        except RuntimeError as error:
            raise ranks_lost(error) from error
        name, *arguments = decode(message.numpy().data)
        return name, arguments


def encode(value: Any) -> bytes:
    """Encode plain values, lists, paths, tensors, arrays and ``MESSAGE_TYPES`` as JSON and raw bytes."""
    blobs: list[bytes] = []
    text = json.dumps(_to_json(value, blobs)).encode()
    return b"".join([HEADER.pack(len(text)), text, *blobs])


def decode(message: bytes | memoryview) -> Any:
    """Decode the result of ``encode``. Tuples become lists."""
    (length,) = HEADER.unpack_from(message)
    stream = BytesIO(message)
    stream.seek(HEADER.size)
    return _from_json(json.loads(stream.read(length)), stream)


def _to_json(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        blobs.append(array.tobytes())
        kind = "tensor" if isinstance(value, Tensor) else "array"
        return {"kind": kind, "dtype": str(array.dtype), "shape": array.shape, "bytes": array.nbytes}
    if is_dataclass(value):
        parts = {field.name: _to_json(getattr(value, field.name), blobs) for field in fields(value)}
        return {"type": type(value).__name__, "fields": parts}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, list | tuple):
        return [_to_json(item, blobs) for item in value]
    return value


def _from_json(value: Any, stream: BytesIO) -> Any:
    match value:
        case {"dtype": dtype, "shape": shape, "bytes": size, "kind": kind}:
            array = np.ndarray(shape, dtype=dtype, buffer=bytearray(stream.read(size)))
            return torch.from_numpy(array) if kind == "tensor" else array
        case {"type": name, "fields": parts}:
            return MESSAGE_TYPES[name](**{key: _from_json(part, stream) for key, part in parts.items()})
        case {"path": path}:
            return Path(path)
        case list():
            return [_from_json(item, stream) for item in value]
    return value


def require_whole_shares(count: int, sequence_parallel: int) -> None:
    """Check that ``sequence_parallel`` divides the processes; raises ``ConfigError``."""
    if count % sequence_parallel:
        raise ConfigError(
            f"train.sequence_parallel = {sequence_parallel} does not divide the learner's {count} processes: "
            "set train.processes, or torchrun's --nproc-per-node, to a multiple of it"
        )


@contextmanager
def process_group(*, device: str, sequence_parallel: int, timeout_s: float) -> Iterator[Ranks]:
    """Join the process group that torchrun's environment variables describe, for the block.

    Args:
        device: "cpu", or "cuda" for the GPU whose number is the local rank.
        sequence_parallel: ranks that share each row.
        timeout_s: timeout of collectives.

    Raises:
        ConfigError: ``sequence_parallel`` does not divide the number of processes.
        RanksLost: the rendezvous failed.
    """
    count = world_size()
    require_whole_shares(count, sequence_parallel)
    on_gpu = device.startswith("cuda")
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(own)
    timeout = timedelta(seconds=timeout_s)
    try:
        _init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout)
    except RuntimeError as error:
        raise ranks_lost(error) from error
    try:
        shape = (count // sequence_parallel, sequence_parallel)
        yield Ranks(
            device=own,
            mesh=init_device_mesh(own.type, shape, mesh_dim_names=("data", "sequence")),
            commands=dist.new_group(backend="gloo", timeout=timeout),
            storage=dist.new_group(backend="gloo", timeout=timedelta(seconds=CHECKPOINT_TIMEOUT_S)),
            timeout_s=timeout_s,
        )
    finally:
        dist.destroy_process_group()


def _init_process_group(backend: str, timeout: timedelta) -> None:
    """Initialize the process group once all ranks are present. Imports can take longer than ``timeout``."""
    longest = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    store, own, count = next(rendezvous("env://", timeout=longest))
    store.set(f"present/{own}", "")
    store.wait([f"present/{number}" for number in range(count)], longest)
    dist.init_process_group(backend, store=store, rank=own, world_size=count, timeout=timeout)


class LeadLearner(Learner):
    """The learner of rank 0, which makes all ranks execute each call. Thread-safe."""

    def __init__(self, model: Any, *, ranks: Ranks, **options: Any) -> None:
        """Initialize with the options of ``Learner``, which must be equal on all ranks."""
        super().__init__(model, place=ranks, **options)
        self._ranks = ranks
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._diverged = False
        threading.Thread(target=self._send_heartbeats, name="ranks", daemon=True).start()

    def step(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Update on all ranks."""
        with self._on_all_ranks("step", batches):
            return super().step(batches)

    def logprobs(self, sequences: Sequence[TokenSequence], teacher: str | None = None) -> list[FloatArray]:
        """Score on all ranks."""
        with self._on_all_ranks("logprobs", sequences, teacher):
            return super().logprobs(sequences, teacher)

    def gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Gather parameters of all ranks."""
        with self._on_all_ranks("gather", names):
            return super().gather(names)

    def snapshot(self) -> Snapshot:
        """Copy on all ranks. Writing the snapshot makes all of them write."""
        with self._on_all_ranks(SNAPSHOT):
            return replace(super().snapshot(), announce=partial(self._broadcast, WRITE))

    def load(self, folder: Path) -> None:
        """Load on all ranks."""
        with self._on_all_ranks("load", folder):
            super().load(folder)

    def release(self) -> None:
        """Release unused device memory on all ranks."""
        with self._on_all_ranks(RELEASE):
            release_memory()

    def close(self) -> None:
        """Stop the other ranks; idempotent. Unresponsive ranks are left to their launcher."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._diverged or not self._lock.acquire(timeout=CLOSE_TIMEOUT_S):
            logger.warning("the other ranks of the learner are not stopped: they no longer answer")
            return
        try:
            self._ranks.broadcast(STOP, self.num_updates)
        except RanksLost as error:
            logger.warning("%s", error)
        finally:
            self._lock.release()

    def _broadcast(self, name: str, *arguments: Any) -> None:
        """Broadcast a command without executing it here."""
        with self._lock:
            self._ranks.broadcast(name, self.num_updates, *arguments)

    @contextmanager
    def _on_all_ranks(self, name: str, *arguments: Any) -> Iterator[None]:
        """Make the other ranks execute the call that the block makes."""
        with self._lock:
            self._ranks.broadcast(name, self.num_updates, *arguments)
            try:
                yield
            except RuntimeError as error:
                self._diverged = True
                if ran_out_of_memory(error):
                    raise
                raise ranks_lost(error) from error

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(self._ranks.timeout_s / 4):
            with self._lock:
                if self._closed.is_set():
                    return
                try:
                    self._ranks.broadcast(HEARTBEAT, self.num_updates)
                except RanksLost as error:
                    logger.warning("%s", error)
                    return


def release_memory() -> None:
    """Release device memory that PyTorch caches."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def execute_commands(learner: Learner, ranks: Ranks) -> None:
    """Execute the commands of rank 0 until it sends stop.

    Stop signals are ignored: rank 0 handles them, and needs the others for its last step and checkpoint.

    Raises:
        RanksLost: rank 0 or another rank failed or exited.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    snapshot: Snapshot | None = None
    writer = threading.Thread()
    while True:
        name, (num_updates, *arguments) = ranks.receive()
        if name == STOP:
            break
        learner.num_updates = num_updates
        try:
            if name == SNAPSHOT:
                snapshot = learner.snapshot()
            elif name == WRITE and snapshot is not None:
                writer = threading.Thread(target=_write, args=(snapshot, *arguments))
                writer.start()
            elif name == RELEASE:
                release_memory()
            elif name in FORWARDED:
                getattr(learner, name)(*arguments)
        except BadUpdate as error:
            logger.debug("%s Rank 0 gets the same error and handles it.", error)
        except RuntimeError as error:
            if ran_out_of_memory(error):
                raise RanksLost(
                    "this rank of the learner is out of memory: lower train.micro_batch_tokens, then "
                    "continue with --resume"
                ) from error
            raise ranks_lost(error) from error
    if writer.ident is not None:
        writer.join()


def _write(snapshot: Snapshot, folder: Path) -> None:
    try:
        snapshot.write(folder)
    except RuntimeError as error:
        logger.error("%s", error)


def ranks_lost(error: BaseException) -> RanksLost:
    """Return a ``RanksLost`` error for a failed collective."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RanksLost(
        f"a rank of the learner failed or exited ({reason}): check the output of every rank, then continue "
        "with --resume"
    )
