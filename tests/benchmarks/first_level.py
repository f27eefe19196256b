"""``python -m tests.benchmarks.first_level MODEL [TASK ...]`` evaluates a language model on first levels.

Plays the first samples of each task's ``test`` split greedily, before any training, like ``agentrl-train
eval``. The episodes are in ``runs/first_level``. An interrupted command continues when it is repeated. The
figures of each task are written to ``docs/evidence/first_level/MODEL.json``.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl_env.environment import find_class
from agentrl_env.evaluation.record import EpisodeRecord, TurnRecord, read_run
from agentrl_env.evaluation.statistics import wilson_interval
from agentrl_env.tools import toolset

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs/evidence/first_level"
RUNS = ROOT / "runs/first_level"
FOLDERS = {"airline": "support/airline", "telecom": "support/telecom"}
"""Folders in ``environments`` of tasks with a different name."""
TASKS = (
    *("household", "shop", "sql", "dbbench", "os_interaction", "knowledgegraph", "alfworld", "webshop"),
    *("sokoban", "frozenlake", "textcraft", "search_qa", "countdown", "support", "airline", "telecom"),
    *("babyai", "terminal", "collab", "swe_repair", "textworld", "scienceworld", "miniwob"),
)
MAX_TURNS, MAX_NEW_TOKENS, MAX_CONTEXT = 8, 64, 4096
CONFIG = """\
[run]
name = "first_level"
steps = 1
threads = {threads}

[model]
path = "{model}"

[[environments]]
serve = ["{target}"]

[engine]
max_sessions = {samples}
max_context = {max_context}
max_new_tokens = {max_new_tokens}
completion_timeout_s = 3600.0

[rollout]
max_turns = {{{task} = {max_turns}}}
episode_timeout_s = 3600.0
environment_timeout_s = 600.0

[eval]
samples = {samples}
temperature = 0.0
"""
END_ERRORS = {
    "terminated": "wrong result",
    "truncated_turns": "turn limit",
    "truncated_time": "time limit",
    "truncated_length": "context full",
}
"""Error by the end of a failed episode, if its turns do not explain it."""


def turn_error(turn: TurnRecord, tools: Collection[str]) -> str | None:
    """Return the kind of error of a turn, or None if the environment accepted it.

    Args:
        turn: a turn of an episode.
        tools: names of the tools of the task.
    """
    calls = turn.action.tool_calls or ()
    unread = any(not call.function.name for call in calls)
    if not turn.invalid_calls:
        return None
    if (unread or not calls) and turn.finish_reason == "length":
        return "turn cut at the token limit"
    if unread:
        return "call cannot be parsed"
    if not calls:
        return "no call"
    if any(call.function.name not in tools for call in calls):
        return "unknown tool"
    return "invalid arguments"


def episode_error(episode: EpisodeRecord, tools: Collection[str]) -> str | None:
    """Return the error of an episode, or None if it succeeded.

    An episode that the task ended has a wrong result. Otherwise the error is the most frequent error of its
    turns if at least half of the turns have one, then ``repeats a call`` if at least half of the turns repeat
    an earlier turn, then the limit at which it ended.
    """
    if episode.success:
        return None
    if episode.end == "terminated":
        return END_ERRORS["terminated"]
    turns = episode.turns
    errors = Counter(error for turn in turns if (error := turn_error(turn, tools)))
    if turns and 2 * errors.total() >= len(turns):
        return errors.most_common(1)[0][0]
    calls = [[call.function for call in turn.action.tool_calls or ()] for turn in turns]
    repeated = sum(bool(call) and call in calls[:number] for number, call in enumerate(calls))
    return "repeats a call" if turns and 2 * repeated >= len(turns) else END_ERRORS[episode.end]


def summary(episodes: Sequence[EpisodeRecord], tools: Collection[str]) -> dict[str, Any]:
    """Return the figures of one task's episodes, at least one."""
    successes = sum(episode.success for episode in episodes)
    turns = [turn for episode in episodes for turn in episode.turns]
    errors = Counter(error for episode in episodes if (error := episode_error(episode, tools)))
    low, high = wilson_interval(successes, len(episodes))
    return {
        "episodes": len(episodes),
        "successes": successes,
        "interval": [round(low, 4), round(high, 4)],
        "turns": round(fmean(len(episode.turns) for episode in episodes), 2),
        "valid_turns": round(sum(not turn.invalid_calls for turn in turns) / max(1, len(turns)), 4),
        "errors": dict(errors.most_common()),
    }


def missing(model: str) -> str:
    """Return an error message for the name of a model that is unknown or not fetched, otherwise ""."""
    from agentrl_train.config.paths import PACKAGE, fetch_hint

    return "" if "/" in model or model.startswith(PACKAGE) else fetch_hint(model)


def evaluate(model: str, task: str, *, samples: int, threads: int) -> dict[str, Any]:
    """Return the figures of a model on a task, or the reason why this machine cannot play it.

    Raises:
        EnvironmentUnavailable: more than half of the episodes failed, so that there is no figure.
    """
    from agentrl_train.cli.evaluating import evaluate_and_record  # imports PyTorch, which takes seconds
    from agentrl_train.errors import ConfigError
    from agentrl_train.training.trainer import Trainer

    target = ROOT / "environments" / FOLDERS.get(task, task)
    folder = RUNS / model / f"{task}-{samples}"
    folder.mkdir(parents=True, exist_ok=True)
    limits = {"max_turns": MAX_TURNS, "max_new_tokens": MAX_NEW_TOKENS, "max_context": MAX_CONTEXT}
    config = folder / "config.toml"
    text = CONFIG.format(model=model, task=task, target=target, samples=samples, threads=threads, **limits)
    config.write_text(text, encoding="utf-8")
    try:
        evaluate_and_record(Trainer(config), path=model, output=folder)
        tools = list(toolset(find_class(str(target))).tools)
    except ConfigError as error:
        return {"skipped": str(error).replace(f"{ROOT}/", "")}
    return summary(read_run(folder / task).counted, tools) | limits


def write_result(model: str, task: str, result: Mapping[str, Any]) -> None:
    """Add the figures of a task to the file of a model, in the order of ``TASKS``."""
    path = EVIDENCE / f"{model}.json"
    known = read_results(path) | {task: dict(result)}
    ordered = {name: known[name] for name in TASKS if name in known}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def read_results(path: Path) -> dict[str, Any]:
    """Return the figures in a file by task, or an empty dict if the file does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def main() -> None:
    """Evaluate a model on the tasks missing from its file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a value of model.path")
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], help="default: all")
    parser.add_argument("--samples", type=int, default=12, help="episodes of each task")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    options = parser.parse_intermixed_args()
    if reason := missing(options.model):  # otherwise each task would be recorded as skipped
        parser.error(reason)
    from agentrl_train.errors import TrainError

    for task in options.tasks or TASKS:
        path = EVIDENCE / f"{options.model}.json"
        known = read_results(path).get(task, {})
        if known.get("episodes", 0) >= options.samples:
            print(f"{task} is kept; delete its entry in {path} to repeat it", flush=True)
            continue
        try:
            result = evaluate(options.model, task, samples=options.samples, threads=options.threads)
        except TrainError as error:
            print(f"{task} has no figures: {error}", flush=True)
            continue
        if "skipped" not in known and "episodes" in known and "skipped" in result:
            continue
        write_result(options.model, task, result)
        print(task, json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
