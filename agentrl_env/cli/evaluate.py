"""The commands ``eval``, for a model on a task, and ``compare``, for two evaluations."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl_env.cli.options import (
    ClientTokenFile,
    Target,
    Task,
    Token,
    client_of,
    endpoint_key,
    finite,
    given_options,
    log_to_stderr,
    resolve_token,
)
from agentrl_env.cli.settings import settings_as_options
from agentrl_env.client.credentials import NOT_PRINTABLE, is_header_name
from agentrl_env.errors import AgentRLError
from agentrl_env.wire import is_header_value

if TYPE_CHECKING:
    from agentrl_env.client.client import EnvClient
    from agentrl_env.evaluation.record import EpisodeRecord, EvaluationRun, EvaluationSettings, RunFile
    from agentrl_env.evaluation.runner import PolicyOf
    from agentrl_env.evaluation.summary import Comparison, Summary

endpoint_option = partial(typer.Option, rich_help_panel="Endpoint")
episodes_option = partial(typer.Option, rich_help_panel="Episodes")
results_option = partial(typer.Option, rich_help_panel="Results")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
RECORDED = (
    "temperature",
    "body",
    "header",
    "send_seed",
    "model_timeout",
    "requests_per_minute",
    "split",
    "samples",
    "index",
    "attempts",
    "seed",
)
"""Options that ``--replay`` does not read, because it repeats the recorded samples and messages."""
MIN_LINE_S = 10.0
"""Seconds between two lines of progress if standard error is not a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Options of ``eval``."""

    target: Target
    task: Task = None
    base_url: Annotated[
        str | None, endpoint_option(metavar="URL", help="An OpenAI-compatible endpoint: http://HOST/v1.")
    ] = None
    model: Annotated[str | None, endpoint_option(metavar="NAME", help="The model.")] = None
    api_key_env: Annotated[
        str | None, endpoint_option(metavar="VARIABLE", help="The variable with the endpoint's key.")
    ] = None
    api_key_file: Annotated[
        Path | None, endpoint_option(metavar="FILE", help="The file with the endpoint's key.")
    ] = None
    temperature: Annotated[
        float | None,
        endpoint_option(min=0.0, callback=finite, help="The temperature.", show_default="the endpoint's"),
    ] = None
    body: Annotated[
        list[str] | None,
        endpoint_option(
            metavar="KEY=JSON", help="An additional field of each request: max_tokens=512. Repeatable."
        ),
    ] = None
    header: Annotated[
        list[str] | None,
        endpoint_option(
            metavar="'NAME: VALUE'",
            help="An additional header of each request, with $VARIABLE of the environment. Repeatable.",
        ),
    ] = None
    send_seed: Annotated[
        bool,
        endpoint_option("--send-seed", help="Send the seed of each episode, for endpoints that use it."),
    ] = False
    model_timeout: Annotated[
        float,
        endpoint_option(min=0.001, callback=finite, metavar="SECONDS", help="The time for one completion."),
    ] = 600.0
    requests_per_minute: Annotated[
        float | None,
        endpoint_option(
            min=0.001, callback=finite, metavar="N", help="The maximum number of requests per minute."
        ),
    ] = None
    replay: Annotated[
        Path | None,
        endpoint_option(
            metavar="FOLDER", help="Repeat the messages of this evaluation instead of a model's."
        ),
    ] = None
    split: Annotated[str, episodes_option(help="The split of the dataset.")] = "test"
    samples: Annotated[
        int, episodes_option(min=1, metavar="N", help="The number of samples, drawn at random.")
    ] = 100
    index: Annotated[
        list[str] | None,
        episodes_option("--index", metavar="INDEX", help="The name or number of a sample; repeatable."),
    ] = None
    attempts: Annotated[int, episodes_option(min=1, metavar="K", help="The attempts per sample.")] = 1
    seed: Annotated[int, episodes_option(min=0, help="The seed of the samples and of --send-seed.")] = 0
    concurrency: Annotated[
        int, episodes_option(min=1, metavar="N", help="The number of concurrent episodes.")
    ] = 16
    retries: Annotated[
        int, episodes_option(min=0, metavar="N", help="How often a failed episode is repeated.")
    ] = 2
    step_timeout: Annotated[
        float,
        episodes_option(
            min=0.001, callback=finite, metavar="SECONDS", help="The time for one call of the task's server."
        ),
    ] = 600.0
    output: Annotated[
        Path | None,
        results_option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="The folder of the results.",
            show_default="evals/TASK-MODEL",
        ),
    ] = None
    price_input: Annotated[
        float | None,
        results_option(min=0, callback=finite, metavar="PRICE", help="The price of a million prompt tokens."),
    ] = None
    price_output: Annotated[
        float | None,
        results_option(
            min=0, callback=finite, metavar="PRICE", help="The price of a million written tokens."
        ),
    ] = None
    transcripts: Annotated[
        int, results_option(min=0, metavar="N", help="The maximum number of episodes in the report.")
    ] = 200
    token: Token = None
    token_file: ClientTokenFile = None
    as_json: AsJson = False


@settings_as_options
def eval_(context: typer.Context, settings: EvalSettings) -> None:
    """Evaluate a model of an OpenAI-compatible endpoint on a task.

    The same command continues an interrupted evaluation. The exit code is 1 if an episode failed.
    """
    log_to_stderr(False)
    token = resolve_token(context, settings.token, settings.token_file)
    if settings.replay is not None and (unused := given_options(context, RECORDED)):
        raise AgentRLError(f"--replay repeats recorded samples and messages; omit {', '.join(unused)}")
    source = _source(settings)

    async def run() -> tuple[EvaluationRun, Path]:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connect())
            plan = await _plan(client, source, settings)
            file = stack.enter_context(_open(settings.output, plan))
            policy = await _policy(stack, source, file)
            await _play(client, policy, file, settings)
            return file.run, file.path.parent

    with redirect_stdout(sys.stderr):  # the output of the task, because the result is printed to stdout
        connect = client_of(settings.target, token, timeout=settings.step_timeout)
        finished = asyncio.run(run())
    _finish(*finished, settings)


def compare(
    first: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of an evaluation.")],
    second: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of another one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two evaluations on the samples that both of them have played."""
    from agentrl_env.evaluation import summary
    from agentrl_env.evaluation.record import read_run

    found = summary.compare(read_run(first), read_run(second))
    if as_json:
        print(found.model_dump_json())
    else:
        _print_comparison(found)


def _source(settings: EvalSettings) -> EvaluationRun | dict[str, Any]:
    """Return the recorded evaluation to repeat, or the arguments of ``ChatModel``."""
    from agentrl_env.evaluation.record import read_run

    if settings.replay is not None:
        endpoint = (settings.base_url, settings.model, settings.api_key_env, settings.api_key_file)
        if any(option is not None for option in endpoint):
            raise AgentRLError("--replay plays without an endpoint; omit --base-url, --model and the key")
        return read_run(settings.replay)
    if settings.base_url is None or settings.model is None:
        raise AgentRLError("give --base-url and --model, or --replay with the folder of an evaluation")
    return {
        "url": settings.base_url,
        "model": settings.model,
        "key": endpoint_key(settings.api_key_env, settings.api_key_file),
        "timeout": settings.model_timeout,
        "temperature": settings.temperature,
        "body": _fields(settings.body or []),
        "headers": _headers(settings.header or []),
        "requests_per_minute": settings.requests_per_minute,
    }


async def _plan(
    client: EnvClient, source: EvaluationRun | dict[str, Any], settings: EvalSettings
) -> EvaluationSettings:
    """Return the settings of the evaluation. A replay repeats the recorded settings."""
    from agentrl_env.evaluation.record import EvaluationRun, EvaluationSettings
    from agentrl_env.evaluation.runner import choose_indices
    from agentrl_env.wire import choose_task

    tasks = await client.tasks()
    if isinstance(source, EvaluationRun):
        own = source.settings
        name = choose_task(settings.task or own.task, tasks)
        return own.model_copy(update={"task": name, "model": f"replay of {own.model}", "url": None})
    info = tasks[choose_task(settings.task, tasks)]
    if settings.index:
        indices = tuple(info.parse_index(settings.split, index) for index in settings.index)
    else:
        indices = choose_indices(info, settings.split, settings.samples, seed=settings.seed)
    return EvaluationSettings(
        task=info.name,
        indices=indices,
        split=settings.split,
        attempts=settings.attempts,
        seed=settings.seed,
        send_seed=settings.send_seed,
        **{name: source[name] for name in ("url", "model", "temperature", "body")},
    )


def _open(output: Path | None, settings: EvaluationSettings) -> RunFile:
    from agentrl_env.evaluation.record import RunFile

    name = re.sub(r"[^\w.-]+", "-", f"{settings.task}-{settings.model}").strip("-.")
    return RunFile(output or Path("evals") / name, settings)


async def _policy(stack: AsyncExitStack, source: EvaluationRun | dict[str, Any], file: RunFile) -> PolicyOf:
    from agentrl_env.evaluation.chat_model import ChatModel
    from agentrl_env.evaluation.runner import model_policy, replay_policy

    if isinstance(source, dict):
        return model_policy(await stack.enter_async_context(ChatModel(**source)), file.run)
    return replay_policy(source)


async def _play(client: EnvClient, policy: PolicyOf, file: RunFile, settings: EvalSettings) -> None:
    from agentrl_env.evaluation.runner import evaluate

    limits = {"concurrency": settings.concurrency, "retries": settings.retries}
    with _progress(file.run) as on_episode:
        await evaluate(client, policy, file, on_episode=on_episode, **limits)


@contextmanager
def _progress(run: EvaluationRun) -> Iterator[Any]:
    """Show progress as a bar, or as lines without a terminal. Yield a function to call with each episode."""
    import time

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counted = run.counted
    total, done, wins = len(run.settings.plan()), len(counted), sum(e.success for e in counted)
    failed, next_line = 0, 0.0
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        name = f"{run.settings.model} on {run.settings.task}/{run.settings.split}"
        bar = bars.add_task(name, total=total, completed=done, figures="")

        def on_episode(episode: EpisodeRecord) -> None:
            nonlocal next_line, done, wins, failed
            if episode.failed is None:
                done, wins = done + 1, wins + episode.success
            else:
                failed += 1
            figures = f"success {wins / done:.1%}" if done else "no result yet"
            figures += f", {failed} failed" if failed else ""
            bars.update(bar, completed=done + failed, figures=figures)
            if not console.is_terminal and (done + failed == total or time.monotonic() >= next_line):
                next_line = time.monotonic() + MIN_LINE_S
                print(f"{done + failed}/{total} episodes, {figures}", file=sys.stderr, flush=True)

        yield on_episode


def _finish(run: EvaluationRun, folder: Path, settings: EvalSettings) -> None:
    from agentrl_env.evaluation.record import EvaluationError
    from agentrl_env.evaluation.report import write_report
    from agentrl_env.evaluation.summary import summarize

    summary = summarize(run, price_input=settings.price_input, price_output=settings.price_output)
    report = folder / "report.html"
    write_report(report, run, summary, transcripts=settings.transcripts)
    try:
        (folder / "summary.json").write_text(summary.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"{folder} cannot be written: {error.strerror or error}") from error
    if settings.as_json:
        print(json.dumps({**summary.model_dump(mode="json"), "report": str(report)}))
    else:
        _print_summary(summary)
        print(f"report: {report}")
    if summary.failed:
        print(
            f"{summary.failed} of {summary.planned} episodes failed and have no result; "
            "the same command plays them again",
            file=sys.stderr,
        )
    raise typer.Exit(1 if summary.failed else 0)


def _print_summary(summary: Summary) -> None:
    from agentrl_env.evaluation.report import failed_after, percent

    table = Table(title=f"{summary.model} on {summary.task}/{summary.split}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    rows: list[tuple[str, str]] = [
        ("episodes with a result", f"{summary.episodes} of {summary.planned}"),
        ("success (95 % interval)", percent(summary.success)),
    ]
    if summary.reward is not None:
        reward = summary.reward
        rows.append(("reward (95 % interval)", f"{reward.value:.3g} ({reward.low:.3g} – {reward.high:.3g})"))
    if summary.attempts > 1:
        rows += [(f"pass@{k}", f"{value:.1%}") for k, value in summary.pass_at.items()]
        rows += [(f"pass^{k}", f"{value:.1%}") for k, value in summary.pass_hat.items() if k > 1]
    if summary.turns is not None:
        rows.append(("turns of an episode", f"{summary.turns:.1f}"))
    tokens = summary.tokens
    if tokens.input is not None:
        rows.append(("tokens read", f"{tokens.input:,}"))
    if tokens.output is not None:
        rows.append(("tokens written", f"{tokens.output:,}"))
    if tokens.cost is not None:
        rows.append(("cost", f"{tokens.cost:,.2f}"))
    for name, found in (("model", summary.model_latency), ("environment", summary.environment_latency)):
        if found is not None:
            rows.append((f"{name}, p50/p99 of a turn", f"{found.p50:.3f} s / {found.p99:.3f} s"))
    if summary.repeated_requests:
        rows.append(("requests repeated", f"{summary.repeated_requests:,}"))
    rows += [(f"ended: {name}", str(number)) for name, number in summary.ends.items()]
    rows += [
        (f"failed: {reason}"[:100], f"{number} ({failed_after(summary, reason)})")
        for reason, number in summary.failures.items()
    ]
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _print_comparison(found: Comparison) -> None:
    table = Table(title=f"{found.task}/{found.split}: {found.samples} samples", title_justify="left")
    for heading in ("figure", *found.models, "difference"):
        table.add_column(Text(heading), justify="left" if heading == "figure" else "right")
    gain, reward = found.difference, found.reward_difference
    points = f"{100 * gain.value:+.1f} ({100 * gain.low:+.1f} – {100 * gain.high:+.1f})"
    table.add_row("success (95 % interval)", f"{found.first:.1%}", f"{found.second:.1%}", points)
    table.add_row("reward", "", "", f"{reward.value:+.3g} ({reward.low:+.3g} – {reward.high:+.3g})")
    table.add_row("better samples", str(found.worse), str(found.better), f"p = {found.p_value:.3g}")
    Console().print(table)
    if found.left_out:
        print(f"{found.left_out} samples have a result in only one evaluation and are omitted.")


def _headers(given: Sequence[str]) -> dict[str, str]:
    """Return headers with environment variables filled in, so that keys stay off the command line."""
    headers = {}
    for text in given:
        name, colon, value = (part.strip() for part in text.partition(":"))
        if not colon:
            raise AgentRLError("--header: give NAME: VALUE; one has no colon")
        if not is_header_name(name):
            raise AgentRLError(f"--header {name!r}: this is not the name of a header")
        for variable in re.findall(r"\$(\w+|\{\w+\})", value):
            if variable.strip("{}") not in os.environ:
                raise AgentRLError(f"--header {name}: there is no variable ${variable}")
        value = os.path.expandvars(value).strip()
        if not value:
            raise AgentRLError(f"--header {name}: give NAME: VALUE; the value is empty")
        if not is_header_value(value):
            raise AgentRLError(f"--header {name}: the value has {NOT_PRINTABLE}")
        headers[name] = value
    return headers


def _fields(pairs: list[str]) -> dict[str, Any]:
    """Return the fields of ``--body``. Raises AgentRLError."""
    from agentrl_env.evaluation.chat_model import as_json

    fields = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise AgentRLError(f"--body {pair}: give KEY=JSON, such as max_tokens=512")
        try:
            fields[name] = json.loads(value)
        except (ValueError, RecursionError):
            fields[name] = value  # a word, such as reasoning_effort=low
        as_json(fields[name], f"--body {name}: {value[:100]!r}", AgentRLError)
    return fields
