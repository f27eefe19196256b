"""The command ``check``: the contract of environments and, with ``--quality``, their quality."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement

from agentrl_env.cli.imports import uncollected_imports
from agentrl_env.cli.options import (
    ClientTokenFile,
    Task,
    Token,
    client_of,
    endpoint_key,
    given_options,
    is_url,
    log_to_stderr,
    quality_option,
    resolve_token,
)
from agentrl_env.cli.settings import settings_as_options
from agentrl_env.errors import AgentRLError, TargetError

if TYPE_CHECKING:
    from agentrl_env.testing.quality import Load, TaskQuality
    from agentrl_env.testing.report import Report


QUALITY = ("samples", "split", "hold", "resume", "model_url", "model", "api_key_env")
"""Options that only ``--quality`` reads."""
MAX_DEADLINE_S = 86_400.0
"""Threads cannot wait for an infinite time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Options of ``check``."""

    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET|URL...",
            help="Folders with environment.py, file.py:Class, module:Class, task names or servers' URLs.",
        ),
    ]
    task: Task = None
    token: Token = None
    token_file: ClientTokenFile = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False
    deadline: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=MAX_DEADLINE_S,
            metavar="SECONDS",
            help="The time limit of a check, or of a policy on a split.",
        ),
    ] = 60.0
    traceback: Annotated[bool, typer.Option("--traceback", help="Show tracebacks of the task's code.")] = (
        False
    )
    quality: Annotated[
        bool, quality_option("--quality", help="Measure the quality of the tasks for training instead.")
    ] = False
    samples: Annotated[int, quality_option(min=1, metavar="N", help="The samples per split.")] = 40
    split: Annotated[list[str] | None, quality_option(help="A split; repeatable.", show_default="all")] = None
    hold: Annotated[
        int, quality_option(min=0, metavar="N", help="The number of sessions to hold; 0 starts no server.")
    ] = 64
    resume: Annotated[
        Path | None,
        quality_option(
            metavar="FILE",
            help="Append each target's figures to a file, and skip targets that are already in it.",
        ),
    ] = None
    model_url: Annotated[
        str | None, quality_option(metavar="URL", help="An OpenAI-compatible endpoint: http://HOST/v1.")
    ] = None
    model: Annotated[
        str | None, quality_option(metavar="NAME", help="The model, which plays groups of 8.")
    ] = None
    api_key_env: Annotated[
        str | None, quality_option(metavar="VARIABLE", help="The variable with the endpoint's key.")
    ] = None


@settings_as_options
def check(context: typer.Context, settings: CheckSettings) -> None:
    """Check that environments meet the contract. The exit code is 1 if a check fails.

    With --quality the exit code is 1 only if a task cannot be measured. The figures do not affect it.
    """
    with uncollected_imports():
        from agentrl_env.evaluation.chat_model import ChatModel
        from agentrl_env.testing.checker import run_checks, run_quality
        from agentrl_env.testing.load import measure_load

    quality, resume, traceback = settings.quality, settings.resume, settings.traceback
    if not quality and (unused := given_options(context, QUALITY)):
        raise AgentRLError(f"{', '.join(unused)}: add --quality, or omit this")
    log_to_stderr(traceback)
    key = resolve_token(context, settings.token, settings.token_file)
    endpoint = _endpoint(settings.model_url, settings.model, settings.api_key_env)
    progress = Console(stderr=True)
    common: dict[str, Any] = {"task": settings.task, "deadline": settings.deadline}

    def measure(target: str) -> list[TaskQuality]:
        model = ChatModel(**endpoint) if endpoint else None
        own: dict[str, Any] = {"samples": settings.samples, "splits": settings.split or (), "model": model}
        found = run_quality(client_of(target, key), **common, **own)
        if not settings.hold or is_url(target):
            return found
        return _with_load(found, partial(measure_load, target, sessions=settings.hold, **common))

    def conform(target: str) -> list[Report]:
        connect = client_of(target, key, timeout=settings.deadline)
        with progress.status(f"checking {target} ...") as status:
            return run_checks(
                connect,
                on_result=lambda name, result: status.update(f"checking {name}: {result.name} done"),
                **common,
            )

    found: list[Any] = []
    errors: list[dict[str, str]] = []
    measured = _read_figures(resume)
    if resume is not None:
        _check_writable(resume)
    with redirect_stdout(sys.stderr):  # the output of the tasks, because the report is printed to stdout
        for target in _environments(settings.targets):
            try:
                if quality:
                    with progress.status(f"measuring {target} ..."):
                        found += measured.get(target) or _keep(resume, target, measure(target))
                else:
                    found += conform(target)
            except AgentRLError as error:
                if traceback and isinstance(error, TargetError) and error.__cause__ is not None:
                    print_exception(error.__cause__)
                errors.append({"target": target, "type": type(error).__name__, "message": str(error)})
    ok = not errors and (quality or all(report.ok for report in found))
    if settings.as_json:
        key_of = "quality" if quality else "reports"
        results = [one.model_dump(mode="json") for one in found]
        print(json.dumps({"ok": ok, key_of: results, "errors": errors}))
    elif quality:
        _print_quality(found)
    else:
        _print_reports(found)
    for failure in errors:
        print(f"error: {failure['message']}", file=sys.stderr)
    if not ok and found and not quality and not traceback:
        print("--traceback shows the tracebacks of the task's code.", file=sys.stderr)
    raise typer.Exit(0 if ok else 1)


def _with_load(tasks: list[TaskQuality], measure: Callable[[], Load]) -> list[TaskQuality]:
    """Return the figures with the load of a server, or with a finding if the server cannot be measured."""
    try:
        load = measure()
    except AgentRLError as error:
        said = f"its server could not be measured: {type(error).__name__}: {error}"
        return [task.model_copy(update={"findings": (*task.findings, said)}) for task in tasks]
    return [task.model_copy(update={"load": load}) for task in tasks]


def _read_figures(file: Path | None) -> dict[str, list[TaskQuality]]:
    """Return the figures in a file of ``--resume``, by target. Raises AgentRLError."""
    from agentrl_env.testing.quality import TaskQuality

    if file is None or not file.exists():
        return {}
    try:
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return {
            line["target"]: [TaskQuality.model_validate(one) for one in line["quality"]] for line in lines
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AgentRLError(f"--resume {file} holds no figures of this command: {error}") from error


def _check_writable(file: Path) -> None:
    """Raise AgentRLError, before anything is measured, if the figures could not be stored."""
    try:
        file.open("a").close()
    except OSError as error:
        raise AgentRLError(
            f"--resume {file} cannot be written ({error.strerror}): name another file"
        ) from error


def _keep(file: Path | None, target: str, figures: list[TaskQuality]) -> list[TaskQuality]:
    """Append the figures of a target to a file of ``--resume`` and return them."""
    if file is not None:
        line = {"target": target, "quality": [one.model_dump(mode="json") for one in figures]}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
    return figures


def _print_reports(reports: list[Report]) -> None:
    for report in reports:
        Console().print(report.table())
        print(f"{report.summary()}\n")


def _print_quality(tasks: list[TaskQuality]) -> None:
    from agentrl_env.testing.quality_table import quality_table

    if tasks:
        table, console = quality_table(tasks), Console()
        needed = Measurement.get(Console(width=1_000), console.options.update(width=1_000), table).maximum
        Console(width=max(console.width, needed)).print(table)
    for task in tasks:
        for sentence in task.findings:
            print(f"{task.task}: {sentence}.")


def _environments(targets: list[str]) -> list[str]:
    """Return the targets of a command line, without the README that ``environments/*`` also matches."""
    kept = [target for target in targets if Path(target).suffix == ".py" or not Path(target).is_file()]
    return kept if len(targets) > 1 else targets


def _endpoint(url: str | None, model: str | None, variable: str | None) -> dict[str, Any]:
    """Return the arguments of ``ChatModel``, or none without an endpoint. Raises AgentRLError."""
    if url is None and model is None:
        if variable is not None:
            raise AgentRLError("--api-key-env needs --model-url and --model")
        return {}
    if url is None or model is None:
        raise AgentRLError("--model-url and --model belong together; give both")
    return {"url": url, "model": model, "key": endpoint_key(variable)}
