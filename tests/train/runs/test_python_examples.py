"""The examples of the Python API: a loop from scratch that learns, and a notebook."""

from __future__ import annotations

import asyncio
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
def test_notebook_trains_a_class_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
