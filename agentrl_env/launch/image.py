"""Builds a task's image with the Docker daemon, without writing into the task's folder."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentrl_env.errors import LaunchError
from agentrl_env.launch.image_context import BuildContext, TaskFiles, index_settings, own_version
from agentrl_env.sandbox.docker_daemon import OWNER, connect, daemon_errors, remove
from agentrl_env.sandbox.orphans import process_identity
from agentrl_env.wire import PROTOCOL_VERSION

DEFAULT_BASE = "python:3.11-slim"
_TAIL = 15
_SILENT_S = 900.0  # maximum seconds without output during a build step
_PRINT_NAME = """
import json, sys
from agentrl_env.errors import AgentRLError
from agentrl_env.environment import find_class
try:
    print("name " + json.dumps(find_class(sys.argv[1]).name))
except AgentRLError as error:
    sys.exit(f"error: {error}")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A built image: its name with the tag, its id, and the task that it serves."""

    name: str
    id: str
    task: str


def build_image(
    target: str,
    *,
    base: str = DEFAULT_BASE,
    tag: str | None = None,
    requirements: Sequence[str] = (),
    wheelhouse: Path | None = None,
    ca: Path | None = None,
    network: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Image:
    """Build an image that serves a target on port 8000 as a non-root user.

    The task's ``requirements.txt`` (pip), ``packages.txt`` (Debian) and ``.dockerignore`` are respected.

    Args:
        target: a folder, ``file.py:Class`` or ``module:Class``.
        base: an image with Python 3.11 or newer.
        tag: the image's name. The default is ``agentrl-TASK:latest``.
        requirements: additional pip requirements. ``agentrl-kit[EXTRA]`` selects an extra of this package.
        wheelhouse: folder with every required wheel, for a build without a package index.
        ca: PEM file with certificates that pip trusts during the build. By default the file named by
            PIP_CERT, REQUESTS_CA_BUNDLE or SSL_CERT_FILE.
        network: the network of the build steps, as for ``docker build --network``.
        report: called with each line of the build's output.

    Raises:
        TargetError: the target does not exist.
        LaunchError: no daemon answers, the build fails, or the task does not load inside the image. The
            message ends with the last lines of the output.
    """
    if wheelhouse is not None and not any(wheelhouse.glob("*.whl")):
        raise LaunchError(
            f"{wheelhouse} has no wheels; fill it with: pip download -d {wheelhouse} PACKAGE..."
        )
    ca = _certificates() if ca is None else ca
    if ca is not None and not ca.is_file():
        raise LaunchError(f"{ca}: no such certificate file")
    files = TaskFiles.of(target)
    context = BuildContext(task=files, base=base, requirements=requirements, wheelhouse=wheelhouse, ca=ca)
    client = connect(_SILENT_S)
    try:
        with tempfile.TemporaryFile() as file:
            context.write(file)
            file.seek(0)
            options = {"custom_context": True, "network_mode": network, "buildargs": index_settings()}
            unnamed = run_build(client, file, target, report, **options)
        task = _task_name(client, unnamed, files.target, target)
        name = tag or f"agentrl-{task}:latest"
        labels = {"tasks": task, "protocol": str(PROTOCOL_VERSION), "version": own_version()}
        label = " ".join(f"org.agentrl.{key}={json.dumps(value)}" for key, value in labels.items())
        dockerfile = io.BytesIO(f"FROM {unnamed}\nLABEL {label}\n".encode())
        named = run_build(client, dockerfile, target, report, tag=name)
        return Image(name=name, id=named, task=task)
    finally:
        client.close()


def run_build(
    client: Any, context: IO[bytes], target: str, report: Callable[[str], None], **options: Any
) -> str:
    """Build an image and return its id."""
    with daemon_errors(f"{target}: the image was not built"):
        events = client.api.build(fileobj=context, rm=True, forcerm=True, decode=True, **options)
        return _follow(events, target, report)


def _follow(events: Iterable[dict[str, Any]], target: str, report: Callable[[str], None]) -> str:
    step, built, error = "", "", ""
    tail: deque[str] = deque(maxlen=_TAIL)
    for event in events:  # read to the end, otherwise the connection would stay open
        error = error or str(event.get("error", "")).strip()
        built = event.get("aux", {}).get("ID", built)
        text = re.sub(r"\x1b\[[0-9;]*m", "", event.get("stream", ""))
        for line in filter(None, map(str.rstrip, text.splitlines())):
            report(line)
            if found := re.match(r"Step \d+/\d+ : (.*)", line):
                step = found.group(1)
                tail.clear()
            else:
                tail.append(line)
    if error:
        log = "".join(f"\n  | {line}" for line in [*tail, error][-_TAIL:])
        raise LaunchError(f"{target}: the image was not built; the failed step is {step or 'the start'}{log}")
    if not built:
        raise LaunchError(
            f"{target}: the image was not built; the Docker daemon ended the build without an error"
        )
    return built


def _task_name(client: Any, image: str, inside: str, target: str) -> str:
    """Load the task inside its image as a test, and return its name."""
    command = ["/opt/agentrl/bin/python", "-c", _PRINT_NAME, inside]
    container = None
    with daemon_errors(f"{target}: the image was built but could not be tested"):
        try:
            container = client.containers.create(
                image,
                entrypoint=command,
                network_mode="none",
                labels={OWNER: process_identity()},
                read_only=True,
                tmpfs={"/tmp": ""},
                healthcheck={"test": ["NONE"]},
            )
            container.start()
            code = container.wait(timeout=120)["StatusCode"]
            output = container.logs().decode(errors="replace").strip()
        finally:
            if container is not None:
                remove(container)
    names = [line for line in output.splitlines() if line.startswith("name ")]
    if code != 0 or not names:
        last = output.splitlines()[-1].removeprefix("error: ") if output else f"exit code {code}"
        raise LaunchError(
            f"{target}: the image was built, but the task does not load in it ({last}); list its pip "
            "requirements in requirements.txt and Debian packages in packages.txt, beside it"
        )
    return str(json.loads(names[-1].removeprefix("name ")))


def _certificates() -> Path | None:
    """Return the certificate file that is named by an environment variable."""
    names = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
    given = (Path(os.environ[name]) for name in names if os.environ.get(name))
    return next((path for path in given if path.is_file()), None)
