"""The command line: ``agentrl-env new | serve | controller | build | up | check | play``."""

from __future__ import annotations

import importlib
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from agentrl_env.client.client import EnvClient
from agentrl_env.errors import AgentRLError
from agentrl_env.server.parent import signal_own_group, stop_at_end_of_input

if TYPE_CHECKING:
    from agentrl_env.server.operations import Operations

app = typer.Typer(
    name="agentrl-env",
    help="Environments for language-model agents: make one, check it, play it, serve it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

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


@app.command()
def new(
    name: Annotated[Path, typer.Argument(help="The new folder; its name becomes the task's.")],
) -> None:
    """Write a small working environment into a new folder."""
    from agentrl_env.launch.scaffold import create_environment

    try:
        files = create_environment(name)
    except (ValueError, OSError) as error:
        raise AgentRLError(str(error)) from error
    for file in files:
        print(f"wrote {file}")
    print(f"\nNext: agentrl-env check {name} && agentrl-env play {name}")


@app.command()
def serve(
    targets: Targets,
    host: Annotated[str, typer.Option(help="The address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    max_sessions: Annotated[int, typer.Option(min=1, help="Open at the same time.")] = 1024,
    token: Token = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve beyond loopback without a token.")
    ] = False,
    oracle: Annotated[bool, typer.Option("--oracle", help="Let clients ask the task's expert.")] = False,
    lease: Annotated[float, typer.Option(help="Seconds a session may be idle.")] = 900.0,
    drain: Annotated[float, typer.Option(help="Seconds open sessions get at the end.")] = 30.0,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with its share of sessions.")] = 1,
    controller: Annotated[
        list[str] | None,
        typer.Option(help="A controller's URL to dial; with --host none nothing listens here."),
    ] = None,
    stop_with_stdin: Annotated[
        bool,
        typer.Option(
            "--stop-with-stdin", help="Stop when standard input closes, so as to die with a parent."
        ),
    ] = False,
    slow_step: Annotated[float, typer.Option(help="Seconds after which a step is logged as slow.")] = 30.0,
    caller_limit: CallerLimit = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = None,
    log_messages: LogMessages = False,
    traces: Traces = None,
) -> None:
    """Serve tasks over HTTP until Ctrl-C; open sessions may end first, a second Ctrl-C hurries."""
    from agentrl_env.server.serve import serve as run

    operations = _operations(caller_limit, log_format, log_level, log_messages, traces)
    if stop_with_stdin:
        threading.Thread(target=stop_at_end_of_input, args=(drain, host == "none"), daemon=True).start()
    if workers > 1:
        from agentrl_env.controller.serve import serve_with_workers

        if controller:
            raise AgentRLError("--workers brings a controller of its own; give --workers or --controller")
        each = ["--max-sessions", str(-(-max_sessions // workers)), "--lease", str(lease)]
        each += ["--slow-step", str(slow_step), *operations.arguments()]
        with operations.begin() as begun:
            serve_with_workers(
                targets,
                workers=workers,
                arguments=[*each, "--oracle"] if oracle else each,
                drain_s=drain,
                host=host,
                port=port,
                token=token,
                insecure=insecure,
                **begun,
            )
        return
    with operations.begin() as begun:
        run(
            targets,
            announce=partial(print, flush=True),
            host=host,
            port=port,
            max_sessions=max_sessions,
            token=token,
            insecure=insecure,
            oracle=oracle,
            lease_s=lease,
            drain_s=drain,
            controllers=controller or (),
            slow_step_s=slow_step,
            **begun,
        )
    if stop_with_stdin:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal_own_group(signal.SIGTERM)


@app.command()
def controller(
    host: Annotated[str, typer.Option(help="The address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8100,
    token: Token = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve beyond loopback without a token.")
    ] = False,
    advertise: Annotated[
        str | None, typer.Option(help="The URL that servers reach this controller at.")
    ] = None,
    redis: Annotated[
        str | None, typer.Option(envvar="AGENTRL_REDIS", help="Share the fleet with other controllers.")
    ] = None,
    fleet: Annotated[str, typer.Option(help="Its name; sets fleets in one Redis apart.")] = "fleet",
    queue: Annotated[float, typer.Option(help="Seconds an opening waits for room at least.")] = 30.0,
    lost_after: Annotated[float, typer.Option(min=1, help="Seconds of silence until it is dead.")] = 5.0,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="TASK=N", help="Sessions of a task in the whole fleet.")
    ] = None,
    client_limit: Annotated[int | None, typer.Option(min=1, help="Sessions of one client.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a dead server's sessions, where tasks can fork.")
    ] = False,
    caller_limit: CallerLimit = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = None,
    log_messages: LogMessages = False,
    traces: Traces = None,
) -> None:
    """Put one address in front of many servers; they dial in with ``serve --controller``."""
    from agentrl_env.controller.fleet import Fleet
    from agentrl_env.controller.redis import RedisState
    from agentrl_env.controller.serve import control

    with _operations(caller_limit, log_format, log_level, log_messages, traces).begin() as begun:
        control(
            Fleet(
                state=RedisState(redis, fleet=fleet) if redis else None,
                lost_after_s=lost_after,
                queue_s=queue,
                task_limits=dict(map(_task_limit, limit or ())),
                client_limit=client_limit,
                resume=resume,
            ),
            host=host,
            port=port,
            token=token,
            insecure=insecure,
            advertise=advertise,
            **begun,
        )


@app.command()
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


@app.command()
def up(
    file: Annotated[Path, typer.Argument(help="The fleet: tasks, replicas, limits, controller; TOML.")],
    print_: Annotated[
        str | None,
        typer.Option("--print", metavar="kubernetes|compose", help="Print manifests, start nothing."),
    ] = None,
) -> None:
    """Run a whole fleet from one file until Ctrl-C; SIGHUP replaces its servers one by one."""
    from agentrl_env.launch.plan import read_plan

    plan = read_plan(file)
    if print_ is not None:
        from agentrl_env.launch.manifests import compose, kubernetes

        formats = {"kubernetes": kubernetes, "compose": compose}
        if print_ not in formats:
            raise AgentRLError(f"--print {print_} is unknown; choose kubernetes or compose")
        print(formats[print_](plan), end="")
        return
    from agentrl_env.launch.fleet import up as run

    run(plan)


@app.command()
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
    connect = _connect(target, token, timeout=deadline)
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


@app.command()
def play(
    target: Target,
    task: Task = None,
    split: Annotated[str, typer.Option(help="Of the dataset.")] = "train",
    index: Annotated[int | None, typer.Option(help="Which sample; any by default.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the episode.")] = None,
    token: Token = None,
) -> None:
    """Be the agent: type tool calls, see what the environment answers."""
    from agentrl_env.client.play import play as run

    _log_to_stderr(False)
    with suppress(ImportError):  # line editing and history, where the platform has them
        importlib.import_module("readline")
    client = _connect(target, token)()
    result = run(client, _read_line, Console(), task=task, split=split, index=index, seed=seed)
    raise typer.Exit(1 if result is not None and result.status == "failed_environment" else 0)


def _task_limit(text: str) -> tuple[str, int]:
    task, _, number = text.partition("=")
    if not task or not number.isdecimal() or int(number) < 1:
        raise AgentRLError(f"--limit {text}: say TASK=N, such as --limit shop=100")
    return task, int(number)


def _operations(
    caller_limit: list[str] | None,
    log_format: Literal["text", "json"],
    log_level: str | None,
    log_messages: bool,
    traces: bool | None,
) -> Operations:
    from agentrl_env.server.operations import Operations

    return Operations(
        caller_limits=tuple(caller_limit or ()),
        log_format=log_format,
        log_level=log_level,
        log_messages=log_messages,
        traces=traces,
    )


def _connect(target: str, token: str | None, timeout: float = 120.0) -> Callable[[], EnvClient]:
    """Return what makes a client: of the server at a URL, or of a class in this process."""
    from agentrl_env.server.targets import load_target

    if target.startswith(("http://", "https://", "ws://", "wss://")):
        return partial(EnvClient.connect, target, token=token, timeout=timeout)
    return load_target(target).local


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
