"""The rules of the layout: who may import whom, how long files and functions are, which names are taken."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("agentrl_env", "agentrl_train")
SOURCES = sorted(
    p for package in PACKAGES for p in (ROOT / package).rglob("*.py") if "template" not in p.parts
)
TASKS = sorted((ROOT / "environments").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
BANNED_NAMES = {"utils", "common", "helpers", "core", "components", "manager"}
STEPS = {
    1: "agentrl_env/dataset.py",
    2: "agentrl_env/session/__init__.py",
    3: "agentrl_env/tools.py",
    4: "agentrl_train/actor.py",
    5: "agentrl_train/advantage.py",
    6: "agentrl_train/batch.py",
    7: "agentrl_train/learner/__init__.py",
    8: "agentrl_train/weights.py",
    9: "agentrl_train/engine/__init__.py",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in SOURCES}


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """Yield the modules a file imports; those for type checking alone do not count."""
    tree = ast.parse(path.read_text())
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)
        elif not (top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            pending.extend(ast.iter_child_nodes(node))


def reaches(path: Path, *names: str) -> list[str]:
    return [i for i in imports(path) if any(i == name or i.startswith(name + ".") for name in names)]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def step_files(name: str) -> list[Path]:
    """Return the file of a step, or those of the folder that it became."""
    file, folder = ROOT / f"agentrl_train/{name}.py", ROOT / f"agentrl_train/{name}"
    return [file] if file.exists() else sorted(folder.rglob("*.py"))


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.parts[-1] and "agentrl_env" in p.parts], ids=relative
)
def test_the_environment_sdk_knows_neither_the_trainer_nor_torch(path: Path) -> None:
    assert not reaches(path, "agentrl_train", "torch", "transformers", "vllm")


@pytest.mark.parametrize("path", TASKS, ids=relative)
def test_tasks_import_the_sdk_and_nothing_else_of_ours(path: Path) -> None:
    assert not reaches(path, "agentrl_train", "torch", "tests")


@pytest.mark.parametrize("path", SOURCES + EXAMPLES, ids=relative)
def test_vllm_is_imported_under_engine_alone(path: Path) -> None:
    if "engine" not in path.parts:
        assert not reaches(path, "vllm")


@pytest.mark.parametrize("path", [p for p in SOURCES if "agentrl_train" in p.parts], ids=relative)
def test_the_trainer_speaks_to_environments_through_the_client(path: Path) -> None:
    allowed = ("agentrl_env.client", "agentrl_env.types", "agentrl_env.errors", "agentrl_env.launch")
    assert [i for i in reaches(path, "agentrl_env") if not i.startswith(allowed)] == []


def test_steps_five_to_eight_do_not_import_one_another() -> None:
    names = {"advantage", "batch", "learner", "weights"}
    for name in names:
        others = [f"agentrl_train.{other}" for other in names - {name}]
        for path in step_files(name):
            assert not reaches(path, *others)


@pytest.mark.parametrize("name", ["advantage", "batch", "loss"])
def test_the_pure_steps_know_neither_asyncio_nor_the_runtime(name: str) -> None:
    assert not reaches(ROOT / f"agentrl_train/{name}.py", "asyncio", "agentrl_train.runtime", "threading")


@pytest.mark.parametrize(("number", "path"), STEPS.items())
def test_each_step_of_the_path_says_its_number(number: int, path: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    assert docstring.startswith(f"Step {number} of 9")


def test_no_other_module_claims_a_step_of_the_path() -> None:
    claiming = [p for p in SOURCES if (ast.get_docstring(ast.parse(p.read_text())) or "").startswith("Step ")]
    steps = {relative(path) for path in claiming}
    assert steps - set(STEPS.values()) <= {"agentrl_train/loss.py"}


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = {
        module_name(path): {
            i for i in imports(path, top_level=True) if i in MODULES and i != module_name(path)
        }
        for path in SOURCES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("path", SOURCES + TASKS + EXAMPLES, ids=relative)
def test_files_and_functions_keep_their_size(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} is too long"


@pytest.mark.parametrize("path", SOURCES + TASKS, ids=relative)
def test_modules_are_named_for_what_they_do(path: Path) -> None:
    assert not BANNED_NAMES & set(re.split(r"[/_.]", relative(path)))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_nothing_is_left_unfinished(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", text)
    assert not re.search(r"except (Exception|BaseException)?:\s*pass", text)


CODE_CARRYING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MAY_PICKLE = {
    # Handles of CUDA memory, which vLLM's interface takes pickled; they go to the trainer's own engine.
    "agentrl_train/engine/native.py",
}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_module_uses_serialisation_that_can_carry_code(path: Path) -> None:
    if relative(path) in MAY_PICKLE:
        return
    assert not reaches(path, *CODE_CARRYING)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert options.get("allow_pickle", "False") == "False"
            assert ast.unparse(node.func) != "torch.load" or options.get("weights_only") == "True"
