"""Refuse a quick start that does not learn: ``accept.py SUMMARY [AFTER RISE]``.

``AFTER`` is the least mean success after training, sampled, and ``RISE`` its least rise, sampled and greedy.
The bounds leave room for the noise of one seed.
"""

import json
import sys

least, rise = (float(value) for value in sys.argv[2:4] or (0.7, 0.3))
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
risen = mean["after"] - mean["before"] >= rise and mean["after_greedy"] - mean["before_greedy"] >= rise
if mean["after"] < least or not risen or worse:
    sys.exit(
        f"the quick start must end at {least:.0%} or more, and rise by {rise:.0%}, sampled and greedy; "
        f"worse: {', '.join(worse) or 'none'}"
    )
