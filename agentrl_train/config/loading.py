"""Loads and validates a configuration file with the overrides of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from agentrl_train.config.paths import absolute, base_folder
from agentrl_train.config.run_config import GatewayConfig, RunConfig
from agentrl_train.config.toml import apply_override, merge, problems, read_toml
from agentrl_train.errors import ConfigError

PRESETS = Path(__file__).with_name("presets")
IN_FILE = re.compile(r".+\.py:[A-Za-z_]\w*")


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
    return validate_table(
        table, overrides, base=path.resolve().parent, failure=f"{path} is invalid; please correct"
    )


def gateway_config(model: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a gateway without a run: a model, and overrides of other sections.

    Raises ``ConfigError`` with all problems in one message.
    """
    table: dict[str, Any] = {
        "run": {"name": "gateway", "steps": 1},
        "model": {"path": model},
        # A run needs tasks. A gateway plays no tasks, so it never connects to this server.
        "environments": [{"url": "http://127.0.0.1"}],
        "rollout": {"max_staleness": 0},
        "eval": {"samples": 0},
    }
    failure = "the gateway cannot be started; please correct"
    return validate_table(table, overrides, base=Path.cwd(), failure=failure, kind=GatewayConfig)


def validate_table(
    table: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    base: Path,
    failure: str,
    kind: type[RunConfig] = RunConfig,
) -> RunConfig:
    """Return the configuration of a raw table with overrides, on top of its preset.

    Args:
        table: sections of a run.
        overrides: ``section.key=value``, applied last.
        base: folder that paths are relative to.
        failure: first line of the error.
        kind: class of the configuration.

    Raises:
        ConfigError: the table is invalid. The message has all problems.
    """
    for override in overrides:
        apply_override(table, override)
    table, unknown = _with_preset(table, base)
    context = base_folder(base)
    if found := [*problems(table, kind, context=context), *unknown]:
        lines = "\n".join(f"  - {problem}" for problem in found)
        raise ConfigError(f"{failure}:\n{lines}")
    return kind.model_validate(table, context=context)


def _with_preset(table: dict[str, Any], base: Path) -> tuple[dict[str, Any], list[str]]:
    """Merge a raw table into the table of its preset. Also return the problems of finding the preset."""
    section = table.get("algorithm")
    name = section.get("preset") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(name, str):
        return table, []
    path = absolute(name, base) if name.endswith(".toml") else PRESETS / f"{name}.toml"
    if not path.is_file():
        names = sorted(one.stem for one in PRESETS.glob("*.toml"))
        near = get_close_matches(name, names, n=2)
        choice = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"choose one of {', '.join(names)}, or a TOML file"
        )
        return table, [f"algorithm.preset = {name!r} does not exist; {choice}"]
    preset = _in_folder(read_toml(path), path.parent)
    merge(preset, table)
    if name.endswith(".toml"):
        preset["algorithm"]["preset"] = str(path)
    return preset, []


def _in_folder(value: Any, folder: Path) -> Any:
    """Return a raw table of a preset with absolute paths in ``file.py:function``."""
    if isinstance(value, dict):
        return {key: _in_folder(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [_in_folder(one, folder) for one in value]
    return str(absolute(value, folder)) if isinstance(value, str) and IN_FILE.fullmatch(value) else value
