"""Opens a sandbox: a container if the task names an image, else bubblewrap, else none if allowed."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from agentrl_env.errors import SandboxFailed, SandboxUnavailable
from agentrl_env.sandbox import bubblewrap, docker
from agentrl_env.sandbox.sandbox import Sandbox, SandboxLimits, parse_size
from agentrl_env.sandbox.unsafe import UnsafeSandbox

logger = logging.getLogger("agentrl_env")
Kind = Literal["auto", "docker", "bubblewrap", "unsafe"]
Limits = Literal["enforced", "best_effort"]
ALLOW_UNSAFE = "AGENTRL_ALLOW_UNSAFE_SANDBOX"
"""Environment variable that allows commands without a sandbox when set to 1."""
SANDBOX_LIMITS = "AGENTRL_SANDBOX_LIMITS"
"""Environment variable that accepts limits that are not enforced when set to best_effort."""


def open_sandbox(
    kind: Kind = "auto",
    *,
    image: str | None = None,
    files: Mapping[str, str | bytes] | None = None,
    memory: int | str = "256m",
    disk: int | str = "64m",
    pids: int = 64,
    cpus: float = 1.0,
    timeout: float = 20.0,
    max_output: int = 16_384,
    network: bool = False,
    background: bool = False,
    root: bool = False,
    limits: Limits = "enforced",
    allow_unsafe: bool = False,
) -> Sandbox:
    """Open an isolated sandbox for the commands of one episode. Close it when the episode ends.

    Args:
        kind: "auto" uses a container if ``image`` names one, else bubblewrap.
        image: a container image, or the absolute path of a folder that becomes bubblewrap's root file
            system. By default commands see the host's ``/usr`` and nothing else of the host.
        files: path -> content, written before the first command. Relative paths start at ``/home/agent``.
        memory: bytes of RAM for all processes and files together, such as 268435456 or "256m".
        disk: bytes for all files together. They are part of ``memory``.
        pids: maximum number of processes and threads.
        cpus: CPU time per second, in processors.
        timeout: default seconds that a command may run.
        max_output: default number of bytes kept of a command's stdout, and of its stderr.
        network: allow commands to reach this machine's networks. Leave it off unless the task needs it.
        background: keep processes that a command leaves behind running until a command exceeds its timeout
            or the sandbox closes. By default they end with the command.
        root: run commands as a container's root user, in the image's own working folder and environment, with
            all its files writable. ``disk`` is then not part of ``memory``. Written files are counted when a
            command ends, so that a single command can exceed the limit. Only with a container's ``image``.
        limits: "enforced" opens no sandbox if nothing can enforce the limits. "best_effort" opens a sandbox
            with the limits that can be enforced, and logs this once. ``AGENTRL_SANDBOX_LIMITS=best_effort``
            does the same for all tasks.
        allow_unsafe: run commands without a sandbox if none is available, without the image if no Docker
            daemon answers, and with best-effort limits. ``AGENTRL_ALLOW_UNSAFE_SANDBOX=1`` does the same for
            all tasks.

    Raises:
        SandboxUnavailable: this machine has no sandbox. The message says what to install or allow.
        SandboxFailed: a sandbox is available and does not start, or nothing can enforce its limits.
    """
    if limits not in get_args(Limits):
        raise ValueError(f"limits={limits!r} must be one of {', '.join(get_args(Limits))}")
    allow_unsafe = allow_unsafe or os.environ.get(ALLOW_UNSAFE) == "1"
    bounds = SandboxLimits(
        memory=parse_size(memory),
        disk=parse_size(disk),
        pids=pids,
        cpus=cpus,
        timeout=timeout,
        max_output=max_output,
        network=network,
        background=background,
        root=root,
        best_effort="best_effort" in (limits, os.environ.get(SANDBOX_LIMITS)) or allow_unsafe,
    )
    sandbox = _make(kind, image, bounds, allow_unsafe)
    try:
        if files:
            sandbox.write_all(files)
    except OSError as error:
        sandbox.close()
        raise SandboxFailed(f"the sandbox's files cannot be written: {error}") from error
    except BaseException:
        sandbox.close()
        raise
    return sandbox


def _make(kind: Kind, image: str | None, limits: SandboxLimits, allow_unsafe: bool) -> Sandbox:
    folder = Path(image) if image and image.startswith("/") else None
    container = image if image and not folder else None
    if not container and (kind == "docker" or limits.root):
        raise SandboxUnavailable("a container sandbox needs image='name:tag'")
    if kind == "bubblewrap" and container:
        raise SandboxUnavailable(f"bubblewrap's image is a folder's absolute path, not {image!r}")
    reasons = ["kind='unsafe' runs a task's commands without a sandbox"] if kind == "unsafe" else []
    try:
        if container and kind in ("docker", "auto"):
            return docker.DockerSandbox(limits, image=container)
    except SandboxUnavailable as error:
        if kind == "docker":
            raise
        reasons.append(str(error))
        if limits.root:
            raise
        if not allow_unsafe:
            refusal = f"To run the task's commands with this machine's programs instead, set {ALLOW_UNSAFE}=1"
            raise SandboxUnavailable(f"{error}. {refusal}") from None
        logger.warning("%s; commands run with this machine's programs and not in %s", error, container)
    try:
        if kind in ("bubblewrap", "auto"):
            bubblewrap.check_available()
            sandbox = bubblewrap.BubblewrapSandbox(limits, image=folder)
            bubblewrap.announce_limits()
            return sandbox
    except SandboxUnavailable as error:
        if kind == "bubblewrap":
            raise
        reasons.append(str(error))
    if allow_unsafe:
        return UnsafeSandbox(limits)
    refusal = "To run commands as the server's own user, without any protection, set"
    raise SandboxUnavailable(f"{'; '.join(reasons)}. {refusal} {ALLOW_UNSAFE}=1")
