"""Placement: GPUs by configuration, the colocated layout, and ranks of torchrun."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentrl_train.config import load_config
from agentrl_train.config.paths import CACHE, KNOWN_MODELS, model_folder
from agentrl_train.errors import ConfigError
from agentrl_train.placement.devices import Devices, assign, visible_gpus
from agentrl_train.training.compose import open_launcher, processes
from agentrl_train.training.learners import limit_memory
from tests.train.runs.processes import finish, steps, write_config
from tests.train.runs.test_repeats import reproducible, weights

CUDA = "engine.device=cuda"
VLLM = "engine.kind=vllm"
COLOCATED = "placement.layout=colocated"
SHARED = "placement.layout=shared"
SHARDED = "engine.vllm.args.tensor_parallel_size=2"
THIRD = "engine.vllm.args.gpu_memory_utilization=0.3"
HALF = "engine.vllm.args.gpu_memory_utilization=0.5"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("placement"))


def devices(config_file: Path, *overrides: str, gpus: int, ranks: int = 1, **options: bool) -> Devices:
    config = load_config(config_file, overrides)
    return assign(processes(config), gpus=[f"g{n}" for n in range(gpus)], ranks=ranks, **options)


@pytest.mark.parametrize(
    ("overrides", "gpus", "ranks", "learner", "engine"),
    [
        ([], 4, 2, "", ""),
        ([CUDA], 1, 1, "0", "0"),
        ([CUDA], 2, 1, "0", "1"),
        ([CUDA], 2, 2, "01", "0"),
        ([CUDA, VLLM], 2, 1, "0", "1"),
        ([CUDA, VLLM, "engine.vllm.replicas=4"], 8, 4, "0123", "4567"),
        (
            [CUDA, VLLM, "engine.vllm.args.tensor_parallel_size=2", "engine.vllm.replicas=2"],
            8,
            4,
            "0123",
            "4567",
        ),
        ([CUDA, VLLM, "rollout.stale.fraction=0.1"], 3, 1, "0", "12"),
        ([CUDA, VLLM, COLOCATED], 1, 1, "0", "0"),
        ([CUDA, VLLM, COLOCATED, "engine.vllm.replicas=2"], 4, 2, "01", "01"),
        ([CUDA, VLLM, SHARED, HALF], 1, 1, "0", "0"),
        ([CUDA, VLLM, SHARED, HALF, "engine.vllm.replicas=2"], 4, 2, "01", "01"),
        ([CUDA, VLLM, "placement.engine=[0]"], 3, 2, "12", "0"),
        ([CUDA, VLLM, "placement.learner=[3]", "placement.engine=[2]"], 4, 1, "3", "2"),
    ],
)
def test_gpus_are_assigned_by_layout(
    config_file: Path, overrides: list[str], gpus: int, ranks: int, learner: str, engine: str
) -> None:
    given = devices(config_file, *overrides, gpus=gpus, ranks=ranks)
    assert given == Devices(learner=tuple(f"g{n}" for n in learner), engine=tuple(f"g{n}" for n in engine))


def test_node_without_engine_uses_all_gpus_for_ranks(config_file: Path) -> None:
    given = devices(config_file, CUDA, VLLM, gpus=2, ranks=2, with_engine=False)
    assert given == Devices(learner=("g0", "g1"))


@pytest.mark.parametrize(
    ("overrides", "gpus", "ranks", "reason"),
    [
        ([CUDA], 0, 1, "no GPU is visible: set it to 'cpu'"),
        ([CUDA, VLLM], 1, 1, "this process sees 1 GPU: use fewer processes, or layout = 'colocated'"),
        (
            [CUDA, "placement.learner=[5]"],
            4,
            1,
            "learner on GPU 5 and the engine on GPU 0, but this process sees 4 GPUs",
        ),
        ([CUDA, "placement.learner=[0, 1, 2]"], 4, 2, "lists 3 GPUs for 2 learner processes"),
        (
            [CUDA, VLLM, "placement.engine=[2, 3]"],
            4,
            2,
            "the engine needs 1 GPU, but the placement gives it 2",
        ),
        (
            [CUDA, VLLM, COLOCATED, "engine.vllm.replicas=2"],
            8,
            1,
            "the engine needs 2 GPUs, but the placement gives it 1",
        ),
        (
            [CUDA, VLLM, SHARED, HALF, "eval.concurrent=true", "eval.every=2", "eval.samples=4"],
            1,
            1,
            "or set eval.concurrent = false",
        ),
    ],
)
def test_placement_that_exceeds_the_gpus_is_rejected(
    config_file: Path, overrides: list[str], gpus: int, ranks: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason.replace("[", r"\[")) as refused:
        devices(config_file, *overrides, gpus=gpus, ranks=ranks)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            [CUDA, "placement.learner=[1]", "placement.engine=[1]"],
            "GPU 1 is assigned to both learner and engine",
        ),
        ([CUDA, "placement.learner=[1, 1]"], "must list different GPUs"),
        (["placement.learner=[0]"], "engine.device is 'cpu': set it to 'cuda'"),
        ([CUDA, VLLM, SHARED], "gpu_memory_utilization = 0.9 leaves nothing .* set it to 0.5"),
        ([CUDA, VLLM, SHARED, HALF, "engine.vllm.transfer=nccl"], "needs separate GPUs"),
        ([COLOCATED, "rollout.max_staleness=1"], "set rollout.max_staleness to 0, not 1"),
        (["placement.launcher=torchrun", "train.processes=2"], "leave train.processes out"),
        ([CUDA, "placement.launcher=ray", "placement.learner=[0]"], "Ray assigns the GPUs"),
        (["placement.launcher.address=auto"], "unknown key placement.launcher.address"),
    ],
)
def test_contradictory_placement_is_rejected_on_load(
    config_file: Path, overrides: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(config_file, overrides)


def test_torchrun_launcher_requires_torchrun(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = load_config(config_file, ["placement.launcher=torchrun"])
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node"), open_launcher(config):
        pass


def test_gpus_keep_names_of_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8f3c")
    assert visible_gpus() == ("5", "GPU-8f3c")


def test_memory_of_a_shared_gpu_is_split(config_file: Path) -> None:
    def learner_share(*overrides: str) -> float | None:
        return load_config(config_file, overrides).learner_memory_fraction

    assert learner_share(CUDA, VLLM, SHARED, HALF) == pytest.approx(0.45)
    assert learner_share(CUDA, VLLM, SHARED, THIRD) == pytest.approx(0.65)
    assert learner_share(CUDA, VLLM, COLOCATED) is None
    assert learner_share(CUDA, SHARED) is None
    assert learner_share(SHARED) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_learner_stays_within_its_share_of_a_gpu(config_file: Path) -> None:
    limit_memory(load_config(config_file, [CUDA, VLLM, SHARED, HALF]).learner_memory_fraction)
    whole = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.empty(int(0.4 * whole), dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.5 * whole), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


def trained(folder: Path, *overrides: str) -> Path:
    done = finish(write_config(folder), "engine.deterministic=true", *overrides)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def spans(run: Path) -> list[str]:
    """Return the trainer's trace events in each step, in order."""
    events = json.loads((run / "trace.json").read_text())
    events = events if isinstance(events, list) else events["traceEvents"]
    shown = {"sleep", "check", "learn", "wake", "publish"}
    found = [(event["ts"], event["name"]) for event in events if event.get("name") in shown]
    return [name for _, name in sorted(found)]


@pytest.mark.extended
@pytest.mark.slow
def test_engine_of_a_shared_layout_plays_while_the_learner_works(tmp_path: Path) -> None:
    run = trained(tmp_path, SHARED, "engine.deterministic=false", "rollout.max_staleness=1")
    assert len(steps(run)) == 8
    assert not {"sleep", "wake"} & set(spans(run))
    events = json.loads((run / "trace.json").read_text())
    events = events if isinstance(events, list) else events["traceEvents"]
    learning, playing = (
        [(one["ts"], one["ts"] + one["dur"]) for one in events if one.get("name") == name]
        for name in ("learn", "engine")
    )
    assert any(begin < end and start < stop for start, end in learning for begin, stop in playing)


@pytest.mark.slow
def test_colocated_run_matches_separated_run_bit_for_bit(tmp_path: Path) -> None:
    apart, in_turns = trained(tmp_path / "apart"), trained(tmp_path / "turns", COLOCATED)
    assert len(steps(apart)) == 8
    assert list(map(reproducible, steps(in_turns))) == list(map(reproducible, steps(apart)))
    ours, theirs = weights(in_turns), weights(apart)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert spans(apart) == ["check", "learn", "publish"] * 8
    assert spans(in_turns) == ["sleep", "check", "learn", "wake", "publish"] * 8


EXAMPLES = Path(__file__).parents[3] / "examples"


MADE_FIRST = ("boxes", "users")
"""Examples that start from a model created by another command."""
# test_starter_examples.py loads the examples of AgentBench.
READY = sorted(path for path in EXAMPLES.rglob("*.toml") if path.parent.name != "agentbench")


@pytest.mark.parametrize("path", READY, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_example_configuration_loads(path: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    for name in KNOWN_MODELS:
        model_folder(name).mkdir(parents=True)
    starter = f"model.path={EXAMPLES / 'quickstart/starter'}"
    load_config(path, [starter] if path.parent.name in MADE_FIRST else [])


@pytest.mark.parametrize(
    ("name", "gpus", "ranks", "with_engine", "learner", "engine"),
    [
        ("gpu/one-gpu", 1, 1, True, "0", "0"),
        ("gpu/one-gpu-shared", 1, 1, True, "0", "0"),
        ("real/qwen2.5-0.5b-gpu", 1, 1, True, "0", "0"),
        ("real/qwen2.5-1.5b-gpu", 1, 1, True, "0", "0"),
        ("gpu/eight-gpus", 8, 4, True, "0123", "4567"),
        ("gpu/two-nodes", 8, 4, True, "0123", "4567"),
        ("gpu/two-nodes", 8, 8, False, "01234567", ""),
    ],
)
def test_gpu_examples_fit_their_machines(
    name: str, gpus: int, ranks: int, with_engine: bool, learner: str, engine: str
) -> None:
    config = load_config(EXAMPLES / f"{name}.toml")
    given = assign(processes(config), gpus=list("01234567"[:gpus]), ranks=ranks, with_engine=with_engine)
    assert given == Devices(learner=tuple(learner), engine=tuple(engine))


def test_two_nodes_leave_no_gpu_idle() -> None:
    path = EXAMPLES / "gpu" / "two-nodes.toml"
    commands = re.findall(r"--node-rank (\d) --nproc-per-node (\d+)", path.read_text())
    config, used = load_config(path), []
    for node, ranks in commands:
        given = assign(processes(config), gpus=list("01234567"), ranks=int(ranks), with_engine=node == "0")
        used.append(len({*given.learner, *given.engine}))
    assert used == [8, 8]


@pytest.mark.slow
@pytest.mark.extended
def test_two_torchrun_nodes_match_two_local_processes(tmp_path: Path) -> None:
    options = ("engine.deterministic=true", "run.steps=3")
    config = write_config(tmp_path / "nodes")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [part for option in (*options, "placement.launcher=torchrun") for part in ("--set", option)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    run = ["-m", "agentrl_train", "run", str(config), *settings]
    nodes = [
        subprocess.Popen(
            [*torchrun, *meeting, "--node-rank", str(rank), *run],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [node.communicate(timeout=240)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    local = trained(tmp_path / "local", *options, "train.processes=2")
    ours, theirs = weights(tmp_path / "nodes/run"), weights(local)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
