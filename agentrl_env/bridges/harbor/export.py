"""Export tasks as Harbor task folders, for ``agentrl-env export harbor``.

Each folder holds one sample with its seed. ``instruction.md`` has the opening and the tools. ``environment``
builds an image with the task and the command ``task``, which calls its tools. ``tests/test.sh`` reports the
recorded reward, and ``solution/solve.sh`` repeats the moves of the task's expert.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl_env.bridges.episode import RESPOND, offered_tools
from agentrl_env.bridges.harbor import container_session, container_tool
from agentrl_env.bridges.harbor.container_session import text_of
from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.errors import LaunchError, NotSupported, UnknownSample
from agentrl_env.launch.image import DEFAULT_BASE
from agentrl_env.launch.image_context import BuildContext, TaskFiles
from agentrl_env.types import Message, SessionInfo, TaskInfo, ToolSpec

AGENT = "agent"
_AGENT_ID = 65531
_STEP_S = 60.0
"""Seconds added to the agent's time limit for each turn of the task."""
_INSTRUCTION = """{opening}

## How to act

The command `task` plays this episode; nothing else on this machine has a part in it. Each call is one turn,
of which there are {turns}, and prints the answer:

    task TOOL '{{"argument": "value"}}'

`task` alone shows the task again. The tools, with the schemas of their arguments:

{tools}
"""
_SETTINGS = """version = "1.0"

[metadata]
task = {task}
split = {split}
tags = ["agentrl-env"]
{oracle}
[agent]
timeout_sec = {agent_s}
user = "{user}"

[verifier]
timeout_sec = 120.0

[environment]
build_timeout_sec = 1200.0
cpus = 1
memory_mb = 2048
storage_mb = 10240

[environment.healthcheck]
command = "/opt/agentrl/bin/python -I -m {module}"
timeout_sec = 120.0
retries = 2
"""
_TEST = """#!/bin/sh
# Ends the agent's processes, and reports what its session has earned. A failed environment has no record.
for process in /proc/[0-9]*; do
    [ "$(stat -c %u "$process" 2>/dev/null)" = {id} ] && kill -9 "${{process#/proc/}}" 2>/dev/null
done
mkdir -p /logs/verifier
rm -rf /logs/verifier/reward.json /logs/verifier/reward.txt
cp {record} /logs/verifier/reward.json
"""
_IMAGE = """USER root
HEALTHCHECK NONE
ENV HOME=/home/{user}
RUN echo '{user}:x:{id}:{id}::/home/{user}:/bin/sh' >>/etc/passwd && echo '{user}:x:{id}:' >>/etc/group \\
    && mkdir -p /home/{user} && chown {id}:{id} /home/{user}
COPY tool.py /usr/local/bin/task
COPY sample.json {folder}/sample.json
RUN chmod 755 /usr/local/bin/task && chown -R {owner}:{owner} {folder} /srv && chmod -R go= {folder} /srv
WORKDIR /home/{user}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported folder and the reward of its solution, or None without a solution."""

    folder: Path
    oracle: float | None


async def export(
    target: str,
    out: Path,
    *,
    split: str = "test",
    count: int = 10,
    base: str = DEFAULT_BASE,
    requirements: Sequence[str] = (),
    wheelhouse: Path | None = None,
) -> list[Exported]:
    """Write the first samples of a split as task folders in ``out``.

    Args:
        target: a folder with an ``environment.py``, ``file.py:Class`` or ``module:Class``.
        out: output folder, created if missing. It must not contain these task folders.
        split: split of the samples.
        count: maximum number of samples.
        base: base image with Python 3.11 or newer.
        requirements: additional pip requirements.
        wheelhouse: folder with all required wheels, which are copied for builds without a package index.

    Raises TargetError, LaunchError, WireError.
    """
    context = BuildContext(
        task=TaskFiles.of(target), base=base, requirements=requirements, wheelhouse=wheelhouse
    )
    archive = io.BytesIO()
    context.write(archive)
    exported = []
    async with EnvClient.local(target) as client:
        (task,) = (await client.tasks()).values()
        if split not in task.splits:
            raise UnknownSample(f"{task.name} has no split {split!r}; splits: {', '.join(task.splits)}")
        number = task.splits[split].num_samples
        for index in range(count if number is None else min(count, number)):
            folder = out / f"{_slug(task.name)}-{_slug(split)}-{index:04}"
            if folder.exists():
                raise LaunchError(f"{folder} already exists; choose another --output, or remove it")
            async with await client.open(task.name, split=split, index=index) as session:
                info = session.info
                moves, reward = await _oracle(session)
            try:
                _write(folder, task, info, moves, reward)
                _write_image(folder / "environment", context, archive, info)
            except OSError as error:
                reason = error.strerror or error
                raise LaunchError(
                    f"{folder} cannot be written ({reason}); choose another --output"
                ) from error
            exported.append(Exported(folder=folder, oracle=reward))
    return exported


async def _oracle(session: ClientSession) -> tuple[list[tuple[str, str]], float | None]:
    """Play the expert, one call per turn. Return its calls, and its reward or None without an expert."""
    moves, reward = [], 0.0
    while not session.status.final:
        try:
            move = await session.expert()
        except NotSupported:
            return [], None
        for call in move.tool_calls or (None,):
            if session.status.final:
                break
            name = call.function.name if call else RESPOND.function.name
            arguments = call.function.arguments if call else json.dumps({"text": move.content})
            moves.append((name, arguments))
            one = Message.assistant(None, call) if call else move
            reward += (await session.step(one)).reward
    return moves, reward


def _write(
    folder: Path, task: TaskInfo, info: SessionInfo, moves: list[tuple[str, str]], oracle: float | None
) -> None:
    files = {
        "instruction.md": _INSTRUCTION.format(
            opening=text_of(info.messages),
            turns=task.max_turns,
            tools="\n".join(map(_describe, offered_tools(task, info.tools))),
        ),
        "task.toml": _SETTINGS.format(
            task=json.dumps(task.name),
            split=json.dumps(info.sample.split),
            oracle="" if oracle is None else f"oracle_reward = {oracle}\n",
            agent_s=max(600.0, _STEP_S * task.max_turns),
            user=AGENT,
            module=container_session.__name__,
        ),
        "tests/test.sh": _TEST.format(id=_AGENT_ID, record=container_session.RECORD),
    }
    if oracle is not None:
        lines = [f"task {shlex.quote(name)} {shlex.quote(arguments)}\n" for name, arguments in moves]
        files["solution/solve.sh"] = "".join(["#!/bin/sh\nset -e\n", *lines])
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)


def _write_image(folder: Path, context: BuildContext, archive: io.BytesIO, info: SessionInfo) -> None:
    """Write the build context: the context of the task's own image, the sample and the tool."""
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        tar.extractall(folder, filter="data")
    served, entry, _ = context.dockerfile().rpartition("ENTRYPOINT ")
    added = _IMAGE.format(
        user=AGENT, id=_AGENT_ID, folder=container_session.FOLDER, owner=container_session.USER
    )
    assert entry
    (folder / "Dockerfile").write_text(served + added, encoding="utf-8")
    sample = info.sample.model_dump(include={"split", "index", "seed"})
    (folder / "sample.json").write_text(json.dumps({"target": context.task.target, **sample}))
    (folder / "tool.py").write_bytes(Path(container_tool.__file__).read_bytes())


def _describe(tool: ToolSpec) -> str:
    function = tool.function
    return f"- `{function.name}` `{json.dumps(function.parameters)}`\n  {function.description}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
