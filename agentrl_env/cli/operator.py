"""Commands for operators: ``serve``, ``controller``, ``up``, ``token`` and ``bench``."""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl_env.cli import options
from agentrl_env.cli.imports import uncollected_imports
from agentrl_env.cli.options import (
    fleet_option,
    listening_option,
    logs_option,
    security_option,
    sessions_option,
)
from agentrl_env.cli.settings import settings_as_options
from agentrl_env.errors import AgentRLError
from agentrl_env.server.watchdog import STUCK_S, Watchdog, signal_own_group


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(options.ProcessOptions):
    """Options of ``serve``."""

    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            show_default=False,
            help="Folders with an environment.py, file.py:Class, module:Class or installed tasks.",
        ),
    ] = None
    config: options.Config = None
    host: options.Host = "127.0.0.1"
    port: options.Port = 8000
    reload: Annotated[
        bool,
        listening_option(
            "--reload/--no-reload",
            help="Restart the server, without its open sessions, when a Python file in a target's folder "
            "changes. For development.",
        ),
    ] = False
    stop_with_stdin: Annotated[
        bool,
        listening_option(
            "--stop-with-stdin",
            help="Stop when standard input closes, for example because the parent process died.",
        ),
    ] = False
    max_sessions: Annotated[
        int, sessions_option(min=1, metavar="N", help="The maximum number of open sessions.")
    ] = 1024
    lease: Annotated[
        float, sessions_option(min=1, metavar="SECONDS", help="The time that a session may be idle.")
    ] = 900.0
    drain: Annotated[
        float,
        sessions_option(
            min=0, metavar="SECONDS", help="The time that open sessions get when the server stops."
        ),
    ] = 30.0
    oracle: Annotated[bool, sessions_option("--oracle", help="Let clients call the task's expert.")] = False
    stuck_after: Annotated[
        float,
        sessions_option(
            min=0,
            metavar="SECONDS",
            help="Kill a process if its event loop has not run for this long. 0 disables this. "
            "--workers and up then start another process.",
        ),
    ] = STUCK_S
    token: options.ServerToken = None
    token_file: options.TokenFile = None
    insecure: options.Insecure = False
    print_metrics_token: options.PrintMetricsToken = False
    workers: Annotated[
        int,
        fleet_option(min=1, metavar="N", help="Serve with this many processes, which share the sessions."),
    ] = 1
    controller: Annotated[
        list[str] | None,
        fleet_option(
            metavar="URL",
            help="Connect to this controller. Its link token (controller --print-link-token) "
            "suffices as the token. Repeat the option for each controller of the fleet. With --host none "
            "the server is reachable only through its controllers.",
        ),
    ] = None
    resume: Annotated[
        bool,
        fleet_option(
            "--resume",
            help="With --workers: resume the sessions of a dead worker on another, for tasks that can fork.",
        ),
    ] = False
    slow_step: Annotated[
        float, logs_option(min=0, metavar="SECONDS", help="Log a warning for steps that take longer.")
    ] = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings(options.ProcessOptions):
    """Options of ``controller``."""

    config: options.Config = None
    host: options.Host = "127.0.0.1"
    port: options.Port = 8100
    queue: Annotated[
        float,
        sessions_option(
            min=0, metavar="SECONDS", help="The minimum time that a new session waits for capacity."
        ),
    ] = 30.0
    limit: Annotated[
        list[str] | None,
        sessions_option(
            metavar="TASK=N", help="The maximum number of a task's sessions in the fleet. Repeatable."
        ),
    ] = None
    client_limit: Annotated[
        int | None, sessions_option(min=1, metavar="N", help="The maximum number of one client's sessions.")
    ] = None
    token: options.ServerToken = None
    token_file: options.TokenFile = None
    insecure: options.Insecure = False
    print_link_token: Annotated[
        bool,
        security_option(
            "--print-link-token",
            help="Print the token that only allows servers to connect, and exit.",
        ),
    ] = False
    print_metrics_token: options.PrintMetricsToken = False
    redis: Annotated[
        str | None,
        fleet_option(
            metavar="URL", envvar="AGENTRL_REDIS", help="The Redis server that the fleet's controllers share."
        ),
    ] = None
    fleet: Annotated[str, fleet_option(metavar="NAME", help="The fleet's name in a shared Redis server.")] = (
        "fleet"
    )
    lost_after: Annotated[
        float,
        fleet_option(min=1, metavar="SECONDS", help="The silence after which a server is lost."),
    ] = 5.0
    resume: Annotated[
        bool,
        fleet_option(
            "--resume", help="Resume the sessions of a dead server on another, for tasks that can fork."
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings(options.TlsOptions):
    """Options of ``up``."""

    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="TOML file with the fleet's tasks, replicas, limits and controller."
        ),
    ]
    print_: Annotated[
        str | None,
        typer.Option(
            "--print", metavar="kubernetes|compose", help="Print manifests instead of starting the fleet."
        ),
    ] = None
    token_file: options.ClientTokenFile = None


@settings_as_options
def serve(context: typer.Context, settings: ServeSettings) -> None:
    """Serve tasks over HTTP until Ctrl-C.

    The first Ctrl-C lets open sessions end. A second Ctrl-C stops immediately.
    """
    with uncollected_imports():
        from agentrl_env.hosting.serve import serve as run
        from agentrl_env.server.auth import metrics_token

    token = options.resolve_token(context, settings.token, settings.token_file)
    if settings.print_metrics_token:
        options.print_derived_token(token, metrics_token)
        return
    if not settings.targets:
        raise typer.BadParameter(
            "give at least one, here or as targets in the --config file", ctx=context, param_hint="TARGET..."
        )
    _check_combination(settings)
    if settings.reload:
        _reload(settings.targets, settings, token)
        return
    workers, drain, stuck = settings.workers, settings.drain, settings.stuck_after
    process = settings.process()
    watchdog = Watchdog(0.0 if workers > 1 else stuck, settings.log_format)  # each worker has its own
    watchdog.start(drain if settings.stop_with_stdin else None, unreachable=settings.host == "none")
    common: dict[str, Any] = {"host": settings.host, "port": settings.port, "token": token, "drain_s": drain}
    with watchdog, process.apply() as begun:
        common |= {"insecure": settings.insecure, "tls": settings.tls(), **begun}
        if workers > 1:
            with uncollected_imports():
                from agentrl_env.fleet.serve import serve_with_workers

            each = ["--max-sessions", str(-(-settings.max_sessions // workers))]
            each += ["--lease", str(settings.lease), "--slow-step", str(settings.slow_step)]
            each += [*process.arguments(), *(["--oracle"] if settings.oracle else [])]
            common |= {"workers": workers, "arguments": each, "resume": settings.resume, "stuck_s": stuck}
            serve_with_workers(settings.targets, **common)
            return
        run(
            settings.targets,
            max_sessions=settings.max_sessions,
            oracle=settings.oracle,
            lease_s=settings.lease,
            controllers=settings.controller or (),
            slow_step_s=settings.slow_step,
            watchdog=watchdog,
            **common,
        )
    if settings.stop_with_stdin:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal_own_group(signal.SIGTERM)


@settings_as_options
def controller(context: typer.Context, settings: ControllerSettings) -> None:
    """Provide one address for many servers.

    Servers connect with serve --controller URL. The operator's token allows everything. Servers need only
    the link token, which is derived from it and printed by --print-link-token.
    """
    with uncollected_imports():
        from agentrl_env.fleet.controller import FleetService
        from agentrl_env.fleet.redis_store import RedisStore
        from agentrl_env.fleet.serve import control
        from agentrl_env.server.auth import link_token, metrics_token

    token = options.resolve_token(context, settings.token, settings.token_file)
    if settings.print_link_token or settings.print_metrics_token:
        options.print_derived_token(token, link_token if settings.print_link_token else metrics_token)
        return
    with settings.process().apply() as begun:
        sessions = FleetService(
            store=RedisStore(settings.redis, fleet=settings.fleet) if settings.redis is not None else None,
            lost_after_s=settings.lost_after,
            queue_s=settings.queue,
            task_limits=dict(map(_task_limit, settings.limit or ())),
            client_limit=settings.client_limit,
            resume=settings.resume,
        )
        address: dict[str, Any] = {"host": settings.host, "port": settings.port, "token": token}
        control(sessions, **address, insecure=settings.insecure, tls=settings.tls(), **begun)


@settings_as_options
def up(settings: UpSettings) -> None:
    """Run a whole fleet from one file until Ctrl-C.

    SIGHUP reads FILE again. Servers are added, removed and replaced without losing their sessions.
    """
    if settings.print_ is not None:
        from agentrl_env.fleet.config import read_fleet_config
        from agentrl_env.fleet.manifests import compose, kubernetes

        formats = {"kubernetes": kubernetes, "compose": compose}
        if settings.print_ not in formats:
            raise AgentRLError(f"--print {settings.print_} is unknown; choose kubernetes or compose")
        print(formats[settings.print_](read_fleet_config(settings.file)), end="")
        return
    from agentrl_env.fleet.up import up as run

    token = options.read_token(settings.token_file) if settings.token_file else None
    run(settings.file, token=token, tls=settings.tls())


def bench(
    context: typer.Context,
    target: options.Target,
    task: options.Task = None,
    sessions: Annotated[
        int, typer.Option(min=1, metavar="N", help="The number of concurrent sessions.")
    ] = 64,
    seconds: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="The duration, after one second of warm-up.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the calls.")] = 0,
    token: options.Token = None,
    token_file: options.ClientTokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure a server with random valid calls in many concurrent sessions."""
    from agentrl_env.client.benchmark import measure

    token = options.resolve_token(context, token, token_file)
    load = measure(
        options.client_of(target, token), task=task, sessions=sessions, seconds=seconds, warmup=1.0, seed=seed
    )
    print(load.model_dump_json() if as_json else load.text())


def token(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's or controller's URL.")],
    sessions: Annotated[list[str], typer.Argument(metavar="SESSION...", help="Ids of open sessions.")],
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Only revoke the tokens. The sessions continue.")
    ] = False,
    token: options.Token = None,
    token_file: options.ClientTokenFile = None,
) -> None:
    """Revoke all agent tokens of sessions and print a new token for each session."""
    import asyncio

    from agentrl_env.client.http import HttpBackend
    from agentrl_env.wire import RENEW, REVOKE, SessionRequest

    operator = options.resolve_token(context, token, token_file)

    async def run() -> None:
        backend = HttpBackend(url, token=operator)
        try:
            for session_id in sessions:
                request = SessionRequest(session_id=session_id)
                answer = await backend.call(REVOKE if revoke else RENEW, request)
                print(f"revoked all tokens of {session_id}" if revoke else answer.agent_token)
        finally:
            await backend.aclose()

    asyncio.run(run())


def _reload(targets: list[str], settings: ServeSettings, token: str | None) -> None:
    """Serve in a child process with the options of this command line, and restart it on changes."""
    from agentrl_env.launch.process import ServerProcess
    from agentrl_env.launch.reload import serve_and_reload

    own = [argument for argument in sys.argv[sys.argv.index("serve") + 1 :] if argument != "--reload"]
    server = ServerProcess(
        host=settings.host,
        port=settings.port,
        token=token,
        max_sessions=settings.max_sessions,
        lease=settings.lease,
        forward_output=True,
        start_timeout=math.inf,
        arguments=["--no-reload", *own],
    )
    serve_and_reload(server, targets)


def _check_combination(settings: ServeSettings) -> None:
    if settings.reload and settings.controller:
        raise AgentRLError("--reload needs a server with its own address; give --reload or --controller")
    if settings.workers > 1 and settings.controller:
        raise AgentRLError("--workers starts its own controller; give --workers or --controller")
    if settings.workers == 1 and settings.resume:
        raise AgentRLError(
            "--resume resumes the sessions of a dead worker and needs --workers; "
            "for separate servers use agentrl-env controller --resume"
        )


def _task_limit(text: str) -> tuple[str, int]:
    task, _, number = text.partition("=")
    if not task or not number.isdecimal() or int(number) < 1:
        raise AgentRLError(f"--limit {text}: give TASK=N, such as --limit shop=100")
    return task, int(number)
