"""The public names, and the modules loaded by importing them."""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import agentrl_env
import agentrl_train

SERVER_AND_CLIENTS = {"fastapi", "starlette", "uvicorn", "httpx", "websockets", "gymnasium"}
MAKE = """
for make, options in ((gymnasium.make, {}), (gymnasium.make_vec, {"num_envs": 2})):
    env = make("agentrl_env:agentrl/Env-v0", client=Guess.local, **options)
    env.reset(seed=1)
    env.close()
"""
GUESS = "from tests.env.tasks import Guess"


def run(*statements: str) -> str:
    """Run statements in a new process, with warnings as errors, and return the output."""
    command = [sys.executable, "-W", "error", "-c", "\n".join(statements)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement: str) -> set[str]:
    return set(run("import sys", statement, "print(' '.join(sys.modules))").split())


def own_modules(names: set[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] == "agentrl_env"}


def test_environment_sdk_exports_the_author_api() -> None:
    promised = {"Done", "EnvClient", "Environment", "Message", "Reply", "SessionStatus", "StepResult"}
    promised |= {"TaskSample", "ToolCall", "ToolError", "ToolSpec", "tool"}
    assert promised <= set(agentrl_env.__all__)
    assert sorted(agentrl_env.__all__) == list(agentrl_env.__all__)
    assert all(hasattr(agentrl_env, name) for name in agentrl_env.__all__)
    assert set(agentrl_env.__all__) <= set(dir(agentrl_env))


def test_trainer_package_exports_the_trainer_and_its_steps() -> None:
    promised = {"Actor", "ChatFormat", "Learner", "Publisher", "RunConfig", "TorchEngine", "TrainError"}
    promised |= {"Trainer", "advantages", "load_config", "load_policy", "pack", "policy_loss", "sequences"}
    assert promised <= set(agentrl_train.__all__)
    assert sorted(agentrl_train.__all__) == list(agentrl_train.__all__)
    assert all(hasattr(agentrl_train, name) for name in agentrl_train.__all__)
    assert set(agentrl_train.__all__) <= set(dir(agentrl_train))


@pytest.mark.parametrize("package", [agentrl_env, agentrl_train], ids=lambda package: package.__name__)
def test_type_checkers_see_the_same_names(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname: node.module for node in imports for alias in node.names}
    assert typed == package._MODULES


@pytest.mark.parametrize("package", [agentrl_env, agentrl_train], ids=lambda package: package.__name__)
def test_unknown_name_raises_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Chess'"):
        _ = package.Chess


def test_submodules_can_be_imported_from_the_root() -> None:
    assert run("from agentrl_env import errors", "print(errors.__name__)") == "agentrl_env.errors\n"


def test_star_import_works() -> None:
    assert run("from agentrl_env import *", "print(ToolCall.__name__, tool.__name__)") == "ToolCall tool\n"


def test_importing_the_root_loads_no_framework() -> None:
    loaded = loaded_by("import agentrl_env")
    assert not loaded & (SERVER_AND_CLIENTS | {"pydantic", "numpy", "torch", "transformers", "agentrl_train"})
    assert own_modules(loaded) == {"agentrl_env", "agentrl_env.gym"}


@pytest.mark.parametrize("name", ["ToolCall", "Message", "StepResult", "ToolError"])
def test_importing_a_data_model_loads_few_modules(name: str) -> None:
    loaded = loaded_by(f"from agentrl_env import {name}")
    assert not loaded & (SERVER_AND_CLIENTS | {"numpy"})
    assert own_modules(loaded) <= {
        "agentrl_env",
        "agentrl_env.gym",
        "agentrl_env.types",
        "agentrl_env.errors",
    }


def test_importing_the_author_api_loads_no_framework() -> None:
    loaded = loaded_by("from agentrl_env import Done, Environment, Reply, ToolError, tool")
    assert not loaded & SERVER_AND_CLIENTS
    assert not {name for name in own_modules(loaded) if name.split(".")[1:2] in (["client"], ["server"])}


def test_importing_the_client_loads_no_server_and_no_gymnasium() -> None:
    assert not loaded_by("from agentrl_env import EnvClient") & {"fastapi", "uvicorn", "gymnasium"}


def test_importing_the_trainer_loads_no_torch() -> None:
    assert not {"torch", "transformers"} & loaded_by("from agentrl_train import Trainer")


def test_importing_the_training_command_line_loads_no_torch() -> None:
    assert not {"torch", "transformers"} & loaded_by("import agentrl_train.__main__")


@pytest.mark.parametrize(
    "imports",
    [
        ["import gymnasium", GUESS],
        [GUESS, "import gymnasium"],
        pytest.param(["import agentrl_env", "import gymnasium", GUESS], marks=pytest.mark.slow),
        pytest.param(["import gymnasium", "import agentrl_env", GUESS], marks=pytest.mark.slow),
        pytest.param(["import agentrl_env.gym.env", "import gymnasium", GUESS], marks=pytest.mark.slow),
        ["import importlib.util", GUESS, "assert importlib.util.find_spec('gymnasium')", "import gymnasium"],
        pytest.param(["from agentrl_env import GymEnv", "import gymnasium", GUESS], marks=pytest.mark.slow),
    ],
    ids=" then ".join,
)
def test_gymnasium_make_works_in_any_order_of_imports(imports: list[str]) -> None:
    run(*imports, MAKE)


def test_gymnasium_make_imports_the_package_itself() -> None:
    options = 'url="http://127.0.0.1:9", task="guess", disable_env_checker=True'
    run("import gymnasium", f'gymnasium.make("agentrl_env:agentrl/Env-v0", {options}).close()')
