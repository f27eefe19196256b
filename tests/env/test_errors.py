"""The hierarchy of errors, and the tree in the module's docstring."""

import re

from agentrl_env import errors
from agentrl_env.errors import AgentRLError, WireError


def subclasses(base: type, depth: int = 0) -> list[tuple[int, str, str]]:
    """Return the depth, name and HTTP status of each error derived from a base class."""
    found = []
    for error in base.__subclasses__():
        if error.__module__ == errors.__name__:
            status = str(error.status) if issubclass(error, WireError) and error is not WireError else ""
            found += [(depth, error.__name__, status), *subclasses(error, depth + 1)]
    return found


def test_tree_in_the_docstring_shows_every_error_at_its_place_with_its_status() -> None:
    line = re.compile(r"^((?:    |│   )*)[├└]── (\w+) +(\d{3})?", re.MULTILINE)
    shown = [(len(indent) // 4, name, status) for indent, name, status in line.findall(errors.__doc__)]
    assert errors.__doc__.splitlines()[2] == AgentRLError.__name__
    assert len(shown) > 30
    assert sorted(shown) == sorted(subclasses(AgentRLError))


def test_last_line_of_each_level_of_the_tree_closes_it() -> None:
    lines = [line for line in errors.__doc__.splitlines() if "──" in line]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        depth, next_depth = (re.search(r"\w|$", text).start() for text in (line, following))
        assert ("└" in line) == (next_depth < depth or "WireError" in line)
