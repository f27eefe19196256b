"""``python -m tests.fuzz --requests N --seed S`` fuzzes a server. The last line has the results as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from tests.fuzz.run import fuzz


def main() -> None:
    """Fuzz a server, print the results, and exit with 1 on any failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    account = fuzz(chosen.requests, chosen.seed, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(account))
    raise SystemExit(0 if account["ok"] else 1)


if __name__ == "__main__":
    main()
