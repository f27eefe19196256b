"""Reads samples and plays episodes in fresh processes, for a comparison with this process.

``python -m agentrl_env.testing.fresh_process TARGET`` reads ``{"wanted": {split: [index, ...]}}`` or
``{"rollouts": [...]}`` from standard input. The last line that it prints is the result of ``read_samples``
or the rollouts that were played again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from agentrl_env.dataset import Dataset
from agentrl_env.environment import Environment
from agentrl_env.errors import AgentRLError
from agentrl_env.hosting.loader import TARGET_PACKAGE, load_target
from agentrl_env.session.tasks import Tasks
from agentrl_env.testing.context import CheckContext, Rollout
from agentrl_env.testing.report import readable

FRESH = "AGENTRL_FRESH_PROCESS"
"""Environment variable of a process that was started to read samples."""
Wanted = Mapping[str, Sequence[int]]
_ROLLOUTS = TypeAdapter(list[Rollout])


class CannotRead(Exception):
    """The process did not print an answer. The text is the reason."""


def target_of(environment: type[Environment]) -> str | None:
    """Return the target by which another process can import a class, or None.

    A class that a bridge made has the target as ``__target__``. A class inside a function cannot be imported.
    A script, or a module that runs the checks when it is imported, must not be imported again.
    """
    target: str | None = vars(environment).get("__target__")
    if target is not None:
        return target if FRESH not in os.environ else None
    name, module = environment.__name__, sys.modules.get(environment.__module__)
    if module is None or getattr(module, name, None) is not environment:
        return None
    if module.__name__ == "__main__" or FRESH in os.environ:
        return None
    if not module.__name__.startswith(TARGET_PACKAGE):
        return f"{module.__name__}:{name}"
    file = inspect.getsourcefile(module)
    return f"{file}:{name}" if file and os.path.isfile(file) else None


def read_samples(environment: type[Environment], wanted: Wanted) -> dict[str, str]:
    """Load the data set and return the samples as JSON by name, with the sizes of the splits."""
    dataset = Dataset(environment)
    found = {f"The size of {split}": str(info.num_samples) for split, info in dataset.info().items()}
    for split, indices in wanted.items():
        for index in indices:
            try:
                found[f"Sample {split}/{index}"] = readable(dataset.sample(split, index).data)
            except AgentRLError as error:
                found[f"Sample {split}/{index}"] = str(error)
    return found


def read_in_process(target: str, wanted: Wanted, *, hash_seed: int, timeout: float) -> dict[str, str]:
    """Like ``read_samples``, but in a fresh process with the hash seed ``hash_seed``.

    Raises CannotRead.
    """
    found: dict[str, str] = json.loads(_ask(target, {"wanted": wanted}, hash_seed, timeout))
    return found


def replay_in_process(
    target: str, rollouts: Sequence[Rollout], *, hash_seed: int, timeout: float
) -> list[Rollout]:
    """Play episodes again in a fresh process with the hash seed ``hash_seed``. Raises CannotRead."""
    recorded = _ROLLOUTS.dump_python(list(rollouts), mode="json")
    return _ROLLOUTS.validate_json(_ask(target, {"rollouts": recorded}, hash_seed, timeout))


def _ask(target: str, question: Mapping[str, Any], hash_seed: int, timeout: float) -> str:
    """Return the answer of a fresh process. Raises CannotRead."""
    variables = {
        **os.environ,
        FRESH: "1",
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, target],  # as agentrl-env, which does not import from here
            input=json.dumps(question),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=variables,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise CannotRead(
            f"it did not answer within {timeout:g} s. If the machine is busy, use a longer deadline."
        ) from None
    except OSError as error:
        raise CannotRead(str(error)) from None
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    if done.returncode or not lines:
        raise CannotRead(lines[-1] if lines else f"exit code {done.returncode}")
    return lines[-1]


async def _read(environment: type[Environment], wanted: Wanted) -> str:
    tasks = Tasks([environment], threads=1, oracle=False)
    try:
        await tasks.describe()  # samples() might need resources that startup() opens
        return json.dumps(await asyncio.to_thread(read_samples, environment, wanted))
    finally:
        await tasks.aclose()


async def _replay(environment: type[Environment], recorded: object) -> str:
    async with environment.local() as client:
        info = (await client.tasks())[environment.name]
        context = CheckContext(client=client, task=info, deadline=math.inf)
        played = [await context.replay(rollout) for rollout in _ROLLOUTS.validate_python(recorded)]
    return _ROLLOUTS.dump_json(played).decode()


def _answer(environment: type[Environment], question: Mapping[str, Any]) -> str:
    """Return the answer to a question of another process."""
    if "wanted" in question:
        return asyncio.run(_read(environment, question["wanted"]))
    return asyncio.run(_replay(environment, question["rollouts"]))


if __name__ == "__main__":
    try:
        print(f"\n{_answer(load_target(sys.argv[1]), json.load(sys.stdin))}", flush=True)
    except AgentRLError as failure:
        sys.exit(str(failure))
