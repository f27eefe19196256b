"""Commands for task authors: ``new``, ``list``, ``play``, ``build`` and ``export``."""

from __future__ import annotations

import asyncio
import importlib
import keyword
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from agentrl_env.cli.options import (
    ClientTokenFile,
    Target,
    Task,
    Token,
    client_of,
    log_to_stderr,
    resolve_token,
)
from agentrl_env.errors import AgentRLError

Base = Annotated[str, typer.Option(help="The base image, with Python 3.11 or newer.")]
Extra = Annotated[
    list[str] | None,
    typer.Option(
        help="An additional pip requirement; agentrl-kit\\[EXTRA] selects an extra of this package."
    ),
]
Wheelhouse = Annotated[
    Path | None, typer.Option(help="A folder with every required wheel; pip then uses no index.")
]


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
        "folder": shlex.quote(str(name)),
        "class_name": "".join(word.capitalize() for word in words),
        "title": " ".join(words).capitalize(),
    }
    try:
        name.mkdir(parents=True)
        for source, file in (
            ("environment.py", "environment.py"),
            ("README.md", "README.md"),
            ("test_environment.py", f"test_{task}.py"),  # pytest does not allow two test files with one name
        ):
            template = files(__package__).joinpath("template", f"{source}.template")
            text = Template(template.read_text(encoding="utf-8")).substitute(values)
            (name / file).write_text(text, encoding="utf-8")
            print(f"wrote {name / file}")
    except OSError as error:
        raise AgentRLError(f"{name} cannot be written ({error.strerror}): choose another folder") from error
    print(f"\nNext: agentrl-env check {values['folder']} && agentrl-env play {values['folder']}")


def list_() -> None:
    """List the tasks of installed packages. Every command accepts their names."""
    from agentrl_env.launch.installed import GROUP, installed_tasks

    tasks = installed_tasks()
    if not tasks:
        print(f"no installed package has tasks (entry points of the group {GROUP}), such as agentrl-tasks")
    width = max((len(task.name) for task in tasks), default=0)
    for package, group in groupby(sorted(tasks, key=lambda task: task.package), lambda task: task.package):
        print(package)
        for task in group:
            print(f"  {task.name:<{width}}  {task.summary()}".rstrip())


def play(
    context: typer.Context,
    target: Target,
    task: Task = None,
    split: Annotated[str, typer.Option(help="The split of the dataset.")] = "train",
    index: Annotated[
        str | None, typer.Option(help="The name or the number of the sample; random by default.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The seed of the episode.")] = None,
    expert: Annotated[bool, typer.Option("--expert", help="Let the task's expert play.")] = False,
    token: Token = None,
    token_file: ClientTokenFile = None,
) -> None:
    """Play an episode by hand: type tool calls and read the environment's answers."""
    from agentrl_env.cli.play import play as run

    log_to_stderr(False)
    with suppress(ImportError):  # line editing and history, if the platform has them
        importlib.import_module("readline")
    client = client_of(target, resolve_token(context, token, token_file))()
    lines = _expert_lines() if expert else _read_line
    result = run(client, lines, Console(), task=task, split=split, index=index, seed=seed, expert=expert)
    raise typer.Exit(1 if result is not None and result.status == "failed_environment" else 0)


def build(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A folder with environment.py, file.py:Class, module:Class or an installed task.",
        ),
    ],
    base: Base = "python:3.11-slim",
    tag: Annotated[str | None, typer.Option(help="The image's name; agentrl-TASK:latest by default.")] = None,
    extra: Extra = None,
    wheelhouse: Wheelhouse = None,
    ca: Annotated[
        Path | None, typer.Option(help="A PEM file with certificates that pip trusts during the build.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="The network of the build steps, as for docker build.")
    ] = None,
) -> None:
    """Build an image that serves a task on port 8000. The last printed line is its name."""
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


def export(
    format_: Annotated[Literal["harbor"], typer.Argument(metavar="harbor", help="The format.")],
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="Folders with environment.py, file.py:Class, module:Class or installed tasks.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The folder that gets the task folders.")
    ],
    split: Annotated[str, typer.Option(help="The split of the samples.")] = "test",
    count: Annotated[int, typer.Option(min=1, metavar="N", help="The number of samples of each task.")] = 10,
    base: Base = "python:3.11-slim",
    extra: Extra = None,
    wheelhouse: Wheelhouse = None,
) -> None:
    """Write samples of tasks as Harbor task folders and print their names."""
    from agentrl_env.bridges.harbor.export import export as write

    for target in targets:
        options: dict[str, Any] = {"split": split, "count": count, "base": base, "requirements": extra or ()}
        for one in asyncio.run(write(target, output, wheelhouse=wheelhouse, **options)):
            print(f"{one.folder}: " + ("no solution" if one.oracle is None else f"solution {one.oracle:g}"))


def _expert_lines() -> Callable[[str], str | None]:
    """Return a source of lines that let the expert make every move, until a prompt repeats."""
    asked: set[str] = set()

    def line(prompt: str) -> str | None:
        if prompt in asked:  # the move failed, so there is no expert
            return None
        asked.add(prompt)
        print(f"{prompt}/do")
        return "/do"

    return line


def _read_line(prompt: str) -> str | None:
    """Read one line from the terminal or a pipe. Lines from a pipe are echoed."""
    try:
        line = input(prompt)
    except EOFError:
        print()
        return None
    if not sys.stdin.isatty():
        print(line)
    return line
