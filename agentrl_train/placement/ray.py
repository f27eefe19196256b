"""Learner ranks and engines as Ray actors in one placement group.

::

    bundle 0   rank 0, on the node of this process; its actor only reserves the resources
    bundle 1   rank 1 ...
    bundle n   an engine ... (colocated engines share the bundles of the ranks)

Ray reports actors that die. ``ReplicaSupervisor`` restarts a lost engine. A lost rank ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl_train.config.sections import RayLauncher as RaySettings
from agentrl_train.engine.options import ServingOptions
from agentrl_train.errors import ConfigError, RanksLost
from agentrl_train.placement.devices import Devices, Processes
from agentrl_train.placement.launcher import (
    EXIT_TIMEOUT_S,
    POLL_INTERVAL_S,
    Follower,
    Rendezvous,
    environment,
    visible_devices,
)
from agentrl_train.placement.ray_engine import RayEngine, WeightStore

ACTOR_TIMEOUT_S = 120.0
"""Timeout for an actor to start once its bundle is reserved."""

Bundle = dict[str, float]


@ray.remote(num_cpus=1, max_restarts=0)
class RankHost:
    """The actor of one learner rank. The actor of rank 0 only reserves the resources."""

    def gpus(self) -> tuple[str, ...]:
        """Return the GPUs that Ray assigned to this actor."""
        return tuple(map(str, ray.get_gpu_ids()))

    def run(self, follow: Callable[[], None], variables: Mapping[str, str]) -> None:
        """Run a rank other than 0 until rank 0 finishes."""
        os.environ.update(variables)
        follow()


class RayLauncher:
    """Starts ranks and engines as actors of a placement group; implements ``Launcher``."""

    separate_engines = True
    devices = Devices()  # Ray assigns them

    def __init__(self, processes: Processes, follower: Follower, group: PlacementGroup) -> None:
        """Initialize with a ready placement group of ``bundles(processes)``."""
        self._processes = processes
        self._follower = follower
        self._group = group
        self._weights = WeightStore()
        self._free = engine_bundles(processes)
        self._gpus: list[tuple[str, ...]] = []
        self._running: dict[Any, int] = {}

    @contextmanager
    def single(self) -> Iterator[None]:
        """Restrict this process to the GPUs of rank 0, which an actor reserves."""
        with self._hosts(), environment(visible_devices(self._gpus[0])):
            yield

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Start the actors of all ranks, and stop them on exit."""
        if self._processes.train.processes == 1:
            with self.single():
                yield
            return
        with self._hosts() as hosts:
            rendezvous = Rendezvous(len(hosts), host=ray.util.get_node_ip_address())
            variables = [rendezvous.variables(n, gpus=gpus) for n, gpus in enumerate(self._gpus)]
            for number, host in list(enumerate(hosts))[1:]:
                self._running[host.run.remote(self._follower.run, variables[number])] = number
            with environment(variables[0]):
                yield

    @contextmanager
    def _hosts(self) -> Iterator[list[Any]]:
        """Start an actor for each rank and record its GPUs."""
        gpu = 1 if self._processes.on_gpus else 0
        hosts = [
            RankHost.options(num_gpus=gpu, scheduling_strategy=self._in_bundle(n)).remote()  # type: ignore[attr-defined]
            for n in range(self._processes.train.processes)
        ]
        try:
            self._gpus = ray.get([host.gpus.remote() for host in hosts], timeout=ACTOR_TIMEOUT_S)
            yield hosts
        except RayError as error:
            raise RanksLost(f"the ranks of the learner could not be placed by Ray: {error}") from error
        finally:
            running, self._running = list(self._running), {}
            with suppress(RayError):
                ray.wait(running, num_returns=len(running), timeout=EXIT_TIMEOUT_S) if running else None
            for host in hosts:
                ray.kill(host)

    async def wait_lost(self) -> None:
        """Wait until Ray reports that a rank ended.

        Raises:
            RanksLost: a rank ended. The message has its number and the reason.
        """
        while True:
            ended, _ = ray.wait(list(self._running), timeout=0) if self._running else ([], [])
            for reference in ended:
                number = self._running[reference]
                try:
                    await reference
                    reason = "it ended before the run did"
                except RayError as error:
                    reason = str(error).strip().splitlines()[-1].strip()
                raise RanksLost(f"rank {number} of the learner is lost ({reason}): continue with --resume")
            await asyncio.sleep(POLL_INTERVAL_S)

    def spawn(self, options: ServingOptions, *, python: str, liveness_s: float) -> RayEngine:
        """Return an engine for the next free bundle."""
        bundle = self._free.pop(0)
        size = options.tensor_parallel
        separated = self._processes.placement.layout == "separated"
        if not separated:
            shared = [gpu for gpus in self._gpus[bundle : bundle + size] for gpu in gpus]
            options = replace(options, devices=shared)
        gpus = size if separated and self._processes.on_gpus else 0
        return RayEngine(
            options,
            python=python,
            liveness_s=liveness_s,
            actor_options=lambda: {
                "num_cpus": 1 if separated else 0,
                "num_gpus": gpus,
                "scheduling_strategy": self._in_bundle(bundle),
            },
            on_stop=partial(self._free.append, bundle),
            weights=self._weights,
        )

    def _in_bundle(self, number: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)


def bundles(processes: Processes, *, node: str) -> list[Bundle]:
    """Return the bundles to reserve. The bundle of rank 0 is pinned to the node with this address."""
    gpus = processes.on_gpus
    ranks = [{"CPU": 1.0, **({"GPU": 1.0} if gpus else {})} for _ in range(processes.train.processes)]
    ranks[0][f"node:{node}"] = 0.001
    if processes.placement.layout != "separated":
        return ranks
    share = processes.engine.vllm.tensor_parallel
    engine = {"CPU": 1.0, **({"GPU": float(share)} if gpus else {})}
    return [*ranks, *(dict(engine) for _ in range(processes.num_engines))]


def strategy(processes: Processes) -> str:
    """Return the placement strategy: colocated engines need all bundles on one node."""
    return "STRICT_PACK" if processes.placement.layout != "separated" else "PACK"


def engine_bundles(processes: Processes) -> list[int]:
    """Return the bundle index of each engine.

    Raises:
        ConfigError: colocated engines need more GPUs than the learner has.
    """
    ranks, count = processes.train.processes, processes.num_engines
    if processes.placement.layout == "separated":
        return list(range(ranks, ranks + count))
    if (needed := processes.engine_gpus) > ranks and processes.on_gpus:
        raise ConfigError(
            f"the engine needs {needed} GPUs, but shares the {ranks} of the learner: raise train.processes, "
            "or lower engine.vllm.replicas or engine.vllm.args.tensor_parallel_size"
        )
    return [number * processes.engine.vllm.tensor_parallel % ranks for number in range(count)]


@contextmanager
def cluster(processes: Processes, follower: Follower) -> Iterator[RayLauncher]:
    """Connect to the Ray cluster and reserve the resources of the run; release them on exit.

    Raises:
        ConfigError: the cluster does not answer, or lacks the resources.
    """
    chosen = processes.placement.launcher
    assert isinstance(chosen, RaySettings)
    engine_bundles(processes)
    _connect(processes, address=chosen.address or os.environ.get("RAY_ADDRESS"))
    try:
        requested = bundles(processes, node=ray.util.get_node_ip_address())
        group = placement_group(requested, strategy=strategy(processes))
        try:
            if not group.wait(chosen.timeout_s):
                raise ConfigError(_missing_resources(requested, strategy(processes), chosen.timeout_s))
            yield RayLauncher(processes, follower, group)
        finally:
            remove_placement_group(group)
    finally:
        ray.shutdown()


def _connect(processes: Processes, *, address: str | None) -> None:
    # Do not detect the address, because Ray remembers the last cluster of a machine, even a stopped one.
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "configure_logging": False}
    if address is None:
        needed = len(bundles(processes, node="here"))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        count = max(needed, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=count, include_dashboard=False, **quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address}: start it, and set RAY_AUTH_MODE and RAY_AUTH_TOKEN to its "
            "values"
        ) from error


def _missing_resources(requested: Sequence[Bundle], how: str, waited_s: float) -> str:
    needed = {key: sum(bundle.get(key, 0.0) for bundle in requested) for key in ("CPU", "GPU")}
    free = ray.available_resources()
    return (
        f"the Ray cluster had no room for the run within {waited_s:g} s: it needs {needed['CPU']:g} CPUs and "
        f"{needed['GPU']:g} GPUs ({how}), and {free.get('CPU', 0):g} and {free.get('GPU', 0):g} are free: "
        "wait, add nodes, or use fewer processes"
    )
