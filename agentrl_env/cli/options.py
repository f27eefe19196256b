"""Arguments and options that several commands have, in one wording."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import typer

from agentrl_env.client.client import EnvClient

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|URL",
        help="A folder with an environment.py, file.py:Class, module:Class, or a server's URL.",
    ),
]
Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET...", help="Folders with an environment.py, file.py:Class or module:Class."
    ),
]
Token = Annotated[
    str | None, typer.Option(envvar="AGENTRL_TOKEN", help="The server's token.", show_envvar=True)
]
CallerLimit = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A limit of one caller, such as rate_per_s=100; repeatable."),
]
LogFormat = Annotated[Literal["text", "json"], typer.Option(help="Of the log on standard error.")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None,
    typer.Option(help="The least that is logged.", show_default="info with json, else warning"),
]
LogMessages = Annotated[
    bool, typer.Option("--log-messages", help="Log what models and environments say, too.")
]
Traces = Annotated[
    bool | None,
    typer.Option(help="Send OpenTelemetry spans.", show_default="where OTEL_EXPORTER_OTLP_ENDPOINT is set"),
]
Task = Annotated[str | None, typer.Option(help="Which task, where there are several.")]
Host = Annotated[str, typer.Option(help="The address to bind.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Serve beyond loopback without a token.")]


def client_of(target: str, token: str | None, timeout: float = 120.0) -> Callable[[], EnvClient]:
    """Return what makes a client: of the server at a URL, or of a class in this process."""
    from agentrl_env.server.loader import load_target

    if target.startswith(("http://", "https://", "ws://", "wss://")):
        return partial(EnvClient.connect, target, token=token, timeout=timeout)
    return load_target(target).local
