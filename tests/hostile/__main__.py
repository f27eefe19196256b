"""``python -m tests.hostile`` runs the attacks and prints the results as one JSON object.

Two runs with the same seed make the same attacks in the same order until their time is up. ``--only`` runs
one kind of attacker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence

from tests.hostile.account import Account
from tests.hostile.run import KINDS, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attacks, print the results, and return 1 if an attack succeeded."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="seed of all choices")
    parser.add_argument("--seconds", type=float, default=120.0, help="time for the attacks, without starts")
    names = [kind.name for kind in KINDS]
    parser.add_argument("--only", action="append", choices=names, help="one kind; may be repeated")
    parser.add_argument("--skip", action="append", choices=names, default=[], help="not this kind")
    options = parser.parse_args(arguments)
    logging.getLogger().setLevel(logging.ERROR)
    account = Account(options.seed)
    kinds = [kind for kind in KINDS if kind.name in (options.only or names) and kind.name not in options.skip]
    asyncio.run(run(account, options.seconds, kinds))
    print(json.dumps(account.report()), flush=True)
    return 1 if account.failed else 0


if __name__ == "__main__":
    sys.exit(main())
