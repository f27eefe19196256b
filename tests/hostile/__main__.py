"""``python -m tests.hostile``: the attacks, and their account as one JSON object on standard output.

Two runs with one seed make the same attacks in the same order, as far as their time reaches. ``--only`` runs
one kind of attacker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys

from tests.hostile.account import Account
from tests.hostile.run import KINDS, run


def main() -> int:
    """Attack, print the account, and return 1 if an attack achieved anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="seed of all choices")
    parser.add_argument("--seconds", type=float, default=120.0, help="time for the attacks, without starts")
    parser.add_argument(
        "--only", action="append", choices=[kind.name for kind in KINDS], metavar="NAME", help="one kind"
    )
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    account = Account(options.seed)
    asyncio.run(run(account, options.seconds, only=options.only))
    print(json.dumps(account.report()), flush=True)
    return 1 if account.failed else 0


if __name__ == "__main__":
    sys.exit(main())
