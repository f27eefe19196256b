"""Rules of the code layout: layers, sizes, names and forbidden imports."""

import ast
import re
from collections.abc import Iterator
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
LAYERS = {
    "agentrl_env": (
        {"author_code", "ecma_pattern"},
        {"types", "errors"},
        {"wire"},
        {"schema", "fast_wire", "dataset", "wording"},
        {"json_schema"},
        {"tools"},
        {"definition"},
        {"environment"},
        {"session"},
        {"server", "client"},
        {"gym"},
        {"evaluation"},
        {"users"},
        {"sandbox"},
        {"launch"},
        {"bridges"},
        {"hosting"},
        {"fleet"},
        {"testing"},
        {"cli"},
        {"__main__"},
    ),
    "agentrl_train": (
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
        {"sft", "template_check"},
        {"gateway"},
        {"placement"},
        {"report"},
        {"training"},
        {"sweep", "planning", "watch"},
        {"cli"},
        {"__main__"},
    ),
}
"""Layers of each package, lowest first. A module refers only to lower layers and to its own folder."""
REACHES_UP = {"agentrl_env", "agentrl_env.environment", "agentrl_train"}
"""The package roots load names lazily. ``Environment.local()`` and its siblings do too."""
KNOW_THE_RUN = ("config/", "training/compose.py", "training/trainer.py", "cli/", "sweep/plan.py")
KNOW_THE_RUN += ("__init__.py", "__main__.py")
"""The modules of agentrl_train that name ``RunConfig``; all others take the sections that they use."""
MAX_PARAMETERS = 12
CODE_CARRYING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CODE_CARRYING |= {"torch.distributed.checkpoint"}  # its metadata is a pickle


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


parse = cache(ast.parse)


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of the syntax tree of a file."""
    return tuple(ast.walk(parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Free the syntax trees after the last test, so that garbage collections do not traverse them."""
    yield
    nodes.cache_clear()
    parse.cache_clear()


MODULES = {module_name(path) for path in SOURCES}


@cache
def imports(path: Path, *, top_level: bool = False) -> tuple[str, ...]:
    """Return the modules that a file imports, except for type checking."""
    return tuple(imported_by(path, top_level))


def imported_by(path: Path, top_level: bool) -> Iterator[str]:
    pending: list[ast.AST] = list(parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level and path in TASKS:  # the folder of a task is its own package
                continue
            assert node.level == 0, f"{path} has a relative import"
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


def room_of(module: str) -> str:
    """Return the top-level folder or file of a module within its package, or "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def layer(module: str) -> int:
    """Return the layer number of a module. The package root is 0 because it loads lazily."""
    name, room = module.partition(".")[0], room_of(module)
    return next((number for number, rooms in enumerate(LAYERS[name], start=1) if room in rooms), 0)


def named_modules(source: str, name: str) -> set[str]:
    """Return the modules of a package that a source refers to in imports or strings."""
    found: set[str] = set()
    docstrings = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            found |= set(re.findall(rf"\b{name}(?:\.\w+)+", node.value))
    modules = set()
    for words in (text.split(".") for text in found):
        prefixes = (".".join(words[:end]) for end in range(len(words), 0, -1))
        modules.add(next((prefix for prefix in prefixes if prefix in MODULES), name))
    return {module for module in modules if module.startswith(f"{name}.")}


def test_layers_count_every_way_of_naming_a_module() -> None:
    source = '''
"""The docstring of agentrl_env.cli.options."""
from typing import TYPE_CHECKING
from agentrl_env import __version__, wire
from agentrl_train.loss import cross_entropy
if TYPE_CHECKING:
    from agentrl_env.fleet.controller import FleetService
def lazy():
    """Like agentrl_env.testing.checks."""
    import agentrl_env.session.pool
    import_module("agentrl_env.bridges.mcp.server:mount")
    run("python -m agentrl_env.evaluation.record", getLogger("agentrl_env.messages"))
    return f"agentrl_env.gym.{lazy}"
'''
    assert named_modules(source, "agentrl_env") == {
        "agentrl_env.wire",
        "agentrl_env.fleet.controller",
        "agentrl_env.session.pool",
        "agentrl_env.bridges.mcp.server",
        "agentrl_env.evaluation.record",
        "agentrl_env.gym",
    }


@pytest.mark.parametrize("name", LAYERS)
def test_every_module_refers_only_to_lower_layers(name: str) -> None:
    upward = []
    for path in package(name):
        module = module_name(path)
        if module in REACHES_UP:
            continue
        for other in sorted(named_modules(path.read_text(), name)):
            if room_of(other) != room_of(module) and layer(other) >= layer(module):
                upward.append(f"{relative(path)} names {other}")
    assert upward == []


@pytest.mark.parametrize("name", LAYERS)
def test_every_file_and_folder_of_a_package_has_one_layer(name: str) -> None:
    rooms = sorted({room_of(module_name(path)) for path in package(name)} - {""})
    assert sorted(room for rooms in LAYERS[name] for room in rooms) == rooms


def test_only_the_composition_root_knows_the_whole_configuration() -> None:
    naming = [p for p in package("agentrl_train") if re.search(r"\bRunConfig\b", p.read_text())]
    places = [path.relative_to(ROOT / "agentrl_train").as_posix() for path in naming]
    assert "training/compose.py" in places
    assert [place for place in places if not place.startswith(KNOW_THE_RUN)] == []


def test_constructors_have_at_most_12_parameters() -> None:
    wide = set()
    for path in SOURCES:
        for node in nodes(path):
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
                    if count > MAX_PARAMETERS:
                        wide.add(f"{relative(path)}: {node.name}")
    assert wide == set()


def test_environment_imports_higher_layers_only_inside_functions() -> None:
    own = "agentrl_env.environment"
    imported = imports(ROOT / "agentrl_env/environment.py", top_level=True)
    assert [i for i in imported if i.startswith("agentrl_env.") and layer(i) > layer(own)] == []


def test_agentrl_env_imports_neither_the_trainer_nor_torch() -> None:
    names = ("agentrl_train", "torch", "transformers", "vllm")
    assert {relative(p): found for p in package("agentrl_env") if (found := reaches(p, *names))} == {}


def test_tasks_import_only_agentrl_env() -> None:
    names = ("agentrl_train", "torch", "tests")
    assert {relative(p): found for p in TASKS if (found := reaches(p, *names))} == {}


def test_vllm_is_imported_only_under_engine() -> None:
    others = [path for path in SOURCES + EXAMPLES if "engine" not in path.parts]
    assert {relative(p): found for p in others if (found := reaches(p, "vllm"))} == {}


def test_trainer_uses_environments_through_the_client() -> None:
    allowed = ("agentrl_env.client", "agentrl_env.types", "agentrl_env.errors", "agentrl_env.launch")
    allowed += ("agentrl_env.author_code", "agentrl_env.cli.settings", "agentrl_env.cli.imports")
    allowed += ("agentrl_env.evaluation.statistics", "agentrl_env.evaluation.chat_model")
    allowed += ("agentrl_env.evaluation.record",)
    allowed += ("agentrl_env.server.embedded",)
    # The live page is served with the same token, limits and signals as everything else.
    page = ("agentrl_env.server.", "agentrl_env.hosting.serve")
    found = {
        relative(path): [
            i
            for i in reaches(path, "agentrl_env")
            if not i.startswith(allowed + page * ("/watch" in relative(path)))
        ]
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
    docstring = ast.get_docstring(parse((ROOT / path).read_text())) or ""
    assert docstring.startswith(f"Step {number} of 9")


def test_only_steps_number_themselves() -> None:
    claiming = [p for p in SOURCES if (ast.get_docstring(parse(p.read_text())) or "").startswith("Step ")]
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


@cache
def bound_names(path: Path) -> frozenset[str]:
    """Return the names that a module binds outside of functions and classes."""
    found: set[str] = set()
    pending: list[ast.AST] = list(parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        pending.extend(ast.iter_child_nodes(node))
    return frozenset(found)


def test_every_name_that_is_imported_from_a_package_exists() -> None:
    places = {module_name(path): path for path in SOURCES}
    scripts = [p for folder in ("tests", "docs") for p in (ROOT / folder).rglob("*.py")]
    missing = []
    for path in (*SOURCES, *TASKS, *EXAMPLES, *scripts):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGES):
                origin = places.get(str(node.module))
                bound = bound_names(origin) if origin else frozenset()
                names = [alias.name for alias in node.names]
                missing += [
                    f"{relative(path)}: {node.module}.{name}"
                    for name in names
                    if name not in bound and f"{node.module}.{name}" not in places
                ]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith(PACKAGES)]
                missing += [f"{relative(path)}: {name}" for name in names if name not in places]
    assert missing == []


def test_files_and_functions_are_within_their_size_limits() -> None:
    large = []
    for path in SOURCES + TASKS + EXAMPLES:
        text = path.read_text()
        if len(text.splitlines()) > MAX_FILE_LINES:
            large.append(f"{relative(path)}: {len(text.splitlines())} lines")
        for node in nodes(path):
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
        for node in nodes(path):
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
        for node in nodes(path):
            if isinstance(node, ast.Call) and is_load(node.func):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                safe = options.get("allow_pickle", "False") == "False"
                if ast.unparse(node.func) == "torch.load":
                    safe = options.get("weights_only") == "True"
                if not safe:
                    found.append(f"{relative(path)}: {ast.unparse(node)}")
    assert found == []


@pytest.mark.parametrize("mark", ["faults", "bridges"])
def test_target_of_a_mark_runs_every_file_with_the_mark(mark: str) -> None:
    (command,) = re.findall(rf"pytest -m {mark} .*?\$\(ARGS\)", (ROOT / "Makefile").read_text(), re.DOTALL)
    folders = [ROOT / word for word in command.split() if word.startswith("tests/")]
    marked = [p for p in (ROOT / "tests").rglob("test_*.py") if f"pytest.mark.{mark}" in p.read_text()]
    assert marked
    assert [p for p in marked if not any(p.is_relative_to(folder) for folder in folders)] == []
