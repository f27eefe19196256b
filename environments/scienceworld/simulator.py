"""ScienceWorld's simulator: Java processes for sessions, a few idle ones, and one for gold paths."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from threading import Lock
from typing import NamedTuple

OPTIONS = (
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    # The simulator lists things in the order of hash sets. A constant hash makes episodes reproducible.
    *("-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"),
)
"""Options of Java: one thread for garbage collection, one quick compiler, no file for each process."""
SESSION_MB, GOLD_MB = 128, 400
"""Heap memory of a session's process, and of the process that computes gold paths."""
ANSWER_SECONDS = 240
LIMIT = int(os.environ.get("SCIENCEWORLD_PROCESSES", "64"))
"""Maximum number of open Java processes of one server process."""
IDLE = 4
"""Number of idle Java processes to keep for new sessions."""
EPISODES = 100
"""Number of episodes after which a Java process is replaced."""
GOLD_PATHS = 4_096
"""Number of gold paths to cache."""

logging.getLogger("py4j").setLevel(logging.CRITICAL)  # errors are raised here as SimulatorFailed


class SimulatorFailed(RuntimeError):
    """The simulator cannot start, or the Java process of a session crashed, hung or reported an error."""


class Seen(NamedTuple):
    """The simulator's text, its score (1 at the end, below 0 after a fatal mistake), and whether it ended."""

    text: str
    score: float
    completed: bool


class Simulator:
    """One Java process, which simulates one episode at a time. Raises SimulatorFailed."""

    def __init__(self, *, heap_mb: int = SESSION_MB) -> None:
        self.episodes, self.usable = 0, True
        try:
            from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
            from scienceworld.constants import JAR_PATH
        except ImportError as error:
            raise SimulatorFailed(f"{error}: pip install 'agentrl-kit[scienceworld]'") from error
        home = os.environ.get("JAVA_HOME")
        java = shutil.which(os.path.join(home, "bin", "java") if home else "java")
        if java is None:
            raise SimulatorFailed(
                "there is no java: install Java 8 or newer, such as Debian's package default-jre-headless"
            )
        self.folder = tempfile.TemporaryDirectory(prefix="scienceworld-")  # the simulator writes a list there
        try:
            # The process ends when its standard input closes, which happens when this process ends.
            port, token, self.process = launch_gateway(
                classpath=JAR_PATH,
                javaopts=[f"-Xmx{heap_mb}m", *OPTIONS],
                java_path=java,
                cwd=self.folder.name,
                die_on_exit=True,
                enable_auth=True,
                return_proc=True,
            )
        except (OSError, ValueError) as error:
            self.folder.cleanup()
            raise SimulatorFailed(f"{java} does not start: {error}") from error
        self.gateway = JavaGateway(
            gateway_parameters=GatewayParameters(
                port=port,
                auth_token=token,
                read_timeout=ANSWER_SECONDS,
                enable_memory_management=False,  # it would connect to a process that has ended
            )
        )
        self.server = self.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def load(self, task: str, variation: int, simplifications: str, *, gold: bool = False) -> Seen:
        """Start an episode. With ``gold`` the simulator also solves it, which can take many seconds."""
        self.episodes += 1
        self.call("load", task, variation, simplifications, gold)
        return self._seen(self.call("freeActionLook"))

    def step(self, action: str) -> Seen:
        return self._seen(self.call("step", action))

    def reached(self) -> set[str]:
        """Return the names of the subgoals that have been reached."""
        rows = (line.split("\t") for line in str(self.call("getGoalProgressStr")).splitlines())
        return {row[3].strip() for row in rows if len(row) == 4 and row[1] == "true"}

    def call(self, name: str, *arguments):
        """Call a method of the simulator's interface for Python."""
        from py4j.protocol import Py4JError

        self.usable = False  # until the call has returned, because its time limit can interrupt it
        try:
            value = getattr(self.server, name)(*arguments)
        except (Py4JError, OSError) as error:
            raise SimulatorFailed(
                f"the simulator of this session failed at {name}: {type(error).__name__}: {error}"
            ) from error
        self.usable = True
        return value

    def close(self) -> None:
        """End the Java process."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.gateway.close()
        self.folder.cleanup()

    def _seen(self, text: str) -> Seen:
        return Seen(str(text), float(self.call("getScore")), bool(self.call("getCompleted")))


class Simulators:
    """Opens simulators up to a limit, keeps a few returned ones, and computes each gold path once."""

    def __init__(self) -> None:
        self.lock, self.gold_lock = Lock(), Lock()
        self.open_now = 0
        self.idle: list[Simulator] = []
        self.solver: Simulator | None = None
        self.paths: dict[tuple[str, int, str], list[str]] = {}

    def open(self) -> Simulator:
        """Return a simulator for a session. Starting Java takes seconds. Raises SimulatorFailed."""
        with self.lock:
            while self.idle:
                simulator = self.idle.pop()
                if simulator.process.poll() is None:
                    self.open_now += 1
                    return simulator
                simulator.close()
            if self.open_now >= LIMIT:
                raise SimulatorFailed(
                    f"{LIMIT} sessions have a Java process: serve with --max-sessions {LIMIT}, or set "
                    "SCIENCEWORLD_PROCESSES to what fits into memory at 0.2 GB each"
                )
            self.open_now += 1
        try:
            return Simulator()
        except SimulatorFailed:
            with self.lock:
                self.open_now -= 1
            raise

    def give_back(self, simulator: Simulator) -> None:
        """Keep a working simulator for the next session, or end it."""
        with self.lock:
            self.open_now -= 1
            if simulator.usable and len(self.idle) < IDLE and simulator.episodes < EPISODES:
                self.idle.append(simulator)
                return
        simulator.close()

    def gold_path(self, task: str, variation: int, simplifications: str) -> list[str]:
        """Return the actions that solve a problem. They are computed on first use."""
        problem = (task, variation, simplifications)
        with self.gold_lock:
            if problem not in self.paths:
                if self.solver is not None and (not self.solver.usable or self.solver.episodes >= EPISODES):
                    self.solver.close()
                    self.solver = None
                self.solver = self.solver or Simulator(heap_mb=GOLD_MB)
                self.solver.load(*problem, gold=True)
                if len(self.paths) >= GOLD_PATHS:
                    del self.paths[next(iter(self.paths))]
                self.paths[problem] = [str(one) for one in self.solver.call("getGoldActionSequence")]
            return self.paths[problem]

    def close(self) -> None:
        """End the processes that no session uses."""
        with self.lock:
            while self.idle:
                self.idle.pop().close()
        self.end_solver()

    def end_solver(self) -> None:
        """End the process that computes gold paths. The next path starts a new process."""
        with self.gold_lock:
            if self.solver is not None:
                self.solver.close()
                self.solver = None
