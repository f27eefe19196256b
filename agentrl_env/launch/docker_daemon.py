"""The Docker daemon of this machine: how it is reached, whose containers are whose, what is swept up."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from agentrl_env.errors import LaunchError
from agentrl_env.launch.orphans import owner_is_dead

OWNER = "org.agentrl.owner"
"""Label of everything started here: which process of which machine owns it."""
RUN = "org.agentrl.run"
"""Label of what belongs to one server: random, the same on its container and at its keeper."""
FOLDER = "org.agentrl.folder"
"""Label with the folder of this machine that a server's socket lies in."""
FOLDER_PREFIX = "agentrl-"


def connect(timeout: float = 60.0) -> Any:
    """Return a ``docker.DockerClient`` of the daemon at DOCKER_HOST.

    Args:
        timeout: seconds that a call may be silent.

    Raises:
        LaunchError: the SDK is not installed, or no daemon answers.
    """
    try:
        import docker
    except ImportError as error:
        raise LaunchError(
            "Docker needs its extra package: install agentrl-kit[docker], or the package docker"
        ) from error
    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    client = None
    try:
        _knock(address)
        client = docker.from_env(timeout=timeout)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        if client is not None:
            client.close()
        raise LaunchError(
            f"no Docker daemon answers at {address}; start dockerd, or point DOCKER_HOST at one"
        ) from error
    return client


def sweep(client: Any) -> list[str]:
    """Remove the containers whose owners are dead, and their folders; return the containers' names.

    Those of another machine or of an earlier boot are removed only where they no longer run.

    Raises:
        LaunchError: the daemon refused.
    """
    removed = []
    with daemon_errors("cannot clean up"):
        for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
            dead = owner_is_dead(container.labels[OWNER])
            if dead or (dead is None and container.status in ("exited", "dead")):
                remove(container)
                removed.append(str(container.name))
    return removed


def remove(container: Any) -> None:
    """Remove a container, however it stands, and the folder of its socket; idempotent."""
    import docker

    with contextlib.suppress(docker.errors.NotFound):
        try:
            container.remove(force=True, v=True)
        except docker.errors.APIError as error:
            if error.status_code != 409:  # somebody else is removing it
                raise
    remove_folder(container.labels.get(FOLDER, ""))


def make_folder() -> Path:
    """Return a new folder for a socket: short, for a socket's path holds 107 bytes, and one's own."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent if len(parent) < 60 else "/tmp"))


def remove_folder(folder: str) -> None:
    """Remove a folder made by ``make_folder``, and no other; idempotent."""
    if os.path.basename(folder).startswith(FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def daemon_errors(doing: str) -> Any:
    """Turn what the daemon refuses into a LaunchError that says what was being done."""
    import docker
    import requests

    try:
        yield
    except docker.errors.APIError as error:
        raise LaunchError(f"{doing}: Docker says: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise LaunchError(f"{doing}: the Docker daemon does not answer: {error}") from error


def _knock(address: str) -> None:
    """Raise OSError where nobody listens; the SDK would find out as well and leave its socket open."""
    scheme, _, path = address.partition("://")
    if scheme == "unix":
        with socket.socket(socket.AF_UNIX) as knocking:
            knocking.settimeout(5.0)
            knocking.connect(path)
