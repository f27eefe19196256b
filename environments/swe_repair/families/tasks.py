"""Schedules of tasks that depend on one another."""

from ..library import Family

ORDER = '''
"""The order of tasks."""


class Cycle(ValueError):
    """Tasks wait for one another."""


def rank(task):
    """Return what a task is sorted by: the lowest comes first."""
    name, length, urgency = task["name"], task["length"], task["urgency"]
    return (-urgency, length, name)  #: high !brief
    return (urgency, length, name)  #: !high !brief
    return (length, -urgency, name)  #: high brief
    return (length, urgency, name)  #: !high brief


def ready(tasks, done):
    """Return the tasks that are not done and wait for none, best first."""
    found = [one for one in tasks if one["name"] not in done and all(need in done for need in one["needs"])]
    return sorted(found, key=rank)


def $sequence(tasks):
    """Return the names in the order in which one worker does the tasks. Raises Cycle."""
    done = []
    while len(done) < len(tasks):
        found = ready(tasks, done)
        if not found:
            raise Cycle("tasks wait for one another")
        done.append(found[0]["name"])
    return done
'''
PLAN = '''
"""The plan."""

from .order import ready, $sequence


class $Plan:
    """Tasks and the workers that do them."""

    def __init__(self, $workers=1):
        self.$workers = $workers
        self._tasks = []

    def $add(self, name, length, urgency=$urgency, needs=()):
        """Add a task; its length is in hours."""
        if length < $briefest:
            raise ValueError("the task is too short")  #: strict
            length = $briefest  #: !strict
        if any(one["name"] == name for one in self._tasks):
            raise ValueError("the task exists")
        self._tasks.append({"name": name, "length": length, "urgency": urgency, "needs": list(needs)})

    def $order(self):
        """Return the names in the order in which one worker does them."""
        return $sequence(self._tasks)

    def $times(self):
        """Return name -> first and last hour, for all workers."""
        $sequence(self._tasks)
        done, running, times, now = set(), [], {}, 0
        while len(done) < len(self._tasks):
            running.sort()
            for end, name in [one for one in running if one[0] <= now]:
                done.add(name)
                running.remove((end, name))
            started = done | {name for _, name in running}
            for task in ready(self._tasks, done):
                if task["name"] in started or len(running) >= self.$workers:
                    continue
                end = now + task["length"] + (1 if self._rests(now) else 0)  #: rest
                end = now + task["length"]  #: !rest
                running.append((end, task["name"]))
                times[task["name"]] = [now, end]
            if running:
                now = min(running)[0]
        return times

    def _rests(self, now):  #: rest
        """Return whether a task that starts now has a pause: on each full $pause hours, but not at first."""  #: rest
        return now > 0 and now % $pause == 0  #: rest
  #: rest
    def $finish(self):
        """Return the hour when all is done."""
        return max((end for _, end in self.$times().values()), default=0)

    def late(self, limits):
        """Return the names that end after their limit, in order of how late they are."""
        times = self.$times()
        found = [(times[name][1] - limit, name) for name, limit in limits.items() if times[name][1] > limit]
        return [name for _, name in sorted(found, key=lambda one: (-one[0], one[1]))]

    def $before(self, name):
        """Return all that must be done before a task, by name."""  #: deep
        """Return what a task waits for itself, by name."""  #: !deep
        task = next(one for one in self._tasks if one["name"] == name)
        found = set(task["needs"])
        for need in task["needs"]:  #: deep
            found.update(self.$before(need))  #: deep
        return sorted(found)

    def hours(self, urgency):
        """Return the length of all tasks at least as urgent."""
        chosen = [one for one in self._tasks if one["urgency"] >= urgency]  #: high
        chosen = [one for one in self._tasks if one["urgency"] <= urgency]  #: !high
        return sum(one["length"] for one in chosen)
'''


def case(rng, on, n):
    names = list("abcdefg"[: rng.randint(3, 6)])
    lines = [f"p = {n['Plan']}({n['workers']}={rng.randint(1, 3)})"]
    for place, name in enumerate(names):
        needs = sorted(rng.sample(names[:place], min(place, rng.choice((0, 0, 1, 1, 2)))))
        if rng.random() < 0.01:
            needs = [names[-1]]
        urgency = f", urgency={rng.randint(1, 3)}" if rng.random() < 0.7 else ""
        needed = f", needs={needs}" if needs else ""
        lines.append(
            f"p.{n['add']}({name!r}, {rng.randint(2 if rng.random() < 0.9 else 0, 5)}{urgency}{needed})"
        )
    kind = rng.choice(("order", "times", "times", "finish", "late", "before", "hours", "twice"))
    if kind == "twice":
        end = f"p.{n['add']}({rng.choice('abz')!r}, {rng.randint(0, 3)})\np.{n['times']}()"
        return "adding one more task", "\n".join([*lines, end])
    limits = {name: rng.randint(2, 9) for name in names}
    title, end = {
        "order": ("one worker does the tasks", f"p.{n['order']}()"),
        "times": ("planning the hours", f"p.{n['times']}()"),
        "finish": ("asking for the end", f"p.{n['finish']}()"),
        "late": ("asking what is late", f"p.late({limits})"),
        "before": ("asking what comes before", f"[p.{n['before']}(name) for name in {names}]"),
        "hours": ("adding up urgent hours", "[p.hours(u) for u in (1, 2, 3)]"),
    }[kind]
    return title, "\n".join([*lines, end])


FAMILY = Family(
    name="tasks",
    summary="Plans for tasks that depend on one another.",
    options=("high", "brief", "strict", "rest", "deep"),
    names={
        "pkg": ("planner", "schedule", "worklist"),
        "Plan": ("Plan", "Schedule", "Project"),
        "sequence": ("sequence", "sorted_names"),
        "workers": ("workers", "people"),
        "add": ("add", "task"),
        "order": ("order", "in_turn"),
        "times": ("times", "hours_of"),
        "finish": ("finish", "end"),
        "before": ("before", "needs"),
        "urgency": (1, 2),
        "briefest": (1, 2),
        "pause": (2, 3, 4),
    },
    modules={"order": ORDER, "plan": PLAN},
    rules="""
- A task has a name, a length in hours, an urgency ($urgency unless given) and the names of tasks that come before.
- Tasks shorter than $briefest hours raise ValueError.  #: strict
- Tasks shorter than $briefest hours take $briefest.  #: !strict
- A second task of the same name raises ValueError. Tasks that wait for one another raise Cycle.
- A free worker takes, of the tasks that wait for nothing that is not done, the one that comes first.
- The highest urgency comes first, then the shortest, then the name.  #: high !brief
- The lowest urgency number is the most urgent and comes first, then the shortest, then the name.  #: !high !brief
- The shortest comes first, then the highest urgency, then the name.  #: high brief
- The shortest comes first, then the lowest urgency number, which is the most urgent, then the name.  #: !high brief
- A task that starts at an hour that $pause divides, but not at 0, takes one hour more.  #: rest
- $times returns for each name the hour of its start and of its end; an hour that ends is free for the next task.
- late lists the names that end after their limits, the latest first, then by name.
- $before lists all that must come before a task, direct or not, by name.  #: deep
- $before lists what a task waits for directly, by name.  #: !deep
- hours adds up the lengths of the tasks that are as urgent as the given urgency, or more.
""",
    case=case,
)
