"""Queues of events with a clock."""

from ..library import Family

QUEUE = '''
"""Events that wait."""

import heapq


class Queue:
    """Events by their time."""

    def __init__(self):
        self._heap = []
        self._count = 0
        self._cancelled = set()

    def push(self, time, weight, name):
        """Add an event; return its number."""
        self._count += 1
        heapq.heappush(self._heap, (time, -weight, self._count, name))  #: !last
        heapq.heappush(self._heap, (time, -weight, -self._count, name))  #: last
        return self._count

    def cancel(self, number):
        """Take an event out; return whether it was waiting."""
        waiting = number in self.numbers()
        if waiting:
            self._cancelled.add(number)
        return waiting

    def numbers(self):
        """Return the numbers of the events that wait."""
        return sorted(abs(one[2]) for one in self._heap if abs(one[2]) not in self._cancelled)

    def next_time(self):
        """Return the time of the next event, or None."""
        while self._heap and abs(self._heap[0][2]) in self._cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self):
        """Return time, weight, number and name of the next event."""
        if self.next_time() is None:
            raise IndexError("nothing waits")
        time, weight, number, name = heapq.heappop(self._heap)
        return time, -weight, abs(number), name


def rounded(time):
    """Return the next time of the clock, which has steps of $step."""
    return -(-time // $step) * $step
'''
CLOCK = '''
"""The clock."""

from .queue import Queue, rounded


class $Clock:
    """Runs events in the order of their times."""

    def __init__(self):
        self.now = 0
        self.log = []
        self._queue = Queue()
        self._repeats = {}
        self._delays = {}

    def $at(self, time, name, weight=0):
        """Let an event happen at a time; return its number."""
        time = rounded(time)  #: grid
        if time < self.now:
            raise ValueError("the time has passed")  #: strict
            time = self.now  #: !strict
        return self._queue.push(time, weight, name)

    def $in(self, delay, name, weight=0):
        """Let an event happen after a delay."""
        if delay < 0:
            raise ValueError("the delay is negative")
        return self.$at(self.now + delay, name, weight)

    def $every(self, gap, name, times=$times):
        """Let an event happen again and again, first after one gap."""
        if gap <= 0 or times < 1:
            raise ValueError("the gap and the times are positive")
        number = self.$in(gap, name)
        self._repeats[number] = (gap, times - 1)
        return number

    def $cancel(self, number):
        """Cancel an event and its repetitions."""
        self._repeats.pop(number, None)
        return self._queue.cancel(number)

    def $run(self, until):
        """Run the events up to a time, that time included; return how many."""  #: closed
        """Run the events before a time; return how many."""  #: !closed
        count = 0
        while self._due(until):
            time, weight, number, name = self._queue.pop()
            self.now = time
            self.log.append([time, name])
            count += 1
            if number in self._repeats:
                gap, left = self._repeats.pop(number)
                if left > 0:
                    again = self.$at(time + gap, name, weight)
                    self._repeats[again] = (gap, left - 1)
        self.now = max(self.now, until)
        return count

    def _due(self, until):
        time = self._queue.next_time()
        if time is None:
            return False
        return time <= until  #: closed
        return time < until  #: !closed

    def waiting(self):
        """Return how many events wait."""
        return len(self._queue.numbers())

    def idle(self):
        """Return the longest time without an event between two that happened."""
        times = [time for time, _ in self.log]
        return max((after - before for before, after in zip(times, times[1:])), default=0)

    def $counts(self):
        """Return name and number of what happened, the most frequent first, then by name."""  #: top
        """Return name and number of what happened, by name."""  #: !top
        found = {}
        for _, name in self.log:
            found[name] = found.get(name, 0) + 1
        return sorted(([name, count] for name, count in found.items()), key=lambda one: (-one[1], one[0]))  #: top
        return sorted([name, count] for name, count in found.items())  #: !top
'''


def case(rng, on, n):
    lines = [f"c = {n['Clock']}()"]
    for name in "abcd"[: rng.randint(2, 4)]:
        kind = rng.randint(0, 4)
        if kind == 0:
            times = f", times={rng.randint(1, 4)}" if rng.random() < 0.6 else ""
            lines.append(f"c.{n['every']}({rng.randint(1, 5)}, {name!r}{times})")
        else:
            weight = f", weight={rng.randint(0, 2)}" if rng.random() < 0.6 else ""
            lines.append(f"c.{n['at']}({rng.randint(1, 9)}, {name!r}{weight})")
    tie = rng.randint(4, 9)
    lines += [f"c.{n['at']}({tie}, 'x')", f"c.{n['at']}({tie}, 'y', weight={rng.randint(0, 1)})"]
    until = rng.choice((tie, tie, rng.randint(3, 14)))
    run = f"c.{n['run']}({until})"
    kind = rng.choice(("run", "run", "cancel", "waiting", "idle", "counts", "past", "delay", "bad"))
    if kind == "run":
        return "running events", "\n".join([*lines, f"[{run}, c.log, c.now]"])
    if kind == "cancel":
        cancel = f"c.{n['cancel']}({rng.randint(1, 6)})"
        return "an event is cancelled", "\n".join(
            [*lines, f"[{cancel}, {cancel}, c.waiting(), {run}, c.log]"]
        )
    if kind == "waiting":
        return "counting what waits", "\n".join([*lines, f"[c.waiting(), {run}, c.waiting()]"])
    if kind == "idle":
        return "looking for pauses", "\n".join([*lines, run, "c.idle()"])
    if kind == "counts":
        return "counting what happened", "\n".join([*lines, f"c.{n['run']}(20)", f"c.{n['counts']}()"])
    if kind == "past":
        late = f"c.{n['at']}({until + rng.randint(-4, 2)}, 'late')"
        return "an event comes late", "\n".join([*lines, run, late, f"[c.{n['run']}(30), c.log, c.now]"])
    if kind == "delay":
        delay = f"c.{n['in']}({rng.randint(0, 6)}, 'soon')"
        return "an event is delayed", "\n".join(
            [*lines, run, delay, f"c.{n['run']}({until + rng.randint(0, 6)})", "[c.log, c.waiting()]"]
        )
    bad = rng.choice(
        (
            f"c.{n['every']}({rng.randint(-1, 1)}, 'q', times={rng.randint(0, 1)})",
            f"c.{n['in']}({rng.randint(-1, 0)}, 'q')",
        )
    )
    return "numbers are unusual", "\n".join([*lines[:2], bad, f"c.{n['run']}(9)", "c.log"])


FAMILY = Family(
    name="events",
    summary="A clock that runs events.",
    options=("last", "grid", "strict", "closed", "top"),
    names={
        "pkg": ("clockwork", "simulate", "agenda"),
        "Clock": ("Clock", "Simulation", "Timer"),
        "at": ("at", "schedule"),
        "in": ("after", "later"),
        "every": ("every", "repeat"),
        "cancel": ("cancel", "call_off"),
        "run": ("run", "advance"),
        "counts": ("counts", "tally"),
        "step": (2, 3),
        "times": (2, 3),
    },
    modules={"queue": QUEUE, "clock": CLOCK},
    rules="""
- Events run in the order of their times; at the same time the heaviest first, then the one that was added first.  #: !last
- Events run in the order of their times; at the same time the heaviest first, then the one that was added last.  #: last
- Times are rounded up to multiples of $step.  #: grid
- A time that has passed raises ValueError.  #: strict
- An event whose time has passed runs now.  #: !strict
- A negative delay raises ValueError, as do a gap that is not positive and fewer than one time.
- An event that repeats happens $times times unless given, first after one gap, then each a gap after the one before.
- A cancelled event does not run, nor do its repetitions that wait; cancelling tells whether the event was waiting.
- Each event, and each repetition, has a number, from 1 on.
- Running up to a time includes the events at that time; then it is that time.  #: closed
- Running up to a time leaves out the events at that time; then it is that time.  #: !closed
- The log has time and name of what happened, idle the longest time between two entries, or 0.
- $counts lists name and number, the most frequent first, then by name.  #: top
- $counts lists name and number, by name.  #: !top
""",
    case=case,
)
