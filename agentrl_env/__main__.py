"""The command line: ``agentrl-env new | check | play | build | serve | controller | up | bench``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from agentrl_env.cli import author, operator
from agentrl_env.errors import AgentRLError

app = typer.Typer(
    name="agentrl-env",
    help="Environments for language-model agents: make one, check it, play it, serve it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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
    """Run the command line; every known error is one sentence and exit code 1."""
    try:
        app()
    except AgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
