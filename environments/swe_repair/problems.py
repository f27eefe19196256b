"""Problems: a generated library with bugs, a report of the symptoms, and visible and hidden test cases.

The data alone determines a problem. It is verified when it is generated: the original gives an outcome in
every case, and each bug changes some of the hidden outcomes.
"""

from __future__ import annotations

import ast
import functools
import itertools
import random
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl_env.dataset import stable_seed

from .bugs import Bug, bugs, repair
from .families import FAMILIES
from .library import Case, Family, Library, build
from .outcomes import outcome

NUM_SAMPLES = {"train": 10_000, "validation": 1_000, "test": 1_000}
SHARES = {"test": range(3), "validation": range(3, 6), "train": range(6, 10)}
"""Tenths of all combinations of a family's options that belong to a split."""
LEVELS = (1, 2, 3)
SLOTS = 8
"""Maximum number of problems, with different bugs, for the same family and options."""
CASES = 60
"""Number of cases for the selection of bugs."""
HIDDEN, VISIBLE = 40, 6
SHOWN = 3
"""Minimum number of hidden cases that each bug changes."""
LEAST, MOST = 0.08, 0.6
"""Minimum and maximum share of the cases that a bug changes."""
STEPS = 5_000
"""Maximum number of loop iterations and calls in a case."""
Place = tuple[str, int]
"""A module, and the number of a bug among all bugs of the module."""


class Unsolvable(ValueError):
    """No problem can be generated from the data."""


class OutOfSteps(BaseException):
    """A case takes too many steps."""


@dataclass(frozen=True)
class Problem:
    """A repository with bugs and the tests that its repair must pass."""

    package: str
    question: str
    files: Mapping[str, str]
    """Path -> text of the repository that the agent gets."""
    edits: Sequence[tuple[str, str, str]]
    """Path, text to replace, its replacement: the repair."""
    hidden: Sequence[str]
    """Codes of the hidden cases."""
    expected: Sequence[dict[str, Any]]
    """Their outcomes with the original library."""


@functools.cache
def choices(split: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the families and options of a split; no other split has one of them."""
    found = []
    for name, family in sorted(FAMILIES.items()):
        sets = [
            on
            for size in range(len(family.options) + 1)
            for on in itertools.combinations(sorted(family.options), size)
        ]
        sets.sort(key=lambda on, name=name: stable_seed("swe_repair", name, on))
        found += [(name, on) for place, on in enumerate(sets) if place % 10 in SHARES[split]]
    return sorted(found, key=lambda choice: stable_seed("swe_repair order", *choice))


class Problems:
    """The data of the problems of a split and a level."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_SAMPLES[self.split]

    def __getitem__(self, index: int) -> dict[str, object]:
        pairs = choices(self.split)
        family, options = pairs[index % len(pairs)]
        return {
            "level": self.level,
            "family": family,
            "options": list(options),
            "slot": index // len(pairs) % SLOTS,
            "round": index // len(pairs) // SLOTS,
        }


def outcomes(source: str, codes: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the outcomes of cases with a library, or None if it does not load or runs for too long."""
    left = [STEPS]

    def step() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OutOfSteps

    names: dict[str, Any] = {"__name__": "library", "_step": step}
    try:
        exec(compile(_stepped(source), "<library>", "exec"), names)
        found = []
        for code in codes:
            left[0] = STEPS
            found.append(outcome(names, code))
        return found
    except (Exception, OutOfSteps):
        return None


def _stepped(source: str) -> ast.Module:
    """Return a source that counts the iterations of its loops and the calls of its functions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While, ast.FunctionDef)):
            call = ast.Expr(ast.Call(ast.Name("_step", ast.Load()), [], []))
            node.body.insert(0, ast.fix_missing_locations(ast.copy_location(call, node.body[0])))
    return tree


def _pool(
    family: Family, on: frozenset[str], names: Mapping[str, str], rng: random.Random, count: int
) -> list[Case]:
    """Draw cases with different codes."""
    drawn: dict[str, str] = {}
    for _ in range(40 * count):
        title, code = family.case(rng, on, names)
        drawn.setdefault(textwrap.dedent(code).strip(), title)
        if len(drawn) == count:
            break
    return [(title, code) for code, title in drawn.items()]


def _planted(library: Library, planted: Sequence[Bug]) -> Library:
    """Return a library with bugs, each in another module."""
    modules = dict(library.modules)
    for bug in planted:
        modules[bug.module] = bug.plant(modules[bug.module])
    return replace(library, modules=modules)


def _differences(found: Sequence[object] | None, right: Sequence[object]) -> list[int]:
    """Return the numbers of the cases with different outcomes. Empty if there are no outcomes."""
    return [i for i, pair in enumerate(zip(found or right, right, strict=True)) if pair[0] != pair[1]]


@functools.lru_cache(512)
def usable(family: str, options: tuple[str, ...], level: int, count: int) -> tuple[tuple[Place, ...], ...]:
    """Return the places of each slot's bugs: one, or at level 3 two of different modules; slots differ."""
    kind, on = FAMILIES[family], frozenset(options)
    names = {name: str(words[0]) for name, words in kind.names.items()}
    library = build(kind, on, names)
    rng = random.Random(stable_seed("swe_repair bugs", family, options, level))
    codes = [code for _, code in _pool(kind, on, names, rng, CASES)]
    right = outcomes(library.merged(), codes)
    if right is None:
        raise Unsolvable(f"the library of {family} with {options} fails in its own cases")
    drawn = [
        (bug, (module, number))
        for module, text in library.modules.items()
        for number, bug in enumerate(bugs(module, text))
        if level > 1 or text[bug.start : bug.end].count("\n") < 2
    ]
    rng.shuffle(drawn)
    singles = (
        place
        for bug, place in drawn
        if LEAST
        <= len(_differences(outcomes(_planted(library, [bug]).merged(), codes), right)) / CASES
        <= MOST
    )
    if level < 3:
        return tuple((place,) for place in itertools.islice(singles, count))
    pairs: list[tuple[Place, ...]] = []
    seen: list[Place] = []
    for place in singles:
        pairs += [(other, place) for other in seen if other[0] != place[0]][-3:]
        seen.append(place)
        if len(pairs) >= count:
            break
    return tuple(pairs[:count])


def places(data: Mapping[str, Any]) -> tuple[Place, ...]:
    """Return the places of the bugs of a sample's data."""
    for count in (SLOTS // 2, SLOTS):
        if data["slot"] < count:
            found = usable(data["family"], tuple(data["options"]), data["level"], count)
            return found[data["slot"] % len(found)]
    raise Unsolvable(f"slot {data['slot']} must be below {SLOTS}")


@functools.lru_cache(256)
def _problem(family: str, options: tuple[str, ...], level: int, slot: int, number: int) -> Problem:
    kind, on = FAMILIES[family], frozenset(options)
    data = {"family": family, "options": options, "level": level, "slot": slot}
    for chosen in _alternatives(data):
        for attempt in range(8):
            seed = stable_seed("swe_repair problem", level, family, options, slot, number, attempt)
            rng = random.Random(seed)
            names = {name: str(rng.choice(words)) for name, words in kind.names.items()}
            library = build(kind, on, names)
            planted = [bugs(module, library.modules[module])[place] for module, place in chosen]
            made = _assemble(library, planted, _pool(kind, on, names, rng, 2 * CASES), rng, level)
            if made:
                return made
    raise Unsolvable(f"no cases show the bugs of {family} with {options}, level {level}, slot {slot}")


def _alternatives(data: Mapping[str, Any]) -> Iterator[tuple[Place, ...]]:
    """Yield the places of a sample's bugs, then others outside the slots: a bug can hang in more cases."""
    yield places(data)
    found = usable(data["family"], tuple(data["options"]), data["level"], 2 * SLOTS)
    yield from found[SLOTS + data["slot"] :]


def problem(data: Mapping[str, Any]) -> Problem:
    """Return the problem of a sample's data. Raises Unsolvable."""
    return _problem(data["family"], tuple(data["options"]), data["level"], data["slot"], data.get("round", 0))


def _assemble(
    library: Library, planted: Sequence[Bug], cases: Sequence[Case], rng: random.Random, level: int
) -> Problem | None:
    """Choose the cases for the report, the visible and the hidden tests. None if too few show a bug."""
    codes = [code for _, code in cases]
    right = outcomes(library.merged(), codes)
    broken = _planted(library, planted)
    got = outcomes(broken.merged(), codes)
    if right is None or got is None:
        return None
    alone = [_differences(got, right)]
    if len(planted) > 1:
        alone = [_differences(outcomes(_planted(library, [bug]).merged(), codes), right) for bug in planted]
    wrong = set(_differences(got, right))
    reported, hidden = [], []
    for changed in alone:
        both = [i for i in changed if i in wrong and i not in reported]
        if len(both) < SHOWN + 2:
            return None
        reported.append(min(both[: SHOWN + 2], key=lambda i: len(cases[i][1])))
        hidden += [i for i in changed if i not in reported][: max(SHOWN, HIDDEN // 4)]
    hidden = [i for i in dict.fromkeys(hidden) if i not in reported]
    if any(len(set(changed) & set(hidden)) < SHOWN for changed in alone):
        return None
    rest = [i for i in range(len(cases)) if i not in hidden and i not in reported]
    passing = [i for i in rest if i not in wrong]
    visible = passing[:VISIBLE] + reported[: level == 1]
    hidden += [i for i in rest if i not in visible][: HIDDEN - len(hidden)]
    rng.shuffle(hidden)
    files = broken.files(merged=level == 1)
    gold = library.files(merged=level == 1)
    texts = [f"{cases[i][1]}\n{right[i].get('raises', '')}" for i in visible]
    names = sorted({word for text in texts for word in _used(text, library)})
    tests = "\n\n".join(_test(n, cases[i], right[i]) for n, i in enumerate(visible, 1))
    raises = "import pytest\n\n" if "pytest.raises" in tests else ""
    return Problem(
        package=library.package,
        question=_question(library, level, [(cases[i], got[i], right[i]) for i in reported]),
        files={
            **files,
            "README.md": f"# {library.package}\n\n{library.summary}\n\n## Rules\n\n{library.rules}\n",
            f"tests/test_{library.package}.py": (
                f"{raises}from {library.package} import {', '.join(names)}\n\n\n{tests}"
            ),
        },
        edits=[(path, *repair(files[path], text)) for path, text in gold.items() if text != files[path]],
        hidden=[cases[i][1] for i in hidden],
        expected=[right[i] for i in hidden],
    )


def _used(code: str, library: Library) -> set[str]:
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    defined = {one.name for text in library.modules.values() for one in ast.parse(text).body
               if isinstance(one, (ast.ClassDef, ast.FunctionDef))}  # fmt: skip
    return names & defined


def shown(plain: Any) -> str:
    """Return the Python text of a plain value."""
    if isinstance(plain, dict):
        ((kind, items),) = plain.items()
        if kind == "dict":
            return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in items) + "}"
        if kind == "tuple":
            return "(" + ", ".join(map(shown, items)) + (",)" if len(items) == 1 else ")")
        return "{" + ", ".join(map(shown, items)) + "}" if items else "set()"
    return "[" + ", ".join(map(shown, plain)) + "]" if isinstance(plain, list) else repr(plain)


def _test(number: int, case: Case, right: Mapping[str, Any]) -> str:
    """Return a visible test: the code of a case with its right outcome."""
    *before, last = case[1].splitlines()
    name = f"test_{number}_" + "".join(c if c.isalnum() else "_" for c in case[0].lower())[:60]
    if "raises" in right:
        body = "\n".join(f"    {line}" for line in (*before, last))
        lines = ["    with pytest.raises(" + right["raises"] + "):", textwrap.indent(body, "    ")]
    else:
        lines = [*(f"    {line}" for line in before), f"    assert {last} == {shown(right['value'])}"]
    return "\n".join([f"def {name}():", *lines, ""])


def _told(found: Mapping[str, Any], gives: str, raises: str) -> str:
    return f"{raises} {found['raises']}" if "raises" in found else f"{gives} {shown(found['value'])}"


def _question(
    library: Library, level: int, reports: Sequence[tuple[Case, Mapping[str, Any], Mapping[str, Any]]]
) -> str:
    """Return the request: reports of the symptoms, the content of the repository, and how to end."""
    texts = []
    for (title, code), got, right in reports:
        wanted = f"but should {_told(right, 'give', 'raise')}" if level < 3 else "against README.md"
        end = f"It {_told(got, 'gives', 'raises')}, {wanted}."
        texts.append(f"Something is wrong when {title}:\n\n{textwrap.indent(code, '    ')}\n\n{end}")
    name = library.package
    users = "A user reports" if len(texts) == 1 else f"{len(texts)} users report"
    return "\n\n".join([
        f"{users} that the library {name} does not do what it should.",
        *texts,
        "Repair the library in /home/agent/repo so that it keeps the rules of README.md, then call submit(). "
        "`python3 -m pytest -q` runs the visible tests there; hidden tests of the whole library decide.",
    ])  # fmt: skip
