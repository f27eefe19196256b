"""Commands for operators: ``serve``, ``controller``, ``up`` and ``bench``."""

from __future__ import annotations

import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl_env.cli.options import (
    CallerLimit,
    Config,
    Host,
    Insecure,
    LogFormat,
    LogLevel,
    LogMessages,
    Port,
    ServerToken,
    Target,
    Task,
    Token,
    TokenFile,
    Traces,
    client_of,
    fleet_option,
    listening_option,
    logs_option,
    resolve_token,
    security_option,
    sessions_option,
)
from agentrl_env.errors import AgentRLError
from agentrl_env.server.parent_watch import signal_own_group, stop_at_end_of_input

if TYPE_CHECKING:
    from agentrl_env.server.settings import ProcessSettings


Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET...",
        show_default=False,
        help="Folders with an environment.py, file.py:Class or module:Class.",
    ),
]
StopWithStdin = Annotated[
    bool,
    listening_option(
        "--stop-with-stdin",
        help="Stop when standard input closes, for example because the parent process died.",
    ),
]
MaxSessions = Annotated[int, sessions_option(min=1, metavar="N", help="The maximum number of open sessions.")]
Lease = Annotated[float, sessions_option(metavar="SECONDS", help="The time that a session may be idle.")]
Drain = Annotated[
    float, sessions_option(metavar="SECONDS", help="The time that open sessions get when the server stops.")
]
Oracle = Annotated[bool, sessions_option("--oracle", help="Let clients ask the task's expert.")]
WorkerCount = Annotated[
    int, fleet_option(min=1, metavar="N", help="Serve with this many processes, which share the sessions.")
]
Controllers = Annotated[
    list[str] | None,
    fleet_option(
        metavar="URL",
        help="Connect to this controller; the token may then be the one that controller "
        "--print-link-token prints. Repeat it for each controller of the fleet. "
        "With --host none the server is reachable only through them.",
    ),
]
ResumeWorkers = Annotated[
    bool,
    fleet_option(
        "--resume",
        help="With --workers: resume the sessions of a dead worker on another, for tasks that can fork.",
    ),
]
SlowStep = Annotated[float, logs_option(metavar="SECONDS", help="Log a warning for steps that take longer.")]
Queue = Annotated[
    float, sessions_option(metavar="SECONDS", help="The minimum time that a new session waits for capacity.")
]
TaskLimits = Annotated[
    list[str] | None,
    sessions_option(
        metavar="TASK=N", help="The maximum number of a task's sessions in the fleet. Repeatable."
    ),
]
ClientLimit = Annotated[
    int | None, sessions_option(min=1, metavar="N", help="The maximum number of one client's sessions.")
]
PrintLinkToken = Annotated[
    bool,
    security_option(
        "--print-link-token",
        help="Print the token that lets servers connect and permits nothing else, and exit.",
    ),
]
RedisUrl = Annotated[
    str | None,
    fleet_option(
        metavar="URL", envvar="AGENTRL_REDIS", help="The Redis server that the fleet's controllers share."
    ),
]
FleetName = Annotated[str, fleet_option(metavar="NAME", help="The fleet's name in a shared Redis server.")]
LostAfter = Annotated[
    float, fleet_option(min=1, metavar="SECONDS", help="The silence after which a server counts as dead.")
]
ResumeServers = Annotated[
    bool,
    fleet_option(
        "--resume", help="Resume the sessions of a dead server on another, for tasks that can fork."
    ),
]


def serve(
    context: typer.Context,
    targets: Targets = None,
    config: Config = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    stop_with_stdin: StopWithStdin = False,
    max_sessions: MaxSessions = 1024,
    lease: Lease = 900.0,
    drain: Drain = 30.0,
    oracle: Oracle = False,
    token: ServerToken = None,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    caller_limit: CallerLimit = None,
    workers: WorkerCount = 1,
    controller: Controllers = None,
    resume: ResumeWorkers = False,
    slow_step: SlowStep = 30.0,
    log_format: LogFormat = "text",
    log_level: LogLevel = None,
    log_messages: LogMessages = False,
    traces: Traces = None,
) -> None:
    """Serve tasks over HTTP until Ctrl-C.

    The first Ctrl-C lets open sessions end; a second one stops at once.
    """
    from agentrl_env.server.serve import serve as run

    if not targets:
        raise typer.BadParameter(
            "give at least one, here or as targets in the --config file", ctx=context, param_hint="TARGET..."
        )
    _check_combination(workers, controller, resume)
    token = resolve_token(context, token, token_file)
    operations = _operations(caller_limit, log_format, log_level, log_messages, traces)
    if stop_with_stdin:
        threading.Thread(target=stop_at_end_of_input, args=(drain, host == "none"), daemon=True).start()
    common: dict[str, Any] = {
        "host": host,
        "port": port,
        "token": token,
        "insecure": insecure,
        "drain_s": drain,
    }
    with operations.apply() as begun:
        if workers > 1:
            from agentrl_env.fleet.serve import serve_with_workers

            each = ["--max-sessions", str(-(-max_sessions // workers)), "--lease", str(lease)]
            each += ["--slow-step", str(slow_step), *operations.arguments()]
            each += ["--oracle"] if oracle else []
            serve_with_workers(targets, workers=workers, arguments=each, resume=resume, **common, **begun)
            return
        run(
            targets,
            announce=partial(print, flush=True),
            max_sessions=max_sessions,
            oracle=oracle,
            lease_s=lease,
            controllers=controller or (),
            slow_step_s=slow_step,
            **common,
            **begun,
        )
    if stop_with_stdin:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal_own_group(signal.SIGTERM)


def controller(
    context: typer.Context,
    config: Config = None,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    queue: Queue = 30.0,
    limit: TaskLimits = None,
    client_limit: ClientLimit = None,
    token: ServerToken = None,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    caller_limit: CallerLimit = None,
    print_link_token: PrintLinkToken = False,
    redis: RedisUrl = None,
    fleet: FleetName = "fleet",
    lost_after: LostAfter = 5.0,
    resume: ResumeServers = False,
    log_format: LogFormat = "text",
    log_level: LogLevel = None,
    log_messages: LogMessages = False,
    traces: Traces = None,
) -> None:
    """Provide one address for many servers.

    Servers connect with serve --controller URL. The token is the operator's, who may do everything.
    Servers need only the link token, which is derived from it and printed by --print-link-token.
    """
    from agentrl_env.fleet.controller import FleetService
    from agentrl_env.fleet.redis_store import RedisStore
    from agentrl_env.fleet.serve import control

    token = resolve_token(context, token, token_file)
    if print_link_token:
        print(_link_token(token))
        return
    with _operations(caller_limit, log_format, log_level, log_messages, traces).apply() as begun:
        control(
            FleetService(
                store=RedisStore(redis, fleet=fleet) if redis else None,
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
            **begun,
        )


def up(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="TOML file with the fleet's tasks, replicas, limits and controller."
        ),
    ],
    print_: Annotated[
        str | None,
        typer.Option(
            "--print", metavar="kubernetes|compose", help="Print manifests instead of starting the fleet."
        ),
    ] = None,
) -> None:
    """Run a whole fleet from one file until Ctrl-C.

    SIGHUP replaces its servers one by one.
    """
    from agentrl_env.fleet.config import read_fleet_config

    config = read_fleet_config(file)
    if print_ is not None:
        from agentrl_env.fleet.manifests import compose, kubernetes

        formats = {"kubernetes": kubernetes, "compose": compose}
        if print_ not in formats:
            raise AgentRLError(f"--print {print_} is unknown; choose kubernetes or compose")
        print(formats[print_](config), end="")
        return
    from agentrl_env.fleet.up import up as run

    run(config)


def bench(
    target: Target,
    task: Task = None,
    sessions: Annotated[
        int, typer.Option(min=1, metavar="N", help="The number of concurrent sessions.")
    ] = 64,
    seconds: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="The duration, after one second of warm-up.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the calls.")] = 0,
    token: Token = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure a server with random valid calls in many concurrent sessions."""
    from agentrl_env.client.benchmark import measure

    load = measure(
        client_of(target, token), task=task, sessions=sessions, seconds=seconds, warmup=1.0, seed=seed
    )
    print(load.model_dump_json() if as_json else load.text())


def _check_combination(workers: int, controller: list[str] | None, resume: bool) -> None:
    if workers > 1 and controller:
        raise AgentRLError("--workers starts a controller of its own; give --workers or --controller")
    if workers == 1 and resume:
        raise AgentRLError(
            "--resume resumes the sessions of a dead worker and needs --workers; "
            "for separate servers use agentrl-env controller --resume"
        )


def _link_token(token: str | None) -> str:
    from agentrl_env.server.auth import link_token

    if not token:
        raise AgentRLError("the link token is derived from the operator's; give --token or AGENTRL_TOKEN")
    return link_token(token)


def _task_limit(text: str) -> tuple[str, int]:
    task, _, number = text.partition("=")
    if not task or not number.isdecimal() or int(number) < 1:
        raise AgentRLError(f"--limit {text}: give TASK=N, such as --limit shop=100")
    return task, int(number)


def _operations(
    caller_limit: list[str] | None,
    log_format: Literal["text", "json"],
    log_level: str | None,
    log_messages: bool,
    traces: bool | None,
) -> ProcessSettings:
    from agentrl_env.server.settings import ProcessSettings

    return ProcessSettings(
        caller_limits=tuple(caller_limit or ()),
        log_format=log_format,
        log_level=log_level,
        log_messages=log_messages,
        traces=traces,
    )
