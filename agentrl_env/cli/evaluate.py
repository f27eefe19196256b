"""The commands ``eval``, for a model on a task, and ``compare``, for two of its evaluations."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agentrl_env.cli.options import (
    ClientTokenFile,
    Target,
    Task,
    Token,
    client_of,
    endpoint_key,
    log_to_stderr,
    resolve_token,
)
from agentrl_env.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl_env.client.client import EnvClient
    from agentrl_env.evaluation.record import EpisodeRecord, EvaluationRun, EvaluationSettings, RunFile
    from agentrl_env.evaluation.runner import PolicyOf
    from agentrl_env.evaluation.summary import Comparison, Summary

endpoint_option = partial(typer.Option, rich_help_panel="Endpoint")
episodes_option = partial(typer.Option, rich_help_panel="Episodes")
results_option = partial(typer.Option, rich_help_panel="Results")

BaseUrl = Annotated[
    str | None, endpoint_option(metavar="URL", help="An OpenAI-compatible endpoint: http://HOST/v1.")
]
Model = Annotated[str | None, endpoint_option(metavar="NAME", help="The model.")]
ApiKeyEnv = Annotated[
    str | None, endpoint_option(metavar="VARIABLE", help="The variable with the endpoint's key.")
]
ApiKeyFile = Annotated[Path | None, endpoint_option(metavar="FILE", help="The file with the endpoint's key.")]
Temperature = Annotated[
    float | None, endpoint_option(min=0.0, help="The temperature.", show_default="the endpoint's")
]
Body = Annotated[
    list[str] | None,
    endpoint_option(metavar="KEY=JSON", help="A further field of each request: max_tokens=512. Repeatable."),
]
SendSeed = Annotated[
    bool,
    endpoint_option("--send-seed", help="Send the seed of each episode, where the endpoint knows one."),
]
ModelTimeout = Annotated[float, endpoint_option(metavar="SECONDS", help="The time for one completion.")]
PerMinute = Annotated[
    float | None, endpoint_option(min=0.001, metavar="N", help="The most requests that begin in a minute.")
]
Replay = Annotated[
    Path | None,
    endpoint_option(metavar="FOLDER", help="Repeat the messages of this evaluation instead of a model's."),
]
Split = Annotated[str, episodes_option(help="The split of the dataset.")]
Samples = Annotated[
    int,
    episodes_option(min=1, metavar="N", help="The samples, drawn where the split has more."),
]
Indices = Annotated[
    list[str] | None, episodes_option("--index", metavar="INDEX", help="A sample; repeatable.")
]
Attempts = Annotated[int, episodes_option(min=1, metavar="K", help="The attempts at each sample.")]
Seed = Annotated[int, episodes_option(min=0, help="The seed of the samples and of --send-seed.")]
Concurrency = Annotated[int, episodes_option(min=1, metavar="N", help="The episodes at the same time.")]
Retries = Annotated[
    int, episodes_option(min=0, metavar="N", help="How often an episode that failed is begun again.")
]
StepTimeout = Annotated[
    float, episodes_option(metavar="SECONDS", help="The time for one call of the task's server.")
]
Output = Annotated[
    Path | None,
    results_option(
        "--output", "-o", metavar="FOLDER", help="The folder of the results.", show_default="evals/TASK-MODEL"
    ),
]
PriceInput = Annotated[
    float | None, results_option(min=0, metavar="PRICE", help="The price of a million tokens of prompts.")
]
PriceOutput = Annotated[
    float | None, results_option(min=0, metavar="PRICE", help="The price of a million tokens written.")
]
Transcripts = Annotated[int, results_option(min=0, metavar="N", help="The most episodes in the report.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
MIN_LINE_S = 10.0
"""Seconds between two lines of progress where standard error is no terminal."""


def eval_(
    context: typer.Context,
    target: Target,
    task: Task = None,
    base_url: BaseUrl = None,
    model: Model = None,
    api_key_env: ApiKeyEnv = None,
    api_key_file: ApiKeyFile = None,
    temperature: Temperature = None,
    body: Body = None,
    send_seed: SendSeed = False,
    model_timeout: ModelTimeout = 600.0,
    requests_per_minute: PerMinute = None,
    replay: Replay = None,
    split: Split = "test",
    samples: Samples = 100,
    index: Indices = None,
    attempts: Attempts = 1,
    seed: Seed = 0,
    concurrency: Concurrency = 16,
    retries: Retries = 2,
    step_timeout: StepTimeout = 600.0,
    output: Output = None,
    price_input: PriceInput = None,
    price_output: PriceOutput = None,
    transcripts: Transcripts = 200,
    token: Token = None,
    token_file: ClientTokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model of an OpenAI-compatible endpoint on a task.

    The same command goes on with an evaluation that was stopped. The exit code is 1 if an episode failed.
    """
    log_to_stderr(False)
    connect = client_of(target, resolve_token(context, token, token_file), timeout=step_timeout)
    if replay is not None:
        _reject_endpoint(base_url, model, api_key_env, api_key_file)
        source: EvaluationRun | dict[str, Any] = _recorded(replay)
    elif base_url is None or model is None:
        raise AgentRLError("give --base-url and --model, or --replay with the folder of an evaluation")
    else:
        key = endpoint_key(api_key_env, api_key_file)
        source = {"url": base_url, "model": model, "key": key, "timeout": model_timeout}
        source |= {"temperature": temperature, "body": _fields(body or [])}
        source |= {"requests_per_minute": requests_per_minute}
    chosen = {"split": split, "attempts": attempts, "seed": seed, "send_seed": send_seed}

    async def run() -> tuple[EvaluationRun, Path]:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connect())
            settings = await _settings(client, source, task, samples, index, chosen)
            file = stack.enter_context(_open(output, settings))
            policy = await _policy(stack, source, file)
            await _play(client, policy, file, concurrency=concurrency, retries=retries)
            return file.run, file.path.parent

    done, folder = asyncio.run(run())
    _finish(done, folder, prices=(price_input, price_output), transcripts=transcripts, as_json=as_json)


def compare(
    first: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of an evaluation.")],
    second: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of another one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two evaluations on the samples that both have played."""
    from agentrl_env.evaluation import summary
    from agentrl_env.evaluation.record import read_run

    found = summary.compare(read_run(first), read_run(second))
    if as_json:
        print(found.model_dump_json())
    else:
        _print_comparison(found)


async def _settings(
    client: EnvClient,
    source: EvaluationRun | dict[str, Any],
    task: str | None,
    samples: int,
    index: list[str] | None,
    chosen: dict[str, Any],
) -> EvaluationSettings:
    """Return the settings of the options; those of a replay are the recorded ones."""
    from agentrl_env.evaluation.record import EvaluationRun, EvaluationSettings
    from agentrl_env.evaluation.runner import choose_indices
    from agentrl_env.wire import choose_task

    tasks = await client.tasks()
    if isinstance(source, EvaluationRun):
        own = source.settings
        name = choose_task(task or own.task, tasks)
        return own.model_copy(update={"task": name, "model": f"replay of {own.model}", "url": None})
    info = tasks[choose_task(task, tasks)]
    if index:
        indices = tuple(int(one) if re.fullmatch(r"\d+", one) else one for one in index)
    else:
        indices = choose_indices(info, chosen["split"], samples, seed=chosen["seed"])
    endpoint = {name: source[name] for name in ("url", "model", "temperature", "body")}
    return EvaluationSettings(task=info.name, indices=indices, **endpoint, **chosen)


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


async def _play(
    client: EnvClient, policy: PolicyOf, file: RunFile, *, concurrency: int, retries: int
) -> None:
    from agentrl_env.evaluation.runner import evaluate

    with _progress(file.run) as on_episode:
        await evaluate(client, policy, file, concurrency=concurrency, retries=retries, on_episode=on_episode)


@contextmanager
def _progress(run: EvaluationRun) -> Iterator[Any]:
    """Show a bar on a terminal, else a line from time to time; yield what takes each episode."""
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


def _finish(
    run: EvaluationRun,
    folder: Path,
    *,
    prices: tuple[float | None, float | None],
    transcripts: int,
    as_json: bool,
) -> None:
    from agentrl_env.evaluation.record import EvaluationError
    from agentrl_env.evaluation.report import write_report
    from agentrl_env.evaluation.summary import summarize

    summary = summarize(run, price_input=prices[0], price_output=prices[1])
    report = folder / "report.html"
    write_report(report, run, summary, transcripts=transcripts)
    try:
        (folder / "summary.json").write_text(summary.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"{folder} cannot be written: {error.strerror or error}") from error
    if as_json:
        print(json.dumps({**summary.model_dump(mode="json"), "report": str(report)}))
    else:
        _print_summary(summary)
        print(f"report: {report}")
    if summary.failed:
        print(
            f"{summary.failed} of {summary.planned} episodes failed, which is no result; "
            "the same command plays them again",
            file=sys.stderr,
        )
    raise typer.Exit(1 if summary.failed else 0)


def _print_summary(summary: Summary) -> None:
    from agentrl_env.evaluation.report import percent

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
    rows += [(f"failed: {reason}"[:100], str(number)) for reason, number in summary.failures.items()]
    for row in rows:
        table.add_row(*map(_literal, row))
    Console().print(table)


def _print_comparison(found: Comparison) -> None:
    table = Table(title=f"{found.task}/{found.split}: {found.samples} samples", title_justify="left")
    for heading in ("figure", *found.models, "difference"):
        table.add_column(_literal(heading), justify="left" if heading == "figure" else "right")
    gain, reward = found.difference, found.reward_difference
    points = f"{100 * gain.value:+.1f} ({100 * gain.low:+.1f} – {100 * gain.high:+.1f})"
    table.add_row("success (95 % interval)", f"{found.first:.1%}", f"{found.second:.1%}", points)
    table.add_row("reward", "", "", f"{reward.value:+.3g} ({reward.low:+.3g} – {reward.high:+.3g})")
    table.add_row("better samples", str(found.worse), str(found.better), f"p = {found.p_value:.3g}")
    Console().print(table)
    if found.left_out:
        print(f"{found.left_out} samples have a result in one evaluation only and are left out.")


def _literal(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _recorded(folder: Path) -> EvaluationRun:
    from agentrl_env.evaluation.record import read_run

    return read_run(folder)


def _reject_endpoint(*options: object) -> None:
    if any(option is not None for option in options):
        raise AgentRLError("--replay plays without an endpoint; leave out --base-url, --model and the key")


def _fields(pairs: list[str]) -> dict[str, Any]:
    """Return the fields of ``--body``. Raises AgentRLError."""
    fields = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise AgentRLError(f"--body {pair}: give KEY=JSON, such as max_tokens=512")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value  # a word, such as reasoning_effort=low
    return fields
