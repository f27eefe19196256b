"""Paths in graphs."""

from ..library import Family

EDGES = '''
"""Roads between places."""


class Roads:
    """The lengths of the roads between places."""

    def __init__(self):
        self._ends = {}

    def place(self, name):
        """Add a place if it is new."""
        self._ends.setdefault(name, {})

    def join(self, start, end, length):
        """Add a road; of several the shortest counts."""  #: shortest
        """Add a road; of several the last counts."""  #: !shortest
        if length < 0 or start == end:
            raise ValueError("this is no road")
        self.place(start)
        self.place(end)
        if length < self._ends[start].get(end, length + 1):  #: shortest
            self._ends[start][end] = length  #: shortest
            self._ends[end][start] = length  #: shortest !oneway
        self._ends[start][end] = length  #: !shortest
        self._ends[end][start] = length  #: !shortest !oneway

    def names(self):
        """Return the places by name."""
        return sorted(self._ends)

    def out(self, name):
        """Return the places that a road leads to, by name, each with its length."""
        return sorted(self._ends.get(name, {}).items())


def walk(roads, start, limit):
    """Return place -> number of roads from a start, up to a limit."""
    found, edge = {start: 0}, [start]
    while edge:
        name = edge.pop(0)
        for other, _ in roads.out(name):
            if other not in found and found[name] < limit:
                found[other] = found[name] + 1
                edge.append(other)
    return found
'''
MAP = '''
"""The map."""

from .edges import Roads, walk


class $Map:
    """Places and the ways between them."""

    def __init__(self, roads=()):
        self._roads = Roads()
        self._closed = set()
        for start, end, length in roads:
            self._roads.join(start, end, length)

    def close(self, name):
        """Close a place: no way leads through it, but ways may start or end there."""  #: ends
        """Close a place: no way leads through it, to it or from it."""  #: !ends
        self._closed.add(name)

    def $path(self, start, end):
        """Return length and places of the shortest way, or None."""
        best = {start: (0, 0, [start])}
        todo = [start]
        while todo:
            name = min(todo, key=lambda one: best[one])
            todo.remove(name)
            if name == end:
                break
            if self._blocked(name, start):
                continue
            length, steps, way = best[name]
            for other, far in self._roads.out(name):
                further = (length + far + $toll, steps + 1, [*way, other])  #: toll
                further = (length + far, steps + 1, [*way, other])  #: !toll
                if other not in best or further < best[other]:
                    best[other] = further
                    if other not in todo:
                        todo.append(other)
        if end not in best or self._barred(start, end):
            return None
        return [best[end][0], best[end][2]]

    def _blocked(self, name, start):
        return name in self._closed and name != start

    def _barred(self, start, end):
        return False  #: ends
        return start in self._closed or end in self._closed  #: !ends

    def $reach(self, start, limit):
        """Return the places within a number of roads, the start left out, by name."""  #: !nearest
        """Return the places within a number of roads, the start left out, the nearest first, then by name."""  #: nearest
        found = walk(self._roads, start, limit)
        names = [name for name in found if name != start and name not in self._closed]
        return sorted(names)  #: !nearest
        return sorted(names, key=lambda name: (found[name], name))  #: nearest

    def $degree(self, name):
        """Return number and whole length of the roads that leave a place."""
        out = self._roads.out(name)
        return [len(out), sum(length for _, length in out)]

    def groups(self):
        """Return the places that can be reached from each place in order, each place once."""
        seen, found = set(), []
        for name in self._roads.names():
            if name not in seen:
                group = [one for one in walk(self._roads, name, 99) if one not in seen]
                seen.update(group)
                found.append(sorted(group))
        return sorted(found, key=lambda group: (-len(group), group))  #: largest
        return found  #: !largest

    def busiest(self):
        """Return the place with the most roads, of equal ones the first by name."""
        return min(self._roads.names(), key=lambda name: (-self.$degree(name)[0], name))

    def tour(self, stops):
        """Return the length of the shortest ways from stop to stop, and back to the first."""
        pairs = zip(stops, stops[1:] + stops[:1])
        ways = [self.$path(start, end) for start, end in pairs]
        return None if None in ways else sum(way[0] for way in ways)
'''


def case(rng, on, n):
    names = "abcdefgh"[: rng.randint(4, 7)]
    roads = []
    for _ in range(rng.randint(len(names) - 1, len(names) + 4)):
        start, end = rng.sample(names, 2)
        roads.append((start, end, rng.randint(1, 9)))
    if rng.random() < 0.3:
        start, end, length = rng.choice(roads)
        roads.append((start, end, length + rng.randint(-1, 2)))
    new = f"m = {n['Map']}({roads})\n"
    if rng.random() < 0.35:
        new += f"m.close({rng.choice(names)!r})\n"
    start, end = rng.sample(names, 2)
    kind = rng.choice(("path", "path", "path", "reach", "degree", "groups", "busiest", "tour", "bad"))
    if kind == "path":
        ends = f"({start!r}, {end!r}), ({end!r}, {start!r}), ({start!r}, {names[0]!r})"
        return "looking for the shortest way", f"{new}[m.{n['path']}(s, e) for s, e in ({ends})]"
    if kind == "reach":
        return "asking what is near", f"{new}m.{n['reach']}({start!r}, {rng.randint(1, 3)})"
    if kind == "degree":
        return "counting roads", f"{new}[m.{n['degree']}(name) for name in {names!r}]"
    if kind == "groups":
        return "grouping places", f"{new}m.groups()"
    if kind == "busiest":
        return "looking for the busiest place", f"{new}m.busiest()"
    if kind == "tour":
        return "planning a tour", f"{new}m.tour({rng.sample(names, rng.randint(2, 3))})"
    return (
        "a road is unusual",
        f"{n['Map']}([('a', {rng.choice('ab')!r}, {rng.randint(-1, 1)})]).{n['path']}('a', 'b')",
    )


FAMILY = Family(
    name="graph",
    summary="Places, roads and the shortest ways.",
    options=("shortest", "oneway", "ends", "toll", "nearest", "largest"),
    names={
        "pkg": ("roadmap", "atlas", "waymap"),
        "Map": ("Map", "Network", "Atlas"),
        "path": ("path", "way", "route"),
        "reach": ("reach", "nearby"),
        "degree": ("degree", "roads_of"),
        "toll": (1, 2),
    },
    modules={"edges": EDGES, "map": MAP},
    rules="""
- A road has two different ends and a length of at least 0, else ValueError is raised.
- A road leads from its first end to its second.  #: oneway
- A road leads both ways.  #: !oneway
- Of several roads between two places the shortest counts.  #: shortest
- Of several roads between two places the one that was added last counts.  #: !shortest
- A way's length is that of its roads, and $toll more for each road.  #: toll
- A way's length is that of its roads.  #: !toll
- Of ways of equal length the one with the fewest roads is taken, then the first by the names of its places.
- No way leads through a closed place, but ways may start and end there.  #: ends
- No way leads through, to or from a closed place.  #: !ends
- $path returns None if there is no way, else length and places. The way from a place to itself has length 0.
- $reach returns the places within a number of roads, without the start and closed ones, by name.  #: !nearest
- $reach returns the places within a number of roads, without the start and closed ones, the nearest first, then by name.  #: nearest
- For $reach, roads through closed places count.
- groups lists, for each place by name that is in no group yet, the places that can be reached from it, closed or
  not, without those of earlier groups.
- Groups are listed by size, the largest first, then by name.  #: largest
- tour adds up the shortest ways between stops and back; None if one is missing.
""",
    case=case,
)
