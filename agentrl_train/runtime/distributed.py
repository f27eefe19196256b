"""Distributed learner: rank 0 runs the loop, the other ranks follow its commands.

``placement`` or torchrun starts the processes, on one node or many. Rank 0 owns rollouts, window, journal and
metrics; its ``LeadLearner`` is a ``Learner`` that broadcasts every call to the others first::

    rank 0    LeadLearner.step(batches)   -> ("step", batches) ->   own step
    rank 1    follow(learner, ranks)      <- ("step", batches) <-   learner.step(batches)

Every wait is bounded: rank 0 broadcasts at least every quarter of ``timeout_s``, a collective takes at most
``timeout_s``, and a lost rank closes its connections.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from agentrl_train.errors import BadUpdate, ConfigError, RanksLost, ran_out_of_memory
from agentrl_train.learner import Learner, Snapshot
from agentrl_train.types import Batch, FloatArray, TokenSequence

logger = logging.getLogger(__name__)

WRITING_S = 3600.0
"""Timeout of collectives while a checkpoint is written."""
MEETING_S = 600.0
"""Timeout of the rendezvous."""
CLOSE_S = 5.0
"""Timeout for a call in progress on close, after which the other ranks are not told to stop."""
PR_SET_PDEATHSIG = 1
IDLE, STOP, SNAPSHOT, WRITE, RELEASE = "idle", "stop", "snapshot", "write", "release"


def world_size() -> int:
    """Return ``WORLD_SIZE``, 1 by default."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return ``RANK``, 0 by default."""
    return int(os.environ.get("RANK", "0"))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits, also before the rendezvous."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The process groups and device of this rank."""

    device: torch.device
    mesh: DeviceMesh
    commands: dist.ProcessGroup
    """CPU group for the commands of rank 0."""
    storage: dist.ProcessGroup
    """CPU group for writing checkpoints."""
    timeout_s: float

    def tell(self, name: str, *arguments: Any) -> None:
        """Broadcast a command from rank 0; raises ``RanksLost``."""
        try:
            dist.broadcast_object_list([(name, arguments)], src=0, group=self.commands)
        except RuntimeError as error:
            raise lost(error) from error

    def hear(self) -> tuple[str, tuple[Any, ...]]:
        """Return the next command of rank 0; raises ``RanksLost``."""
        told: list[Any] = [None]
        try:
            dist.broadcast_object_list(told, src=0, group=self.commands)
        except RuntimeError as error:
            raise lost(error) from error
        name, arguments = told[0]
        return name, arguments


def require_whole_shares(count: int, sequence_parallel: int) -> None:
    """Check that ``sequence_parallel`` divides the processes; raises ``ConfigError``."""
    if count % sequence_parallel:
        raise ConfigError(
            f"train.sequence_parallel = {sequence_parallel} does not divide the learner's {count} processes: "
            "set train.processes, or torchrun's --nproc-per-node, to a multiple of it"
        )


@contextmanager
def joined(*, device: str, sequence_parallel: int, timeout_s: float) -> Iterator[Ranks]:
    """Join the process group that torchrun's environment variables describe, for the block.

    Args:
        device: "cpu", or "cuda": then each process takes the GPU of its number on its node.
        sequence_parallel: ranks that share each row.
        timeout_s: longest that a rank waits for another.

    Raises:
        ConfigError: the processes cannot be divided so.
        RanksLost: they did not come together.
    """
    count = world_size()
    require_whole_shares(count, sequence_parallel)
    on_gpu = device.startswith("cuda")
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
    wait = timedelta(seconds=timeout_s)
    try:
        _meet("cpu:gloo,cuda:nccl" if on_gpu else "gloo", wait)
    except RuntimeError as error:
        raise lost(error) from error
    try:
        shape = (count // sequence_parallel, sequence_parallel)
        yield Ranks(
            device=place,
            mesh=init_device_mesh(place.type, shape, mesh_dim_names=("data", "sequence")),
            commands=dist.new_group(backend="gloo", timeout=wait),
            storage=dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITING_S)),
            timeout_s=timeout_s,
        )
    finally:
        dist.destroy_process_group()


def _meet(backend: str, wait: timedelta) -> None:
    """Make the process group; until all have come, which takes as long as their imports, wait for them."""
    meeting = timedelta(seconds=MEETING_S)
    store, own, count = next(rendezvous("env://", timeout=meeting))
    store.set(f"here/{own}", "")
    store.wait([f"here/{number}" for number in range(count)], meeting)
    dist.init_process_group(backend, store=store, rank=own, world_size=count, timeout=wait)


class LeadLearner(Learner):
    """The learner of rank 0, which makes all ranks execute each call. Thread-safe."""

    def __init__(self, model: Any, *, ranks: Ranks, **options: Any) -> None:
        """Take the options of ``Learner``; the other ranks must have been given the same."""
        super().__init__(model, mesh=ranks.mesh, device=ranks.device, storage_group=ranks.storage, **options)
        self._ranks = ranks
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._out_of_step = False
        self._beats = threading.Thread(target=self._beat, name="ranks", daemon=True)
        self._beats.start()

    def step(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Update on all ranks."""
        with self._together("step", batches):
            return super().step(batches)

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[FloatArray]:
        """Score on all ranks."""
        with self._together("logprobs", sequences):
            return super().logprobs(sequences)

    def gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Gather parameters of all ranks."""
        with self._together("gather", names):
            return super().gather(names)

    def snapshot(self) -> Snapshot:
        """Copy on all ranks; writing it makes all of them write."""
        with self._together(SNAPSHOT):
            return replace(super().snapshot(), announce=partial(self.tell, WRITE))

    def load(self, folder: Path) -> None:
        """Load on all ranks."""
        with self._together("load", folder):
            super().load(folder)

    def release(self) -> None:
        """Release unused device memory on all ranks."""
        with self._together(RELEASE):
            release_memory()

    def tell(self, name: str, *arguments: Any) -> None:
        """Broadcast a command without executing it here."""
        with self._lock:
            self._ranks.tell(name, self.num_updates, *arguments)

    def close(self) -> None:
        """Stop the other ranks; idempotent. Unresponsive ranks are left to their launcher."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._out_of_step or not self._lock.acquire(timeout=CLOSE_S):
            logger.warning("the other ranks of the learner are not told to stop: they no longer follow")
            return
        try:
            self._ranks.tell(STOP, self.num_updates)
        except RanksLost as error:
            logger.warning("%s", error)
        finally:
            self._lock.release()

    @contextmanager
    def _together(self, name: str, *arguments: Any) -> Iterator[None]:
        """Make the other ranks execute what the block does."""
        with self._lock:
            self._ranks.tell(name, self.num_updates, *arguments)
            try:
                yield
            except RuntimeError as error:
                self._out_of_step = True
                if ran_out_of_memory(error):
                    raise
                raise lost(error) from error

    def _beat(self) -> None:
        """Send heartbeats to the other ranks."""
        while not self._closed.wait(self._ranks.timeout_s / 4):
            with self._lock:
                if self._closed.is_set():
                    return
                try:
                    self._ranks.tell(IDLE, self.num_updates)
                except RanksLost as error:
                    logger.warning("%s", error)
                    return


def release_memory() -> None:
    """Release device memory that PyTorch caches."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def follow(learner: Learner, ranks: Ranks) -> None:
    """Execute the commands of rank 0 until it sends stop.

    Stop signals are ignored: rank 0 handles them, and needs the others for its last step and checkpoint.

    Raises:
        RanksLost: rank 0 or another rank failed or is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    held: Snapshot | None = None
    writer = threading.Thread()
    while True:
        name, (num_updates, *arguments) = ranks.hear()
        if name == STOP:
            break
        learner.num_updates = num_updates
        try:
            if name == SNAPSHOT:
                held = learner.snapshot()
            elif name == WRITE and held is not None:
                writer = threading.Thread(target=_write, args=(held, *arguments))
                writer.start()
            elif name == RELEASE:
                release_memory()
            elif name != IDLE:
                getattr(learner, name)(*arguments)
        except BadUpdate as error:
            logger.debug("%s Rank 0 saw it too, and decides.", error)
        except RuntimeError as error:
            if ran_out_of_memory(error):
                raise RanksLost(
                    "this rank of the learner is out of memory: lower train.micro_batch_tokens, and go on "
                    "with --resume"
                ) from error
            raise lost(error) from error
    if writer.ident is not None:
        writer.join()


def _write(snapshot: Snapshot, folder: Path) -> None:
    try:
        snapshot.write(folder)
    except RuntimeError as error:
        logger.error("%s", error)


def lost(error: BaseException) -> RanksLost:
    """Return a ``RanksLost`` error for a failed collective."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RanksLost(
        f"the ranks of the learner are out of step, because one failed or is gone ({reason}): look at what "
        "each has printed, then go on with --resume"
    )
