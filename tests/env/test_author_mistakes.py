"""Mistakes of authors that are detected before a session opens, and their error messages.

The error must name the line that ends with ``# here``.
"""

from __future__ import annotations

import re
from textwrap import dedent, indent

import pytest

from agentrl_env.errors import TargetError
from agentrl_env.hosting.loader import load_target

IMPORTS = "from agentrl_env import Done, Environment, Message, Reply, ToolCall, ToolError, tool\n"
RESET = 'def reset(self, sample, rng):\n    return "Guess."\n'
TOOL = '@tool\ndef guess(self, n: int):\n    """Guess."""\n    return "no"\n'
HELPERS = "WORDS = ['apple']\n"


def task(body: str, reset: str = RESET, tools: str = TOOL) -> str:
    """Return the file of a task with this class body. ``reset`` and a tool are provided."""
    parts = [dedent(body), "" if "def reset" in body else reset, "" if "def guess" in body else tools]
    return f'{IMPORTS}class Guess(Environment):\n    """Guess."""\n{indent("".join(parts), "    ")}'


def write_task(folder, source: str, **files: str) -> str:
    """Write a task to the folder ``guess`` and return it as a target."""
    place = folder / "guess"
    place.mkdir()
    for name, text in {"environment": source, "helpers": HELPERS, **files}.items():
        (place / f"{name}.py").write_text(dedent(text))
    return str(place)


def marked_line(source: str) -> str:
    """Return the place that the error must name: the file, and the marked line if any."""
    lines = dedent(source).splitlines()
    return next((f"environment.py:{n}" for n, line in enumerate(lines, 1) if line.endswith("# here")), "")


def check_sentence(text: str, sentence: str, source: str) -> None:
    """Assert that an error is one line with the sentence and the marked place."""
    assert sentence in text
    assert "\n" not in text
    assert not re.search(r"\((\S+:\d+)(, in \w+)?\).*\(\1\b", text), text
    assert re.search(re.escape(marked_line(source)) + r"\b", text), text


IMPORT = {
    "unknown name": ("WORDS = itn  # here", "importing it failed: NameError: name 'itn' is not defined"),
    "syntax error": ("x = 1\ndef (:  # here", "importing it failed: SyntaxError: invalid syntax"),
    "indentation": ("def f():\nreturn 1  # here", "IndentationError: expected an indented block"),
    "unclosed bracket": ("x = (1,  # here\n", "SyntaxError: '(' was never closed"),
    "package that is not installed": (
        "import no_such_package  # here",
        "it needs the module 'no_such_package'; install it",
    ),
    "neighbour imported by name": (
        "from helpers import WORDS  # here",
        "for the file beside it write 'from .helpers import WORDS'",
    ),
    "neighbour imported as a module": (
        "import helpers  # here",
        "for the file beside it write 'from . import helpers'",
    ),
    "neighbour imported through the folder": (
        "from guess.helpers import WORDS  # here",
        "for the file beside it write 'from .helpers import WORDS'",
    ),
    "misspelt neighbour": (
        "from .helprs import WORDS  # here",
        "there is no helprs.py beside environment.py; did you mean '.helpers'?",
    ),
    "name that a neighbour lacks": (
        "from .helpers import WORD  # here",
        "ImportError: cannot import name 'WORD' from 'helpers'",
    ),
    "import from above the folder": (
        "from ..shared import WORDS  # here",
        "ImportError: attempted relative import beyond top-level package",
    ),
    "misspelt base class": (
        "from agentrl_env import Enviroment  # here",
        "ImportError: cannot import name 'Enviroment' from 'agentrl_env'",
    ),
    "missing file": ("open('words.txt')  # here", "FileNotFoundError: [Errno 2] No such file or directory"),
    "missing variable": ("import os\nos.environ['API_KEY']  # here", "KeyError: 'API_KEY'"),
    "exit at import": ("raise SystemExit(3)  # here", "importing it failed: SystemExit: 3"),
    "error in a class body": (task("size = 1 / 0  # here\n"), "ZeroDivisionError: division by zero"),
    "base class without import": (
        "class Guess(Environment):  # here\n    ...",
        "NameError: name 'Environment' is not defined",
    ),
}

TARGET = {
    "no class": ("x = 1", "needs exactly one Environment class (found: none)"),
    "two classes": (
        task("") + f"class Other(Guess):\n{indent(RESET, '    ')}",
        "needs exactly one Environment class (found: Guess, Other); name it as file.py:Class",
    ),
    "class without its base": (
        f"{IMPORTS}class Guess:  # here\n{indent(TOOL, '    ')}",
        "(found: none); write class Guess(Environment)",
    ),
    "no reset": (
        f"{IMPORTS}class Guess(Environment):  # here\n{indent(TOOL, '    ')}",
        "Guess has no reset(self, sample, rng)",
    ),
    "misspelt reset": (
        task("def rest(self, sample, rng):  # here\n    return ''\n", reset=""),
        "Guess has no reset(self, sample, rng); Guess has 'rest', is that it?",
    ),
    "no tools": (
        f"{IMPORTS}class Guess(Environment):  # here\n{indent(RESET, '    ')}",
        "Guess has no tools; mark at least one method with @tool, or define respond(self, text) for a task",
    ),
    "tool without the mark": (
        task("def guess(self, n: int):\n    return 'no'\n").replace("Environment):", "Environment):  # here"),
        "Guess has no tools; mark at least one method with @tool",
    ),
}

SETTINGS = {
    'max_turns = "8"': "Guess.max_turns is '8'; it must be a whole number of at least 1",
    "max_turns = 0": "Guess.max_turns is 0; it must be a whole number of at least 1",
    "max_turns = 8,": "Guess.max_turns is (8,); it must be a whole number of at least 1",
    "max_turns = 2.5": "Guess.max_turns is 2.5; it must be a whole number of at least 1",
    "max_turns: int = None": "Guess.max_turns is None; it must be a whole number of at least 1",
    "max_turn = 3": "Guess.max_turn is not a setting; did you mean 'max_turns'?",
    "maxturns = 3": "Guess.maxturns is not a setting; did you mean 'max_turns'?",
    "tool_timeouts = 3": "Guess.tool_timeouts is not a setting; did you mean 'tool_timeout'?",
    "reset_timout = 3": "Guess.reset_timout is not a setting; did you mean 'reset_timeout'?",
    'split = ("train",)': "Guess.split is not a setting; did you mean 'splits'?",
    "max_seconds = -1": "Guess.max_seconds is -1; it must be seconds above 0, or None",
    'max_seconds = "1 h"': "Guess.max_seconds is '1 h'; it must be seconds above 0, or None",
    "tool_timeout = -1": "Guess.tool_timeout is -1; it must be seconds above 0",
    "tool_timeout = None": "Guess.tool_timeout is None; it must be seconds above 0",
    "reset_timeout = 0": "Guess.reset_timeout is 0; it must be seconds above 0",
    'reset_timeout = float("nan")': "Guess.reset_timeout is nan; it must be seconds above 0",
    'blocking = "no"': "Guess.blocking is 'no'; it must be True or False",
    "blocking = 0": "Guess.blocking is 0; it must be True or False",
    'splits = ("train")': 'Guess.splits is \'train\'; it must be a tuple of names, such as ("train", "test")',
    'splits = ["train", 3]': "Guess.splits is ['train', 3]; it must be a tuple of names",
    'name = "my task"': "Guess.name is 'my task'; it must be text of letters, digits, '_', '-' or '.'",
    'name = ""': "Guess.name is ''; it must be text of letters",
}

HOOKS = {
    "misspelt score": (
        "def scores(self):  # here\n    return {}\n",
        "Guess.scores is never called; did you mean score(self)? Rename a helper, or call it _scores",
    ),
    "misspelt expert": (
        "async def expret(self, rng):  # here\n    return 'x'\n",
        "Guess.expret is never called; did you mean expert(self, rng)?",
    ),
    "misspelt samples": (
        "@classmethod  # here\ndef sample(cls, split):\n    return [{}]\n",
        "Guess.sample is never called; did you mean samples(cls, split)?",
    ),
    "misspelt startup": (
        "@classmethod  # here\ndef start_up(cls): ...\n",
        "Guess.start_up is never called; did you mean startup(cls)?",
    ),
    "misspelt shutdown": (
        "@classmethod  # here\ndef shut_down(cls): ...\n",
        "did you mean shutdown(cls)?",
    ),
    "misspelt restore": (
        "def snapshot(self): ...\ndef restor(self, state): ...  # here\n",
        "did you mean restore(self, state)?",
    ),
    "misspelt respond": ("def repond(self, text): ...  # here\n", "did you mean respond(self, text)?"),
    "misspelt close": ("def closes(self): ...  # here\n", "did you mean close(self)?"),
    "tool named close": (
        "@tool  # here\ndef close(self, n: int): ...\n",
        "Guess.close is a tool, but Environment has an attribute of this name; rename it, "
        "and keep the name for models with @tool(name='close')",
    ),
    "tool named reset": ("@tool  # here\ndef reset(self): ...\n", "Guess.reset is a tool, but Environment"),
    "tool named snapshot": ("@tool  # here\ndef snapshot(self): ...\n", "Guess.snapshot is a tool, but"),
    "tool named local": ("@tool  # here\ndef local(self): ...\n", "Guess.local is a tool, but Environment"),
    "tool named name": ("@tool  # here\ndef name(self): ...\n", "Guess.name is a tool, but Environment"),
    "reset without arguments": (
        "def reset(self):  # here\n    return ''\n",
        "Guess.reset is called with other arguments; write reset(self, sample, rng)",
    ),
    "reset without rng": (
        "def reset(self, sample):  # here\n    return ''\n",
        "Guess.reset is called with other arguments; write reset(self, sample, rng)",
    ),
    "reset like Gymnasium's": (
        "def reset(self, *, seed=None, options=None):  # here\n    return ''\n",
        "Guess.reset is called with other arguments; write reset(self, sample, rng)",
    ),
    "reset with Gymnasium's arguments": (
        "def reset(self, seed=None, options=None):  # here\n    return ''\n",
        "Guess.reset has a parameter 'seed', but is called with (self, sample, rng) in this order; write "
        "reset(self, sample, rng)",
    ),
    "reset with swapped arguments": (
        "def reset(self, rng, sample):  # here\n    return ''\n",
        "Guess.reset has a parameter 'rng', but is called with (self, sample, rng) in this order",
    ),
    "reset of the class": (
        "@classmethod  # here\ndef reset(cls, sample, rng):\n    return ''\n",
        "Guess.reset is a classmethod; the state of an episode belongs on self",
    ),
    "reset that yields": (
        "def reset(self, sample, rng):  # here\n    yield ''\n",
        "Guess.reset yields; return the value instead",
    ),
    "samples without classmethod": (
        "def samples(self, split):  # here\n    return []\n",
        "Guess.samples is called with other arguments; put @classmethod above it, and write "
        "samples(cls, split)",
    ),
    "samples without split": (
        "@classmethod  # here\ndef samples(cls):\n    return []\n",
        "Guess.samples is called with other arguments; write samples(cls, split)",
    ),
    "async samples": (
        "@classmethod  # here\nasync def samples(cls, split):\n    return []\n",
        "Guess.samples cannot be async; write a plain classmethod",
    ),
    "startup without classmethod": (
        "def startup(self): ...  # here\n",
        "put @classmethod above it, and write startup(cls)",
    ),
    "respond without text": ("def respond(self): ...  # here\n", "write respond(self, text)"),
    "close with an argument": ("def close(self, force): ...  # here\n", "write close(self)"),
    "score with an argument": ("def score(self, result): ...  # here\n", "write score(self)"),
    "expert without rng": ("def expert(self): ...  # here\n", "write expert(self, rng)"),
    "restore without state": (
        "def snapshot(self): ...\ndef restore(self): ...  # here\n",
        "Guess.restore is called with other arguments; write restore(self, state)",
    ),
    "snapshot without restore": (
        "def snapshot(self):  # here\n    return vars(self)\n",
        "Guess has snapshot() and no restore(): sessions can fork only with both",
    ),
    "restore without snapshot": (
        "def restore(self, state): ...  # here\n",
        "Guess has restore() and no snapshot(): sessions can fork only with both",
    ),
    "close that is no method": (
        "close = None  # here\n",
        "Guess.close is a NoneType, but Environment has a method of this name; rename it",
    ),
    "description as text": (
        "description = 'Guess.'  # here\n",
        "Guess.description is a str, but Environment has a method of this name; rename it",
    ),
    "session as a property": (
        "@property\ndef session(self):  # here\n    return 1\n",
        "Guess.session is a property, but Environment has a method of this name; rename it",
    ),
    "local with arguments": ("def local(self, place): ...  # here\n", "Guess.local is called with other"),
    "constructor with an argument": (
        "def __init__(self, size):  # here\n    self.size = size\n",
        "Guess.__init__() is called without arguments; set up the episode in reset()",
    ),
}

TOOLS = {
    "no annotation": (
        "@tool  # here\ndef guess(self, n):\n    return ''\n",
        "Guess.guess: parameter 'n' needs a type annotation",
    ),
    "variable arguments": (
        "@tool  # here\ndef guess(self, *n: int): ...\n",
        "Guess.guess: parameter 'n' must be a plain named one, because a model passes arguments by name",
    ),
    "keyword arguments": ("@tool  # here\ndef guess(self, **n: int): ...\n", "parameter 'n' must be a plain"),
    "positional argument": ("@tool  # here\ndef guess(self, n: int, /): ...\n", "'n' must be a plain named"),
    "unknown type": (
        "@tool  # here\ndef guess(self, n: 'Nummer'): ...\n",
        "Guess.guess: cannot resolve its annotations: name 'Nummer' is not defined; define it in the "
        "module or in Guess",
    ),
    "no self": ("@tool  # here\ndef guess(n: int): ...\n", "Guess.guess: its first parameter must be self"),
    "no parameter": ("@tool  # here\ndef guess(): ...\n", "Guess.guess: its first parameter must be self"),
    "type without a schema": (
        "import sqlite3\n@tool  # here\ndef guess(self, n: int, db: sqlite3.Connection): ...\n",
        "Guess.guess: no schema for its arguments: parameter 'db' has a type that JSON cannot express; use "
        "str, int, float, bool, list, dict, Literal, an Enum or a pydantic model",
    ),
    "array": (
        "import numpy\n@tool  # here\ndef guess(self, n: numpy.ndarray): ...\n",
        "parameter 'n' has a type that JSON cannot express",
    ),
    "callback": (
        "from collections.abc import Callable\n@tool  # here\ndef guess(self, n: Callable[[], int]): ...\n",
        "parameter 'n' has a type that JSON cannot express",
    ),
    "items that parsing does not validate": (
        "from collections.abc import Iterable\n"
        "@tool  # here\ndef guess(self, n: dict[str, Iterable[int]]): ...\n",
        "Guess.guess: the items of an Iterable are validated when the tool reads them, and a wrong item "
        "fails the episode; annotate the parameter with list[...]",
    ),
    "invalid pattern": (
        "from typing import Annotated\nfrom pydantic import Field\n"
        "@tool  # here\ndef guess(self, n: Annotated[str, Field(pattern='(')]): ...\n",
        "no schema for its arguments: parameter 'n': error: missing ), unterminated subpattern at position 0",
    ),
    "Literal of an Enum": (
        "from enum import Enum\nfrom typing import Literal\n"
        "@tool  # here\ndef guess(self, n: list[Literal[Enum('Side', 'LEFT').LEFT]]): ...\n",
        "an argument can be <Side.LEFT: 1>, which JSON cannot express; write the plain values in Literal",
    ),
    "Enum of tuples": (
        "from enum import Enum\n@tool  # here\ndef guess(self, n: Enum('Side', {'LEFT': (0, 1)})): ...\n",
        "an argument can be (0, 1), which JSON cannot express",
    ),
    "Field as the default": (
        "from pydantic import Field\n@tool  # here\ndef guess(self, n: int = Field(ge=1)): ...\n",
        "the Field() of parameter 'n' belongs into its annotation: n: Annotated[..., Field(...)] = default",
    ),
    "default of another type": (
        "@tool  # here\ndef guess(self, n: int = 'x'): ...\n",
        "Guess.guess: the default 'x' of parameter 'n' does not fit its annotation; give it a valid integer",
    ),
    "None as a default": (
        "@tool  # here\ndef guess(self, *, n: int = None): ...\n",
        "the default None of parameter 'n' does not fit its annotation; annotate it with ... | None, or give",
    ),
    "default that is none of the choices": (
        "from typing import Literal\n@tool  # here\ndef guess(self, n: Literal['a', 'b'] = 'c'): ...\n",
        "the default 'c' of parameter 'n' does not fit its annotation; give it 'a' or 'b'",
    ),
    "two tools of one name": (
        "@tool(name='guess')\ndef one(self): ...\n@tool(name='guess')  # here\ndef two(self): ...\n",
        "Guess has two tools named 'guess'; rename one",
    ),
    "tool over staticmethod": (
        "@tool  # here\n@staticmethod\ndef guess(n: int): ...\n",
        "@tool is put on a plain method, closest to it, not on a staticmethod",
    ),
    "tool under staticmethod": (
        "@staticmethod\n@tool\ndef guess(n: int): ...\n",
        "Guess.guess: put @tool on a plain method, closest to it",
    ),
    "tool over classmethod": (
        "@tool  # here\n@classmethod\ndef guess(cls, n: int): ...\n",
        "@tool is put on a plain method, closest to it, not on a classmethod",
    ),
    "tool over property": ("@tool  # here\n@property\ndef guess(self): ...\n", "not on a property"),
    "tool over a cache": (
        "import functools\n@tool  # here\n@functools.cache\ndef guess(self, n: int): ...\n",
        "@tool is put on a plain method, closest to it, not on a _lru_cache_wrapper",
    ),
    "tool with a name alone": ("@tool('guess')\ndef guess(self): ...\n", "not on a str"),
    "negative timeout": (
        "@tool(timeout=-1)  # here\ndef guess(self): ...\n",
        "@tool(timeout=-1): timeout takes seconds above 0",
    ),
    "name that models refuse": (
        "@tool(name='guess it!')  # here\ndef guess(self): ...\n",
        "a tool cannot be named 'guess it!': models accept 1 to 64 letters, digits, '_' or '-'",
    ),
    "tool that yields": (
        "@tool  # here\ndef guess(self, n: int):\n    yield 'no'\n",
        "tool 'guess' yields; return the answer instead",
    ),
}


def load_error(folder, source: str, suffix: str = "", **files: str) -> str:
    with pytest.raises(TargetError) as caught:
        load_target(write_task(folder, source, **files) + suffix)
    return str(caught.value)


@pytest.mark.parametrize(("source", "sentence"), [*IMPORT.values(), *TARGET.values()], ids=[*IMPORT, *TARGET])
def test_mistake_in_the_file_is_named_with_its_line(source, sentence, tmp_path):
    check_sentence(load_error(tmp_path, source), sentence, source)


@pytest.mark.parametrize("setting", SETTINGS)
def test_invalid_setting_is_refused_when_the_class_is_defined(setting, tmp_path):
    source = task(f"{setting}  # here\n")
    check_sentence(load_error(tmp_path, source), SETTINGS[setting], source)


@pytest.mark.parametrize(("body", "sentence"), [*HOOKS.values(), *TOOLS.values()], ids=[*HOOKS, *TOOLS])
def test_mistake_in_a_method_is_refused_when_the_class_is_defined(body, sentence, tmp_path):
    source = task(body)
    check_sentence(load_error(tmp_path, source), sentence, source)


def test_misspelt_reset_of_a_subclass_is_refused(tmp_path):
    source = (
        task("") + "\nclass Level2(Guess):\n    def resets(self, sample, rng):  # here\n        return ''\n"
    )
    sentence = "Level2.resets is never called; did you mean reset(self, sample, rng)?"
    check_sentence(load_error(tmp_path, source), sentence, source)


HELPER_METHODS = {
    "a helper that a tool calls": "def scores(self): ...\ndef score(self):\n    return self.scores()\n",
    "a helper inside a comprehension": "def sample(self, n): ...\n"
    "def score(self):\n    return {str(n): [self.sample(m) for m in 'ab'] for n in range(3)}\n",
    "a helper by its name": "def scores(self): ...\ndef close(self):\n    getattr(self, 'scores')()\n",
    "one beside the hook": "def closed(self): ...\ndef close(self): ...\n",
    "another word": "def solve(self): ...\ndef place(self): ...\ndef expand(self): ...\n",
    "a property": "@property\ndef closed(self): ...\n",
    "a private method": "def _scores(self): ...\n",
}


@pytest.mark.parametrize("body", HELPER_METHODS.values(), ids=HELPER_METHODS)
def test_helper_methods_are_not_mistaken_for_misspelt_hooks(body, tmp_path):
    assert load_target(write_task(tmp_path, task(body))).name == "guess"


def test_error_in_a_neighbour_names_the_neighbour(tmp_path):
    text = load_error(tmp_path, "from .helpers import WORDS", helpers="# Words.\nWORDS = itn\n")
    assert "NameError: name 'itn' is not defined" in text
    assert "guess/helpers.py:2)" in text


def test_circular_import_of_neighbours_is_named(tmp_path):
    text = load_error(tmp_path, "from .helpers import X", helpers="from .environment import Y")
    assert "cannot import name 'Y' from partially initialized module 'environment'" in text
    assert "guess/helpers.py:1)" in text


def test_misspelt_class_in_the_target_is_named(tmp_path):
    text = load_error(tmp_path, task(""), suffix="/environment.py:Gess")
    assert "no Environment class named 'Gess' there; did you mean 'Guess'?" in text


def test_tool_that_is_overridden_without_its_mark_is_refused(tmp_path):
    source = task("") + "class Hard(Guess):\n    def guess(self, n: int):  # here\n        return 'no'\n"
    text = load_error(tmp_path, source)
    check_sentence(text, "Hard.guess overrides a tool without @tool: add @tool; guess = None", source)


def test_none_removes_an_inherited_tool(tmp_path):
    more = "    @tool\n    def look(self):\n        return 'dark'\n"
    target = write_task(tmp_path, task("") + f"class Blind(Guess):\n    guess = None\n{more}")
    assert [spec.function.name for spec in load_target(f"{target}/environment.py:Blind").tool_specs()] == [
        "look"
    ]


def test_other_attributes_are_allowed(tmp_path):
    own = "names = ['a']\ntimeout = 3\nturns: int = 2\nMAX_TURNS = 3\nWORDS = ()\nsize: int\n"
    hooks = "@staticmethod\ndef samples(split):\n    return [{}]\nasync def close(self, *args): ...\n"
    assert load_target(write_task(tmp_path, task(own + hooks))).name == "guess"
