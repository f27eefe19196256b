"""Routes of a web site."""

from ..library import Family

PATTERN = '''
"""Patterns of paths."""


def parts(path):
    """Return the parts of a path."""
    path = path.lower()  #: fold
    path = path.split("?")[0]
    return [part for part in path.split("/") if part]  #: !empty
    return path.strip("/").split("/") if path.strip("/") else []  #: empty


def fits(pattern, path):
    """Return the values of a pattern's fields if it fits a path, else None."""
    wanted, given = parts(pattern), parts(path)
    values = {}
    if wanted and wanted[-1] == "*":
        if len(given) < len(wanted) - 1:
            return None
        values["rest"] = "/".join(given[len(wanted) - 1 :])
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    if len(wanted) != len(given):
        return None
    for want, have in zip(wanted, given):
        if want.startswith("#"):
            if not have.isdigit():
                return None
            values[want[1:]] = int(have)
        elif want.startswith(":"):
            values[want[1:]] = have
        elif want != have:
            return None
    return values


def weight(pattern):
    """Return how special a pattern is: the highest is tried first."""
    found = 0
    for part in parts(pattern):
        if part == "*":
            found += 0
        elif part.startswith(":"):
            found += 1
        elif part.startswith("#"):
            found += 2
        else:
            found += 3
    return found


def query(path):
    """Return name -> value of what follows the question mark."""
    _, _, text = path.partition("?")
    found = {}
    for pair in text.split("&"):
        name, sign, value = pair.partition("=")
        if not name:
            continue
        if name in found:  #: first
            continue  #: first
        found[name] = value if sign else "$yes"
    return found
'''
ROUTER = '''
"""The router."""

from .pattern import fits, parts, query, weight


class $Router:
    """Finds the target of a path."""

    def __init__(self, prefix=""):
        self.prefix = prefix
        self._routes = []
        self.visits = {}

    def $add(self, pattern, target, methods=("GET",)):
        """Add a route."""
        whole = self.prefix + pattern
        for old, _, known in self._routes:
            if parts(old) == parts(whole) and set(known) & set(methods):
                raise ValueError("the route exists")
        self._routes.append((whole, target, tuple(methods)))

    def _candidates(self):
        """Return the routes in the order in which they are tried."""
        return self._routes  #: !special
        return sorted(self._routes, key=lambda route: -weight(route[0]))  #: special

    def $find(self, path, method="GET"):
        """Return the target of a path and the values of its fields."""
        if method == "HEAD":  #: head
            method = "GET"  #: head
        allowed = []
        for pattern, target, methods in self._candidates():
            values = fits(pattern, path)
            if values is None:
                continue
            if method not in methods:
                allowed.extend(methods)
                continue
            self.visits[target] = self.visits.get(target, 0) + 1
            return [target, {**query(path), **values}]
        if allowed:
            return [405, sorted(set(allowed))]
        return [404, {}]

    def $link(self, target, **values):
        """Return the path of a target; values that are no fields follow a question mark, by name."""
        for pattern, name, _ in self._routes:
            if name == target:
                break
        else:
            raise KeyError(target)
        made = []
        for part in parts(pattern):
            if part[0] in ":#":
                made.append(str(values.pop(part[1:])))
            elif part == "*":
                made.append(values.pop("rest", ""))
            else:
                made.append(part)
        text = "/" + "/".join(made)
        pairs = [f"{name}={value}" for name, value in sorted(values.items()) if value is not None]
        return text + ("?" + "&".join(pairs) if pairs else "")

    def $mount(self, prefix, other):
        """Take over the routes of another router below a prefix."""
        for pattern, target, methods in other._routes:
            self.$add(prefix + pattern, target, methods)

    def $popular(self, count=$count):
        """Return the targets that were found most often, of equal ones by name."""
        ranked = sorted(self.visits, key=lambda target: (-self.visits[target], target))
        return ranked[:count]

    def table(self):
        """Return pattern and methods of all routes, as they are tried."""
        return [["/" + "/".join(parts(pattern)), list(methods)] for pattern, _, methods in self._candidates()]
'''


PATTERNS = [
    "/users",
    "/users/:name",
    "/users/#id",
    "/users/me",
    "/files/*",
    "/files/:name",
    "/",
    "/:page",
    "/Users/:name/posts/#post",
    "/files/:name/*",
]
PATHS = [
    "/users",
    "/users/7",
    "/users/me",
    "/users/Ann",
    "/files/a/b",
    "/files/",
    "/files",
    "/",
    "/home",
    "/Users/ann/posts/3",
    "/users/ann/posts/x",
    "//users",
    "/users//7",
    "/files/a",
    "/none/x/y",
]


def case(rng, on, n):
    patterns = rng.sample(PATTERNS, 5)
    lines = [f"r = {n['Router']}({rng.choice(('', '', '', repr('/v1')))})"]
    pre = "/v1" if "v1" in lines[0] else ""
    for place, pattern in enumerate(patterns):
        methods = (
            f", methods={rng.choice((('POST',), ('GET', 'POST'), ('PUT', 'GET')))}"
            if rng.random() < 0.35
            else ""
        )
        lines.append(f"r.{n['add']}({pattern!r}, 't{place}'{methods})")

    def path():
        ask = rng.choice(("", "", "", "?a=1", "?a=1&a=2&b", "?=3&c=", "?name=9"))
        return pre + rng.choice(PATHS) + ask

    body = "\n".join(lines)
    kind = rng.choice(
        ("find", "find", "find", "method", "link", "mount", "popular", "table", "query", "twice")
    )
    if kind == "find":
        return "looking up paths", f"{body}\n[r.{n['find']}(p) for p in {[path() for _ in range(3)]}]"
    if kind == "method":
        return (
            "methods differ",
            f"{body}\n[r.{n['find']}({path()!r}, m) for m in ('GET', 'POST', 'HEAD', 'PUT')]",
        )
    if kind == "link":
        values = rng.choice(
            (
                "name='ann'",
                "id=4",
                "name='bo', post=2, z=1, a='x'",
                "rest='x/y', name='f'",
                "page='home', q=None",
                "",
            )
        )
        return "making links", f"{body}\nr.{n['link']}('t{rng.randint(0, 4)}', {values})".replace(", )", ")")
    if kind == "mount":
        return (
            "mounting a router",
            f"{body}\no = {n['Router']}('/sub')\no.{n['mount']}('/x', r)\n[o.{n['find']}('/sub/x' + p)[0] for p in {[path() for _ in range(3)]}]",
        )
    if kind == "popular":
        return (
            "counting visits",
            f"{body}\nfor p in {[path() for _ in range(9)]}:\n    r.{n['find']}(p)\n[r.{n['popular']}(), r.{n['popular']}(1)]",
        )
    if kind == "table":
        return "listing routes", f"{body}\nr.table()"
    if kind == "query":
        return (
            "reading what follows the question mark",
            f"[query({path()!r}), query({path()!r} + '?k=1&k=2')]",
        )
    return (
        "adding one more route",
        f"{body}\nr.{n['add']}({rng.choice(patterns)!r}, 'again', methods={rng.choice((('GET',), ('PUT',), ('DELETE', 'POST')))})\nlen(r.table())",
    )


FAMILY = Family(
    name="routes",
    summary="Routes from paths to targets.",
    options=("fold", "empty", "first", "special", "head"),
    names={
        "pkg": ("router", "routes", "paths"),
        "Router": ("Router", "Routes", "Site"),
        "add": ("add", "route"),
        "find": ("find", "resolve", "match"),
        "link": ("link", "path_for"),
        "mount": ("mount", "include"),
        "popular": ("popular", "top"),
        "yes": ("1", "yes", "on"),
        "count": (2, 3),
    },
    modules={"pattern": PATTERN, "router": ROUTER},
    rules="""
- Paths are the same in upper and lower case, and values are in lower case.  #: fold
- Paths differ in upper and lower case.  #: !fold
- Empty parts of a path, between two strokes, do not count.  #: !empty
- Strokes at both ends of a path do not count; an empty part between two strokes does.  #: empty
- In a pattern :name fits any part, #name a whole number, whose value is a number, and * at the end any rest, also
  none, whose parts, joined by strokes, are the value rest.
- Routes are tried in the order in which they were added.  #: !special
- The route of the highest weight is tried first, a fixed part weighs 3, # 2, : 1, * 0; of equal ones the older.  #: special
- A second route of the same pattern and a method of the first raises ValueError.
- HEAD finds what GET finds.  #: head
- Values come from the query too; those of fields go first. A name without = has the value "$yes"; a pair without
  a name does not count.
- Of a name that occurs twice in a query the first counts.  #: first
- Of a name that occurs twice in a query the last counts.  #: !first
- If only the method does not fit, the result is 405 and the methods by name, each once, else 404 and nothing.
- A link has its fields filled in, a missing one raises KeyError; other values follow as a query by name, without None.
- A mounted router's routes come below its prefix. Each target that is found counts as visited, and $popular lists
  the $count most visited unless given, of equal ones by name.
""",
    case=case,
)
