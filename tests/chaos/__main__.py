"""``python -m tests.chaos``: the seeded fault runs, and their account as one JSON object on the last line.

CHAOS_SECONDS and CHAOS_SEED set length and seed: two runs with one seed have the same faults at the same
times, and clients that decide alike. With CHAOS_RESUME=1 other servers go on with the sessions of lost
ones; what a lost one did after its last answer counts as undone.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys

from tests.chaos.serving import run_in_folder

SHOWN_NOTES = 40


def main() -> int:
    """Run, print, and return 1 where anything was lost silently, done twice, leaked, or hung."""
    if shutil.which("redis-server") is None:
        print("the fault runs need a real Redis: apt-get install redis-server", file=sys.stderr)
        return 2
    logging.getLogger("httpx").setLevel(logging.WARNING)
    seed, seconds = int(os.environ.get("CHAOS_SEED", "1")), float(os.environ.get("CHAOS_SECONDS", "900"))
    resume = bool(os.environ.get("CHAOS_RESUME"))
    words = ", lost servers' sessions go on at others" if resume else ""
    print(f"serving: {seconds:g} seconds of faults, seed {seed}{words}", flush=True)
    report = run_in_folder(seed, seconds, resume=resume)
    for name, value in report.rows():
        print(f"  {name}: {value}")
    for note in report.account.notes[:SHOWN_NOTES]:
        print(f"  ! {note}")
    if len(report.account.notes) > SHOWN_NOTES:
        print(f"  ! and {len(report.account.notes) - SHOWN_NOTES} more")
    print("training: not run; its zeros below say nothing")
    account = report.account
    serving = {
        "steps": account.steps,
        "applied_twice": account.applied_twice,
        "lost_silently": account.lost_silently,
        "leaked": account.leaked,
    }
    training = {"samples": 0, "trained_twice": 0, "lost_silently": 0, "hangs": 0}
    whole = {"seed": seed, "seconds": round(report.seconds), "kills": report.kills}
    print(json.dumps({**whole, "serving": serving, "training": training}), flush=True)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
