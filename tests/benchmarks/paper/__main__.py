"""Run the sweeps behind docs/evidence.md and write their figures: ``make paper``, or ``ARGS=NAME`` for one.

The runs are in runs/paper. Finished runs are kept, so an interrupted command continues when it is repeated.
``make paper-real`` runs the sweeps with a real language model, which take about seven hours. It skips the
seeds whose runs are in tests/benchmarks/paper/records. To train these too, delete that folder and runs/paper.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_train.sweep.command import sweep
from agentrl_train.sweep.page import figure
from agentrl_train.sweep.plan import load_sweep
from tests.benchmarks.paper.policy import write_policy
from tests.benchmarks.paper.records import keep, restore
from tests.benchmarks.paper.rooms import write_reader

ROOT = Path(__file__).parents[3]
HERE = Path("tests/benchmarks/paper")
EVIDENCE = ROOT / "docs/evidence"
TITLES = {
    "task_normalization": "Two tasks, rewarded by 1 and by 100",
    "presets": "A combination lock",
    "lengths": "Two words, in turns of one to six letters",
    "staleness": "Two choices, groups up to four steps old",
    "states": "Three doors, seen again after a mistake",
    "turn_rewards": "Four choices, each with its reward",
    "long_credit": "Six turns, the first of which decides",
    "workers": "One to three rooms with long pages",
    "replay": "A combination lock, and a replay of successes",
    "noise": "Two choices, one reward in five is wrong",
    "horizon": "Three doors, back to the first after a mistake",
    "multi_task": "Three tasks: one policy, and three specialists",
    "starter_tasks": "Household, shop and database",
    "two_policies": "Four choices, two policies for two each",
    "cross_policy": "Two choices, with an older policy",
}
"""Titles of the figures by sweep, in the order of the page."""
REAL = {
    "real_tasks": "SmolLM2-135M on household, textcraft and sql",
    "real_settings": "SmolLM2-135M, one choice at a time",
}
"""The same for sweeps with a language model of 135 million parameters."""
POLICIES = 10
"""Initial policies of the small tasks, one for every seed."""
BEFORE = {"two_policies": ["specialists"]}
"""Sweeps that train the models of another sweep."""
KEPT = ("name", "final", "tasks", "difference", "samples", "wall_s", "processor_s")
OF_RUN = ("success", "greedy", "area")
"""Final values to keep from every run, in the order of the seeds."""


def write_evidence(found: Mapping[str, Any], folder: Path) -> None:
    """Write the figure of a sweep and the numbers of its table for the documentation."""
    folder.mkdir(exist_ok=True)
    name = found["name"]
    svg = figure(found, "held_out_success", title=f"{(TITLES | REAL)[name]}: held-out success")
    (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
    short = {key: found[key] for key in ("name", "seeds", "baseline", "interval", "area_samples")}
    short["variants"] = [
        {key: one[key] for key in KEPT}
        | {"runs": {key: [run["final"][key] for run in one["runs"]] for key in OF_RUN}}
        for one in found["variants"]
    ]
    (folder / f"{name}.json").write_text(json.dumps(_rounded(short), indent=1) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def imitate(seeds: Sequence[int], *, known: Collection[int]) -> None:
    """Write a policy for every seed that imitates the experts, as ``make real`` does, if they are missing.

    For seeds with ``known`` runs only the folder is needed, which a sweep's file names.
    """
    for seed in seeds:
        folder = ROOT / f"runs/paper/imitations/{seed}"
        if seed in known:
            folder.mkdir(parents=True, exist_ok=True)
        elif not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            begun = folder.with_name(f"{seed}.begun")
            shutil.rmtree(begun, ignore_errors=True)
            # A process of its own: this one would keep its memory, as much as a run needs.
            command = ["-m", "agentrl_train", "sft", "examples/real/smollm2-135m.toml", "-o", str(begun)]
            subprocess.run([sys.executable, *command, "--set", f"run.seed={seed}"], cwd=ROOT, check=True)
            begun.rename(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named sweeps, or all. Return the exit status of the first failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TITLES | REAL)}")
    parser.add_argument("--real", action="store_true", help="without NAME: those with a real language model")
    parser.add_argument("--processes", type=int, help="runs at a time")
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    for seed in range(POLICIES):
        write_policy(ROOT / f"runs/paper/policies/{seed}", seed=seed)
    cores = len(os.sched_getaffinity(0))
    for name in options.names or (REAL if options.real else TITLES):
        if name in REAL:
            seeds = tomllib.loads((HERE / f"{name}.toml").read_text())["seeds"]
            imitate(seeds, known=restore(name, root=ROOT))
        if name == "workers":
            write_reader(ROOT / "runs/paper/rooms")
        for one in (*BEFORE.get(name, ()), name):
            path = HERE / f"{one}.toml"
            status = sweep(path, cores=cores, processes=options.processes, replace=False)
            if one in REAL:
                keep(load_sweep(path, cores=cores), root=ROOT)
            if status:
                return status
        write_evidence(json.loads((ROOT / f"runs/paper/{name}/results.json").read_text()), EVIDENCE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
