"""Repair of small Python libraries: a report, a repository with tests, a shell, and hidden tests."""

from __future__ import annotations

import io
import json
import posixpath
import tarfile
from pathlib import Path

from agentrl_env import Done, Environment, Message, ToolCall, ToolError, tool
from agentrl_env.errors import SandboxFailed
from agentrl_env.sandbox import HOME, open_sandbox

from . import outcomes, toolbox
from .problems import LEVELS, NUM_SAMPLES, Problems, problem

REPOSITORY = f"{HOME}/repo"
LIMITS = {"memory": "256m", "disk": "48m", "pids": 48, "timeout": 30.0, "max_output": 8000}
GRADING = {"memory": "192m", "disk": "16m", "pids": 16, "timeout": 30.0, "max_output": 400_000}
MAX_LINES, MAX_CHARS = 200, 8000
"""Maximum numbers of lines and characters that ``view`` shows."""
MAX_FILES, MAX_SIZE = 64, 200_000
"""Maximum number and size of the graded source files."""
TESTS = "python3 -m pytest -qq"
"""The expert's run of the visible tests. With -qq the output has no duration."""


class SweRepair(Environment):
    """Find and repair the bugs that users report of a small Python library."""

    name = "swe_repair"
    splits = tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NUM_SAMPLES)
    max_turns = 20
    tool_timeout = reset_timeout = 180.0
    box = None

    @classmethod
    def samples(cls, split):
        """Return the problems of "train", "validation" or "test" (level 1), or of "train-2", "test-3" ..."""
        name, _, level = split.partition("-")
        return Problems(name, int(level or 1))

    def reset(self, sample, rng):
        self.data = sample.data
        self.problem = problem(self.data)
        self.done = []
        self.box = self._open()
        self.box.write_all({f"{REPOSITORY}/{path}": text for path, text in self.problem.files.items()})
        return self.problem.question

    @tool
    def bash(self, command: str):
        """Run a command in the repository with bash. Files are kept, processes are not.

        Args:
            command: Such as "ls -R", "grep -n merge *.py" or "python3 -m pytest -q".
        """
        self.done.append(command)
        done = self.box.run(command, cwd=REPOSITORY, env=toolbox.ENV)
        return done.text if self.box.alive else self._dead(done.text)

    @tool
    def view(self, path: str, first: int = 1, last: int = MAX_LINES):
        """Show lines of a file with their numbers.

        Args:
            path: The file; relative paths start in the repository.
            first: The first line.
            last: The last line; at most 200 are shown.
        """
        lines = self._read(path).splitlines()
        self.done.append(path)
        first = max(1, first)
        shown = lines[first - 1 : min(last, first + MAX_LINES - 1)]
        numbered = [f"{number:4} {line}" for number, line in enumerate(shown, first)]
        return (
            "\n".join(numbered)[:MAX_CHARS]
            or f"{path} has {len(lines)} lines; none is from {first} to {last}."
        )

    @tool
    def edit(self, path: str, old: str, new: str):
        """Replace a text of a file, which must occur exactly once.

        Args:
            path: The file; relative paths start in the repository.
            old: The text to replace, with its blanks; empty to write a new file.
            new: The text to put there.
        """
        if old:
            text = self._read(path)
            count = text.count(old)
            if count != 1:
                raise ToolError(f"The text occurs {count} times in {path}; it must occur exactly once.")
            new = text.replace(old, new)
        try:
            self.box.write(posixpath.join(REPOSITORY, path), new)
        except OSError as error:
            raise ToolError(f"{path} cannot be written: {error.strerror or error}.") from error
        return f"{path} is changed." if old else f"{path} is written."

    @tool
    def submit(self):
        """Hand in the repository as it is now. This ends the task."""
        passed = self._passed()
        share = sum(passed) / len(passed)
        note = "All hidden tests pass." if all(passed) else f"Hidden tests that fail: {passed.count(False)}."
        return Done(note, reward=float(all(passed)), metrics={"tests_passed": share})

    def close(self):
        if self.box:
            self.box.close()

    def snapshot(self):
        state = {name: value for name, value in vars(self).items() if name not in ("box", "problem")}
        return {**state, "machine": self.box.snapshot()}

    def restore(self, state):
        machine = state.pop("machine")
        vars(self).update(state)
        self.problem = problem(self.data)
        self.box = open_sandbox(**LIMITS)
        self.box.restore(machine)

    def expert(self, rng):
        """View the position of each bug, repair it, run the visible tests, and submit."""
        for path, old, new in self.problem.edits:
            try:
                text = self._read(path)
            except ToolError:
                text = ""
            if old in text:
                line = text[: text.index(old)].count("\n") + 1
                if path not in self.done:
                    first, last = max(1, line - 12), line + 12
                    return Message.assistant(
                        f"I look at {path}.", ToolCall.of("view", path=path, first=first, last=last)
                    )
                return Message.assistant("This is wrong.", ToolCall.of("edit", path=path, old=old, new=new))
        if TESTS not in self.done:
            return Message.assistant("I run the tests.", ToolCall.of("bash", command=TESTS))
        return Message.assistant("It is repaired.", ToolCall.of("submit"))

    def _open(self):
        box = open_sandbox(**LIMITS)
        try:
            toolbox.install(box)
        except BaseException:
            box.close()
            raise
        return box

    def _dead(self, text):
        return Done(f"{text}\nThe command has stopped the machine.", metrics={"tests_passed": 0.0})

    def _read(self, path):
        try:
            return self.box.read(posixpath.join(REPOSITORY, path), MAX_SIZE).decode("utf-8", "replace")
        except OSError as error:
            raise ToolError(f"{path} cannot be read: {error.strerror or error}.") from error

    def _passed(self):
        """Run the hidden tests on the submitted sources in a fresh sandbox, and return which pass.

        The sandbox has no tests or settings of the agent and no right outcomes, because outcomes are compared
        here. Raises SandboxFailed if the tests do not finish on the repaired library either.
        """
        sources = self._sources()
        self.box.close()
        lines = self._outcomes(sources)
        wanted = [json.dumps(one, sort_keys=True) for one in self.problem.expected]
        if len(lines) < len(wanted) and len(self._outcomes(self._repaired())) < len(wanted):
            raise SandboxFailed("the hidden tests do not run to their end, not even on the repaired library")
        return [found == right for found, right in zip(lines + [None] * len(wanted), wanted, strict=False)]

    def _outcomes(self, sources):
        """Return the lines that the hidden tests print for a library. A crash or hang gives fewer lines."""
        asked = {"folder": REPOSITORY, "library": self.problem.package, "codes": list(self.problem.hidden)}
        with open_sandbox(**GRADING) as box:
            try:
                box.write_all({**sources, "run.py": Path(outcomes.__file__).read_text()})
            except OSError:  # the sources do not fit
                return []
            return box.run(["python3", "-I", "-S", "run.py"], stdin=json.dumps(asked)).stdout.splitlines()

    def _repaired(self):
        """Return the files of the repaired repository: path -> content."""
        files = dict(self.problem.files)
        for path, old, new in self.problem.edits:
            files[path] = files[path].replace(old, new)
        return {f"{REPOSITORY}/{path}": text for path, text in files.items()}

    def _sources(self):
        """Return the library's source files after the agent's changes: path -> content."""
        try:
            state = self.box.snapshot() if self.box.alive else b""
        except SandboxFailed:
            if not self.box.alive:
                raise
            state = b""  # the agent has made files that cannot be read
        return library_files(state, self.problem.package) if state else {}


def library_files(state: bytes, package: str) -> dict[str, bytes]:
    """Return the Python files of a package, or of a module with its name, in a snapshot: path -> content."""
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(state)) as archive:
        for entry in archive:
            path = f"/{entry.name.removeprefix('root/')}"
            module = path == f"{REPOSITORY}/{package}.py"
            inside = path.startswith(f"{REPOSITORY}/{package}/") and path.endswith(".py")
            if entry.isreg() and (module or inside) and entry.size <= MAX_SIZE and len(found) < MAX_FILES:
                found[path] = archive.extractfile(entry).read()
    return found
