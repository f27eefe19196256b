"""The examples of the Python API: a loop from scratch that learns, and notebooks."""

from __future__ import annotations

import asyncio
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import fmean

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[3] / "examples"
FROM_SCRATCH = EXAMPLES / "from-scratch/grpo.py"


def test_loop_from_scratch_is_short() -> None:
    assert len(FROM_SCRATCH.read_text().splitlines()) <= 60


@pytest.mark.slow
def test_loop_from_scratch_learns_the_household() -> None:
    spec = spec_from_file_location("from_scratch", FROM_SCRATCH)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    success = asyncio.run(module.train(10))
    assert fmean(success[-3:]) > fmean(success[:3]) + 0.2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_notebook_trains_its_own_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart").symlink_to(EXAMPLES / "quickstart")
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(EXAMPLES / "notebooks/train.ipynb", as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    steps = "".join(output.text for output in code[2].outputs if output.get("name") == "stdout")
    assert [line.split()[0] for line in steps.splitlines()] == ["1", "2", "3", "4"]
    (result,) = (output for output in code[3].outputs if output.output_type == "execute_result")
    assert "vowels: success" in result.data["text/plain"]
    assert (folder / "policy/config.json").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("notebook", "shown"),
    [("environment", "'fridge'"), ("rollouts", "metrics.jsonl")],
)
def test_notebooks_run_from_top_to_bottom(
    notebook: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quickstart").symlink_to(EXAMPLES / "quickstart")
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    content = nbformat.read(EXAMPLES / f"notebooks/{notebook}.ipynb", as_version=4)
    NotebookClient(content, timeout=500, resources={"metadata": {"path": str(folder)}}).execute()
    assert shown in str([cell.get("outputs") for cell in content.cells])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_notebook_compares_two_algorithms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart").symlink_to(EXAMPLES / "quickstart")
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(EXAMPLES / "notebooks/compare.ipynb", as_version=4)
    NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": str(folder)}}).execute()
    results = json.loads((folder / "runs/comparison/results.json").read_text())
    assert (results["planned"], results["finished"]) == (6, 6)
    assert {one["name"]: len(one["runs"]) for one in results["variants"]} == {"grpo": 3, "rloo": 3}
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    charts = [output.data["image/svg+xml"] for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert [chart.count('class="band"') for chart in charts] == [2, 2]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "difference to grpo" in printed
