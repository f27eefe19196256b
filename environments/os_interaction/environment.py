"""OS interaction: do something with a shell on a Linux machine of its own, as in AgentBench.

The problems are generated; ``OS_INTERACTION_DATA`` adds those of AgentBench's files.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import tarfile
import threading
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path

from agentrl_env import Done, Environment, Message, TaskSample, ToolCall, Wording, tool
from agentrl_env.errors import SandboxFailed, SandboxUnavailable
from agentrl_env.sandbox import open_sandbox

from . import checks, generator, official, shell
from .problems import COMMANDS, Problem

logger = logging.getLogger("agentrl_env")
IMAGE = os.environ.get("OS_INTERACTION_IMAGE") or None
"""Container image of the machines of generated problems. By default this machine's programs are used."""
LEVELS = {f"{split}{suffix}": (level, split) for level, suffix in ((1, ""), (2, "-2"), (3, "-3"))
          for split in generator.COUNT}  # fmt: skip
FILES = official.files(os.environ.get("OS_INTERACTION_DATA", ""), taken=LEVELS)
"""AgentBench's file, or its folder. Each file is a split."""
MAX_CHARS = 800
"""Maximum length of an output that is shown completely, as in AgentBench."""
SHOWN = 780
"""Length of the shown part of a longer output, as in AgentBench."""
MAX_ANSWER = 4000
KILLS_ALL = ("timeout", "output", "pids")
"""Limits for which a sandbox also kills the problem's own programs. They are then started again."""
HOME = "/home/agent"
ROOT = {
    "cwd": "/root",
    "env": {
        "HOME": "/root",
        "USER": "root",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    },
}
"""How commands of AgentBench's problems run."""
FOUND_NOTHING = 3
SEARCH = ["python3", "-I", "-S", "-c",
          f"import re, sys; sys.exit(0 if re.search(*sys.argv[1:]) else {FOUND_NOTHING})"]  # fmt: skip
USERS = {
    "daemon": 1, "bin": 2, "sys": 3, "sync": 4, "games": 5, "man": 6, "lp": 7, "mail": 8, "news": 9,
    "uucp": 10, "proxy": 13, "www-data": 33, "backup": 34, "list": 38, "irc": 39, "nobody": 65534,
}  # fmt: skip
GROUPS = {
    "daemon": 1, "bin": 2, "sys": 3, "adm": 4, "tty": 5, "disk": 6, "lp": 7, "mail": 8, "news": 9, "uucp": 10,
    "man": 12, "proxy": 13, "cdrom": 24, "sudo": 27, "audio": 29, "www-data": 33, "backup": 34, "list": 38,
    "irc": 39, "shadow": 42, "utmp": 43, "video": 44, "plugdev": 46, "staff": 50, "games": 60, "users": 100,
    "nogroup": 65534,
}  # fmt: skip
"""The accounts of Debian."""
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]*[1-9])?")
"""A number, but not a text like 0644 or version 3.10."""
LOADED_FIRST = re.compile(
    r"/etc/ld\.so\.|/usr/local/lib/python[^/]*/[a-z]+-packages/((site|user)customize\b|[^/]*\.pth/)"
)
"""Files that the dynamic linker or Python runs before every program."""
LIMITS = {"memory": "128m", "disk": "32m", "pids": 48, "timeout": 15.0, "max_output": 4000}


@cache
def _accounts() -> dict[str, str]:
    """Return the files of the usual accounts, and the commands that change them."""
    users = "".join(f"{name}:x:{i}:{i}:{name}:/nonexistent:/usr/sbin/nologin\n" for name, i in USERS.items())
    groups = "".join(f"{name}:x:{i}:\n" for name, i in GROUPS.items())
    return {
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/bash\n{users}",
        "/etc/group": f"root:x:0:\n{groups}",
        "/usr/local/sbin/accounts": Path(__file__).with_name("accounts.py").read_text(),
    }


LINK_COMMANDS = (
    "cd /usr/local/sbin && chmod 755 accounts && for c in useradd adduser groupadd addgroup usermod userdel "
    "deluser groupdel delgroup gpasswd chown chgrp su runuser sudo passwd chpasswd; do "
    "ln -s accounts $c; done; mkdir -p /root"
)


@cache
def _records(split: str) -> list[dict[str, object]]:
    usable, unusable = official.read(FILES[split])
    for reason in unusable:
        logger.warning("os_interaction leaves a record out: %s", reason)
    return [{"problem": record} for record in usable]


trials: list[tuple[threading.Event, threading.Thread]] = []


def _try_records(environment_class, stop):
    """Log the problems of AgentBench's files whose machine cannot be set up, until ``stop`` is set."""
    for split in FILES:
        for index, data in enumerate(_records(split)):
            if stop.is_set():
                return
            environment = environment_class()
            try:
                environment.reset(TaskSample(task=environment_class.name, data=data), None)
            except SandboxUnavailable:
                return  # every session reports the error
            except SandboxFailed as error:
                logger.warning("os_interaction cannot set up sample %d of %s: %s", index, split, error)
            finally:
                environment.close()


class OsInteraction(Environment):
    """Do something with a shell on a Linux machine, or answer a question about it."""

    name = "os_interaction"
    splits = (*LEVELS, *FILES)
    max_turns = 8
    wording = Wording(
        os.environ.get("OS_INTERACTION_WORDING"),
        opening="{question}",
        output=("{result}", "output"),
        no_output="{result}",
        cut="\n(cut off)",
    )
    tool_timeout = reset_timeout = 300.0
    box = None
    expert_noise = 0.0
    """Probability that the expert only lists the files instead of a gold command, or gives a wrong answer."""

    @classmethod
    def samples(cls, split):
        """Return the problems of "train", "validation", "test" (level 1), "train-2" and so on, or a file."""
        if split in FILES:
            return _records(split)
        level, name = LEVELS[split]
        return [{"level": level, "number": number} for number in generator.numbers(name)]

    @classmethod
    def startup(cls):
        """Set up the official problems in the background, and log those that fail."""
        if FILES:
            stop = threading.Event()
            trial = threading.Thread(target=_try_records, args=(cls, stop), daemon=True)
            trials.append((stop, trial))
            trial.start()

    @classmethod
    def shutdown(cls):
        while trials:
            stop, trial = trials.pop()
            stop.set()
            trial.join()

    def reset(self, sample, rng):
        self.data = sample.data
        self.problem = _problem(sample.data)
        self.example = self.seen = None
        self.box = self._machine()
        if any(check is None for check in self.problem.checks or [self.problem]):
            self.example = self._example()
        self.shell = shell.SU if self.problem.official else ""
        if self.problem.start:
            done, _ = self._in_shell(self.problem.start)
            _check_not_killed(done, "start")
        return self.wording.opening(question=self.problem.question)

    @tool
    def bash_action(self, script: str):
        """Run a bash script and see its output. Files, the folder and variables are kept between scripts.

        Args:
            script: What to run, such as "ls" or "grep -c apple notes.txt".
        """
        done, ended = self._in_shell(script)
        self.seen = done.stdout.strip()
        if not self.box.alive:
            return Done(f"{done.text}\nThe command has stopped the machine.")
        if done.killed_by in KILLS_ALL:
            self._start(self.box)
        text = self._described(done)
        return f"{text}\n(The shell has ended. The next script runs in a new one.)" if ended else text

    @tool
    def finish_action(self, thought: str):
        """End the task when what was asked for is done. A question needs answer_action instead.

        Args:
            thought: Why the task is done.
        """
        return self._graded(None)

    @tool
    def answer_action(self, answer: str):
        """Answer the question and end the task, so be sure.

        Args:
            answer: The answer alone: a number, a name or a word.
        """
        return self._graded(answer)

    def close(self):
        if self.box:
            self.box.close()

    def snapshot(self):
        state = {name: value for name, value in vars(self).items() if name not in ("box", "problem")}
        return {**state, "machine": self.box.snapshot()}

    def restore(self, state):
        machine = state.pop("machine")
        vars(self).update(state)
        self.problem = _problem(self.data)
        self.box = self._open()
        self.box.restore(machine)
        self._start(self.box)

    def expert(self, rng):
        problem = self.problem
        asked = problem.answer is not None or problem.pattern is not None or None in (problem.checks or [])
        slip = self.expert_noise > 0 and rng.random() < self.expert_noise
        if self.seen is None and problem.gold:
            language, code = problem.gold
            code = f"python3 -c {shlex.quote(code)}" if language == "python" else code
            script = "ls" if slip else code
            return Message.assistant("Let me see.", ToolCall.of("bash_action", script=script))
        if not asked:
            return Message.assistant("It is done.", ToolCall.of("finish_action", thought="It is done."))
        text = "none" if slip else (self.example or self.seen or problem.answer or "").strip()
        return Message.assistant(f"It is {text}.", ToolCall.of("answer_action", answer=text))

    def _described(self, done):
        """Return a result as text. ``{result}`` has the exit code, and ``{output}`` does not."""
        if not (done.stdout.strip() or done.stderr.strip() or done.note):
            return self.wording.text("no_output", result=done.text)
        result, output = (
            text if len(text) <= MAX_CHARS else text[:SHOWN] + self.wording.text("cut")
            for text in (done.text, replace(done, code=0).text)
        )
        return self.wording.text("output", result=result, output=output)

    def _in_shell(self, script):
        """Run a script in the agent's shell. Return the result, and True if the shell has ended."""
        done, state = shell.run(self.box, script, self.shell, **self._manner)
        self.shell = (shell.SU if self.problem.official else "") if state is None else state
        return done, state is None

    @property
    def _manner(self):
        return ROOT if self.problem.official else {}

    def _graded(self, answer):
        problem = self.problem
        if problem.answer is not None:
            right = answer is not None and same_answer(problem.answer, answer)
        elif problem.pattern is not None:
            right = answer is not None and self._matches(answer[:MAX_ANSWER].replace("\0", "").strip())
        else:
            right = self._state_is_right(answer)
        return Done("Well done." if right else "That is not right.", reward=float(right))

    def _matches(self, answer):
        """Search for the pattern in a sandbox, because an answer could make the search take hours."""
        with self._open() as machine:
            done = machine.run([*SEARCH, self.problem.pattern, answer], cwd="/", env=checks.ENVIRONMENT)
        if done.code not in (0, FOUND_NOTHING) and not done.killed_by:
            raise SandboxFailed(f"the pattern of the problem cannot be searched for: {done.text}")
        return done.code == 0

    def _open(self):
        official = self.problem.official
        box = open_sandbox(
            image=None if official else IMAGE,
            background=official or self.problem.start is not None,
            **LIMITS,
        )
        if official:  # AgentBench's containers have no such folder
            box.run(["rmdir", HOME], cwd="/")
        return box

    def _machine(self):
        """Open the problem's machine with its files, and run the init scripts.

        Raises SandboxFailed if an init script fails. AgentBench also ends such a sample.
        """
        box = self._open()
        try:
            box.write_all({**(_accounts() if self.problem.official else {}), **self.problem.files})
            if self.problem.official:
                done = box.run(LINK_COMMANDS, cwd="/")
                if done.code != 0:
                    raise SandboxFailed(f"the commands of accounts cannot be installed: {done.text}")
            for script in self.problem.init:
                done = self._script(box, script, "init")
                if done.code != 0:
                    raise SandboxFailed(f"an init script of the problem fails: {done.text[:MAX_CHARS]}")
        except BaseException:
            box.close()
            raise
        return box

    def _script(self, box, script, name):
        """Run code of the task itself. A failure is a failure of the task and not of the agent."""
        language, code = script
        done = box.run([*COMMANDS[language], "-c", code], timeout=checks.TIMEOUT, **self._manner)
        _check_not_killed(done, name)
        return done

    def _start(self, box):
        if self.problem.start:
            self._script(box, ("bash", self.problem.start), "start")

    def _example(self):
        """Return the output of the gold command on a second machine like the agent's.

        Raises SandboxFailed if it fails without output, because the right answer is then unknown.
        """
        with self._open() as twin:
            twin.restore(self.box.snapshot())
            self._start(twin)
            done = self._script(twin, self.problem.gold, "example")
        if done.code != 0 and not done.stdout.strip():
            raise SandboxFailed(f"the example script of the problem fails: {done.text[:MAX_CHARS]}")
        return done.stdout

    def _state_is_right(self, answer):
        """Check a clean machine with the agent's files and without its processes.

        For generated problems, only the files in the home folder are copied, so that the agent cannot
        replace programs of the machine.
        """
        try:
            state = self.box.snapshot() if self.box.alive else None
        except SandboxFailed:
            if not self.box.alive:
                raise
            state = None  # the agent has made files that cannot be read
        self.box.close()
        if state is None:
            return False
        with self._open() as machine:
            machine.restore(_kept(state, official=self.problem.official))
            return self._outputs(machine) if self.problem.outputs else self._checks(machine, answer)

    def _outputs(self, machine):
        return all(machine.run(code).stdout == wanted for code, wanted in self.problem.outputs)

    def _checks(self, machine, answer):
        """Run the checks as in AgentBench. Each check gets the answer and the output of the previous checks.

        The output of the example is a right answer even if the check fails to parse it. If there is no other
        check, it is the only right answer. If the output is empty, the answer must be empty too.
        """
        if None in self.problem.checks:
            right, given = self.example.strip(), (answer or "").strip()
            if right == given and (right or answer is not None):
                return True
            if not any(self.problem.checks) or not (right or given):
                return bool(right and given) and same_answer(right, given)
        text = (answer or "")[:MAX_ANSWER].replace("\0", "")
        check, done = self._first_failure(machine, text)
        if check is None:
            return True
        if checks.crashed(check, done) and self._is_broken():
            raise SandboxFailed(f"a check of the problem crashes: {done.text[-MAX_CHARS:]}")
        return False

    def _first_failure(self, machine, answer):
        """Run the checks until one fails. Return this check and its result, or None twice."""
        given = [answer]
        for check in self.problem.checks:
            if check is None:
                given.append(self.example)
                continue
            done = checks.run(machine, check, given)
            if done.code != 0:
                return check, done
            given.append(done.stdout)
        return None, None

    def _is_broken(self):
        """Return True if the checks also crash without the agent, on another machine with the right answer.

        If no script produces the right state, only crashes that it would not prevent count.
        """
        with self._machine() as machine:
            known = None in self.problem.checks
            if not known and self.problem.gold:
                known = self._script(machine, self.problem.gold, "example").code == 0
            check, done = self._first_failure(machine, self.example or "")
        if check is None:
            return False
        return checks.crashed(check, done) if known else checks.defective(check, done)


def _check_not_killed(done, name):
    if done.killed_by:
        raise SandboxFailed(f"the {name} script of the problem was {done.note}")


def same_answer(right: str, given: str) -> bool:
    """Return True if an answer is right: the same text or number, or the last part of a path."""
    given, right = given[:MAX_ANSWER].strip(), right.strip()
    if given == right:
        return True
    given, right = (text.strip("'\"`").rstrip(".").strip() for text in (given, right))
    if NUMBER.fullmatch(right) and re.fullmatch(r"-?[0-9]{1,30}(\.[0-9]{1,30})?", given):
        return Decimal(given) == Decimal(right)
    return right != "" and right in (given, given.rsplit("/", 1)[-1])


def _problem(data):
    if "problem" in data:
        return Problem(**data["problem"])
    return generator.generate(data["level"], data["number"])


def _kept(state: bytes, *, official: bool) -> bytes:
    """Return a snapshot of the agent's home, or for official problems, of all files that are safe to copy.

    For example, a library in ``/etc/ld.so.preload`` would be loaded into every program of the checks.
    """
    kept = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(state)) as old, tarfile.open(fileobj=kept, mode="w") as new:
        for entry in old:
            name = entry.name.removeprefix("root/")  # a container's snapshot has no layers
            path = f"/usr/{name}/" if name.startswith("local/") else f"/{name}/"
            if not LOADED_FIRST.match(path) if official else path.startswith(f"{HOME}/"):
                new.addfile(entry, old.extractfile(entry) if entry.isreg() else None)
    return kept.getvalue()
