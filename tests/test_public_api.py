"""The public surface: what is exported, and that importing it stays light."""

import subprocess
import sys

import agentrl_env
import agentrl_train


def test_the_environment_sdk_exports_the_words_of_the_author_api() -> None:
    promised = {"Done", "EnvClient", "Environment", "Message", "Reply", "SessionStatus", "StepResult"}
    promised |= {"TaskSample", "ToolCall", "ToolError", "ToolSpec", "tool"}
    assert promised <= set(agentrl_env.__all__)
    assert sorted(agentrl_env.__all__) == list(agentrl_env.__all__)
    assert all(hasattr(agentrl_env, name) for name in agentrl_env.__all__)


def test_the_trainer_exports_its_configuration_and_its_error() -> None:
    assert list(agentrl_train.__all__) == ["RunConfig", "TrainError", "load_config"]
    assert all(hasattr(agentrl_train, name) for name in agentrl_train.__all__)


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_environment_sdk_imports_without_torch() -> None:
    assert not {"torch", "transformers", "agentrl_train"} & loaded_by("import agentrl_env")


def test_the_trainers_configuration_imports_without_torch() -> None:
    assert not {"torch", "transformers"} & loaded_by("import agentrl_train.__main__")
