"""Options that several commands share, and the configuration file that can set them."""

from __future__ import annotations

import difflib
import logging
import math
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl_env.client.client import EnvClient
from agentrl_env.client.credentials import NOT_PRINTABLE
from agentrl_env.errors import AgentRLError
from agentrl_env.wire import is_header_value

if TYPE_CHECKING:
    from agentrl_env.server.settings import ProcessSettings
    from agentrl_env.server.sockets import Tls

listening_option = partial(typer.Option, rich_help_panel="Listening")
sessions_option = partial(typer.Option, rich_help_panel="Sessions")
security_option = partial(typer.Option, rich_help_panel="Security")
fleet_option = partial(typer.Option, rich_help_panel="Fleet")
quality_option = partial(typer.Option, rich_help_panel="Quality of a task")
logs_option = partial(typer.Option, rich_help_panel="Logs and traces")

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|URL",
        help="A folder with an environment.py, file.py:Class, module:Class, an installed task "
        "(agentrl-env list), or a server's URL.",
    ),
]
Task = Annotated[str | None, typer.Option(help="The task, if there are several.")]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="AGENTRL_TOKEN",
        show_envvar=True,
        help="The server's token; other users of the machine see it, unlike --token-file.",
    ),
]
ClientTokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="Read the server's token from this file.")
]
ServerToken = Annotated[
    str | None,
    security_option(
        envvar="AGENTRL_TOKEN",
        show_envvar=True,
        metavar="TOKEN",
        help="The token that callers must send; other users of the machine see it, unlike --token-file.",
    ),
]
TokenFile = Annotated[
    Path | None, security_option(metavar="FILE", help="Read the token from this file instead.")
]
Insecure = Annotated[
    bool, security_option("--insecure", help="Allow other addresses than loopback without a token.")
]
Host = Annotated[str, listening_option(metavar="ADDRESS", help="The address to bind.")]
Port = Annotated[
    int, listening_option(min=0, max=65535, metavar="PORT", help="The port to bind; 0 selects a free one.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """TLS options of all commands that listen on an address."""

    tls_cert: Annotated[
        Path | None,
        security_option(
            metavar="FILE",
            help="Serve HTTPS with the certificate chain in this PEM file; clients verify its host name.",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        security_option(
            metavar="FILE",
            help="The PEM file with the certificate's private key.",
            show_default="the file of --tls-cert",
        ),
    ] = None

    def tls(self) -> Tls | None:
        """Return the certificate of the server. Raises AgentRLError for a key without a certificate."""
        from agentrl_env.server.sockets import Tls

        if self.tls_cert is None:
            if self.tls_key is not None:
                raise AgentRLError("--tls-key needs --tls-cert, the file of its certificate")
            return None
        return Tls(cert=self.tls_cert, key=self.tls_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions(TlsOptions):
    """Options of a server or a controller that concern its whole process."""

    caller_limit: Annotated[
        list[str] | None,
        security_option(
            metavar="NAME=VALUE", help="Set a limit of each caller, such as rate_per_s=100. Repeatable."
        ),
    ] = None
    log_format: Annotated[
        Literal["text", "json"],
        logs_option(metavar="FORMAT", help="The format of the log on standard error: text or json."),
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        logs_option(
            metavar="LEVEL",
            help="The minimum level that is logged: debug, info, warning or error.",
            show_default="info for json, else warning, with the drain and the end of the process",
        ),
    ] = None
    log_messages: Annotated[
        bool,
        logs_option(
            "--log-messages",
            help="Also log the messages of models and environments, and the texts of exceptions.",
        ),
    ] = False
    traces: Annotated[
        bool | None,
        logs_option(help="Export OpenTelemetry spans.", show_default="if OTEL_EXPORTER_OTLP_ENDPOINT is set"),
    ] = None

    def process(self) -> ProcessSettings:
        """Return these options as the settings of a process."""
        from agentrl_env.server.settings import ProcessSettings

        return ProcessSettings(
            caller_limits=self.caller_limit or (),
            log_format=self.log_format,
            log_level=self.log_level,
            log_messages=self.log_messages,
            traces=self.traces,
        )


def is_url(target: str) -> bool:
    """Return True if a target is the URL of a server."""
    return target.startswith(("http://", "https://", "ws://", "wss://"))


PrintMetricsToken = Annotated[
    bool,
    security_option(
        "--print-metrics-token",
        help="Print the token that allows reading /metrics and the dashboard's data, and exit.",
    ),
]


def print_derived_token(token: str | None, derive: Callable[[str], str]) -> None:
    """Print a token that is derived from the operator token. Raises AgentRLError if it is missing."""
    if not token:
        raise AgentRLError("the token is derived from the operator's; give --token-file or AGENTRL_TOKEN")
    print(derive(token))


def log_to_stderr(enabled: bool) -> None:
    """Show or hide the log, which contains the tracebacks of authors' code."""
    handler: logging.Handler = logging.StreamHandler() if enabled else logging.NullHandler()
    logging.getLogger("agentrl_env").handlers[:] = [handler]


def client_of(target: str, token: str | None, timeout: float = 120.0) -> Callable[[], EnvClient]:
    """Return a factory of clients for the server at a URL or for a class in this process."""
    from agentrl_env.hosting.loader import load_target

    if is_url(target):
        return partial(EnvClient.connect, target, token=token, timeout=timeout)
    return load_target(target).local


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Use a TOML file as the defaults of a command's options. This is the callback of ``--config``.

    Keys are the names of options and arguments, with dashes or underscores. Paths are relative to the
    file's folder.

    Raises AgentRLError if the file cannot be read, or a key or value is invalid.
    """
    if file is None:
        return None
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise AgentRLError(f"cannot read {file}: {error}") from error
    parameters = {str(parameter.name): parameter for parameter in context.command.params}
    del parameters["config"]
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name == "token":
            raise AgentRLError(f"{file}: {key} is a secret; use token_file or the variable AGENTRL_TOKEN")
        if name not in parameters:
            nearest = difflib.get_close_matches(name, parameters, n=1, cutoff=0.0)
            raise AgentRLError(f"{file}: unknown option {key!r}; did you mean {nearest[0]!r}?")
        if name in defaults:
            raise AgentRLError(f"{file}: {key} is given twice")
        defaults[name] = _convert(context, parameters[name], value, f"{file}: {key}")
    for name in ("token_file", "tls_cert", "tls_key"):
        if name in defaults:
            defaults[name] = file.parent / defaults[name]
    if "targets" in defaults:
        from agentrl_env.fleet.config import resolve_target

        defaults["targets"] = [resolve_target(file.parent, target) for target in defaults["targets"]]
    context.default_map = defaults
    return file


Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml",
        callback=read_config,
        is_eager=True,
        help="Read options from a TOML file: keys are option names, paths are relative to the file. "
        "Options on the command line take precedence.",
    ),
]


def resolve_token(context: typer.Context, token: str | None, token_file: Path | None) -> str | None:
    """Return the token from the command line, else from AGENTRL_TOKEN, else from the configuration file.

    Warns about a token on the command line, where every user of the machine can read it.

    Raises AgentRLError if the command line has both options, or the file cannot be read or is empty.
    """
    given = given_options(context, ("token", "token_file"))
    if "--token" in given:
        print(
            "warning: other users of this machine can read --token; use --token-file or AGENTRL_TOKEN",
            file=sys.stderr,
        )
    token = token.strip() if token else token
    if token_file is None:
        return token
    if len(given) == 2:
        raise AgentRLError("give --token or --token-file, not both")
    if token and "--token-file" not in given:
        return token
    return read_token(token_file)


def read_token(token_file: Path) -> str:
    """Return the token in a file. Raises AgentRLError if it cannot be read or is empty."""
    try:
        content = token_file.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AgentRLError(f"cannot read the token: {error}") from error
    if not content:
        raise AgentRLError(f"{token_file} is empty; it must contain the token")
    return content


def given_options(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Return the options of these parameters that the command line has, such as ``--token-file``."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def endpoint_key(variable: str | None, file: Path | None = None) -> str | None:
    """Return the key of a model's endpoint, from ``--api-key-env`` or ``--api-key-file``.

    Raises AgentRLError if both are given, or if the given key is empty or cannot be sent in a header.
    """
    if variable is not None and file is not None:
        raise AgentRLError("give --api-key-env or --api-key-file, not both")
    option = f"--api-key-env {variable}" if file is None else f"--api-key-file {file}"
    if file is not None:
        key: str | None = read_token(file)
    else:
        key = os.environ.get(variable, "").strip() if variable else None
        if variable and not key:
            raise AgentRLError(f"--api-key-env: the variable {variable} is empty or not set")
    if not is_header_value(key or ""):
        raise AgentRLError(f"{option}: the key has {NOT_PRINTABLE}")
    return key


def finite(value: float | None) -> float | None:
    """Return the value of an option. Raises BadParameter for infinity, which ``min`` accepts, and NaN."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def _convert(context: typer.Context, parameter: Any, value: Any, where: str) -> Any:
    """Convert a value of the file to the parameter's type. Raises AgentRLError if it is invalid."""
    if (getattr(parameter, "multiple", False) or parameter.nargs == -1) and not isinstance(value, list):
        value = [value]
    try:
        return parameter.process_value(context, value)
    except typer.BadParameter as error:
        raise AgentRLError(f"{where}: {error.message.removeprefix('Value error, ')}") from error
    except (TypeError, ValueError) as error:
        raise AgentRLError(f"{where}: {value!r} is not a valid value") from error
