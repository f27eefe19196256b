"""The shapes of ``make gpu`` and ``make gpu-quick``, and their code on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.gpu_quick.pack import NEEDED, PRESENT, closure
from tests.benchmarks.gpu_quick.parts import PARTS
from tests.benchmarks.shapes import SHAPES, make_model, sizes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("135 M", 0.1345), ("0.5 B", 0.494), ("0.6 B", 0.596), ("1.7 B", 1.72), ("4 B", 4.02)],
)
def test_shapes_have_the_parameters_of_their_models(name: str, billions: float) -> None:
    model = make_model(name, device="meta")
    assert sum(value.numel() for value in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)
    assert name in sizes("cuda")


def test_cpu_measures_the_tiny_shape() -> None:
    assert sizes("cpu") == ["tiny"]
    assert set(sizes("cuda")) == SHAPES.keys() - {"tiny"}


@pytest.mark.extended
@pytest.mark.slow
def test_learner_benchmark_runs_on_a_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "learner", "--quick", "--device", "cpu"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "tiny" in line]
    assert len(rows) == 5
    assert "out of memory" not in done.stdout


@pytest.mark.slow
def test_every_part_of_gpu_quick_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.gpu_quick", str(tmp_path), "--device", "cpu"]
    command += ["--model", str(ROOT / "examples/quickstart/starter")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == list(PARTS)
    assert not [found for found in results.values() if "error" in found], (tmp_path / "log.txt").read_text()
    assert results["tests"]["failed_tests"] == []
    assert [point["step"] for point in results["training"]["curve"]] == [1, 2]
    assert (tmp_path / "report.html").exists()
    assert results["engine"]["stored, 64"]["tokens_per_s"] > 0
    assert results["learner"]["tiny, as it is"]["mfu"] > 0
    assert results["push"]["stored"]["seconds"] > 0


def test_packed_packages_exclude_the_dependencies_of_pytorch() -> None:
    needed = closure(NEEDED) - closure(PRESENT)
    assert {"transformers", "fastapi", "gymnasium", "pytest"} <= needed
    assert "torch" not in needed
    assert not [name for name in needed if name.startswith("nvidia")]
