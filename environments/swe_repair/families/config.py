"""Configuration: layers of settings."""

from ..library import Family

MERGE = '''
"""Merging of settings."""


def $merge(base, layer):
    """Return settings with those of another layer put over them; neither changes."""
    result = dict(base)
    for key, value in layer.items():
        key = key.lower()  #: fold
        if value is None:
            result.pop(key, None)  #: delete
            result[key] = None  #: !delete
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = $merge(result[key], value)
        elif isinstance(value, list) and isinstance(result.get(key), list):
            result[key] = result[key] + [one for one in value if one not in result[key]]  #: extend
            result[key] = list(value)  #: !extend
        elif isinstance(value, dict):
            result[key] = $merge({}, value)
        else:
            result[key] = value
    return result


def find(settings, path):
    """Return whether a dotted path exists, and its value."""
    for part in path.split("$dot"):
        if isinstance(settings, list) and part.isdigit() and int(part) < len(settings):
            settings = settings[int(part)]
        elif isinstance(settings, dict) and part in settings:
            settings = settings[part]
        else:
            return False, None
    return True, settings


def parse(text):
    """Return the value of a text: a number, true or false, a list of values, or the text."""
    text = text.strip()
    if "," in text:
        return [parse(part) for part in text.split(",") if part.strip()]
    if text.lower() in ("true", "yes"):
        return True
    if text.lower() in ("false", "no"):
        return False
    digits = text[1:] if text.startswith("-") else text
    return int(text) if digits.isdigit() else text
'''
SETTINGS = '''
"""The settings."""

from .merge import find, $merge, parse


class Missing(KeyError):
    """There is no such setting."""


class $Settings:
    """Layers of settings; later ones go over earlier ones."""

    def __init__(self, *layers):
        self._values = {}
        self._locked = []
        for layer in layers:
            self.$update(layer)

    def $update(self, layer):
        """Put a layer over the settings; locked ones keep their values."""
        before = {path: find(self._values, path)[1] for path in self._locked}
        self._values = $merge(self._values, layer)
        for path, value in before.items():
            self.$set(path, value, force=True)

    def $get(self, path, *default):
        """Return a setting, with its references replaced."""
        path = path.lower()  #: fold
        found, value = find(self._values, path)
        if not found and default:
            return default[0]
        if not found:
            raise Missing(path)
        return self._resolved(value, 0)

    def _resolved(self, value, depth):
        """Replace texts like @other by the setting that they name, at most $deep times."""
        if depth > $deep:
            raise Missing("the references have no end")
        if isinstance(value, str) and value.startswith("@"):
            found, other = find(self._values, value[1:])
            if not found:
                raise Missing(value)  #: !lax
                return value  #: lax
            return self._resolved(other, depth + 1)
        if isinstance(value, list):
            return [self._resolved(one, depth) for one in value]
        return value

    def $set(self, path, value, force=False):
        """Set one value; missing sections are made."""
        path = path.lower()  #: fold
        if path in self._locked and not force:
            return
        *parents, last = path.split("$dot")
        section = self._values
        for part in parents:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        section[last] = value

    def lock(self, path):
        """Keep a setting as it is from now on."""
        if not find(self._values, path)[0]:
            raise Missing(path)
        if path not in self._locked:
            self._locked.append(path)

    def $read(self, text):
        """Set the values of lines ``path = value``; later lines win."""  #: !first
        """Set the values of lines ``path = value``; the first line of a path wins."""  #: first
        seen = set()
        for line in text.splitlines():
            line = line.split("#")[0].strip()
            if "=" not in line:
                continue
            path, _, value = line.partition("=")
            path = path.strip()
            if path in seen:  #: first
                continue  #: first
            seen.add(path)
            self.$set(path, parse(value))

    def flat(self):
        """Return dotted path -> value of all settings that are no sections."""
        found = {}
        todo = [("", self._values)]
        while todo:
            before, section = todo.pop()
            for key, value in section.items():
                path = f"{before}$dot{key}" if before else key
                if isinstance(value, dict) and value:
                    todo.append((path, value))
                elif not isinstance(value, dict):  #: sections
                    found[path] = value  #: sections
                else:  #: !sections
                    found[path] = value  #: !sections
        return found
'''


def case(rng, on, n):
    keys = ("port", "host", "paths", "debug")

    def value(depth=0):
        kind = rng.randint(0, 6 if depth < 2 else 4)
        if kind == 0:
            return rng.choice((None, True, False))
        if kind == 1:
            return [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        if kind == 2:
            return rng.choice(("local", "@port", "@web" + dot + "port", "@none", "@host"))
        if kind < 5:
            return rng.randint(1, 99)
        return {key: value(depth + 1) for key in rng.sample(keys, rng.randint(1, 3))}

    def layer():
        chosen = rng.sample(("web", "Web", "mail", "port", "host", "paths"), 3)
        return {
            key: ({k: value(1) for k in rng.sample(keys, 2)} if key in ("web", "Web", "mail") else value(1))
            for key in chosen
        }

    dot = n["dot"]
    paths = [
        *("port", "host", "paths", "web"),
        *(f"{section}{dot}{key}" for section in ("web", "mail", "Web") for key in keys[:3]),
        f"paths{dot}1",
    ]
    new = f"s = {n['Settings']}({layer()}, {layer()})\n"
    path = rng.choice(paths)
    kind = rng.choice(("merge", "flat", "get", "get", "set", "lock", "read", "parse", "update", "chain"))
    if kind == "merge":
        return "merging two layers", f"{n['merge']}({layer()}, {layer()})"
    if kind == "flat":
        return "listing all settings", f"{new}s.flat()"
    if kind == "get":
        return "reading settings", f"{new}[s.{n['get']}(p, 'unset') for p in {rng.sample(paths, 4)}]"
    if kind == "set":
        return (
            "setting a value",
            f"{new}s.{n['set']}({path!r}, {rng.randint(1, 9)})\n[s.{n['get']}({path!r}), s.flat()]",
        )
    if kind == "lock":
        return (
            "a setting is locked",
            f"{new}s.lock({rng.choice(paths[:4])!r})\ns.{n['update']}({layer()})\ns.{n['set']}('port', 5)\ns.flat()",
        )
    if kind == "read":
        lines = "\n".join(
            f"{rng.choice(paths[:8])} = {rng.choice(('yes', 'No', '7', '-3', 'a, 2', '1,,2', 'text # note', '-', 'TRUE'))}"
            for _ in range(4)
        )
        return "reading lines of text", f"s = {n['Settings']}()\ns.{n['read']}({lines!r})\ns.flat()"
    if kind == "parse":
        return (
            "reading a value",
            f"[parse(t) for t in {[rng.choice(('yes', 'NO', ' 12 ', '-4', '1,b,', 'x', 'true', '--2', '', '0')) for _ in range(3)]}]",
        )
    if kind == "update":
        return "adding a layer", f"{new}s.{n['update']}({layer()})\ns.flat()"
    length = rng.randint(1, 6)
    chain = {f"k{i}": f"@k{i + 1}" for i in range(length)} | {f"k{length}": 7}
    return "settings refer to one another", f"s = {n['Settings']}({chain})\ns.{n['get']}('k0')"


FAMILY = Family(
    name="config",
    summary="Settings in layers, with references.",
    options=("fold", "delete", "extend", "lax", "first", "sections"),
    names={
        "pkg": ("settings", "layers", "options"),
        "Settings": ("Settings", "Config", "Layers"),
        "merge": ("merge", "overlay"),
        "update": ("update", "put_over"),
        "get": ("get", "value"),
        "set": ("assign", "put"),
        "read": ("read", "load_text"),
        "dot": (".", "/", ":"),
        "deep": (3, 4),
    },
    modules={"merge": MERGE, "settings": SETTINGS},
    rules="""
- A later layer goes over an earlier one; sections are merged, key by key.
- Keys of layers, and paths of $get and $set, are the same in upper and lower case, kept in lower case.  #: fold
- Keys differ in upper and lower case.  #: !fold
- None in a layer deletes the setting.  #: delete
- None in a layer is a value.  #: !delete
- A list is added to the end of an earlier list, without what that has already.  #: extend
- A list replaces an earlier list.  #: !extend
- A path has its parts separated by $dot; a number picks from a list, counted from 0.
- A missing setting raises Missing, or gives the default.
- A text @path is replaced, when it is read, by the setting of that path, also in lists, at most $deep times in a
  row, else Missing is raised.
- A reference to nothing stays as it is.  #: lax
- A reference to nothing raises Missing.  #: !lax
- A locked setting keeps its value; it cannot be locked if it is missing.
- Lines of text are ``path = value``, with # before notes; of a path that occurs twice the first line counts.  #: first
- Lines of text are ``path = value``, with # before notes; of a path that occurs twice the last line counts.  #: !first
- Values of text are whole numbers, yes, no, true, false in any case, lists with commas whose empty parts are left
  out, or text.
- flat lists the paths of all settings; empty sections are left out.  #: sections
- flat lists the paths of all settings; empty sections are listed as such.  #: !sections
""",
    case=case,
)
