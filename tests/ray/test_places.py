"""Placement bundles, strategies and GPUs in a real Ray cluster with declared GPUs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from agentrl_train.config import RunConfig, load_config
from agentrl_train.engine.options import ServingOptions
from agentrl_train.errors import ConfigError, RanksLost
from agentrl_train.placement.launcher import Follower
from agentrl_train.placement.ray import RayLauncher, cluster
from agentrl_train.training.compose import processes, run_follower
from tests.train.runs.processes import finish, steps, write_config

pytestmark = pytest.mark.ray
CPUS, GPUS = 8, 4
VLLM = ("engine.device=cuda", "engine.kind=vllm", "train.processes=2", "engine.vllm.replicas=2")
COLOCATED = "placement.layout=colocated"
OPTIONS = ServingOptions(model="", stop_token_ids=(), max_sessions=1, max_context=16)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start a cluster with Ray's command line and yield its address."""
    variables = pytest.MonkeyPatch()
    variables.setenv("RAY_AUTH_MODE", "disabled")  # the cluster is local
    variables.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    sizes = [f"--num-cpus={CPUS}", f"--num-gpus={GPUS}", "--include-dashboard=false"]
    head = subprocess.Popen([*command, *sizes], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert head.stdout is not None
    for line in head.stdout:  # it prints this line once it is ready
        if "Ray runtime started" in line:
            break
    assert head.poll() is None
    yield f"127.0.0.1:{port}"
    head.terminate()
    head.communicate(timeout=60)
    variables.undo()


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("ray"))


@pytest.fixture
def configured(config_file: Path, address: str) -> Any:
    def configured(*overrides: str) -> RunConfig:
        placement = (
            "placement.launcher=ray",
            f"placement.launcher.address={address}",
            "placement.launcher.timeout_s=60",
        )
        return load_config(config_file, [*placement, *overrides])

    return configured


def reserved(config: RunConfig) -> AbstractContextManager[RayLauncher]:
    """Reserve the resources of a run in the cluster."""
    follower = Follower(command=(), config="", run=partial(run_follower, config))
    return cluster(processes(config), follower)


def books(launcher: RayLauncher) -> tuple[str, list[dict[str, float]]]:
    """Return strategy and bundles of a launcher's placement group as Ray reports them, without node names."""
    table = placement_group_table(launcher._group)
    bundles = [
        {name: size for name, size in bundle.items() if not name.startswith("node:")}
        for _, bundle in sorted(table["bundles"].items())
    ]
    return table["strategy"], bundles


async def test_separated_engines_have_their_own_bundles_and_gpus(configured: Any) -> None:
    with reserved(configured(*VLLM)) as launcher:
        assert books(launcher) == ("PACK", [{"CPU": 1.0, "GPU": 1.0}] * 4)
        with launcher.ranks():
            assert os.environ["CUDA_VISIBLE_DEVICES"] == launcher._gpus[0][0]
            assert len({gpu for gpus in launcher._gpus for gpu in gpus}) == 2
            engine = launcher.spawn(OPTIONS, python="", liveness_s=1.0)
            assert (engine._actor_options()["num_gpus"], engine._options.devices) == (1, ())


async def test_colocated_engines_share_node_and_gpus_with_ranks(configured: Any) -> None:
    with reserved(configured(*VLLM, COLOCATED)) as launcher:
        assert books(launcher) == ("STRICT_PACK", [{"CPU": 1.0, "GPU": 1.0}] * 2)
        with launcher.ranks():
            engines = [launcher.spawn(OPTIONS, python="", liveness_s=1.0) for _ in range(2)]
            assert [tuple(engine._options.devices) for engine in engines] == launcher._gpus
            assert {engine._actor_options()["num_gpus"] for engine in engines} == {0}


async def test_failed_rank_is_reported_with_number_and_reason(configured: Any) -> None:
    why = r"rank 1 of the learner is lost \(.*(?i:cuda|nvidia).*--resume"
    with reserved(configured(*VLLM)) as launcher, launcher.ranks(), pytest.raises(RanksLost, match=why):
        await launcher.wait_lost()  # there is no such GPU on this machine


def test_cluster_without_room_reports_needed_resources(configured: Any) -> None:
    config = configured("train.processes=9", "placement.launcher.timeout_s=2")
    why = r"it needs 10 CPUs and 0 GPUs \(PACK\), and 8 and 4 are free"
    with pytest.raises(ConfigError, match=why), reserved(config):
        pass


def test_more_engines_than_learner_gpus_is_rejected(configured: Any) -> None:
    config = configured(*VLLM, COLOCATED, "engine.vllm.replicas=3")
    why = "the engine needs 3 GPUs, but shares the 2 of the learner"
    with pytest.raises(ConfigError, match=why), reserved(config):
        pass


def test_run_leaves_existing_cluster_unchanged(tmp_path: Path, address: str) -> None:
    config = write_config(tmp_path)
    options = ("placement.launcher=ray", f"placement.launcher.address={address}", "rollout.max_staleness=1")
    done = finish(config, *options, "run.steps=3", "rollout.stale.fraction=0.3")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in steps(tmp_path / "run")] == [1, 2, 3]
    ray.init(address=address, logging_level="ERROR", configure_logging=False)
    try:
        deadline = time.monotonic() + 30
        while ray.available_resources().get("CPU") != CPUS and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ray.available_resources()["CPU"] == CPUS
        assert not [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    finally:
        ray.shutdown()
