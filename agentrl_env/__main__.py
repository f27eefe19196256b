"""The command line, ``agentrl-env``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated

from agentrl_env.cli.imports import uncollected_imports

with uncollected_imports():
    import typer

    from agentrl_env import __version__
    from agentrl_env.cli import author, check, evaluate, operator
    from agentrl_env.errors import AgentRLError, check_system

app = typer.Typer(
    name="agentrl-env",
    help="Environments for language-model agents: create, check, play and serve them.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    author.new,
    author.list_,
    check.check,
    author.play,
    evaluate.eval_,
    evaluate.compare,
    author.build,
    author.export,
    operator.serve,
    operator.controller,
    operator.up,
    operator.token,
    operator.bench,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"agentrl-env {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Environments for language-model agents: create, check, play and serve them."""


for command in _COMMANDS:
    app.command(command.__name__.strip("_"))(command)


def main() -> None:
    """Run the command line. Known errors print one line and exit with 1, usage errors exit with 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # without UTF-8, "?" replaces some characters
    try:
        check_system()
        command = typer.main.get_command(app)
        command.rich_markup_mode = None  # type: ignore[attr-defined]  # plain usage errors; help keeps panels
        command()
    except AgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
