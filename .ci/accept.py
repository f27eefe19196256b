"""Refuse a quick start that does not learn. The bounds leave room for the noise of one seed."""

import json
import sys

with open(sys.argv[1]) as file:
    summary = json.load(file)
tasks = summary["tasks"].values()
mean = {
    key: sum(task[key] for task in tasks) / len(tasks)
    for key in ("before", "after", "before_greedy", "after_greedy")
}
worse = [
    name
    for name, task in summary["tasks"].items()
    if task["after"] < task["before"] or task["after_greedy"] < task["before_greedy"]
]
print(
    f"mean held-out success {mean['before']:.1%} -> {mean['after']:.1%}, "
    f"greedy {mean['before_greedy']:.1%} -> {mean['after_greedy']:.1%}, in {summary['seconds']:.0f} s"
)
risen = mean["after"] - mean["before"] >= 0.3 and mean["after_greedy"] - mean["before_greedy"] >= 0.3
if mean["after"] < 0.7 or not risen or worse:
    sys.exit(
        "the quick start must end at 70 % or more, and rise by 30 points, sampled and greedy; "
        f"worse: {', '.join(worse) or 'none'}"
    )
