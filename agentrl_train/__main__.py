"""The command line: ``agentrl-train run | sft | eval | merge | report | settings``.

The configuration is validated before PyTorch is imported, so ``--help`` and errors are fast.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl_env.errors import AgentRLError, install_extra
from agentrl_train.errors import TrainError
from agentrl_train.runtime.config import RunConfig, load_config

EXTRA_MODULES = ("torch", "transformers", "safetensors", "tokenizers", "jinja2", "tensorboardX")
"""Modules that the extra ``[train]`` installs."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Train agents that call tools over many turns.",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value.")
]


@app.command("run")
def run_command(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint.")] = False,
) -> None:
    """Train a policy by reinforcement learning."""
    loaded = _load(config, overrides)
    _quiet_threads(loaded)
    from agentrl_train.runtime.commands import run

    raise typer.Exit(run(loaded, resume=resume))


@app.command("sft")
def sft_command(
    config: ConfigPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the trained model.")],
    overrides: Overrides = None,
) -> None:
    """Fine-tune a policy on expert episodes of the environments (supervised)."""
    loaded = _load(config, overrides)
    from agentrl_train.runtime.commands import sft

    raise typer.Exit(sft(loaded, output=output))


@app.command("eval")
def eval_command(
    config: ConfigPath,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model folder; default: the newest checkpoint, else model.path."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Evaluate a policy on held-out samples: success rate with its interval, and pass@k."""
    loaded = _load(config, overrides)
    from agentrl_train.runtime.commands import evaluate_policy

    raise typer.Exit(evaluate_policy(loaded, model=model))


@app.command("merge")
def merge_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="A run folder (its newest checkpoint) or a checkpoint."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the model.")],
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
) -> None:
    """Write a checkpoint's policy as a Hugging Face folder, LoRA adapters merged."""
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter("use float32 or bfloat16", param_hint="--dtype")
    from agentrl_train.runtime.commands import merge

    raise typer.Exit(merge(source, output=output, dtype=dtype))


@app.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A folder in runs/.")],
) -> None:
    """Write report.html for a finished or running run."""
    from agentrl_train.runtime.report.page import write_report

    typer.echo(str(write_report(folder)))


@app.command("settings")
def settings_command() -> None:
    """Print a configuration with every setting, its default and its meaning."""
    from agentrl_train.runtime.config.reference import reference

    typer.echo(reference(), nl=False)


def _load(path: Path, overrides: list[str] | None) -> RunConfig:
    return load_config(path, overrides or [])


def _quiet_threads(config: RunConfig) -> None:
    """Keep idle OpenMP threads from spinning while the engine or the environments need the core."""
    if config.run.threads != 1:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _run(command: Callable[[], Any]) -> int:
    try:
        command()
    except (TrainError, AgentRLError) as error:
        print(f"agentrl-train: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_MODULES:
            raise
        print(f"agentrl-train: {error.name} is not installed: {install_extra('train')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("agentrl-train: interrupted", file=sys.stderr)
        return 130
    return 0


def main() -> None:
    """Run the command line; a known error prints its message to stderr and exits with status 1."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    sys.exit(_run(app))


if __name__ == "__main__":
    main()
