"""The benchmarks of ``make gpu``: their shapes, and their code on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.shapes import SHAPES, make_model, sizes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "billions"), [("0.6 B", 0.596), ("1.7 B", 1.72), ("4 B", 4.02)])
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
