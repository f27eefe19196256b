"""Refuse a quick start that does not learn. The bounds leave room for the noise of one seed."""

import json
import sys

with open(sys.argv[1]) as file:
    summary = json.load(file)
tasks = summary["tasks"].values()
before, after = (sum(task[key] for task in tasks) / len(tasks) for key in ("before", "after"))
worse = [name for name, task in summary["tasks"].items() if task["after"] < task["before"]]
print(f"mean held-out success {before:.1%} -> {after:.1%} in {summary['seconds']:.0f} s")
if after < 0.70 or after - before < 0.30 or worse:
    sys.exit(f"the quick start must end at 70 % or more and rise by 30 points; worse: {worse or 'none'}")
