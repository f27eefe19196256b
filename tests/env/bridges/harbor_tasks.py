"""Harbor task folders for the tests."""

SETTINGS = """
version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 100.0
env = { UNIT = "cm" }
[environment]
build_timeout_sec = 120.0
cpus = 1
memory = "256M"
storage = "128M"
allow_internet = false
"""
TEST = """#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat length.txt 2>/dev/null)" = "$(cat /tests/right.txt) $UNIT" ]; then
    echo 1 >/logs/verifier/reward.txt
else
    echo 0 >/logs/verifier/reward.txt
fi
"""


def write_task(folder, *, settings=SETTINGS, test=TEST, solution="echo '12 cm' >length.txt", files=None):
    """Write a task folder. The task is to write the length of a plank to length.txt."""
    contents = {
        "task.toml": settings,
        "instruction.md": "<!-- canary 1234 -->\nWrite the plank's length, with its unit, to length.txt.\n",
        "environment/plank.txt": "12 cm\n",
        "tests/test.sh": test,
        "tests/right.txt": "12\n",
        "solution/solve.sh": solution,
        **(files or {}),
    }
    for path, text in contents.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    return folder
