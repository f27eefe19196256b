"""Loads and validates a configuration file with the overrides of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl_train.errors import ConfigError
from agentrl_train.runtime.config.run_config import RunConfig
from agentrl_train.runtime.config.toml import apply_override, problems, read_toml


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file, apply ``section.key=value`` overrides and validate it.

    Raises ``ConfigError`` with all problems in one message.
    """
    path = Path(path)
    table = read_toml(path)
    for override in overrides:
        apply_override(table, override)
    missing = _resolve_paths(table, path.resolve().parent)
    if found := [*problems(table, RunConfig), *missing]:
        lines = "\n".join(f"  - {problem}" for problem in found)
        raise ConfigError(f"{path} is invalid; please correct:\n{lines}")
    return RunConfig.model_validate(table)


def _resolve_paths(table: dict[str, Any], base: Path) -> list[str]:
    """Make the paths of a raw table absolute; return missing ones as problems. Other types are ignored."""
    problems = []
    run, model, environments = (table.get(key) for key in ("run", "model", "environments"))
    engine = table.get("engine")
    vllm = engine.get("vllm") if isinstance(engine, dict) else None
    if isinstance(vllm, dict) and isinstance(vllm.get("python"), str):
        vllm["python"] = str((base / Path(vllm["python"]).expanduser()).absolute())
    if isinstance(run, dict):
        folder = run.get("folder", "runs")
        if isinstance(folder, str):
            run["folder"] = str(Path(folder).expanduser().absolute())
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        model["path"], problem = _resolve_model(model["path"], base)
        problems += problem
    if isinstance(model, dict) and isinstance(model.get("chat_template"), str):
        template = (base / Path(model["chat_template"]).expanduser()).absolute()
        model["chat_template"] = str(template)
        if not template.is_file():
            problems.append(f"model.chat_template: there is no file {template}")
    for number, section in enumerate(environments if isinstance(environments, list) else ()):
        targets = section.get("serve") if isinstance(section, dict) else None
        if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
            resolved = [_resolve_target(target, base) for target in targets]
            section["serve"] = [target for target, _ in resolved]
            problems += [
                f"environments.{number}.serve: there is no {file}"
                for _, file in resolved
                if file is not None and not file.exists()
            ]
    return problems


def _resolve_model(path: str, base: Path) -> tuple[str, list[str]]:
    """Return the absolute path of a model folder; a hub name (``org/name``) stays unchanged."""
    folder = (base / Path(path).expanduser()).absolute()
    if folder.exists():
        return str(folder.resolve()), []
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        return path, []
    return str(folder), [f"model.path: there is no folder {folder}; give a Hugging Face model folder"]


def _resolve_target(target: str, base: Path) -> tuple[str, Path | None]:
    """Return a target with an absolute path, and that path; ``module:Class`` has None."""
    source, colon, name = target.rpartition(":") if ":" in target else (target, "", "")
    if colon and not source.endswith(".py") and "/" not in source:
        return target, None
    path = (base / Path(source).expanduser()).resolve()
    return f"{path}{colon}{name}", path
