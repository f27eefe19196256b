"""Harbor task folders as a task. The target ``harbor:DIR`` serves every task folder below DIR.

A task folder has ``task.toml``, ``instruction.md``, ``environment/`` (a Dockerfile, or the files of the
working directory), ``tests/test.sh`` and, as the oracle, ``solution/solve.sh``. The model works in a
container of the task's image, as root, with a shell. Its files are then copied into another container, in
which the task's own tests compute the reward. A folder without an image is served in bubblewrap instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl

import numpy as np

from agentrl_env.bridges.harbor.folder import SHELL, HarborTask, Unusable
from agentrl_env.environment import Environment
from agentrl_env.errors import LaunchError, SandboxFailed, TargetError
from agentrl_env.launch.image import run_build
from agentrl_env.sandbox import Sandbox, open_sandbox
from agentrl_env.sandbox.docker_daemon import connect
from agentrl_env.sandbox.sandbox import OVERHEAD
from agentrl_env.tools import Done, tool
from agentrl_env.types import TaskSample, ToolCall

logger = logging.getLogger("agentrl_env")
SPLITS = ("train", "validation", "test")
"""Folders below DIR that are splits. Without them, all tasks are in the split "train"."""
DEPTH = 6
"""Number of levels below DIR to search for task folders."""
COMMAND_S = 180.0
"""Time limit of a command in seconds, unless the model sets another one."""
GRADING_S = 60.0
"""Seconds for opening and copying containers, in addition to the limits of the task."""
MAX_OUTPUT = 16_384
PIDS = 512
REWARD_JSON, REWARD_TEXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"
_builds = threading.Lock()


class NoReward(Exception):
    """Raised if tests end without a reward. The message has the reason and the end of their output."""


class HarborTasks(Environment):
    """Solve a task on a Linux machine with a shell; the task's hidden tests decide."""

    max_turns = 100
    tasks: ClassVar[Mapping[str, Mapping[str, HarborTask]]] = {}
    """Tasks by split and name."""
    network: ClassVar[bool] = True
    """False denies the model's commands any network. The tests keep the network that their task requests."""

    box: Sandbox | None = None

    @classmethod
    def samples(cls, split: str) -> list[dict[str, str]]:
        """Return the task names in alphabetical order."""
        return [{"task": name} for name in cls.tasks[split]]

    def open_box(self, task: HarborTask) -> Sandbox:
        """Open the machine of a task. Override it for remote machines. The sandbox needs ``copy``."""
        network = task.network and self.network
        if not task.needs_image:
            memory = max(task.memory, 2 * OVERHEAD)
            disk = min(task.disk, memory // 2)
            files = task.files("environment")
            options: dict[str, Any] = {"memory": memory, "disk": disk, "files": files, "network": network}
        else:
            image = task.image if not task.dockerfile else built_image(task)
            options = {"image": image, "root": True, "memory": task.memory, "disk": task.disk}
            options |= {"network": network, "background": True}
        return open_sandbox(cpus=task.cpus, pids=PIDS, timeout=COMMAND_S, max_output=MAX_OUTPUT, **options)

    def reset(self, sample: TaskSample, rng: np.random.Generator) -> str:
        """Build the image if it is missing and start the machine."""
        name = sample.data["task"]
        self.task = next(tasks[name] for tasks in self.tasks.values() if name in tasks)
        self.ran: set[str] = set()
        self.metrics: dict[str, float] = {}
        self.box = self._ready_box(self.task)
        self.began = time.monotonic()
        return self.task.instruction

    def _ready_box(self, task: HarborTask) -> Sandbox:
        box = self.open_box(task)
        try:
            if task.workdir is not None:
                made = box.run(["mkdir", "-p", task.workdir], cwd="/")
                if made.code != 0:
                    raise SandboxFailed(f"cannot create environment.workdir {task.workdir}: {made.text}")
            if task.user is not None:
                box.run("mkdir -p /solution && chmod 777 /solution")  # the oracle writes there
            if task.check is not None:
                task.check.pass_on(box, **task.options)
        except BaseException:
            box.close()
            raise
        return box

    @tool
    def shell(self, command: str, timeout: float = COMMAND_S) -> str | Done:
        """Run a command in a shell of the machine. Files stay; the working folder and variables do not.

        Args:
            command: What to run.
            timeout: Seconds after which it is killed.
        """
        assert self.box is not None
        self.ran.add(command)
        left = self.began + self.task.agent_s - time.monotonic()
        if left > 0:
            seconds = max(0.1, min(timeout, left))
            done = self.box.run([*SHELL, command], timeout=seconds, user=self.task.user, **self.task.options)
            if not self.box.alive:
                return self._grade(f"{done.text}\nThe machine has ended.")
            if self.began + self.task.agent_s > time.monotonic():
                return done.text
        return self._grade(f"The time for this task, {self.task.agent_s:g} s, is over.")

    @tool
    def submit(self) -> Done:
        """Hand in the machine's files for grading. This ends the task."""
        return self._grade("The task has been graded.")

    def respond(self, text: str) -> Done:
        """Grade the machine when the model answers without a call."""
        return self._grade("The task has been graded.")

    def score(self) -> dict[str, float]:
        """Return the metrics reported by the tests."""
        return self.metrics

    def expert(self, rng: np.random.Generator) -> ToolCall:
        """Run the task's solution, then submit."""
        command = self.task.solution()
        if command in self.ran:
            return ToolCall.of("submit")
        return ToolCall.of("shell", command=command, timeout=self.task.agent_s)

    def close(self) -> None:
        """Remove the machine."""
        if self.box:
            self.box.close()

    def _grade(self, text: str) -> Done:
        assert self.box is not None
        try:
            reward, self.metrics = grade(self.task, self.box)
        except NoReward:
            # If the tests of an untouched machine fail too, the infrastructure failed. This is not a reward.
            with self._ready_box(self.task) as untouched:
                try:
                    grade(self.task, untouched)
                except NoReward as error:
                    raise RuntimeError(
                        f"the tests of {self.task.name} report no reward for an untouched machine: {error}"
                    ) from error
            reward, self.metrics = 0.0, {"tests_ended": 0.0}
        self.metrics["success"] = float(reward >= 1.0)
        return Done(text, reward=reward)


def load(target: str) -> type[HarborTasks]:
    """Return the class that serves a folder. ``DIR?max_turns=50&network=false`` changes the two settings.

    Unsupported tasks are omitted and logged. Raises TargetError with the reasons if no task is usable.
    """
    place, _, query = target.partition("?")
    root = Path(place).expanduser()
    if not root.is_dir():
        raise TargetError(f"harbor:{target}: there is no folder {place}")
    options = dict(parse_qsl(query, keep_blank_values=True))
    turns, network = options.pop("max_turns", "100"), options.pop("network", "true")
    if options or not turns.isdecimal() or int(turns) < 1 or network not in ("true", "false"):
        raise TargetError(f"harbor:{target}: the settings are max_turns=NUMBER and network=false")
    parts = {name: root / name for name in SPLITS if (root / name).is_dir()}
    if not parts or (root / "task.toml").is_file():
        parts = {"train": root}
    tasks, reasons = {}, []
    for split, folder in parts.items():
        tasks[split], left_out = read_tasks(folder)
        reasons += left_out
    for reason in reasons:
        logger.warning("omitted: %s", reason)
    if not any(tasks.values()):
        found = "; ".join(reasons[:3]) or "no folder below it has a task.toml"
        raise TargetError(f"harbor:{target}: nothing to serve: {found}")
    every = [task for split in tasks.values() for task in split.values()]
    attributes = {
        "__doc__": HarborTasks.__doc__,
        "__module__": __name__,
        "name": re.sub(r"\W+", "_", root.resolve().name).strip("_").lower() or "harbor",
        "splits": tuple(split for split in tasks if tasks[split]),
        "tasks": {split: found for split, found in tasks.items() if found},
        "network": network == "true",
        "max_turns": int(turns),
        "reset_timeout": max(task.build_s + task.check_s for task in every) + GRADING_S,
        "tool_timeout": max(
            task.agent_s + 2 * task.verifier_s + task.build_s + task.check_s for task in every
        )
        + 2 * GRADING_S,
    }
    return type("HarborFolder", (HarborTasks,), attributes)


def read_tasks(root: Path) -> tuple[dict[str, HarborTask], list[str]]:
    """Return the tasks in or below a folder, sorted by name, and the reasons for omitted tasks."""
    tasks: dict[str, HarborTask] = {}
    reasons = []
    found = [root / "task.toml"] if (root / "task.toml").is_file() else []
    for depth in range(1, DEPTH + 1) if not found else ():
        found += root.glob("/".join(["*"] * depth) + "/task.toml")
    for path in sorted(found):
        try:
            task = HarborTask.read(path.parent)
            if task.name in tasks:
                raise Unusable(f"another task has the name {task.name}")
            tasks[task.name] = task
        except Unusable as error:
            reasons.append(f"{path.parent}: {error}")
    return dict(sorted(tasks.items())), reasons


def grade(task: HarborTask, box: Sandbox) -> tuple[float, dict[str, float]]:
    """Return the reward and the metrics that the task's tests compute for a machine's files.

    The tests run in a copy of the machine's files, without its processes, so the machine does not change.
    Raises NoReward and SandboxFailed.
    """
    if not box.alive:
        box.run("true")  # raises unless its own commands ended it
        return 0.0, {"machine_ended": 1.0}
    with box.copy(network=task.verifier_network) as judge:
        judge.run("rm -rf /tests /logs /solution")
        tests = {f"/tests/{name}": data for name, data in task.files("tests").items()}
        variables = {**task.env, **task.verifier_env}
        try:
            judge.write_all({**tests, "/logs/verifier/.keep": b""})
            test = [*SHELL, "bash /tests/test.sh"]
            done = judge.run(test, timeout=task.verifier_s, cwd=task.workdir, env=variables)
        except OSError as error:
            raise NoReward(f"the tests cannot be written: {error}") from error
        written, scalar = (_content(judge, path) for path in (REWARD_JSON, REWARD_TEXT))
    try:
        if done.timed_out:
            raise ValueError(f"test.sh was {done.note}")
        if written is None and scalar is None:
            raise ValueError("test.sh wrote neither reward.json nor reward.txt")
        return rewards(scalar or b"") if written is None else rewards(written, scalar)
    except (ValueError, RecursionError) as error:
        raise NoReward(f"{error}; its output ends with {done.text[-300:]!r}") from error


def rewards(text: bytes, scalar: bytes | None = None) -> tuple[float, dict[str, float]]:
    """Return the reward and the other numbers in a file.

    Args:
        text: a number, or an object with "reward" or a single number. Other values, such as null, are
            ignored.
        scalar: content of ``reward.txt``, if it exists. It is the reward if the object has no "reward".

    Raises ValueError if there is no reward.
    """
    value = json.loads(text)
    named = value if isinstance(value, dict) else {"reward": value}
    numbers = {name: float(number) for name, number in named.items() if _is_finite(number)}
    if "reward" not in numbers and scalar is not None:
        numbers["reward"] = rewards(scalar)[0]
    if "reward" not in numbers and ("reward" in named or len(numbers) != 1):
        raise ValueError(f"there is no finite reward in {text[:200]!r}")
    reward = numbers.pop("reward", None)
    return (numbers.popitem()[1] if reward is None else reward), numbers


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def _content(box: Sandbox, path: str) -> bytes | None:
    try:
        return box.read(path)
    except OSError:
        return None


def built_image(task: HarborTask) -> str:
    """Return the image name of a task's Dockerfile. Builds the image if the daemon does not have it.

    The name contains a hash of the folder, so a changed task gets a new image. Raises SandboxFailed.
    """
    import docker

    digest = hashlib.blake2b(digest_size=12)
    for name, data in task.files("environment").items():
        mode = (task.folder / "environment" / name).stat().st_mode & 0o111
        digest.update(f"{name}\0{mode}\0{len(data)}\0".encode() + data)
    tag = f"agentrl-harbor:{digest.hexdigest()}"
    try:
        with _builds:
            client = connect(task.build_s)
            try:
                if not client.images.list(tag):
                    context = docker.utils.build.tar(str(task.folder / "environment"))
                    with context:
                        run_build(client, context, task.name, logger.debug, custom_context=True, tag=tag)
            finally:
                client.close()
    except LaunchError as error:
        raise SandboxFailed(str(error)) from error
    return tag
