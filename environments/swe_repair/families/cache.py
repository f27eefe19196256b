"""Caches with a capacity."""

from ..library import Family

ENTRIES = '''
"""The entries of a cache, in the order in which they would be dropped."""


class Entries:
    """Keys with their values and the times when they were stored."""

    def __init__(self):
        self._items = {}

    def __len__(self):
        return len(self._items)

    def keys(self):
        """Return the keys, the one that is dropped first first."""
        return list(self._items)

    def find(self, key):
        """Return the value and the time of a key, or None."""
        return self._items.get(key)

    def put(self, key, value, now):
        """Store a value as the newest."""
        self._items.pop(key, None)  #: refresh
        self._items[key] = (value, now)

    def touch(self, key):
        """Make a key the newest; its time stays."""
        self._items[key] = self._items.pop(key)

    def drop(self, key):
        """Remove a key; return whether it was there."""
        return self._items.pop(key, None) is not None

    def oldest(self, count):
        """Return the keys that are dropped next."""
        return self.keys()[:count]


def expired(stored, now, life):
    """Return whether an entry has reached the end of its life."""
    return now - stored >= life
'''
STORE = '''
"""The cache."""

from .entries import Entries, expired


class $Cache:
    """Keeps at most ``capacity`` values."""

    def __init__(self, capacity, life=$life):
        if capacity < 1:
            raise ValueError("the capacity is at least 1")
        self.capacity = capacity
        self.life = life
        self.$hits = 0
        self.$misses = 0
        self.dropped = []
        self._entries = Entries()

    def $put(self, key, value, now=0):
        """Store a value; drop the oldest ones if there are too many."""
        if value is None:  #: nones
            raise ValueError("None cannot be stored")  #: nones
        if self._entries.find(key) is None and len(self._entries) >= self.capacity:
            self._make_room(now)
        self._entries.put(key, value, now)

    def $get(self, key, default=None, now=0):
        """Return the value of a key."""
        found = self._entries.find(key)
        if found is not None and expired(found[1], now, self.life):
            self._entries.drop(key)
            found = None
        if found is None:
            self.$misses += 1
            return default
        self.$hits += 1
        self._entries.touch(key)  #: recent
        return found[0]

    def peek(self, key, now=0):
        """Return the value of a key, or None, and change nothing."""
        found = self._entries.find(key)
        if found is None or expired(found[1], now, self.life):
            return None
        return found[0]

    def _make_room(self, now):
        """Drop entries: those that have expired, else the oldest."""  #: expiry
        """Drop the oldest entries."""  #: !expiry
        stale = [k for k in self._entries.keys() if expired(self._entries.find(k)[1], now, self.life)]  #: expiry
        gone = stale or self._entries.oldest(self._batch())  #: expiry
        gone = self._entries.oldest(self._batch())  #: !expiry
        for key in gone:
            self._entries.drop(key)
            self.dropped.append(key)

    def _batch(self):
        return 1  #: !batch
        return max(1, self.capacity // $part)  #: batch

    def resize(self, capacity):
        """Change the capacity; drop the oldest entries that no longer fit."""
        for key in self._entries.oldest(max(0, len(self._entries) - capacity)):
            self._entries.drop(key)
            self.dropped.append(key)
        self.capacity = capacity

    def keys(self):
        """Return the keys, the oldest first."""  #: !newest
        """Return the keys, the newest first."""  #: newest
        return self._entries.keys()  #: !newest
        return self._entries.keys()[::-1]  #: newest

    def $rate(self):
        """Return the percentage of hits among all calls of $get, rounded down."""
        asked = self.$hits + self.$misses
        return 100 * self.$hits // asked if asked else 0
'''


def case(rng, on, n):
    capacity = rng.randint(2, 7)
    life = rng.randint(4, 15)
    lines, now, letters = [f"c = {n['Cache']}({capacity}, life={life})"], 0, "abcdefgh"[: capacity + 2]
    for _ in range(rng.randint(capacity + 1, capacity + 9)):
        key, now = rng.choice(letters), now + rng.randint(0, 3)
        if rng.random() < 0.6:
            value = None if rng.random() < 0.02 else rng.randint(0, 99)
            lines.append(f"c.{n['put']}({key!r}, {value}, now={now})")
        else:
            lines.append(f"c.{n['get']}({key!r}, now={now})")
    key, kind = rng.choice(letters), rng.randint(0, 5)
    title, end = (
        ("looking at the keys of", "[c.keys(), c.dropped]"),
        (
            "asking for a value from",
            f"[c.{n['get']}({key!r}, 'none', now={now + rng.randint(0, life)}), c.keys()]",
        ),
        ("counting the hits of", f"[c.{n['hits']}, c.{n['misses']}, c.{n['rate']}()]"),
        ("peeking into", f"[[c.peek(k, now={now + rng.randint(0, life)}) for k in {letters!r}], c.keys()]"),
        ("shrinking", f"c.resize({rng.randint(1, capacity)})\n[c.keys(), c.dropped, c.capacity]"),
        ("looking at what was dropped from", "c.dropped"),
    )[kind]
    if rng.random() < 0.03:
        return "the capacity is small", f"{n['Cache']}({rng.randint(-1, 1)}).capacity"
    return f"{title} a cache that was used", "\n".join([*lines, end])


FAMILY = Family(
    name="cache",
    summary="A cache of limited capacity, whose entries expire.",
    options=("recent", "refresh", "nones", "expiry", "batch", "newest"),
    names={
        "pkg": ("cachebox", "keepsake", "memo"),
        "Cache": ("Cache", "Store", "Memory"),
        "put": ("put", "store", "save"),
        "get": ("get", "load", "fetch"),
        "hits": ("hits", "found"),
        "misses": ("misses", "missed"),
        "rate": ("rate", "hit_rate"),
        "life": (10, 20),
        "part": (2, 3),
    },
    modules={"entries": ENTRIES, "store": STORE},
    rules="""
- A cache holds at most its capacity, which is at least 1, else ValueError is raised.
- A new key of a full cache drops the oldest entry first.  #: !batch
- A new key of a full cache drops its oldest entries first, a 1/$part of the capacity, rounded down, at least one.  #: batch
- If entries have expired, all of them are dropped to make room, and no others.  #: expiry
- Storing a key again makes it the newest.  #: refresh
- Storing a key again leaves its place.  #: !refresh
- A hit makes the key the newest.  #: recent
- A hit does not change the order.  #: !recent
- Storing again changes the time of the entry, a hit does not.
- An entry expires when its life has passed since it was stored: it is a miss, and is removed by $get.
- peek changes nothing, and neither counts.
- None cannot be stored: ValueError.  #: nones
- keys lists the oldest first.  #: !newest
- keys lists the newest first.  #: newest
- dropped lists the keys that lost their place, in order, but not those that $get found expired.
- The rate is a percentage, rounded down; 0 if nothing was asked.
""",
    case=case,
)
