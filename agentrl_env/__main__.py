"""The command line, ``agentrl-env``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from agentrl_env.cli import author, operator
from agentrl_env.errors import AgentRLError

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
    author.check,
    author.play,
    author.build,
    operator.serve,
    operator.controller,
    operator.up,
    operator.bench,
)
for command in _COMMANDS:
    app.command()(command)


def main() -> None:
    """Run the command line; known errors print one line and exit with 1, usage errors with 2."""
    command = typer.main.get_command(app)
    command.rich_markup_mode = None  # type: ignore[attr-defined]  # plain usage errors; help keeps its panels
    try:
        command()
    except AgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
