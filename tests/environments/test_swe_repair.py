"""The swe_repair task in real sandboxes: generated libraries and bugs, hidden tests, and cheating."""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl_env import Done, EnvClient, SessionStatus, TaskSample, ToolCall, ToolError
from agentrl_env.errors import SandboxFailed, SandboxUnavailable
from agentrl_env.hosting.loader import load_target
from agentrl_env.sandbox.bubblewrap import check_available
from tests.environments.play import play

pytestmark = pytest.mark.environments

SweRepair = load_target(str(Path(__file__).parents[2] / "environments" / "swe_repair"))
PACKAGE = SweRepair.__module__.rpartition(".")[0]
environment_module = sys.modules[SweRepair.__module__]
bugs, library, problems = (sys.modules[f"{PACKAGE}.{name}"] for name in ("bugs", "library", "problems"))
FAMILIES = sys.modules[f"{PACKAGE}.families"].FAMILIES
try:
    check_available()
except SandboxUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

every_level = pytest.mark.parametrize("level", [1, 2, 3])
NEVER = {"NameError", "AttributeError", "UnboundLocalError", "TypeError", "SyntaxError"}
"""Exceptions that no generated library should raise. They indicate an error in its template."""


def data(level, index=0, split="test"):
    return problems.Problems(split, level)[index]


def options_of(family, count):
    """Return all options, no options, each option alone, and random subsets."""
    rng = random.Random(7)
    drawn = [{one for one in family.options if rng.random() < 0.5} for _ in range(count)]
    return [set(family.options), set(), *({one} for one in family.options), *drawn]


@pytest.fixture
def start():
    """Start an episode of a problem. It is closed when the test ends."""
    opened = []

    def started(level=1, index=0):
        environment = SweRepair()
        opened.append(environment)
        sample = TaskSample(task="swe_repair", seed=1, data=data(level, index))
        environment.reset(sample, np.random.default_rng(1))
        return environment

    yield started
    for environment in opened:
        environment.close()


def repair(environment, count=None):
    """Apply all edits of the repair, or the first ones."""
    for path, old, new in environment.problem.edits[:count]:
        environment.edit(path, old, new)


# Generation


@pytest.mark.parametrize("name", FAMILIES)
def test_libraries_of_a_family_load_and_have_outcomes_of_their_rules(name):
    family, rng = FAMILIES[name], random.Random(3)
    for on in options_of(family, 6):
        names = {key: str(rng.choice(words)) for key, words in family.names.items()}
        made = library.build(family, frozenset(on), names)
        cases = problems._pool(family, frozenset(on), names, rng, 60)
        found = problems.outcomes(made.merged(), [code for _, code in cases])
        assert found is not None, (name, on)
        raised = {one["raises"] for one in found if "raises" in one}
        assert not raised & NEVER, (name, on)
        assert "object" not in json.dumps(found)
        assert sum("value" in one for one in found) > 30
        assert "$" not in made.rules.replace("$ ", "")


@pytest.mark.parametrize("name", FAMILIES)
def test_names_do_not_change_the_places_of_bugs(name):
    family = FAMILIES[name]
    for on in options_of(family, 2):
        counts = set()
        for seed in range(6):
            rng = random.Random(seed)
            names = {key: str(rng.choice(words)) for key, words in family.names.items()}
            made = library.build(family, frozenset(on), names).modules
            counts.add(tuple(len(bugs.bugs(key, text)) for key, text in made.items()))
        assert len(counts) == 1, (name, on)


def outcomes_of(problem, files):
    """Return the outcomes of the hidden cases, with the library in one module."""
    package = problem.package
    if f"{package}.py" in files:
        source = files[f"{package}.py"]
    else:
        order = [
            line.split()[1][1:] for line in files[f"{package}/__init__.py"].splitlines() if "from ." in line
        ]
        modules = {name: files[f"{package}/{name}.py"] for name in order}
        source = library.Library(package, modules, "", "").merged()
    return problems.outcomes(source, problem.hidden)


def verify(level, index, split="test"):
    """Assert that hidden cases pass with the repair and that each bug alone fails some of them."""
    made = problems.problem(data(level, index, split))
    repaired = dict(made.files)
    for path, old, new in made.edits:
        assert repaired[path].count(old) == 1
        repaired[path] = repaired[path].replace(old, new)
    assert outcomes_of(made, repaired) == list(made.expected)
    assert len(made.edits) == (2 if level == 3 else 1)
    for path, _, _ in made.edits:
        one_left = {**repaired, path: made.files[path]}
        found = outcomes_of(made, one_left)
        wrong = sum(pair[0] != pair[1] for pair in zip(found, made.expected, strict=True))
        assert problems.SHOWN <= wrong < len(made.expected)
    assert len(made.hidden) == len(set(made.hidden)) == problems.HIDDEN
    assert not any(code in made.question or code in str(made.files) for code in made.hidden)
    return made


@every_level
def test_problems_are_verified_and_have_the_files_of_their_level(level):
    for index in (0, 5):
        made = verify(level, index)
        sources = [path for path in made.files if path.endswith(".py") and not path.startswith("tests/")]
        assert len(sources) == 1 if level == 1 else len(sources) >= 3
        assert {"README.md", f"tests/test_{made.package}.py"} < set(made.files)


def test_bug_that_hangs_in_other_cases_is_replaced():
    pairs = problems.choices("test")
    index = pairs.index(("dates", ("late", "saturday", "sticky", "sunday")))
    assert verify(1, index).files


@pytest.mark.slow
@every_level
def test_all_held_out_problems_are_verified_and_different(level):
    planted = set()
    for index in range(1000):
        made = verify(level, index)
        which = data(level, index)
        planted.add((which["family"], *which["options"], problems.places(which)))
        assert made.edits
    assert len(planted) == 1000


@every_level
def test_splits_have_a_thousand_problems_and_share_no_rules(level):
    used = {}
    for split, count in problems.NUM_SAMPLES.items():
        drawn = [data(level, index, split) for index in range(count)]
        assert len({json.dumps(one) for one in drawn}) == count
        used[split] = {(one["family"], *one["options"]) for one in drawn}
        assert {family for family, *_ in used[split]} == set(FAMILIES)
    assert not used["test"] & used["train"]
    assert not used["test"] & used["validation"]
    assert not used["validation"] & used["train"]


def test_task_has_at_least_twelve_families():
    assert len(FAMILIES) >= 12


# Episodes


@pytest.mark.parametrize("count", [2, pytest.param(70, marks=pytest.mark.slow)])
@every_level
async def test_expert_repairs_held_out_libraries(level, count):
    suffix = f"-{level}" if level > 1 else ""
    async with EnvClient.local(SweRepair) as client:
        for index in range(count):
            played = await play(await client.open("swe_repair", split="test" + suffix, index=index))
            assert (played.reward, played.metrics["tests_passed"]) == (1.0, 1.0), played.transcript


async def test_same_seed_plays_the_same_twice():
    async with EnvClient.local(SweRepair) as client:
        which = {"split": "test-2", "index": 4, "seed": 3}
        first, again = [await play(await client.open("swe_repair", **which)) for _ in range(2)]
        assert first == again
        assert first.reward == 1.0


def test_visible_tests_fail_before_and_pass_after_the_repair_at_level_one(start):
    environment = start()
    assert "1 failed" in environment.bash("python3 -m pytest -q")
    repair(environment)
    assert "7 passed" in environment.bash("python3 -m pytest -q")


def test_doing_nothing_and_half_a_repair_earn_nothing(start):
    for count in (0, 1):
        environment = start(level=3)
        repair(environment, count)
        done = environment.submit()
        assert done.reward == 0.0
        assert 0.0 < done.metrics["tests_passed"] < 1.0


def test_other_correct_repairs_also_pass(start):
    environment = start(level=2)
    repair(environment)
    environment.bash(
        "for f in */__init__.py; do echo 'from . import extra' >> $f; done; "
        "for d in */__init__.py; do echo 'X = 1' > ${d%__init__.py}extra.py; done; "
        "for f in */*.py; do echo 'print(\"loading\")' >> $f; done; rm -r tests README.md"
    )
    assert environment.submit().reward == 1.0


def test_tools_report_what_is_wrong(start):
    environment = start()
    path = environment.problem.edits[0][0]
    assert environment.view(path, 1, 2).splitlines()[0].startswith('   1 """')
    assert "has" in environment.view(path, 5000)
    for call in (
        lambda: environment.view("nothing.py"),
        lambda: environment.view(".."),
        lambda: environment.edit(path, "no such text", "x"),
        lambda: environment.edit(path, "return", "x"),
        lambda: environment.edit("/proc/x", "", "x"),
    ):
        with pytest.raises(ToolError):
            call()
    environment.edit("new/file.py", "", "x = 1\n")
    assert (
        environment.bash("cat new/file.py") == environment.view("/home/agent/repo/new/file.py")[5:] == "x = 1"
    )


async def test_fork_continues_with_the_same_files():
    async with EnvClient.local(SweRepair) as client:
        session = await client.open("swe_repair", split="test", index=3)
        await session.step(await session.expert())
        await session.step(await session.expert())
        (fork,) = await session.fork(1)
        result = await fork.step(ToolCall.of("submit"))
        assert result.reward == 1.0
        await session.close()


# A hostile policy

RIGHT = '{"value": true}'
INTO_PACKAGE = "for f in *.py */__init__.py; do case $f in tests*) ;; *) cat cheat >> $f;; esac; done"
CHEATS = {
    "conftest that passes all": (
        "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\n"
        "def pytest_runtest_makereport(item, call):\\n"
        '    out = yield\\n    out.get_result().outcome = "passed"\\n\' > conftest.py; cp conftest.py tests/'
    ),
    "sitecustomize": (
        "echo 'import os; os._exit(0)' > sitecustomize.py; cp sitecustomize.py usercustomize.py; "
        "m=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $m; cp *customize.py $m; "
        "cp sitecustomize.py ../; cp sitecustomize.py /usr/local/lib/python3.11/dist-packages/"
    ),
    "shadowed modules": "for m in json ast os functools pytest; do echo 'raise SystemExit(0)' > $m.py; done",
    "replaced pytest": "echo > ../.pytest.zip; mkdir pytest; echo 'raise SystemExit(0)' > pytest/__main__.py",
    "deleted tests": "rm -r tests",
    "forged reports": (
        'echo \'<testsuite tests="40" failures="0"/>\' | tee junit.xml report.xml ../junit.xml > /dev/null; '
        "echo 40 passed; exit 0"
    ),
    "replaced python": (
        "for p in python3 python bash pytest; do printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/$p; "
        "chmod +x /usr/local/bin/$p; done"
    ),
    "exit on import": f"echo 'import os; os._exit(0)' > cheat; {INTO_PACKAGE}",
    "sys.exit on import": f"echo 'import sys; sys.exit(0)' > cheat; {INTO_PACKAGE}",
    "prints outcomes": (
        f'echo \'import os\nfor f in range(3, 30):\n    try: os.write(f, b"{RIGHT}\\\\n" * 40)\n'
        f"    except OSError: pass\nos._exit(0)' > cheat; {INTO_PACKAGE}"
    ),
    "replaces the runner": (
        'echo \'import sys, json\nm = sys.modules["__main__"]\nm.outcome = lambda *a: {"value": True}\n'
        f'm.plain = lambda v: True\njson.dumps = lambda *a, **k: "passed"\' > cheat; {INTO_PACKAGE}'
    ),
    "looks for the tests": (
        'echo \'import sys\nf = sys._getframe()\nwhile f:\n    a = f.f_locals.get("asked")\n'
        '    if a: a["codes"] = ["True"] * len(a["codes"])\n    f = f.f_back\' > cheat; '
        f"{INTO_PACKAGE}"
    ),
    "equal to everything": (
        "echo 'class Any(dict):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 0\n"
        'for k, v in list(globals().items()):\n    if callable(v) and not k.startswith("_"):\n'
        f"        globals()[k] = lambda *a, **b: Any()' > cheat; {INTO_PACKAGE}"
    ),
    "links": "for f in *.py */*.py; do rm $f; ln -s /etc/passwd $f; done",
    "unreadable": "chmod 000 * ; chmod 000 .",
    "large files": f"head -c 3000000 /dev/zero | tr '\\0' '#' > cheat; {INTO_PACKAGE}",
    "endless import": f"echo 'while True: pass' > cheat; {INTO_PACKAGE}",
    "leaves a process": "(setsid sh -c 'while :; do echo x > /home/agent/repo/x; done' &) > /dev/null 2>&1",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_earns_nothing(start, monkeypatch, cheat):
    monkeypatch.setitem(sys.modules[SweRepair.__module__].GRADING, "timeout", 8.0)
    environment = start(level=2 if len(cheat) % 2 else 1)
    environment.bash(CHEATS[cheat])
    assert environment.submit().reward == 0.0


@pytest.mark.parametrize(
    "cheat", ["conftest that passes all", "shadowed modules", "replaced pytest", "deleted tests"]
)
def test_other_files_do_not_count_against_a_repair(start, cheat):
    environment = start()
    environment.bash(CHEATS[cheat])
    repair(environment)
    assert environment.submit().reward == 1.0


@pytest.mark.parametrize("code", ["while True: pass", "import os; os._exit(0)", "raise SystemExit", "1 / 0"])
def test_library_that_ends_or_hangs_the_hidden_tests_fails_them(start, monkeypatch, code):
    monkeypatch.setitem(environment_module.GRADING, "timeout", 5.0)
    environment = start()
    environment.bash(f"echo '{code}' | tee -a {environment.problem.package}*.py */*.py > /dev/null")
    assert environment.submit().reward == 0.0


@pytest.mark.parametrize("program", ["no_such_name", "import time; time.sleep(100)"])
def test_hidden_tests_that_do_not_run_fail_the_episode_and_not_the_agent(
    start, monkeypatch, tmp_path, program
):
    (tmp_path / "run.py").write_text(program)
    monkeypatch.setattr(environment_module.outcomes, "__file__", str(tmp_path / "run.py"))
    monkeypatch.setitem(environment_module.GRADING, "timeout", 1.0)
    environment = start()
    repair(environment)
    with pytest.raises(SandboxFailed, match="not even on the repaired library"):
        environment.submit()


def test_neither_hidden_tests_nor_the_repair_are_in_the_sandbox(start):
    environment = start(level=2)
    found = environment.box.snapshot()
    assert not any(code.encode() in found for code in environment.problem.hidden)
    assert environment.problem.edits[0][2].encode() not in found
    told = environment.bash(
        "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' ' '; ls -a / /home/agent"
    )
    assert "slot" not in told


@pytest.mark.parametrize("command", ["f() { f | f & }; f", "head -c 90m /dev/zero > full", "tail /dev/zero"])
def test_exhausting_the_machine_earns_nothing(start, command):
    environment = start()
    told = environment.bash(command)
    if not isinstance(told, Done):
        assert environment.submit().reward == 0.0


async def test_death_of_a_machine_fails_only_its_episode():
    async with EnvClient.local(SweRepair) as client:
        one, other = [await client.open("swe_repair", split="test", index=index) for index in (0, 1)]
        for code in ("kill -9 -1; tail /dev/zero", "f() { f | f & }; f"):
            if not one.status.final:
                await one.step(ToolCall.of("bash", command=code))
        while not other.status.final:
            result = await other.step(await other.expert())
        assert (result.reward, other.status) == (1.0, SessionStatus.COMPLETED)
        await one.close()


async def test_episodes_leave_no_process_or_folder_behind():
    def groups():
        return sorted(p for p in Path("/sys/fs/cgroup").glob(f"**/*agentrl*{os.getpid()}*") if p.is_dir())

    before = groups()
    async with EnvClient.local(SweRepair) as client:
        for index in range(2):
            assert (await play(await client.open("swe_repair", split="test-3", index=index))).reward == 1.0
    assert groups() == before
