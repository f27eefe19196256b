"""The processes of a training run with faults: a controller, its servers and the trainer."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from pathlib import Path

from agentrl_train.telemetry.metrics import read_jsonl
from tests.chaos.site import MARK, TASKS_FILE, Part, agentrl, free_ports
from tests.tiny_models import make_model, make_tokenizer

GROUP_SIZE, PER_STEP = 2, 4
SERVERS = 2
REFERENCES = 3
"""Number of undisturbed runs with the torch engine to measure the noise, each with its own seed."""
CONFIG = """
[run]
name = "run"
folder = "{folder}"
steps = 1000000
threads = 1
[model]
path = "{folder}/model"
[[environments]]
url = "{url}"
token_env = "AGENTRL_TOKEN"
[[environments]]
serve = ["{tasks}:OwnTally"]
[engine]
max_sessions = 16
max_context = 512
max_new_tokens = 16
completion_timeout_s = 15
[rollout]
groups_per_step = {per_step}
group_size = {group_size}
max_staleness = 1
window = 2
environment_timeout_s = 15
environment_retries = 4
environment_wait_timeout_s = 30
[train]
learning_rate = {learning_rate}
[checkpoint]
every = 3
[eval]
samples = 0
[metrics]
tensorboard = false
trajectories = 1000000
"""


class Trainer:
    """The process of the trainer."""

    def __init__(self, engine: str, folder: Path, environment: dict[str, str], *overrides: str) -> None:
        self.run = folder / "run"
        self.log = folder / "trainer.log"
        self._engine, self._config, self._environment = engine, folder / "train.toml", environment
        self._overrides = [part for override in overrides for part in ("--set", override)]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process id, or None if it is not running."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def status(self) -> int | None:
        """The exit status, or None while it is running."""
        return None if self._process is None else self._process.returncode

    def steps(self) -> int:
        """Return the number of recorded steps."""
        lines = read_jsonl(self.run / "metrics.jsonl")
        return int(lines[-1]["step"]) if lines else 0

    async def start(self, *, steps: int | None = None) -> None:
        """Start or resume the run, up to step ``steps``."""
        resume = ["--resume"] if (self.run / "config.toml").exists() else []
        command = [
            "-m",
            "tests.chaos.trainer",
            self._engine,
            "run",
            str(self._config),
            *self._overrides,
            *([] if steps is None else ["--set", f"run.steps={steps}"]),
            *resume,
        ]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        if self.pid is not None:
            os.kill(self.pid, number)

    async def ended(self, within_s: float) -> bool:
        """Wait for the process. Return True if it exited in time."""
        assert self._process is not None
        try:
            async with asyncio.timeout(within_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def children(self, words: str) -> list[int]:
        """Return the ids of child processes whose command line contains ``words``."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rpartition(")")[2].split()[1])
                command = (path.parent / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if parent == self.pid and words in command:
                found.append(int(path.parent.name))
        return found


class TrainingSite:
    """A controller, its servers and the trainer."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.mark, token = secrets.token_hex(8), secrets.token_hex(16)
        self.ledgers = folder / "ledgers"
        self.ledgers.mkdir(parents=True)
        environment = {
            MARK: self.mark,
            "AGENTRL_TOKEN": token,
            "CHAOS_LEDGER": str(self.ledgers),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(folder),
        }
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"

        def part(name: str, ready: str, *command: str) -> Part:
            log = folder / f"{name}.log"
            log.touch()
            return Part(name, agentrl(*command), environment, log, ready)

        options = ("--queue", "5", "--lost-after", "4")
        self.controller = part("controller", "controlling ", "controller", "--port", str(port), *options)
        serve = ("serve", "--host", "none", f"--controller={url}", "--lease", "30", "--max-sessions", "40")
        self.servers = [part(f"server{n}", "serving ", *serve, f"{TASKS_FILE}:Tally") for n in range(SERVERS)]
        make_model().save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        rate = 1e-2 if engine == "torch" else 1e-4
        shape = {"per_step": PER_STEP, "group_size": GROUP_SIZE, "learning_rate": rate}
        text = CONFIG.format(folder=folder, url=url, tasks=TASKS_FILE, **shape)
        (folder / "train.toml").write_text(text)
        self.trainer = Trainer(engine, folder, environment)
        self.references = []
        for n in range(REFERENCES if engine == "torch" else 1):
            other = (f"run.name='undisturbed{n}'", f"run.seed={n}")
            self.references.append(Trainer(engine, folder, environment, *other))
            self.references[-1].run = folder / f"undisturbed{n}"

    async def start(self) -> None:
        """Start the controller and the servers."""
        for part in (self.controller, *self.servers):
            await part.start()
            await part.until_ready()

    async def stop(self) -> list[str]:
        """Stop the controller and the servers. Return the names of processes that had to be killed."""
        parts = (*self.servers, self.controller)
        return [part.name for part in parts if not await part.stop()]
