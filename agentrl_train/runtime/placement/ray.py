"""Processes as Ray's actors, in a placement group: the learner's ranks, and the engines.

::

    bundle 0   this process's node: rank 0, which runs the loop; a seat holds its place in Ray's accounts
    bundle 1   rank 1 ...
    bundle n   an engine ... (colocated: engines have no bundles, they sit with the ranks)

Ray sees actors die. A lost engine is started again by whoever supervises engines; a lost rank ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl_train.engine.options import ServingOptions
from agentrl_train.errors import ConfigError, RanksLost
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.placement.devices import Devices
from agentrl_train.runtime.placement.launcher import LOOK_S, Rendezvous, environment, visible_devices
from agentrl_train.runtime.placement.ray_engine import Carrier, RayEngine

END_S = 10.0
"""How long ranks may take to end by themselves."""
PLACE_S = 120.0
"""Longest that an actor of a placed group takes to start."""

Bundle = dict[str, float]


@ray.remote(num_cpus=1, max_restarts=0)
class RankHost:
    """The actor of one rank of the learner; rank 0's only keeps the place."""

    def gpus(self) -> tuple[str, ...]:
        """Return the GPUs that Ray has given it."""
        return tuple(map(str, ray.get_gpu_ids()))

    def follow(self, config: RunConfig, variables: Mapping[str, str]) -> None:
        """Be a rank other than 0, until rank 0 is done."""
        os.environ.update(variables)
        from agentrl_train.runtime.factories import run_follower

        run_follower(config)


class RayLauncher:
    """Starts ranks and engines as actors of a placement group; see ``Launcher``."""

    engines_apart = True
    devices = Devices()  # Ray gives them out

    def __init__(self, config: RunConfig, group: PlacementGroup) -> None:
        """Take a group of ``bundles(config)`` that is ready."""
        self._config = config
        self._group = group
        self._carrier = Carrier()
        self._free = engine_bundles(config)
        self._gpus: list[tuple[str, ...]] = []
        self._following: dict[Any, int] = {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have this process see the GPUs of rank 0, whose place an actor keeps."""
        with self._hosts(), environment(visible_devices(self._gpus[0])):
            yield

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Start the actors of all ranks, and end them at the end."""
        if self._config.train.processes == 1:
            with self.alone():
                yield
            return
        with self._hosts() as hosts:
            meeting = Rendezvous(len(hosts), host=ray.util.get_node_ip_address())
            variables = [meeting.variables(n, gpus=gpus) for n, gpus in enumerate(self._gpus)]
            for number, host in list(enumerate(hosts))[1:]:
                self._following[host.follow.remote(self._config, variables[number])] = number
            with environment(variables[0]):
                yield

    @contextmanager
    def _hosts(self) -> Iterator[list[Any]]:
        """Place an actor for each rank, and learn which GPUs it has."""
        gpu = 1 if self._config.engine.device == "cuda" else 0
        hosts = [
            RankHost.options(num_gpus=gpu, scheduling_strategy=self._in_bundle(n)).remote()  # type: ignore[attr-defined]
            for n in range(self._config.train.processes)
        ]
        try:
            self._gpus = ray.get([host.gpus.remote() for host in hosts], timeout=PLACE_S)
            yield hosts
        except RayError as error:
            raise RanksLost(f"the learner's ranks could not be placed in Ray's cluster: {error}") from error
        finally:
            following, self._following = list(self._following), {}
            with suppress(RayError):
                ray.wait(following, num_returns=len(following), timeout=END_S) if following else None
            for host in hosts:
                ray.kill(host)

    async def lost(self) -> None:
        """Return once Ray has seen a rank end.

        Raises:
            RanksLost: says which, and why.
        """
        while True:
            ended, _ = ray.wait(list(self._following), timeout=0) if self._following else ([], [])
            for reference in ended:
                number = self._following[reference]
                try:
                    await reference
                    reason = "it ended before the run did"
                except RayError as error:
                    reason = str(error).strip().splitlines()[-1].strip()
                raise RanksLost(f"rank {number} of the learner is gone ({reason}): go on with --resume")
            await asyncio.sleep(LOOK_S)

    def spawn(self, options: ServingOptions, *, python: str, liveness_s: float) -> RayEngine:
        """Return an engine that will take one of the places for engines."""
        bundle = self._free.pop(0)
        share = options.tensor_parallel
        apart = self._config.placement.layout == "separated"
        if not apart:
            shared = [gpu for gpus in self._gpus[bundle : bundle + share] for gpu in gpus]
            options = replace(options, devices=shared)
        gpus = share if apart and self._config.engine.device == "cuda" else 0
        return RayEngine(
            options,
            python=python,
            liveness_s=liveness_s,
            place=lambda: {
                "num_cpus": 1 if apart else 0,
                "num_gpus": gpus,
                "scheduling_strategy": self._in_bundle(bundle),
            },
            leave=partial(self._free.append, bundle),
            carrier=self._carrier,
        )

    def _in_bundle(self, number: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)


def bundles(config: RunConfig, *, node: str) -> list[Bundle]:
    """Return what is asked of the cluster, rank 0's place on the node of this address first."""
    gpus = config.engine.device == "cuda"
    ranks = [{"CPU": 1.0, **({"GPU": 1.0} if gpus else {})} for _ in range(config.train.processes)]
    ranks[0][f"node:{node}"] = 0.001
    if config.placement.layout == "colocated":
        return ranks
    share = config.engine.vllm.tensor_parallel
    engine = {"CPU": 1.0, **({"GPU": float(share)} if gpus else {})}
    return [*ranks, *(dict(engine) for _ in range(_num_engines(config)))]


def strategy(config: RunConfig) -> str:
    """Return how near the bundles are to be: on one node where engines sit with the ranks."""
    return "STRICT_PACK" if config.placement.layout == "colocated" else "PACK"


def engine_bundles(config: RunConfig) -> list[int]:
    """Return the number of the bundle of each engine.

    Raises:
        ConfigError: colocated engines need more GPUs than the learner has.
    """
    ranks, count = config.train.processes, _num_engines(config)
    if config.placement.layout == "separated":
        return list(range(ranks, ranks + count))
    if (needed := config.engine_gpus) > ranks and config.engine.device == "cuda":
        raise ConfigError(
            f"the engine takes {needed} GPUs and shares the learner's {ranks}: raise train.processes, or "
            "lower engine.vllm.replicas or engine.vllm.tensor_parallel"
        )
    return [number * config.engine.vllm.tensor_parallel % ranks for number in range(count)]


def _num_engines(config: RunConfig) -> int:
    return len(config.policies) * config.engine.vllm.replicas


@contextmanager
def cluster(config: RunConfig) -> Iterator[RayLauncher]:
    """Join the cluster and have room in it; what was placed there is gone at the end.

    Raises:
        ConfigError: there is no such cluster, or no room in it.
    """
    engine_bundles(config)
    _join(config)
    try:
        wanted = bundles(config, node=ray.util.get_node_ip_address())
        group = placement_group(wanted, strategy=strategy(config))
        try:
            if not group.wait(config.placement.ray_timeout_s):
                raise ConfigError(_no_room(wanted, strategy(config), config.placement.ray_timeout_s))
            yield RayLauncher(config, group)
        finally:
            remove_placement_group(group)
    finally:
        ray.shutdown()


def _join(config: RunConfig) -> None:
    # Never found by itself: Ray remembers the last cluster of a machine, also one that is long gone.
    address = config.placement.ray_address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "configure_logging": False}
    if address is None:
        processes = len(bundles(config, node="here"))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        count = max(processes, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=count, include_dashboard=False, **quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address}: start it there, and set RAY_AUTH_MODE and "
            "RAY_AUTH_TOKEN as it has them"
        ) from error


def _no_room(wanted: Sequence[Bundle], how: str, waited_s: float) -> str:
    sums = {key: sum(bundle.get(key, 0.0) for bundle in wanted) for key in ("CPU", "GPU")}
    there = ray.available_resources()
    return (
        f"Ray's cluster had no room for the run within {waited_s:g} s: it needs {sums['CPU']:g} CPUs and "
        f"{sums['GPU']:g} GPUs ({how}), and {there.get('CPU', 0):g} and {there.get('GPU', 0):g} are free: "
        "wait, add nodes, or use fewer processes"
    )
