"""A task's image: built by the Docker daemon, with nothing written into the task's folder."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentrl_env.errors import LaunchError
from agentrl_env.launch.docker_daemon import OWNER, connect, daemon_errors, remove
from agentrl_env.launch.image_context import Recipe, TaskFiles, index_settings
from agentrl_env.launch.orphans import owner
from agentrl_env.launch.wheel import own_version
from agentrl_env.wire import PROTOCOL_VERSION

DEFAULT_BASE = "python:3.11-slim"
_TAIL = 15
_SILENT_S = 900.0  # how long one step of a build may print nothing
_NAME = """
import json, sys
from agentrl_env.errors import AgentRLError
from agentrl_env.server.loader import load_target
try:
    print("name " + json.dumps(load_target(sys.argv[1]).name))
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
    """Build the image that serves a TARGET on port 8000 as a user who is not root.

    The task's ``requirements.txt`` (pip), ``packages.txt`` (Debian) and ``.dockerignore`` are heeded.

    Args:
        target: a folder, ``file.py:Class`` or ``module:Class``.
        base: an image with Python 3.11 or newer.
        tag: the image's name; ``agentrl-TASK:latest`` by default.
        requirements: further packages for pip; ``agentrl-kit[EXTRA]`` means an extra of this package.
        wheelhouse: folder with every wheel needed, for a build without a package index.
        ca: certificates (PEM) that pip trusts during the build; those that this process was told of
            by PIP_CERT, REQUESTS_CA_BUNDLE or SSL_CERT_FILE by default.
        network: the network of the build's steps, as of ``docker build --network``.
        report: is given each line that the build prints.

    Raises:
        TargetError: there is no such task, or it does not load inside the image.
        LaunchError: no daemon, or the build failed; the message ends with its last lines.
    """
    if wheelhouse is not None and not any(wheelhouse.glob("*.whl")):
        raise LaunchError(
            f"{wheelhouse} has no wheels; fill it with: pip download -d {wheelhouse} PACKAGE..."
        )
    ca = _certificates() if ca is None else ca
    if ca is not None and not ca.is_file():
        raise LaunchError(f"{ca}: no such file of certificates")
    files = TaskFiles.of(target)
    recipe = Recipe(task=files, base=base, requirements=requirements, wheelhouse=wheelhouse, ca=ca)
    client = connect(_SILENT_S)
    try:
        with tempfile.TemporaryFile() as file:
            recipe.write(file)
            file.seek(0)
            unnamed = _build(client, file, target, report, network=network, settings=index_settings())
        task = _task_name(client, unnamed, files.target, target)
        name = tag or f"agentrl-{task}:latest"
        labels = {"tasks": task, "protocol": str(PROTOCOL_VERSION), "version": own_version()}
        label = " ".join(f"org.agentrl.{key}={json.dumps(value)}" for key, value in labels.items())
        context = _only_dockerfile(f"FROM {unnamed}\nLABEL {label}\n")
        named = _build(client, context, target, report, tag=name)
        return Image(name=name, id=named, task=task)
    finally:
        client.close()


def _build(
    client: Any,
    context: IO[bytes],
    target: str,
    report: Callable[[str], None],
    *,
    tag: str | None = None,
    network: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> str:
    """Build one context and return the image's id."""
    with daemon_errors(f"{target}: the image was not built"):
        events = client.api.build(
            fileobj=context,
            custom_context=True,
            tag=tag,
            rm=True,
            forcerm=True,
            decode=True,
            network_mode=network,
            buildargs=settings,
        )
        return _follow(events, target, report)


def _follow(events: Iterable[dict[str, Any]], target: str, report: Callable[[str], None]) -> str:
    step, built = "", ""
    tail: deque[str] = deque(maxlen=_TAIL)
    for event in events:
        if "error" in event:
            said = [*tail, str(event["error"]).strip()]
            log = "".join(f"\n  | {line}" for line in said[-_TAIL:])
            raise LaunchError(
                f"{target}: the image was not built; what failed was {step or 'the start'}{log}"
            )
        built = event.get("aux", {}).get("ID", built)
        for line in filter(None, map(_clean, event.get("stream", "").splitlines())):
            report(line)
            if found := re.match(r"Step \d+/\d+ : (.*)", line):
                step = found.group(1)
                tail.clear()
            else:
                tail.append(line)
    if not built:
        raise LaunchError(f"{target}: the image was not built; the Docker daemon broke off without a word")
    return built


def _clean(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip()


def _task_name(client: Any, image: str, inside: str, target: str) -> str:
    """Load the task inside its image, which proves that it can be loaded there, and return its name."""
    command = ["/opt/agentrl/bin/python", "-c", _NAME, inside]
    container = None
    with daemon_errors(f"{target}: the image was built but not tried"):
        try:
            container = client.containers.create(
                image,
                entrypoint=command,
                network_mode="none",
                labels={OWNER: owner()},
                read_only=True,
                tmpfs={"/tmp": ""},
                healthcheck={"test": ["NONE"]},
            )
            container.start()
            code = container.wait(timeout=120)["StatusCode"]
            said = container.logs().decode(errors="replace").strip()
        finally:
            if container is not None:
                remove(container)
    names = [line for line in said.splitlines() if line.startswith("name ")]
    if code != 0 or not names:
        last = said.splitlines()[-1].removeprefix("error: ") if said else f"it ended with {code}"
        raise LaunchError(
            f"{target}: the image was built, but the task does not load in it ({last}); what it needs from "
            "pip belongs in requirements.txt and from Debian in packages.txt, beside it"
        )
    return str(json.loads(names[-1].removeprefix("name ")))


def _only_dockerfile(text: str) -> IO[bytes]:
    content = text.encode()
    info = tarfile.TarInfo("Dockerfile")
    info.size = len(content)
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        tar.addfile(info, io.BytesIO(content))
    context.seek(0)
    return context


def _certificates() -> Path | None:
    """Return the certificates that this process was told to trust."""
    names = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
    given = (Path(os.environ[name]) for name in names if os.environ.get(name))
    return next((path for path in given if path.is_file()), None)
