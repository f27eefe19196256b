"""AgentBench's development files, if this machine has them."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = [
    Path(os.environ.get("AGENTBENCH_DATA") or "absent"),
    ROOT / "shared/data/agentbench",
    ROOT.parent / "shared/data/agentbench",
]


def folder(name):
    """Return the folder of a task's files. Skips the test if it does not exist."""
    found = next((place / name for place in PLACES if (place / name).is_dir()), None)
    if found is None:
        pytest.skip("set AGENTBENCH_DATA to the data folder of AgentBench")
    return found
