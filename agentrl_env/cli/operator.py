"""What somebody who runs tasks needs: serve them, control a fleet, bring one up, measure it."""

from __future__ import annotations

import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl_env.cli.options import (
    CallerLimit,
    Host,
    Insecure,
    LogFormat,
    LogLevel,
    LogMessages,
    Port,
    Target,
    Targets,
    Task,
    Token,
    Traces,
    client_of,
)
from agentrl_env.errors import AgentRLError
from agentrl_env.server.parent_watch import signal_own_group, stop_at_end_of_input

if TYPE_CHECKING:
    from agentrl_env.server.settings import Operations


def serve(
    targets: Targets,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    max_sessions: Annotated[int, typer.Option(min=1, help="Open at the same time.")] = 1024,
    token: Token = None,
    insecure: Insecure = False,
    oracle: Annotated[bool, typer.Option("--oracle", help="Let clients ask the task's expert.")] = False,
    lease: Annotated[float, typer.Option(help="Seconds a session may be idle.")] = 900.0,
    drain: Annotated[float, typer.Option(help="Seconds open sessions get at the end.")] = 30.0,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with its share of sessions.")] = 1,
    controller: Annotated[
        list[str] | None,
        typer.Option(
            help="A controller's URL to dial, with its fleet's token (controller --print-link-token); "
            "once for each controller of the fleet. With --host none nothing listens here."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a dead worker's sessions, where tasks can fork.")
    ] = False,
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
    _refuse_contradictions(workers, controller, resume)
    if workers > 1:
        from agentrl_env.fleet.serve import serve_with_workers

        each = ["--max-sessions", str(-(-max_sessions // workers)), "--lease", str(lease)]
        each += ["--slow-step", str(slow_step), *operations.arguments()]
        with operations.begin() as begun:
            serve_with_workers(
                targets,
                workers=workers,
                arguments=[*each, "--oracle"] if oracle else each,
                drain_s=drain,
                resume=resume,
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


def controller(
    host: Host = "127.0.0.1",
    port: Port = 8100,
    token: Token = None,
    insecure: Insecure = False,
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
    print_link_token: Annotated[
        bool,
        typer.Option("--print-link-token", help="Print the token that only lets servers dial in, and end."),
    ] = False,
    caller_limit: CallerLimit = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = None,
    log_messages: LogMessages = False,
    traces: Traces = None,
) -> None:
    """Put one address in front of many servers; they dial in with ``serve --controller``.

    The token is the operator's, who may do all. Servers need no more than the fleet's token, which is
    derived from it and printed by --print-link-token.
    """
    from agentrl_env.fleet.controller import Fleet
    from agentrl_env.fleet.redis_store import RedisState
    from agentrl_env.fleet.serve import control

    if print_link_token:
        print(_link_token(token))
        return
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
            **begun,
        )


def up(
    file: Annotated[Path, typer.Argument(help="The fleet: tasks, replicas, limits, controller; TOML.")],
    print_: Annotated[
        str | None,
        typer.Option("--print", metavar="kubernetes|compose", help="Print manifests, start nothing."),
    ] = None,
) -> None:
    """Run a whole fleet from one file until Ctrl-C; SIGHUP replaces its servers one by one."""
    from agentrl_env.fleet.config import read_plan

    plan = read_plan(file)
    if print_ is not None:
        from agentrl_env.fleet.manifests import compose, kubernetes

        formats = {"kubernetes": kubernetes, "compose": compose}
        if print_ not in formats:
            raise AgentRLError(f"--print {print_} is unknown; choose kubernetes or compose")
        print(formats[print_](plan), end="")
        return
    from agentrl_env.fleet.up import up as run

    run(plan)


def bench(
    target: Target,
    task: Task = None,
    sessions: Annotated[int, typer.Option(min=1, help="Open at the same time.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long, after a second to warm up.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the calls.")] = 0,
    token: Token = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure a server: random calls that fit its tools, in many sessions at once."""
    from agentrl_env.client.benchmark import measure

    load = measure(
        client_of(target, token), task=task, sessions=sessions, seconds=seconds, warmup=1.0, seed=seed
    )
    print(load.model_dump_json() if as_json else load.text())


def _refuse_contradictions(workers: int, controller: list[str] | None, resume: bool) -> None:
    if workers > 1 and controller:
        raise AgentRLError("--workers brings a controller of its own; give --workers or --controller")
    if workers == 1 and resume:
        words = "--resume goes on with the sessions of a worker that dies; give --workers too"
        raise AgentRLError(f"{words}, or let the controller resume: agentrl-env controller --resume")


def _link_token(token: str | None) -> str:
    from agentrl_env.server.auth import link_token

    if not token:
        raise AgentRLError("the fleet's token is made of the operator's; give --token or AGENTRL_TOKEN")
    return link_token(token)


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
    from agentrl_env.server.settings import Operations

    return Operations(
        caller_limits=tuple(caller_limit or ()),
        log_format=log_format,
        log_level=log_level,
        log_messages=log_messages,
        traces=traces,
    )
