"""Finished runs of the sweeps with a real language model, kept in the repository.

These sweeps take longer than most machines are free for. The runs of a seed share their policy and their
processor, so they are kept together once all of them are finished. Another machine continues with the other
seeds.
"""

from __future__ import annotations

import json
from pathlib import Path

from agentrl_train.sweep.plan import Sweep
from agentrl_train.sweep.processes import finished

RECORDS = Path(__file__).with_name("records")
FILES = ("config.toml", "evaluations.jsonl", "metrics.jsonl", "summary.json")
"""Files of a run that the results of a sweep are computed from."""
CHECKOUT = "{checkout}"
"""Stands for the folder of the checkout in the texts."""


def keep(plan: Sweep, *, root: Path, records: Path = RECORDS) -> None:
    """Write the runs of every seed of a sweep that has finished with all variants.

    Args:
        plan: the sweep.
        root: folder of the checkout.
        records: folder with a file for each sweep and seed.
    """
    records.mkdir(exist_ok=True)
    for seed in plan.config.seeds:
        runs = [run for run in plan.runs if run.seed == seed]
        if all(map(finished, runs)):
            paths = [path for run in runs for path in (run.usage, *(run.folder / file for file in FILES))]
            texts = {
                str(path.relative_to(root)): path.read_text("utf-8").replace(str(root), CHECKOUT)
                for path in paths
            }
            record = records / f"{plan.config.name}-{seed}.json"
            record.write_text(json.dumps(texts, indent=1) + "\n", encoding="utf-8")


def restore(name: str, *, root: Path, records: Path = RECORDS) -> set[int]:
    """Write the kept runs of a sweep into a checkout, in place of its own. Return their seeds."""
    kept = {int(path.stem.rpartition("-")[2]): path for path in records.glob(f"{name}-*.json")}
    for record in kept.values():
        for path, text in json.loads(record.read_text("utf-8")).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text.replace(CHECKOUT, str(root)), encoding="utf-8")
    return set(kept)
