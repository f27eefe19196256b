"""The rules of the layout: layers, sizes, names, and what no module may import."""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
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
BANNED_NAMES = {"utils", "common", "helpers", "core", "components", "manager", "runtime"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 80
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
LAYERS = (
    {"types", "errors"},
    {"wire"},
    {"schema", "fast_wire", "dataset"},
    {"tools"},
    {"environment"},
    {"session"},
    {"server", "client"},
    {"gym"},
    {"sandbox"},
    {"launch"},
    {"fleet", "bridges"},
    {"evaluation"},
    {"testing"},
    {"cli"},
    {"__main__"},
)
"""Layers of agentrl_env, lowest first: a module imports only modules of lower layers and its own folder."""
TRAIN_LAYERS = (
    {"errors"},
    {"types"},
    {"config"},
    {"tool_calls"},
    {"chat"},
    {"advantage"},
    {"batch", "loss"},
    {"storage"},
    {"models", "telemetry"},
    {"reward"},
    {"algorithm"},
    {"learner", "engine", "weights"},
    {"critics"},
    {"sub_agent"},
    {"actor"},
    {"gateway"},
    {"placement"},
    {"report"},
    {"training"},
    {"sweep"},
    {"cli"},
    {"__main__"},
)
"""Layers of agentrl_train, lowest first. Imports for type checking and names of modules in strings count."""
KNOW_THE_RUN = ("config/", "training/compose.py", "training/trainer.py", "cli/", "sweep/plan.py")
KNOW_THE_RUN += ("__init__.py", "__main__.py")
"""The modules of agentrl_train that name ``RunConfig``; all others take the sections that they use."""
MAX_PARAMETERS = 12
MANY_PARAMETERS = {"agentrl_env/server/serve.py: EnvServer"}
REACHES_UP = {"__init__", "environment"}
"""The package root loads names lazily; ``Environment.local()`` and its siblings do too."""
CODE_CARRYING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CODE_CARRYING |= {"torch.distributed.checkpoint"}  # its metadata is a pickle


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in SOURCES}


@cache
def imports(path: Path, *, top_level: bool = False) -> tuple[str, ...]:
    """Return the modules that a file imports, except for type checking."""
    return tuple(imported_by(path, top_level))


def imported_by(path: Path, top_level: bool) -> Iterator[str]:
    pending: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level and path in TASKS:  # the folder of a task is a package of its own
                continue
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


def package(name: str) -> list[Path]:
    return [path for path in SOURCES if name in path.relative_to(ROOT).parts]


def layer(room: str) -> int:
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


def room_of(module: str) -> str:
    """Return the file at the root of agentrl_env, or the folder, that a module is in."""
    return module.split(".")[1] if "." in module else "__init__"


def named_modules(path: Path) -> Iterator[str]:
    """Return the modules that a file imports, for type checking too, or names in a string."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^agentrl_(?:env|train)(?:\.\w+)+", node.value)


def upward_imports(name: str, layers: Sequence[Collection[str]]) -> list[str]:
    """Return the imports of a package that do not go to a lower layer or stay in a room."""
    height = {room: number for number, rooms in enumerate(layers) for room in rooms}
    found = []
    for path in package(name):
        room = room_of(module_name(path))
        if room == "__init__":  # the package root loads names lazily
            continue
        for module in named_modules(path):
            target = room_of(module)
            if module.startswith(f"{name}.") and target != room and height[target] >= height[room]:
                found.append(f"{relative(path)} names {module}")
    return found


def test_every_module_of_agentrl_train_imports_lower_layers_only() -> None:
    assert upward_imports("agentrl_train", TRAIN_LAYERS) == []


def test_upward_imports_are_seen_in_functions_type_checks_and_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "if TYPE_CHECKING:\n    from agentrl_train.cli import commands",
        "def lazy():\n    import agentrl_train.training.run",
        'MODULE = "agentrl_train.placement.serving"',
        "from agentrl_train.types import Batch",
    )
    path = tmp_path / "agentrl_train/engine/pool.py"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "SOURCES", [path])
    found = [line.split()[-1] for line in upward_imports("agentrl_train", TRAIN_LAYERS)]
    assert sorted(found) == [
        "agentrl_train.cli.commands",
        "agentrl_train.placement.serving",
        "agentrl_train.training.run",
    ]


def test_only_the_composition_root_knows_the_whole_configuration() -> None:
    naming = [p for p in package("agentrl_train") if re.search(r"\bRunConfig\b", p.read_text())]
    places = [path.relative_to(ROOT / "agentrl_train").as_posix() for path in naming]
    assert "training/compose.py" in places
    assert [place for place in places if not place.startswith(KNOW_THE_RUN)] == []


def test_constructors_have_at_most_12_parameters() -> None:
    wide = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
                    if count > MAX_PARAMETERS:
                        wide.add(f"{relative(path)}: {node.name}")
    assert wide == MANY_PARAMETERS


def test_every_module_of_agentrl_env_imports_lower_layers_only() -> None:
    wrong = []
    for path in package("agentrl_env"):
        room = room_of(module_name(path))
        if room in REACHES_UP:
            continue
        for imported in reaches(path, "agentrl_env"):
            target = room_of(imported)
            if target not in (room, "__init__") and layer(target) >= layer(room):
                wrong.append(f"{relative(path)} imports {imported}")
    assert wrong == []


def test_environment_imports_higher_layers_only_inside_functions() -> None:
    upper = [
        i
        for i in imports(ROOT / "agentrl_env/environment.py", top_level=True)
        if i.startswith("agentrl_env.") and layer(room_of(i)) > layer("environment")
    ]
    assert upper == []


def test_agentrl_env_imports_neither_the_trainer_nor_torch() -> None:
    names = ("agentrl_train", "torch", "transformers", "vllm")
    assert {relative(p): found for p in package("agentrl_env") if (found := reaches(p, *names))} == {}


def test_tasks_import_agentrl_env_only() -> None:
    names = ("agentrl_train", "torch", "tests")
    assert {relative(p): found for p in TASKS if (found := reaches(p, *names))} == {}


def test_vllm_is_imported_under_engine_only() -> None:
    others = [path for path in SOURCES + EXAMPLES if "engine" not in path.parts]
    assert {relative(p): found for p in others if (found := reaches(p, "vllm"))} == {}


def test_trainer_uses_environments_through_the_client() -> None:
    allowed = ("agentrl_env.client", "agentrl_env.types", "agentrl_env.errors", "agentrl_env.launch")
    allowed += ("agentrl_env.evaluation.statistics", "agentrl_env.evaluation.chat_model")
    found = {
        relative(path): [i for i in reaches(path, "agentrl_env") if not i.startswith(allowed)]
        for path in package("agentrl_train")
    }
    assert {path: modules for path, modules in found.items() if modules} == {}


@pytest.mark.parametrize(
    "path", ["advantage", "batch", "loss", "critics/gae", "critics/archer", "critics/sweet"]
)
def test_pure_steps_import_neither_asyncio_nor_threads(path: str) -> None:
    assert not reaches(ROOT / f"agentrl_train/{path}.py", "asyncio", "threading")


@pytest.mark.parametrize(("number", "path"), STEPS.items())
def test_docstring_of_a_step_names_its_number(number: int, path: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    assert docstring.startswith(f"Step {number} of 9")


def test_only_steps_number_themselves() -> None:
    claiming = [p for p in SOURCES if (ast.get_docstring(ast.parse(p.read_text())) or "").startswith("Step ")]
    steps = {relative(path) for path in claiming}
    assert steps - set(STEPS.values()) <= {"agentrl_train/loss.py", "agentrl_train/chat.py"}


def test_imports_have_no_cycle() -> None:
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


def test_files_and_functions_are_within_their_size_limits() -> None:
    large = []
    for path in SOURCES + TASKS + EXAMPLES:
        text = path.read_text()
        if len(text.splitlines()) > MAX_FILE_LINES:
            large.append(f"{relative(path)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno
                if lines >= MAX_FUNCTION_LINES:
                    large.append(f"{relative(path)}, {node.name}: {lines} lines")
    assert large == []


def test_module_names_describe_their_content() -> None:
    assert [relative(p) for p in SOURCES + TASKS if BANNED_NAMES & set(re.split(r"[/_.]", relative(p)))] == []


def test_no_unfinished_work_is_marked() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b|except (Exception|BaseException)?:\s*pass")
    assert {relative(p): found for p in SOURCES if (found := marks.findall(p.read_text()))} == {}


def test_docstrings_open_with_a_statement() -> None:
    opening = re.compile(r"(What|Who|Whose|Whether|Where) ")
    found = []
    for path in package("agentrl_env"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if opening.match(text):
                    found.append(f"{relative(path)}: {text.splitlines()[0]}")
    assert found == []


def is_load(function: ast.expr) -> bool:
    named = isinstance(function, ast.Attribute) and function.attr == "load"
    return named and ast.unparse(function) in ("torch.load", "np.load", "numpy.load")


def test_no_module_uses_serialization_that_can_carry_code() -> None:
    found = []
    for path in SOURCES:
        found += [f"{relative(path)} imports {name}" for name in reaches(path, *CODE_CARRYING)]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and is_load(node.func):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                safe = options.get("allow_pickle", "False") == "False"
                if ast.unparse(node.func) == "torch.load":
                    safe = options.get("weights_only") == "True"
                if not safe:
                    found.append(f"{relative(path)}: {ast.unparse(node)}")
    assert found == []
