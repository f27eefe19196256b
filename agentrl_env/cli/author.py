"""What somebody who writes a task needs: make it, check it, play it, put it into an image."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentrl_env.cli.options import Target, Task, Token, client_of
from agentrl_env.errors import AgentRLError


def new(
    name: Annotated[Path, typer.Argument(help="The new folder; its name becomes the task's.")],
) -> None:
    """Write a small working environment into a new folder."""
    from agentrl_env.launch.templates import create_environment

    try:
        files = create_environment(name)
    except (ValueError, OSError) as error:
        raise AgentRLError(str(error)) from error
    for file in files:
        print(f"wrote {file}")
    print(f"\nNext: agentrl-env check {name} && agentrl-env play {name}")


def check(
    target: Target,
    task: Task = None,
    token: Token = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    deadline: Annotated[float, typer.Option(help="Seconds a check may take.")] = 60.0,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show tracebacks of the task's code.")
    ] = False,
) -> None:
    """Prove that an environment keeps the contract; ends with 1 where a check fails."""
    from agentrl_env.testing import run_checks

    _log_to_stderr(traceback)
    connect = client_of(target, token, timeout=deadline)
    console = Console(stderr=True)
    with console.status(f"checking {target} ...") as status:
        reports = run_checks(
            connect,
            task=task,
            deadline=deadline,
            on_result=lambda name, result: status.update(f"checking {name}: {result.name} done"),
        )
    ok = all(report.ok for report in reports)
    if as_json:
        print(json.dumps({"ok": ok, "reports": [r.model_dump(mode="json") for r in reports]}))
    for report in [] if as_json else reports:
        Console().print(report.table())
        print(f"{report.summary()}\n")
    raise typer.Exit(0 if ok else 1)


def play(
    target: Target,
    task: Task = None,
    split: Annotated[str, typer.Option(help="Of the dataset.")] = "train",
    index: Annotated[int | None, typer.Option(help="Which sample; any by default.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the episode.")] = None,
    expert: Annotated[bool, typer.Option("--expert", help="Watch the task's expert play instead.")] = False,
    token: Token = None,
) -> None:
    """Be the agent: type tool calls, see what the environment answers."""
    from agentrl_env.cli.play import play as run

    _log_to_stderr(False)
    with suppress(ImportError):  # line editing and history, where the platform has them
        importlib.import_module("readline")
    client = client_of(target, token)()
    lines = _let_the_expert_play() if expert else _read_line
    result = run(client, lines, Console(), task=task, split=split, index=index, seed=seed)
    raise typer.Exit(1 if result is not None and result.status == "failed_environment" else 0)


def build(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A folder with environment.py, file.py:Class, module:Class."),
    ],
    base: Annotated[
        str, typer.Option(help="The image to build on, with Python 3.11 or newer.")
    ] = "python:3.11-slim",
    tag: Annotated[str | None, typer.Option(help="The image's name; agentrl-TASK:latest by default.")] = None,
    extra: Annotated[
        list[str] | None, typer.Option(help="A further package for pip; agentrl-kit[EXTRA] for our extras.")
    ] = None,
    wheelhouse: Annotated[
        Path | None, typer.Option(help="A folder with every wheel needed; no index is asked then.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="Certificates that pip trusts during the build.")] = None,
    network: Annotated[str | None, typer.Option(help="The build's network, as of docker build.")] = None,
) -> None:
    """Build the image that serves a task on port 8000; its name is printed last."""
    from agentrl_env.launch.image import build_image

    image = build_image(
        target,
        base=base,
        tag=tag,
        requirements=extra or (),
        wheelhouse=wheelhouse,
        ca=ca,
        network=network,
        report=partial(print, file=sys.stderr, flush=True),
    )
    print(image.name)


def _let_the_expert_play() -> Callable[[str], str | None]:
    """Return lines that have the expert make each move, until it is asked for the same one again."""
    asked: set[str] = set()

    def line(prompt: str) -> str | None:
        if prompt in asked:  # the move was refused: there is no expert
            return None
        asked.add(prompt)
        print(f"{prompt}/do")
        return "/do"

    return line


def _read_line(prompt: str) -> str | None:
    """Read one line from the terminal, or from a pipe, whose lines are then shown as well."""
    try:
        line = input(prompt)
    except EOFError:
        print()
        return None
    if not sys.stdin.isatty():
        print(line)
    return line


def _log_to_stderr(wanted: bool) -> None:
    """Show the log of authors' code with its tracebacks, or nothing of it."""
    handler: logging.Handler = logging.StreamHandler() if wanted else logging.NullHandler()
    logging.getLogger("agentrl_env").handlers[:] = [handler]
