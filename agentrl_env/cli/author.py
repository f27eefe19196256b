"""Commands for task authors: ``new``, ``check``, ``play`` and ``build``."""

from __future__ import annotations

import importlib
import json
import keyword
import logging
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template
from traceback import print_exception
from typing import Annotated

import typer
from rich.console import Console

from agentrl_env.cli.options import ClientTokenFile, Target, Task, Token, client_of, resolve_token
from agentrl_env.errors import AgentRLError, TargetError


def new(
    name: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The new folder; its name becomes the task's name.")
    ],
) -> None:
    """Write a small working environment into a new folder."""
    task = name.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", task) or keyword.iskeyword(task):
        raise AgentRLError(
            f"{task!r} is not a valid task name: use lower-case letters, digits and '_', "
            "starting with a letter, for example 'number_game'."
        )
    if name.exists():
        raise AgentRLError(f"{name} exists already; choose another name or remove it first.")
    words = [word for word in task.split("_") if word]
    values = {
        "name": task,
        "folder": str(name),
        "class_name": "".join(word.capitalize() for word in words),
        "title": " ".join(words).capitalize(),
    }
    try:
        name.mkdir(parents=True)
        for file in ("environment.py", "README.md", "test_environment.py"):
            template = files(__package__).joinpath("template", f"{file}.template")
            text = Template(template.read_text(encoding="utf-8")).substitute(values)
            (name / file).write_text(text, encoding="utf-8")
            print(f"wrote {name / file}")
    except OSError as error:
        raise AgentRLError(str(error)) from error
    print(f"\nNext: agentrl-env check {name} && agentrl-env play {name}")


def check(
    context: typer.Context,
    target: Target,
    task: Task = None,
    token: Token = None,
    token_file: ClientTokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="The time that each check may take.")
    ] = 60.0,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show tracebacks of the task's code.")
    ] = False,
) -> None:
    """Check that an environment meets the contract; the exit code is 1 if a check fails."""
    from agentrl_env.testing import run_checks

    _log_to_stderr(traceback)
    console = Console(stderr=True)
    try:
        connect = client_of(target, resolve_token(context, token, token_file), timeout=deadline)
        with console.status(f"checking {target} ...") as status:
            reports = run_checks(
                connect,
                task=task,
                deadline=deadline,
                on_result=lambda name, result: status.update(f"checking {name}: {result.name} done"),
            )
    except AgentRLError as error:
        if traceback and isinstance(error, TargetError) and error.__cause__ is not None:
            print_exception(error.__cause__)
        if as_json:
            failure = {"type": type(error).__name__, "message": str(error)}
            print(json.dumps({"ok": False, "reports": [], "error": failure}))
        raise
    ok = all(report.ok for report in reports)
    if as_json:
        print(json.dumps({"ok": ok, "reports": [r.model_dump(mode="json") for r in reports]}))
    for report in [] if as_json else reports:
        Console().print(report.table())
        print(f"{report.summary()}\n")
    if not ok and not traceback:
        print("--traceback shows the tracebacks of the task's code.", file=sys.stderr)
    raise typer.Exit(0 if ok else 1)


def play(
    context: typer.Context,
    target: Target,
    task: Task = None,
    split: Annotated[str, typer.Option(help="The split of the dataset.")] = "train",
    index: Annotated[int | None, typer.Option(help="The sample; random by default.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The seed of the episode.")] = None,
    expert: Annotated[bool, typer.Option("--expert", help="Let the task's expert play.")] = False,
    token: Token = None,
    token_file: ClientTokenFile = None,
) -> None:
    """Play an episode by hand: type tool calls and read the environment's answers."""
    from agentrl_env.cli.play import play as run

    _log_to_stderr(False)
    with suppress(ImportError):  # line editing and history, if the platform has them
        importlib.import_module("readline")
    client = client_of(target, resolve_token(context, token, token_file))()
    lines = _expert_lines() if expert else _read_line
    result = run(client, lines, Console(), task=task, split=split, index=index, seed=seed, expert=expert)
    raise typer.Exit(1 if result is not None and result.status == "failed_environment" else 0)


def build(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A folder with environment.py, file.py:Class or module:Class."),
    ],
    base: Annotated[
        str, typer.Option(help="The base image, with Python 3.11 or newer.")
    ] = "python:3.11-slim",
    tag: Annotated[str | None, typer.Option(help="The image's name; agentrl-TASK:latest by default.")] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            help="An additional pip requirement; agentrl-kit\\[EXTRA] selects an extra of this package."
        ),
    ] = None,
    wheelhouse: Annotated[
        Path | None, typer.Option(help="A folder with every required wheel; pip then uses no index.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="A PEM file with certificates that pip trusts during the build.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="The network of the build steps, as for docker build.")
    ] = None,
) -> None:
    """Build an image that serves a task on port 8000, and print its name last."""
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


def _expert_lines() -> Callable[[str], str | None]:
    """Return a source of lines that let the expert make each move, until a prompt repeats."""
    asked: set[str] = set()

    def line(prompt: str) -> str | None:
        if prompt in asked:  # the move failed: there is no expert
            return None
        asked.add(prompt)
        print(f"{prompt}/do")
        return "/do"

    return line


def _read_line(prompt: str) -> str | None:
    """Read one line from the terminal, or from a pipe, whose lines are echoed."""
    try:
        line = input(prompt)
    except EOFError:
        print()
        return None
    if not sys.stdin.isatty():
        print(line)
    return line


def _log_to_stderr(enabled: bool) -> None:
    """Show or hide the log, which has the tracebacks of authors' code."""
    handler: logging.Handler = logging.StreamHandler() if enabled else logging.NullHandler()
    logging.getLogger("agentrl_env").handlers[:] = [handler]
