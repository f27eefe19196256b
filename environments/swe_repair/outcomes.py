"""Run test cases against a library and record what they give, as plain JSON.

The environment imports this module for the original library. In the sandbox that grades, it is the program
that runs the submitted one: it reads {"library", "codes"} from stdin and prints one outcome a line. What is
right is never an input, so nothing that runs beside it can know or forge it.
"""

import ast
import functools
import json
import os
import sys

RESULT = "_result"
"""Name of the value of a case's last expression."""


@functools.lru_cache(4096)
def _compiled(code):
    """Return the code of a case compiled; a last expression is assigned to ``RESULT``."""
    tree = ast.parse(code)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        target = ast.Name(RESULT, ast.Store())
        tree.body[-1] = ast.fix_missing_locations(ast.copy_location(ast.Assign([target], last.value), last))
    return compile(tree, "<case>", "exec")


def plain(value):
    """Return a value as JSON: mappings and sets sorted, whole floats as integers."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else round(value, 6)
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [plain(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": sorted(([plain(k), plain(v)] for k, v in value.items()), key=repr)}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((plain(one) for one in value), key=repr)}
    return {"object": type(value).__name__}


def outcome(library, code):
    """Return {"value"} of a case's last expression, or {"raises"} with the exception's name.

    Args:
        library: the public names of the library.
        code: statements that use them.
    """
    names = dict(library)
    try:
        exec(_compiled(code), names)
        return {"value": plain(names.get(RESULT))}
    except Exception as error:
        return {"raises": type(error).__name__}


def main():
    """Print the outcomes of the cases on stdin; what the library prints goes nowhere."""
    asked = json.load(sys.stdin)
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.path.insert(0, asked["folder"])
    library = {}
    exec(f"from {asked['library']} import *", library)
    for code in asked["codes"]:
        try:
            line = json.dumps(outcome(library, code), sort_keys=True)
        except Exception as error:
            line = json.dumps({"raises": type(error).__name__})
        os.write(out, f"{line}\n".encode())


if __name__ == "__main__":
    main()
