"""``python -m tests.chaos`` injects seeded faults and prints the account as one JSON object on the last line.

CHAOS_SECONDS and CHAOS_SEED set the duration and the seed. Two runs with the same seed have the same faults
at the same times, and their clients make the same choices. Each half runs for this duration. The training
half divides it between its engines. CHAOS_HALF=serving or training runs one half, CHAOS_ENGINE=scripted or
torch runs one engine. With CHAOS_RESUME=1 sessions of lost servers continue on other servers. Steps that a
lost server applied after its last answer then count as undone.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys

from tests.chaos.serving import ServingReport, run_in_folder
from tests.chaos.training import ENGINES, TrainingReport, run_training

SHOWN_NOTES = 40


def main() -> int:
    """Run and print the account. Return 1 if anything was silently lost, applied twice, leaked or hung."""
    if shutil.which("redis-server") is None:
        print("the fault runs need a real Redis: apt-get install redis-server", file=sys.stderr)
        return 2
    logging.getLogger("httpx").setLevel(logging.WARNING)
    seed, seconds = int(os.environ.get("CHAOS_SEED", "1")), float(os.environ.get("CHAOS_SECONDS", "900"))
    half = os.environ.get("CHAOS_HALF")
    served = _serving(seed, seconds) if half in (None, "", "serving") else None
    trained = _training(seed, seconds) if half in (None, "", "training") else []
    account = served.account if served else None
    serving = {
        "steps": account.steps if account else 0,
        "applied_twice": account.applied_twice if account else 0,
        "lost_silently": account.lost_silently if account else 0,
        "leaked": account.leaked if account else 0,
    }
    training = {
        "samples": sum(one.account.samples for one in trained),
        "trained_twice": sum(one.account.trained_twice for one in trained),
        "lost_silently": sum(one.account.lost_silently for one in trained),
        "hangs": sum(len(one.hangs) for one in trained),
    }
    reports = [one for one in (served, *trained) if one is not None]
    whole = {
        "seed": seed,
        "seconds": round(sum(one.seconds for one in reports)),
        "kills": sum(one.kills for one in reports),
    }
    print(json.dumps({**whole, "serving": serving, "training": training}), flush=True)
    return 1 if any(one.failed for one in reports) else 0


def _serving(seed: int, seconds: float) -> ServingReport:
    resume = bool(os.environ.get("CHAOS_RESUME"))
    words = ", sessions of lost servers continue on others" if resume else ""
    print(f"serving: {seconds:g} seconds of faults, seed {seed}{words}", flush=True)
    report = run_in_folder(seed, seconds, resume=resume)
    _show(report, report.account.notes)
    return report


def _training(seed: int, seconds: float) -> list[TrainingReport]:
    chosen = [os.environ["CHAOS_ENGINE"]] if os.environ.get("CHAOS_ENGINE") else ENGINES
    reports = []
    for engine in chosen:
        share = seconds / len(chosen)
        print(f"training, {engine} engine: {share:g} seconds of faults, seed {seed}", flush=True)
        report = run_training(engine, seed, share)
        _show(report, [*report.account.notes, *report.hangs])
        reports.append(report)
    return reports


def _show(report: ServingReport | TrainingReport, notes: list[str]) -> None:
    for name, value in report.rows():
        print(f"  {name}: {value}")
    for note in notes[:SHOWN_NOTES]:
        print(f"  ! {note}")
    if len(notes) > SHOWN_NOTES:
        print(f"  ! and {len(notes) - SHOWN_NOTES} more")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
