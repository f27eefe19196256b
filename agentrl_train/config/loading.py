"""Loads and validates a configuration file with the overrides of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_train.config.run_config import RunConfig
from agentrl_train.config.sections import is_function
from agentrl_train.config.toml import apply_override, merge, problems, read_toml
from agentrl_train.errors import ConfigError

PRESETS = Path(__file__).with_name("presets")
FUNCTIONS = {
    "algorithm": ("leave_out", "credit", "baseline", "scale", "anchor", "ratio", "region"),
    "reward": ("functions", "combine"),
}
"""Keys that also take ``file.py:function``, by section."""


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, changes: Sequence[Mapping[str, Any]] = ()
) -> RunConfig:
    """Read a configuration file, apply changes, then ``section.key=value`` overrides, and validate it.

    Raises ``ConfigError`` with all problems in one message.
    """
    path = Path(path)
    table = read_toml(path)
    for change in changes:
        merge(table, change)
    for override in overrides:
        apply_override(table, override)
    return validated(table, base=path.resolve().parent, problem=f"{path} is invalid")


def validated(table: dict[str, Any], *, base: Path, problem: str) -> RunConfig:
    """Return the configuration of a raw table, with paths relative to ``base``.

    Raises ``ConfigError`` with all problems in one message, which opens with ``problem``.
    """
    missing = _resolve_paths(table, base)
    table, unknown = _with_preset(table)
    if found := [*problems(table, RunConfig), *missing, *unknown]:
        lines = "\n".join(f"  - {sentence}" for sentence in found)
        raise ConfigError(f"{problem}; please correct:\n{lines}")
    return RunConfig.model_validate(table)


def gateway_config(model: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a gateway by itself: a model, and the overrides of other sections.

    Raises ``ConfigError`` with all problems in one message.
    """
    table: dict[str, Any] = {
        "run": {"name": "gateway", "steps": 1},
        "model": {"path": model},
        # A run needs tasks. A gateway plays none, and does not connect.
        "environments": [{"url": "http://127.0.0.1"}],
        "rollout": {"max_staleness": 0},
        "eval": {"samples": 0},
    }
    for override in overrides:
        apply_override(table, override)
    return validated(table, base=Path.cwd(), problem="the gateway cannot be started")


def _resolve_paths(table: dict[str, Any], base: Path) -> list[str]:
    """Make the paths of a raw table absolute; return missing ones as problems. Other types are ignored."""
    problems = []
    run, model, environments = (table.get(key) for key in ("run", "model", "environments"))
    problems += _resolve_functions(table, base)
    algorithm = table.get("algorithm")
    if isinstance(algorithm, dict):
        preset = algorithm.get("preset")
        if isinstance(preset, str) and preset.endswith(".toml"):
            algorithm["preset"] = str((base / Path(preset).expanduser()).absolute())
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
    for name, key in (("critic", "model"), ("rollout", "stale_model")):
        section = table.get(name)
        if isinstance(section, dict) and isinstance(section.get(key), str):
            section[key], problem = _resolve_model(section[key], base, key=f"{name}.{key}")
            problems += problem
    distill = table.get("distill")
    teachers: Any = distill.get("teachers") if isinstance(distill, dict) else None
    for task, teacher in teachers.items() if isinstance(teachers, dict) else ():
        if isinstance(teacher, str):
            teachers[task], problem = _resolve_model(teacher, base, key=f"distill.teachers.{task}")
            problems += problem
    if isinstance(model, dict) and isinstance(model.get("chat_template"), str):
        template = (base / Path(model["chat_template"]).expanduser()).absolute()
        model["chat_template"] = str(template)
        if not template.is_file():
            problems.append(f"model.chat_template: there is no file {template}")
    for number, section in enumerate(environments if isinstance(environments, list) else ()):
        if isinstance(section, dict):
            problems += [f"environments.{number}.{one}" for one in _resolve_program(section, base)]
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


def _resolve_program(section: dict[str, Any], base: Path) -> list[str]:
    """Make the paths of a program absolute; return those that do not exist as problems."""
    problems = []
    for key in ("samples", "eval_samples"):
        if isinstance(section.get(key), str):
            section[key] = str((base / Path(section[key]).expanduser()).absolute())
            if not Path(section[key]).is_file():
                problems.append(f"{key}: there is no file {section[key]}")
    program = section.get("program")
    if isinstance(program, str):
        folder = section.get("program_folder", ".")
        if isinstance(folder, str):
            section["program_folder"] = str((base / Path(folder).expanduser()).absolute())
        if is_function(program):
            section["program"], file = _resolve_target(program, base)
            if file is not None and not file.is_file():
                problems.append(f"program: there is no file {file}")
    return problems


def _with_preset(table: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a raw table over that of its preset, whose path is absolute, and the problems of the latter."""
    section = table.get("algorithm")
    name = section.get("preset") if isinstance(section, dict) else None
    if not isinstance(name, str):
        return table, []
    path = Path(name) if name.endswith(".toml") else PRESETS / f"{name}.toml"
    if not path.is_file():
        names = ", ".join(sorted(one.stem for one in PRESETS.glob("*.toml")))
        return table, [f"algorithm.preset = {name!r} is none of {names}, and no TOML file"]
    preset = read_toml(path)
    problems = _resolve_functions(preset, path.parent)
    merged = preset | table
    for key in preset.keys() & table.keys():
        if isinstance(preset[key], dict) and isinstance(table[key], dict):
            merged[key] = preset[key] | table[key]
    return merged, problems


def _resolve_functions(table: dict[str, Any], base: Path) -> list[str]:
    """Make the paths of functions absolute; return those whose file does not exist as problems."""
    problems: list[str] = []

    def resolved(value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [resolved(one, key) for one in value]
        if not isinstance(value, str) or ":" not in value:
            return value
        target, file = _resolve_target(value, base)
        if file is not None and not file.exists():
            problems.append(f"{key}: there is no {file}")
        return target

    for name, keys in FUNCTIONS.items():
        section = table.get(name)
        if isinstance(section, dict):
            chosen = {key: resolved(section[key], f"{name}.{key}") for key in keys if key in section}
            section.update(chosen)
    return problems


def _resolve_model(path: str, base: Path, *, key: str = "model.path") -> tuple[str, list[str]]:
    """Return the absolute path of a model folder; a hub name (``org/name``) stays unchanged."""
    folder = (base / Path(path).expanduser()).absolute()
    if folder.exists():
        return str(folder.resolve()), []
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        return path, []
    return str(folder), [f"{key}: there is no folder {folder}; give a Hugging Face model folder"]


def _resolve_target(target: str, base: Path) -> tuple[str, Path | None]:
    """Return a target with an absolute path, and that path; ``module:Class`` has None."""
    source, colon, name = target.rpartition(":") if ":" in target else (target, "", "")
    if colon and not source.endswith(".py") and "/" not in source:
        return target, None
    path = (base / Path(source).expanduser()).resolve()
    return f"{path}{colon}{name}", path
