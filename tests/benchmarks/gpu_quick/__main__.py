"""``python -m tests.benchmarks.gpu_quick RESULTS`` runs each part in its own process, in order.

``RESULTS/results.json`` has the result of each finished part, and ``log.txt`` the output.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from tests.benchmarks.__main__ import device_at_hand
from tests.benchmarks.gpu_quick.parts import LIMITS_S, PARTS, ROOT


def main() -> None:
    """Run all parts, or a single part in this process."""
    logging.basicConfig(level=logging.INFO)  # the engine logs how it computes
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu_quick")
    parser.add_argument("results", type=Path, help="folder of the results")
    parser.add_argument("--model", required=True, help="a value of model.path")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device_at_hand())
    parser.add_argument("--part", choices=PARTS, help="this part alone, in this process")
    chosen = parser.parse_args()
    chosen.results.mkdir(parents=True, exist_ok=True)
    if chosen.part:
        found = PARTS[chosen.part](chosen.model, chosen.results, chosen.device)
        print(json.dumps(found))
        return
    results: dict[str, object] = {}
    with (chosen.results / "log.txt").open("w") as log:
        for part in PARTS:
            results[part] = in_process(part, chosen, log=log)
            (chosen.results / "results.json").write_text(json.dumps(results, indent=2) + "\n")
            print(part, json.dumps(results[part])[:2000], flush=True)


def in_process(part: str, chosen: argparse.Namespace, *, log: TextIO) -> dict[str, object]:
    """Run a part in its own process and folder. Return its result with its seconds, or its error."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.gpu_quick", folder, "--part", part]
        command += ["--model", chosen.model, "--device", chosen.device]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMITS_S[part])
            output, error = done.stdout + done.stderr, done.stderr.strip().splitlines()[-1:]
            found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": error}
        except subprocess.TimeoutExpired as late:
            output, found = str(late.stdout), {"error": f"not finished after {LIMITS_S[part]} s"}
        print(f"== {part}\n{output}", file=log, flush=True)
        if (report := Path(folder) / "run" / "report.html").exists():
            shutil.copy(report, chosen.results / "report.html")
    return {"part_seconds": round(time.monotonic() - begun, 1)} | found


if __name__ == "__main__":
    main()
