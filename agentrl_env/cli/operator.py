"""Commands for operators: ``serve``, ``controller``, ``up``, ``token`` and ``bench``."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl_env.cli import options
from agentrl_env.errors import AgentRLError
from agentrl_env.server.watchdog import STUCK_S, Watchdog, signal_own_group


def serve(
    context: typer.Context,
    targets: options.Targets = None,
    config: options.Config = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    reload: options.Reload = False,
    stop_with_stdin: options.StopWithStdin = False,
    max_sessions: options.MaxSessions = 1024,
    lease: options.Lease = 900.0,
    drain: options.Drain = 30.0,
    oracle: options.Oracle = False,
    stuck_after: options.StuckAfter = STUCK_S,
    token: options.ServerToken = None,
    token_file: options.TokenFile = None,
    insecure: options.Insecure = False,
    caller_limit: options.CallerLimit = None,
    workers: options.WorkerCount = 1,
    controller: options.Controllers = None,
    resume: options.ResumeWorkers = False,
    slow_step: options.SlowStep = 30.0,
    log_format: options.LogFormat = "text",
    log_level: options.LogLevel = None,
    log_messages: options.LogMessages = False,
    traces: options.Traces = None,
) -> None:
    """Serve tasks over HTTP until Ctrl-C.

    The first Ctrl-C lets open sessions end; a second one stops at once.
    """
    from agentrl_env.hosting.serve import serve as run
    from agentrl_env.server.settings import ProcessSettings

    if not targets:
        raise typer.BadParameter(
            "give at least one, here or as targets in the --config file", ctx=context, param_hint="TARGET..."
        )
    _check_combination(workers, controller, resume, reload)
    token = options.resolve_token(context, token, token_file)
    if reload:
        _reload(targets, host=host, port=port, token=token, max_sessions=max_sessions, lease=lease)
        return
    settings = ProcessSettings(
        caller_limits=caller_limit or (),
        log_format=log_format,
        log_level=log_level,
        log_messages=log_messages,
        traces=traces,
    )
    watchdog = Watchdog(0.0 if workers > 1 else stuck_after, log_format)  # each worker has its own
    watchdog.start(drain if stop_with_stdin else None, unreachable=host == "none")
    common: dict[str, Any] = dict(host=host, port=port, token=token, insecure=insecure, drain_s=drain)
    with watchdog, settings.apply() as begun:
        if workers > 1:
            from agentrl_env.fleet.serve import serve_with_workers

            each = ["--max-sessions", str(-(-max_sessions // workers)), "--lease", str(lease)]
            each += ["--slow-step", str(slow_step), *settings.arguments()]
            each += ["--oracle"] if oracle else []
            common |= {"workers": workers, "arguments": each, "resume": resume, "stuck_s": stuck_after}
            serve_with_workers(targets, **common, **begun)
            return
        run(
            targets,
            max_sessions=max_sessions,
            oracle=oracle,
            lease_s=lease,
            controllers=controller or (),
            slow_step_s=slow_step,
            watchdog=watchdog,
            **common,
            **begun,
        )
    if stop_with_stdin:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal_own_group(signal.SIGTERM)


def controller(
    context: typer.Context,
    config: options.Config = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8100,
    queue: options.Queue = 30.0,
    limit: options.TaskLimits = None,
    client_limit: options.ClientLimit = None,
    token: options.ServerToken = None,
    token_file: options.TokenFile = None,
    insecure: options.Insecure = False,
    caller_limit: options.CallerLimit = None,
    print_link_token: options.PrintLinkToken = False,
    redis: options.RedisUrl = None,
    fleet: options.FleetName = "fleet",
    lost_after: options.LostAfter = 5.0,
    resume: options.ResumeServers = False,
    log_format: options.LogFormat = "text",
    log_level: options.LogLevel = None,
    log_messages: options.LogMessages = False,
    traces: options.Traces = None,
) -> None:
    """Provide one address for many servers.

    Servers connect with serve --controller URL. The token is the operator's, who may do everything.
    Servers need only the link token, which is derived from it and printed by --print-link-token.
    """
    from agentrl_env.fleet.controller import FleetService
    from agentrl_env.fleet.redis_store import RedisStore
    from agentrl_env.fleet.serve import control
    from agentrl_env.server.auth import link_token
    from agentrl_env.server.settings import ProcessSettings

    token = options.resolve_token(context, token, token_file)
    if print_link_token:
        if not token:
            reason = "the link token is derived from the operator's"
            raise AgentRLError(f"{reason}; give --token-file or AGENTRL_TOKEN")
        print(link_token(token))
        return
    settings = ProcessSettings(
        caller_limits=caller_limit or (),
        log_format=log_format,
        log_level=log_level,
        log_messages=log_messages,
        traces=traces,
    )
    with settings.apply() as begun:
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
    token_file: options.ClientTokenFile = None,
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

    run(config, token=options.read_token(token_file) if token_file else None)


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
        bool, typer.Option("--revoke", help="Only revoke the tokens; the sessions go on.")
    ] = False,
    token: options.Token = None,
    token_file: options.ClientTokenFile = None,
) -> None:
    """Revoke all agent tokens of sessions, and print a new token of each."""
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


def _reload(targets: list[str], **options: Any) -> None:
    """Serve in a child process, with the options of this command line, and restart it on changes."""
    from agentrl_env.launch.process import ServerProcess
    from agentrl_env.launch.reload import serve_and_reload

    own = [argument for argument in sys.argv[sys.argv.index("serve") + 1 :] if argument != "--reload"]
    options |= {"forward_output": True, "start_timeout": math.inf, "arguments": ["--no-reload", *own]}
    serve_and_reload(ServerProcess(**options), targets)


def _check_combination(workers: int, controller: list[str] | None, resume: bool, reload: bool) -> None:
    if reload and controller:
        raise AgentRLError("--reload restarts a server of its own address; give --reload or --controller")
    if workers > 1 and controller:
        raise AgentRLError("--workers starts a controller of its own; give --workers or --controller")
    if workers == 1 and resume:
        raise AgentRLError(
            "--resume resumes the sessions of a dead worker and needs --workers; "
            "for separate servers use agentrl-env controller --resume"
        )


def _task_limit(text: str) -> tuple[str, int]:
    task, _, number = text.partition("=")
    if not task or not number.isdecimal() or int(number) < 1:
        raise AgentRLError(f"--limit {text}: give TASK=N, such as --limit shop=100")
    return task, int(number)
