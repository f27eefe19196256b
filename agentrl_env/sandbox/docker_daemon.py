"""The local Docker daemon: connecting, labels, and removal of orphaned containers."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from agentrl_env.errors import LaunchError, install_extra
from agentrl_env.sandbox.orphans import is_dead

OWNER = "org.agentrl.owner"
"""Label of every container with the identity of the process that started it."""
RUN = "org.agentrl.run"
"""Label of a server's container with a random id that its sidecar process also knows."""
FOLDER = "org.agentrl.folder"
"""Label of a server's container with the host folder of its socket."""
FOLDER_PREFIX = "agentrl-"


def connect(timeout: float = 60.0) -> Any:
    """Return a ``docker.DockerClient`` for the daemon at DOCKER_HOST.

    A call fails after ``timeout`` seconds without data. Raises LaunchError without the SDK or a daemon.
    """
    try:
        import docker
    except ImportError as error:
        raise LaunchError(f"Docker needs an extra package: {install_extra('docker')}") from error
    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    client = None
    try:
        _check_socket(address)
        client = docker.from_env(timeout=timeout)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        if client is not None:
            client.close()
        raise LaunchError(
            f"no Docker daemon answers at {address}; start dockerd, or point DOCKER_HOST at one"
        ) from error
    return client


def remove_orphans(client: Any) -> list[str]:
    """Remove containers, and images made of them, whose owners have ended. Return the containers' names.

    Containers of another machine or boot are removed only if they have stopped. Raises LaunchError.
    """
    import docker

    removed = []
    with daemon_errors("cannot remove orphaned containers"):
        for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
            dead = is_dead(container.labels[OWNER])
            if dead or (dead is None and container.status in ("exited", "dead")):
                remove(container)
                removed.append(str(container.name))
        for image in client.images.list(filters={"label": OWNER}):
            if is_dead(image.labels[OWNER]):
                with contextlib.suppress(docker.errors.APIError):  # a container uses it, or it is gone
                    client.images.remove(image.id, force=True)
    return removed


def remove(container: Any) -> None:
    """Remove a container in any state, and the folder of its socket. Idempotent."""
    import docker

    with contextlib.suppress(docker.errors.NotFound):
        try:
            container.remove(force=True, v=True)
        except docker.errors.APIError as error:
            if error.status_code != 409:  # a concurrent removal is in progress
                raise
    remove_folder(container.labels.get(FOLDER, ""))


def make_folder() -> Path:
    """Return a new private folder for a socket. Its path is short, since the limit is 107 bytes."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent if len(parent) < 60 else "/tmp"))


def remove_folder(folder: str) -> None:
    """Remove a folder that ``make_folder`` made. Any other path is ignored. Idempotent."""
    if os.path.basename(folder).startswith(FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def discarded_limits(host: dict[str, Any]) -> str:
    """Return the limits that the daemon dropped from a container's HostConfig, or "" if it enforces all.

    A daemon without cgroups, such as a rootless one, sets a limit that it cannot enforce to zero.
    """
    names = {"Memory": "memory", "PidsLimit": "processes", "NanoCpus": "CPU time"}
    return ", ".join(text for name, text in names.items() if (host.get(name) or 0) <= 0)


@contextlib.contextmanager
def daemon_errors(action: str) -> Any:
    """Convert the daemon's errors to LaunchError, with ``action`` as the start of the message."""
    import docker
    import requests

    try:
        yield
    except docker.errors.APIError as error:
        raise LaunchError(f"{action}: Docker says: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise LaunchError(f"{action}: the Docker daemon does not answer: {error}") from error


def _check_socket(address: str) -> None:
    """Raise OSError if nothing listens. The SDK would also notice this, but leave its socket open."""
    scheme, _, path = address.partition("://")
    if scheme == "unix":
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(5.0)
            probe.connect(path)
