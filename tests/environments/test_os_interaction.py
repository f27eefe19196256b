"""The os_interaction task in real sandboxes: generated problems, AgentBench's problems, and cheating."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl_env import EnvClient, SessionStatus, TaskSample, ToolCall
from agentrl_env.errors import DefinitionError, SandboxFailed, SandboxUnavailable
from agentrl_env.hosting.loader import load_target
from agentrl_env.sandbox.bubblewrap import check_available
from tests.environments import agentbench
from tests.environments.play import play
from tests.processes import until

pytestmark = pytest.mark.environments

OsInteraction = load_target(str(Path(__file__).parents[2] / "environments" / "os_interaction"))
PACKAGE = OsInteraction.__module__.rpartition(".")[0]
environment_module = sys.modules[OsInteraction.__module__]
generator, official = sys.modules[f"{PACKAGE}.generator"], sys.modules[f"{PACKAGE}.official"]
try:
    check_available()
except SandboxUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

every_level = pytest.mark.parametrize("level", [1, 2, 3])
FAMILIES = [(level, family) for level, families in generator.FAMILIES.items() for family in families]


@pytest.fixture
def start():
    """Start an episode of a problem. It is closed when the test ends."""
    opened = []

    def started(**data):
        environment = OsInteraction()
        opened.append(environment)
        environment.reset(TaskSample(task="os_interaction", seed=1, data=data), np.random.default_rng(1))
        return environment

    yield started
    for environment in opened:
        environment.close()


def of_family(family):
    """Return the level and index of a test problem of a family."""
    level = next(level for level, families in generator.FAMILIES.items() if family in families)
    asked = family(np.random.default_rng(0)).question.split()[:2]
    found = (
        n for n in generator.numbers("test") if generator.generate(level, n).question.split()[:2] == asked
    )
    return {"level": level, "number": next(found)}


@pytest.mark.parametrize(("level", "family"), FAMILIES, ids=lambda value: getattr(value, "__name__", value))
def test_gold_solution_succeeds_and_doing_nothing_fails(start, level, family):
    which = of_family(family)
    environment = start(**which)
    gold = environment.expert(None).tool_calls[0]
    environment.bash_action(**json.loads(gold.function.arguments))
    answer = environment.problem.answer
    assert answer is None or environment.seen == answer
    done = (
        environment.finish_action("done") if answer is None else environment.answer_action(environment.seen)
    )
    assert done.reward == 1.0
    for answer in (None, "", "done"):
        idle = start(**which)
        assert (idle.finish_action("done") if answer is None else idle.answer_action(answer)).reward == 0.0


@pytest.mark.slow
@every_level
async def test_expert_always_succeeds(level):
    suffix = f"-{level}" if level > 1 else ""
    async with EnvClient.local(OsInteraction) as client:
        for split in ("train", "validation", "test"):
            for index in range(70):
                assert (await play(await client.open("os_interaction", split=split + suffix, index=index)))[
                    1
                ] == 1.0


async def test_noisy_expert_fails_in_a_part_of_its_episodes():
    noisy = type("Noisy", (OsInteraction,), {"name": "os_interaction", "expert_noise": 0.5})
    async with EnvClient.local(noisy) as client:
        rewards = [(await play(await client.open("os_interaction", index=index)))[1] for index in range(16)]
    assert set(rewards) == {0.0, 1.0}


@pytest.mark.parametrize("suffix", ["", "-2", "-3"])
async def test_same_seed_plays_the_same_twice(suffix):
    async with EnvClient.local(OsInteraction) as client:
        which = {"split": f"test{suffix}", "index": 5, "seed": 3}
        first, again = [await play(await client.open("os_interaction", **which)) for _ in range(2)]
        assert first == again
        assert first[1] == 1.0


def test_first_or_last_line_of_a_log_is_rarely_the_answer():
    problems = [generator.log_top(np.random.default_rng(number)) for number in range(300)]
    for place in (0, -1):
        right = sum(p.answer == p.files["access.log"].splitlines()[place].split()[0] for p in problems)
        assert right < 150


def test_number_of_logins_is_never_the_number_of_users():
    for number in range(100):
        problem = generator.distinct(np.random.default_rng(number))
        day = problem.question.rstrip("?.").split()[-1]
        lines = problem.files["events.csv"].splitlines()
        logins = [line for line in lines if line.startswith(f"{day},") and line.endswith(",login")]
        assert len(logins) > int(problem.answer) > 0


@pytest.mark.parametrize("count", [300, pytest.param(None, marks=pytest.mark.slow)])
@every_level
def test_problems_are_distinct_and_splits_share_none(level, count):
    seen = [
        {repr(generator.generate(level, n)) for n in generator.numbers(split)[:count]}
        for split in generator.COUNT
    ]
    assert [len(found) for found in seen] == [count or c for c in generator.COUNT.values()]
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_there_are_many_families_and_every_test_split_has_all_of_its_level():
    assert len(FAMILIES) >= 8
    for _, family in FAMILIES:
        assert of_family(family)


def dev():
    return agentbench.folder("os_interaction")


def test_development_problems_load():
    assert list(official.files(str(dev()))) == ["dev"]
    usable, unusable = official.read(dev() / "data" / "dev.json")
    assert (len(usable), unusable) == (26, [])


QUICK = {0, 3, 8, 15, 18, 25}


@pytest.mark.parametrize(
    "number", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(26)]
)
def test_development_problem_runs_with_its_own_check_or_match(start, number):
    data = {"problem": official.read(dev() / "data" / "dev.json")[0][number]}
    environment = start(**data)
    gold, checks = environment.problem.gold, environment.problem.checks
    if checks and None not in checks:
        environment.bash_action(gold[1])
    answer = (environment.example or environment.problem.answer or "").strip()
    assert answer or (checks and None not in checks)
    assert environment.answer_action(answer).reward == 1.0
    if number == 8 and "." in answer:
        return  # the check cannot read a decimal point, which is a failure and not a wrong answer
    for wrong in [f"{answer}7", None] if number % 5 == 3 else [f"{answer}7"]:
        other = start(**data)
        assert (other.finish_action("") if wrong is None else other.answer_action(wrong)).reward == 0.0


RECORD = {"description": "What is in a?", "create": {"init": "echo 5 > a"}, "evaluation": {"match": "5"}}
CHECKED = {"check": [None, {"language": "python", "code": "import sys; sys.exit(sys.argv[1] != '5')"}],
           "example": "cat a"}  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        {**RECORD, "create": {"init": {"code": "echo 5 > a"}}},
        {**RECORD, "create": {"init": {"language": "python", "code": "print(5, file=open('a', 'w'))"}}},
        {**RECORD, "evaluation": {"match": 5}},
        {**RECORD, "evaluation": {"match": {"regex": "[45]$"}}},
        {**RECORD, "evaluation": {"match": {"answer": 5.0, "strip": True}}},
        {**RECORD, "create": {"init": ["echo 4 > a", None, {"code": "echo 5 > a"}]}},
        {**RECORD, "evaluation": {"check": [None], "example": ["cd /root", {"code": "cat a"}]}},
        {**RECORD, "start": ["sleep 100 &", {"code": "sleep 99 &"}], "evaluation": CHECKED},
        {
            **RECORD,
            "description": "What is in \ud83d a?",
            "create": {"init": "echo '\ud83d' > b; echo 5 > a"},
        },
        {**RECORD, "evaluation": CHECKED},
        {**RECORD, "evaluation": CHECKED, "start": "sleep 100 &"},
        {**RECORD, "evaluation": {"check": CHECKED["check"]}, "example": {"code": "cat a"}},
        {**RECORD, "evaluation": {"check": "[ $(cat a) = $1 ]"}, "labels": None},
        {"description": "?", "create": [None], "evaluation": {"match": "5"}},
    ],
)
def test_dirty_records_load_and_are_graded(start, record):
    data = {"problem": json.loads(json.dumps(official.problem(record, None)))}
    for answer, reward in (("5", 1.0), ("6", 0.0)):
        assert start(**data).answer_action(answer).reward == reward


INTEGER = "from sys import argv\nif int(argv[1]) == int(argv[2]): exit(0)\nexit(1)"
STRING = "from sys import argv\nif argv[1].strip() == argv[2].strip(): exit(0)\nelse: quit(1)"
CONTAINS = "import sys\nexit(0 if sys.argv[2].strip() in sys.argv[1] else 'no')"


@pytest.mark.parametrize(
    ("code", "right", "wrong"),
    [(INTEGER, " 05", "6"), (INTEGER, "5", "five"), (STRING, " 5\t", "05"), (CONTAINS, "it is 5", "6")],
)
def test_python_checks_have_the_builtins_of_a_normal_interpreter(start, code, right, wrong):
    evaluation = {"check": [None, {"language": "python", "code": code}], "example": "cat a"}
    data = {"problem": official.problem({**RECORD, "evaluation": evaluation}, None)}
    for answer, reward in ((right, 1.0), (wrong, 0.0)):
        assert start(**data).answer_action(answer).reward == reward


def test_checks_get_their_arguments_as_from_agentbench(start):
    python = "import sys\nassert sys.argv[0] == '-c' and __name__ == '__main__'\nprint(sys.argv[1] * 2)"
    bash = 'read -r twice <<< "$2"; [ "$0 $1 $twice $PWD" = "-- 5 55 /root" ]'
    check = [{"language": "python", "code": python}, {"code": bash}]
    environment = start(problem=official.problem({**RECORD, "evaluation": {"check": check}}, None))
    assert environment.answer_action("5").reward == 1.0


def test_python_check_can_import_the_agents_modules_but_no_replaced_modules(start):
    code = "import solution, textwrap\nexit(solution.double(2) != 4 or not textwrap.dedent)"
    evaluation = {"check": {"language": "python", "code": code}}
    data = {"problem": official.problem({**RECORD, "evaluation": evaluation}, None)}
    for factor, reward in ((2, 1.0), (3, 0.0)):
        environment = start(**data)
        environment.bash_action(
            f"echo 'double = lambda n: n * {factor}' > solution.py; echo 1/0 > textwrap.py"
        )
        assert environment.finish_action("done").reward == reward


PYTHON_CRASHES = ["import no_such_module", "undefined_name", "if:", "raise RuntimeError", "int('x')"]


@pytest.mark.parametrize(
    "check",
    [
        *({"language": "python", "code": code} for code in PYTHON_CRASHES),
        "no_such_program",
        "if",
        "kill -9 $$",
    ],
)
def test_crashing_check_fails_the_episode_and_is_not_a_wrong_answer(start, check):
    evaluation = {"check": [None, check], "example": "cat a"}
    environment = start(problem=official.problem({**RECORD, "evaluation": evaluation}, None))
    with pytest.raises(SandboxFailed, match="a check of the problem crashes"):
        environment.answer_action("05")


@pytest.mark.parametrize("gold", [None, "echo 7 > b"])
def test_check_of_a_state_is_only_broken_if_the_right_state_does_not_help(start, gold):
    def graded(code):
        record = {**RECORD, "evaluation": {"check": {"language": "python", "code": code}, "example": gold}}
        return start(problem=official.problem(record, None)).finish_action("done").reward

    assert graded("exit(int(open('b').read()) != 7)") == 0.0
    with pytest.raises(SandboxFailed, match="a check of the problem crashes"):
        graded("exit(int(open('b').read()) != 7 or undefined_name)" if gold else "undefined_name")


def test_check_that_exceeds_its_time_fails_the_episode_unless_the_agent_is_why(start, monkeypatch):
    monkeypatch.setattr(sys.modules[f"{PACKAGE}.checks"], "TIMEOUT", 1.0)
    slow = {**RECORD, "evaluation": {"check": "sleep 100", "example": "echo 7 > b"}}
    with pytest.raises(SandboxFailed, match="a check of the problem crashes"):
        start(problem=official.problem(slow, None)).finish_action("done")
    program = {**RECORD, "evaluation": {"check": "bash b", "example": "echo true > b"}}
    environment = start(problem=official.problem(program, None))
    environment.bash_action("echo 'sleep 100' > b")
    assert environment.finish_action("done").reward == 0.0


@pytest.mark.parametrize(
    "init",
    ["touch /root/made; false", "no_such_program", ["true", {"language": "python", "code": "1 / 0"}]],
)
def test_failing_init_script_fails_the_episode(start, init):
    record = {**RECORD, "create": {"init": init}, "evaluation": {"check": "test -e /root/made"}}
    with pytest.raises(SandboxFailed, match="an init script of the problem fails"):
        start(problem=official.problem(record, None))


def test_records_that_cannot_be_set_up_are_logged_when_the_environment_starts(tmp_path, monkeypatch, caplog):
    failing = {**RECORD, "create": {"init": "echo no space >&2; exit 4"}}
    silent = {**RECORD, "evaluation": {"check": [None], "example": "no_such_program"}}
    (tmp_path / "some.json").write_text(json.dumps([RECORD, failing, silent, RECORD]))
    monkeypatch.setitem(environment_module.FILES, "some", tmp_path / "some.json")
    OsInteraction.startup()
    until(lambda: "sample 2 of some" in caplog.text)
    OsInteraction.shutdown()
    assert "cannot set up sample 1 of some: an init script of the problem fails: no space" in caplog.text
    assert "cannot set up sample 2 of some: the example script of the problem fails" in caplog.text
    assert caplog.text.count("cannot set up") == 2


def bash(environment, script):
    return environment.bash_action(script)


@pytest.fixture
def root(start):
    """Start an episode with the agent as root and a program that writes to /root/log."""
    writer = "(while sleep 0.05; do echo on >> /root/log; done) > /dev/null 2>&1 &"
    record = {**RECORD, "create": {"init": "useradd -m jack"}, "start": f"word=start; cd /tmp; {writer}"}
    return start(problem=official.problem(record, None))


def test_shell_keeps_folder_variables_and_functions_of_start_and_all_scripts(root):
    assert bash(root, "echo $word; pwd") == "start\n/tmp"
    bash(
        root, "cd /var/log; export A='x  y'; list=(1 '2 3'); f() { echo \"f $1\"; }; alias g='f z'; umask 077"
    )
    bash(root, "false")
    assert bash(root, 'pwd; echo "$A" "${list[1]}"; f 1; g; umask') == "/var/log\nx  y 2 3\nf 1\nf z\n0077"
    assert bash(root, "cd /srv; nothing\necho $(env | grep -c ^A=)\nnothing") == (
        "1\n/bin/bash: line 1: nothing: command not found\n"
        "/bin/bash: line 3: nothing: command not found\n(exit code 127)"
    )
    assert bash(root, "cd -") == "/var/log"


def test_generated_problems_also_keep_one_shell(start):
    environment = start(**of_family(generator.count_lines))
    bash(environment, "mkdir deep; cd deep; x=5")
    assert bash(environment, "pwd; echo $x") == "/home/agent/deep\n5"


@pytest.mark.parametrize("end", ["exit 3", "kill -9 $$", "set -e; false", "exec true"])
def test_script_that_ends_the_shell_starts_a_new_shell_with_a_note(root, end):
    assert bash(root, f"x=1; cd /srv; {end}").endswith(
        "(The shell has ended. The next script runs in a new one.)"
    )
    assert bash(root, "echo [$x]; pwd") == "[]\n/root"


def test_killed_script_leaves_the_shell_and_the_problems_programs(root, monkeypatch):
    bash(root, "cd /srv; x=1")
    monkeypatch.setattr(root.box, "limits", replace(root.box.limits, timeout=1.0))
    assert "ran longer than 1 s" in bash(root, "cd /opt; x=2; sleep 100")
    assert bash(root, "echo $x; pwd") == "1\n/srv"
    more = "a=$(wc -l < /root/log); until [ $(wc -l < /root/log) -gt $a ]; do sleep 0.02; done; echo more"
    monkeypatch.setattr(root.box, "limits", replace(root.box.limits, timeout=60.0))
    assert bash(root, more) == "more"


def test_processes_of_the_agent_run_until_the_next_script_as_in_one_shell(root):
    bash(root, "(until [ -e go ]; do sleep 0.02; done; echo late > here) > /dev/null 2>&1 &")
    assert bash(root, "touch go; until [ -s here ]; do sleep 0.02; done; cat here") == "late"


def test_shell_survives_a_fork(root):
    bash(root, "cd /srv; x='a\nb'")
    state = root.snapshot()
    twin = OsInteraction()
    try:
        twin.restore(state)
        assert bash(twin, 'pwd; echo "$x"') == "/srv\na\nb"
    finally:
        twin.close()


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("su jack -c 'echo $USER $HOME; pwd'", "jack /home/jack\n/root"),
        ("su - jack -c pwd", "/home/jack"),
        ("su --login --command='echo $USER' jack", "jack"),
        ("su jack -s /bin/sh -c 'echo $LOGNAME'", "jack"),
        ("su jack <<< 'echo in $USER'", "in jack"),
        ("su -c 'echo $USER'", "root"),
        ("runuser -u jack -- printenv USER", "jack"),
        ("runuser -l jack -c pwd", "/home/jack"),
        ("su nobody2", "su: user nobody2 does not exist\n(exit code 1)"),
    ],
)
def test_su_and_runuser_run_commands_for_another_user(root, script, shown):
    assert bash(root, f"cd /root; {script}") == shown


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        (
            "useradd --shell /bin/zsh --uid 1500 ann && grep ^ann /etc/passwd",
            "ann:x:1500:1500::/home/ann:/bin/zsh",
        ),
        ("adduser --disabled-password --gecos 'A B' ann && ls -d ~ann /home/ann", "/home/ann\n/home/ann"),
        ("addgroup team && adduser jack team && getent group team", "team:x:1001:jack"),
        ("groupadd team; gpasswd -a jack team; gpasswd -d jack team; getent group team", "team:x:1001:"),
        ("usermod --append --groups sudo jack && id -nG jack", "jack sudo"),
        ("deluser --remove-home jack; ls /home; getent passwd jack; true", "(no output)"),
        ("useradd jack", "useradd: user 'jack' already exists\n(exit code 1)"),
    ],
)
def test_commands_of_accounts_take_the_options_of_scripts(root, script, shown):
    assert bash(root, script) == shown


def test_start_script_that_does_not_end_fails_the_episode(start, monkeypatch):
    monkeypatch.setitem(environment_module.LIMITS, "timeout", 1.0)
    with pytest.raises(SandboxFailed, match="the start script of the problem was killed"):
        start(problem=official.problem({**RECORD, "start": "sleep 100"}, None))


def test_su_without_a_command_lasts_until_exit(root):
    bash(root, "su - jack")
    assert bash(root, "echo $USER; pwd") == "jack\n/home/jack"
    bash(root, "exit")
    assert bash(root, "echo $USER; pwd") == "root\n/root"


def test_machine_looks_like_a_normal_machine(start):
    # Without the writer: find stops if a process ends while it reads /proc.
    root = start(problem=official.problem({**RECORD, "create": {"init": "useradd -m jack"}}, None))
    assert bash(root, "ls -A /home /dev/shm") == "/dev/shm:\n\n/home:\njack"
    assert bash(root, "echo 1 > /var/log/x.conf; find / -name x.conf 2>/dev/null; true") == "/var/log/x.conf"


def test_pattern_can_match_anywhere_in_the_answer_and_cannot_hang_the_server(start):
    record = {**RECORD, "evaluation": {"match": {"regex": r"\b5\b"}}}
    for answer, reward in (("It is 5.", 1.0), ("It is 55.", 0.0)):
        environment = start(problem=official.problem(record, None))
        assert environment.answer_action(answer).reward == reward
    slow = start(problem=official.problem({**RECORD, "evaluation": {"match": {"regex": "^(a+)+$"}}}, None))
    assert slow.answer_action("a" * 3000 + "b").reward == 0.0


def test_ubuntu_image_has_its_file(start):
    record = {
        **RECORD,
        "create": {"local": "ubuntu"},
        "evaluation": {"check": [None], "example": "cat /file.txt"},
    }
    environment = start(problem=official.problem(record, None))
    assert "tmp" in environment.bash_action("cat file.txt")
    assert environment.answer_action("tmp").reward == 1.0


@pytest.mark.parametrize(
    ("right", "given", "same"),
    [
        ("5", "5.0", True),
        ("3.10", "3.1", False),
        ("0644", "644", False),
        ("123456789012345678901", "123456789012345678902", False),
        (".", ".", True),
        (".", "", False),
        ("log", "/root/log", True),
        ("log", "`log`", True),
    ],
)
def test_answers_are_compared_as_text_numbers_or_the_end_of_a_path(right, given, same):
    assert environment_module.same_answer(right, given) is same


def test_example_that_prints_nothing_gives_no_reward_for_doing_nothing(start):
    equal = {"language": "python", "code": "import sys; sys.exit(sys.argv[1].strip() != sys.argv[2].strip())"}
    for check in ([None], [None, equal]):
        record = {**RECORD, "evaluation": {"check": check, "example": "true"}}
        assert start(problem=official.problem(record, None)).finish_action("done").reward == 0.0
        assert start(problem=official.problem(record, None)).answer_action("5").reward == 0.0
    failing = {**RECORD, "evaluation": {"check": [None, equal], "example": "cat missing"}}
    with pytest.raises(SandboxFailed, match="the example script of the problem fails"):
        start(problem=official.problem(failing, None))


def test_broken_file_does_not_affect_the_others(tmp_path):
    written = {
        "data/1/stock.json": json.dumps(RECORD),
        "data/train.json": json.dumps([RECORD, RECORD]),
        "data/lines.jsonl": json.dumps(RECORD) + "\n{oops\n" + json.dumps(RECORD),
        "data/deep.json": "[" * 100_000,
    }
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "data/gone.json").symlink_to(tmp_path / "missing")
    found = official.files(str(tmp_path), taken=OsInteraction.splits)
    counts = {split: [len(records) for records in official.read(path)] for split, path in found.items()}
    assert counts == {"1-stock": [1, 0], "official-train": [2, 0], "lines": [2, 1], "deep": [0, 1]}
    assert "record 2" in official.read(found["lines"])[1][0]
    assert official.read(tmp_path / "missing.json")[1] == [
        "missing.json cannot be read: No such file or directory"
    ]
    with pytest.raises(DefinitionError, match="OS_INTERACTION_DATA="):
        official.files(str(tmp_path / "missing.json"))


def test_unusable_records_are_named_with_the_reason(tmp_path):
    records = [
        RECORD,
        7,
        {**RECORD, "description": None},
        {**RECORD, "evaluation": None},
        {**RECORD, "evaluation": {"check": [None, "true"]}},
        {**RECORD, "evaluation": {"check": {"file": "../../etc/passwd"}}},
        {**RECORD, "evaluation": {"check": {"language": "c++", "code": "int main() {}"}}},
        {**RECORD, "evaluation": {"match": {"regex": "("}}},
        {**RECORD, "start": 7},
        {**RECORD, "evaluation": {"match": ["5", "6"]}},
        {**RECORD, "evaluation": {"match": {"answer": " "}}},
        {**RECORD, "evaluation": {"check": [], "example": "cat a"}},
        {**RECORD, "evaluation": {"check": {"file": "check/\0.sh"}}},
        {**RECORD, "evaluation": {"check": {"file": "x" * 5000}}},
    ]
    (tmp_path / "std.json").write_text(json.dumps(records))
    usable, unusable = official.read(tmp_path / "std.json")
    assert len(usable) == 1
    reasons = (
        "no JSON object",
        "no description",
        "neither a match",
        "an example",
        "passwd",
        "c++",
        "regular",
        "7",
        "neither text nor a number",
        "neither text nor a number",
        "neither a match",
        "cannot be read",
        "cannot be read",
    )
    for number, (sentence, reason) in enumerate(zip(unusable, reasons, strict=True), 2):
        assert f"std.json, record {number}:" in sentence
        assert reason in sentence
    (tmp_path / "std.json").write_text("[{")
    assert official.read(tmp_path / "std.json")[1][0].startswith("std.json is not JSON")


def state_problem():
    return of_family(generator.move)


CHEATS = {
    "reads the checks": "cat /check/* /proc/*/environ /proc/*/cmdline 2>/dev/null; ls -R / 2>/dev/null",
    "replaces programs": (
        "mkdir -p bin; for p in find md5sum sort bash echo; do printf '#!/bin/sh\\nexit 0\\n' > bin/$p; "
        "cp bin/$p /usr/local/bin; chmod +x bin/$p /usr/local/bin/$p; done; echo 'find() { :; }' >.bashrc; "
        "cp .bashrc .bash_profile; cp .bashrc .profile; ln -s /usr/local/bin/find /bin/find 2>/dev/null"
    ),
    "leaves a process": "(setsid sh -c 'while :; do echo right; sleep 0.1; done' &) > /dev/null 2>&1",
    "makes files unreadable": "chmod 000 *; chmod 000 .",
    "fills the disk": "head -c 60m /dev/zero > full; cat full full > more",
    "forks": "f() { f | f & }; f",
    "writes outside": "echo x > /usr/bin/find; mkdir /check; echo 'exit 0' > /check/0; rm -rf /usr/share/*",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_on_a_state_gains_nothing(start, cheat):
    environment = start(**state_problem())
    told = environment.bash_action(CHEATS[cheat])
    expected = [wanted for _, wanted in environment.problem.outputs]
    assert all(wanted not in str(told) for wanted in expected)
    if environment.box.alive:
        assert environment.finish_action("All checks passed.").reward == 0.0


@pytest.mark.parametrize("check", [{"language": "python", "code": "raise SystemExit(1)"}, "python3 -c 1/0"])
def test_replaced_programs_do_not_pass_an_official_check(start, check):
    environment = start(problem=official.problem({**RECORD, "evaluation": {"check": check}}, None))
    environment.bash_action(
        "modules=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $modules; "
        "echo 'import os; os._exit(0)' > $modules/usercustomize.py; "
        "for m in $(python3 -c 'import site; print(*site.getsitepackages())'); do mkdir -p $m 2>/dev/null && "
        "echo 'import os; os._exit(0)' | tee $m/sitecustomize.py > $m/a.pth; done; "
        "for p in python3 env bash; do printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/$p; "
        "chmod +x /usr/local/bin/$p; cp /usr/local/bin/$p /usr/local/sbin/; done; mkdir -p /check; "
        "echo > /check/sitecustomize.py; echo 'raise SystemExit(0)' > site.py; cp site.py os.py"
    )
    assert environment.answer_action("5").reward == 0.0


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_preloaded_library_does_not_pass_an_official_check(start):
    record = {**RECORD, "evaluation": {"check": {"language": "python", "code": "raise SystemExit(1)"}}}
    environment = start(problem=official.problem(record, None))
    environment.bash_action(
        "echo '#include <unistd.h>\n__attribute__((constructor)) void f(void) { _exit(0); }' | "
        "sed 's/\\\\n/\\n/' | gcc -x c -shared -fPIC -o /root/x.so - && echo /root/x.so > /etc/ld.so.preload"
    )
    assert "/root/x.so" in environment.box.read("/etc/ld.so.preload").decode()
    assert environment.answer_action("5").reward == 0.0


def test_example_does_not_run_on_the_agents_machine(start):
    environment = start(problem=official.problem({**RECORD, "evaluation": CHECKED}, None))
    assert environment.example == "5\n"
    environment.bash_action("echo 6 > a; printf 'echo 6' > /usr/local/bin/cat")
    assert environment.answer_action("6").reward == 0.0


async def test_death_of_a_machine_fails_only_its_episode():
    async with EnvClient.local(OsInteraction) as client:
        one, other = [await client.open("os_interaction", split="test", index=index) for index in (0, 1)]
        for code in ("kill -9 -1; tail /dev/zero", "f() { f | f & }; f"):
            if not one.status.final:
                await one.step(ToolCall.of("bash_action", script=code))
        while not other.status.final:
            result = await other.step(await other.expert())
        assert (result.reward, other.status) == (1.0, SessionStatus.COMPLETED)
        await one.close()


async def test_episodes_leave_no_process_or_folder_behind():
    def groups():
        return sorted(p for p in Path("/sys/fs/cgroup").glob(f"**/*agentrl*{os.getpid()}*") if p.is_dir())

    before = groups()
    async with EnvClient.local(OsInteraction) as client:
        for index in range(6):
            assert (await play(await client.open("os_interaction", split="test-3", index=index)))[1] == 1.0
    assert groups() == before
