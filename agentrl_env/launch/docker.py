"""A server in a Docker container."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentrl_env.errors import LaunchError, ServeError
from agentrl_env.launch import docker_sidecar
from agentrl_env.launch.image import build_image
from agentrl_env.launch.image_context import PORT, USER
from agentrl_env.launch.process import ServeOptions, ServerHandle, healthy, wait_until_ready
from agentrl_env.sandbox.docker_daemon import (
    FOLDER,
    OWNER,
    RUN,
    connect,
    daemon_errors,
    discarded_limits,
    make_folder,
    remove,
    remove_folder,
    remove_orphans,
)
from agentrl_env.sandbox.orphans import process_identity
from agentrl_env.sandbox.sandbox import parse_size

_TAIL = 10
_INSIDE = "/run/agentrl"
_SOCKET = "server.sock"
_SERVING = re.compile(r"^serving ", flags=re.MULTILINE)


class ContainerLimits(BaseModel):
    """Resource limits of a server in a container.

    Memory includes all sessions and the files in /tmp. A server that exceeds the limit is killed. Sizes are
    bytes, or text such as "512m" and "2g".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory: int = Field(default=2 << 30, ge=32 << 20)
    cpus: float = Field(default=1.0, gt=0.0)
    pids: int = Field(default=256, ge=16)
    tmp: int = Field(default=256 << 20, ge=1 << 20)
    files: int = Field(default=4096, ge=64)

    @field_validator("memory", "tmp", mode="before")
    @classmethod
    def _parse_size(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value


class DockerServer(ServerHandle):
    """A task that is served from a confined container, on a free port of this machine.

    Example::

        with DockerServer("environments/shop", limits=ContainerLimits(memory="512m")) as server:
            client = EnvClient.connect(server.url, token=server.token)

    The container has no network: the server listens on a socket in a folder of this machine, and a sidecar
    process forwards connections from ``url`` (loopback) to it, and from the server to its controllers.
    Files are read-only except in /tmp, the user has no capabilities, and the environment contains only the
    given variables. If this process dies, the sidecar removes the container. If that fails too, the next
    start on this machine removes it.

    Args:
        target: a target. Its image is built on the first start.
        image: an existing image. Give either ``target`` or ``image``.
        network: "none", or a Docker network for the container. "bridge" reaches the same networks as this
            machine. With a network, the server's port is published on loopback, with a random token by
            default.
        limits: resource limits.
        options: options of ``ServeOptions``.
    """

    _advice = "build it with agentrl-env build TARGET"
    """Advice about a missing image."""

    def __init__(
        self,
        target: str | None = None,
        *,
        image: str | None = None,
        network: str = "none",
        limits: ContainerLimits | None = None,
        **options: Any,
    ) -> None:
        if (target is None) == (image is None):
            raise LaunchError("a DockerServer needs a target or an image, and not both")
        self._options = ServeOptions(**options)
        reachable = network != "none" and not self._options.controllers
        self.token = self._options.token or (uuid.uuid4().hex if reachable else None)
        self._target, self._image, self._network = target, image, network
        self._limits = limits or ContainerLimits()
        self._client: Any = None
        self._container: Any = None
        self._folder: Path | None = None
        self._sidecar: subprocess.Popen[str] | None = None
        self._output = ""

    @property
    def name(self) -> str:
        """The container's name. Empty after ``stop``."""
        return str(self._container.name) if self._container is not None else ""

    @property
    def running(self) -> bool:
        """True if the container runs and can be reached. Calls the daemon."""
        if self._container is None or self._sidecar is None or self._sidecar.poll() is not None:
            return False
        return self._state().get("Running", False) is True

    def start(self) -> Self:
        """Start the container. See ``ServerHandle.start``. Raises LaunchError without a daemon or image."""
        if self._container is not None:
            if self.running:
                return self
            self.stop()
        if self._image is None:
            assert self._target is not None
            self._image = build_image(self._target).name
        self._client = connect()
        try:
            remove_orphans(self._client)
            self._pull_if_missing(self._image)
            self._start(self._image)
            wait_until_ready(self, self._answers, self._options.start_timeout, "the server in the container")
            if self._folder is not None:
                (self._folder / "socket").chmod(0o711)  # the socket exists, so nothing else may be written
        except BaseException:
            self._stop(5.0)
            raise
        return self

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the server and remove its container. Idempotent.

        Args:
            timeout: seconds after the drain until the server is killed.
        """
        self._stop(self._options.drain + timeout)

    def _stop(self, seconds: float) -> None:
        container, client = self._container, self._client
        try:
            if container is not None:
                import docker

                with daemon_errors(f"cannot stop the container {container.name}"):
                    with contextlib.suppress(docker.errors.NotFound):
                        container.stop(timeout=math.ceil(seconds))
                    self._output = _logs(container)
                    remove(container)
        except BaseException:
            self._end_sidecar("")  # the sidecar removes the container
            raise
        else:
            self._end_sidecar("done")
        finally:
            self._container = self._client = None
            if self._folder is not None:
                remove_folder(str(self._folder))
                self._folder = None
            if client is not None:
                client.close()

    def stop_waiting(self) -> None:
        """End the drain of a concurrent ``stop`` early."""
        if (container := self._container) is not None:
            with contextlib.suppress(LaunchError), daemon_errors(f"cannot signal {container.name}"):
                container.kill("SIGTERM")

    def is_at(self, place: str) -> bool:
        """Return True if ``place`` is in the container, whose host name is its short id."""
        return self._container is not None and place.partition(" ")[0] == self._container.id[:12]

    def output(self) -> str:
        """Return the server's output since it started."""
        return _logs(self._container) if self._container is not None else self._output

    def end_reason(self) -> str:
        """Return why the container ended: out of memory, or the last lines of its output."""
        state = self._state()
        if state.get("OOMKilled"):
            return f"it exceeded its {self._limits.memory >> 20} MiB of memory"
        lines = [line for line in self.output().splitlines() if line.strip()]
        if not lines:
            return f"it printed nothing; exit code {state.get('ExitCode')}"
        return lines[-1].removeprefix("error: ") + "".join(f"\n  | {line}" for line in lines[-_TAIL:-1])

    def _pull_if_missing(self, image: str) -> None:
        import docker

        with daemon_errors(f"cannot look up {image}"), contextlib.suppress(docker.errors.ImageNotFound):
            self._client.images.get(image)
            return
        try:
            self._client.images.pull(image)
        except docker.errors.DockerException as error:
            raise LaunchError(
                f"image {image} is not on this machine and cannot be pulled; {self._advice} ({error})"
            ) from error

    def _start(self, image: str) -> None:
        run = uuid.uuid4().hex
        labels = {RUN: run, OWNER: process_identity()}
        options = self._confinement()
        host = "0.0.0.0"
        routes: list[tuple[str, str]] = []
        dialled = list(self._options.controllers)
        if self._network == "none":
            self._folder = make_folder()
            labels[FOLDER] = str(self._folder)
            inner = self._folder / "socket"
            inner.mkdir()
            options["volumes"] = {str(inner): {"bind": _INSIDE, "mode": "rw"}}
            if dialled:
                inner.chmod(0o711)
                names = [f"controller-{number}.sock" for number in range(len(dialled))]
                hosts = [urlsplit(controller).netloc for controller in dialled]
                routes = [(f"unix:{inner}/{name}", host) for name, host in zip(names, hosts, strict=True)]
                dialled = [f"unix:{_INSIDE}/{name}" for name in names]
            else:
                inner.chmod(0o777)  # for the server's socket, inside a private folder
                routes = [("127.0.0.1:0", f"unix:{inner}/{_SOCKET}")]
                host = f"unix:{_INSIDE}/{_SOCKET}"
        elif not dialled:
            options["ports"] = {f"{PORT}/tcp": ("127.0.0.1", None)}
        port = self._start_sidecar(f"{RUN}={run}", routes)
        token = {} if self.token is None else {"AGENTRL_TOKEN": self.token}
        self._launch(
            image,
            command=self._options.command_line(host, PORT, dialled),
            labels=labels,
            environment={**self._options.environment, **token},
            **options,
        )
        if "ports" in options:
            port = self._published_port()
        self.url = "" if dialled else f"http://127.0.0.1:{port}"

    def _launch(self, image: str, **options: Any) -> None:
        """Create and start the container. Raises LaunchError."""
        with daemon_errors(f"cannot start a container of {image}"):
            name = f"agentrl-{options['labels'][RUN][:12]}"
            self._container = self._client.containers.create(image, name=name, **options)
            if discarded := discarded_limits(self._container.attrs["HostConfig"]):
                raise LaunchError(
                    f"the Docker daemon does not enforce the container's limits of {discarded}; start the "
                    "daemon with cgroups, or serve the task as a process"
                )
            self._container.start()

    def _published_port(self) -> int:
        """Return the port of this machine on which the container's port is published. Raises ServeError."""
        with daemon_errors("cannot look at the container"):
            self._container.reload()
        bindings = (self._container.ports or {}).get(f"{PORT}/tcp")
        if not bindings:  # Docker removes the ports of a container that has ended
            raise ServeError(f"the server in the container ended: {self.end_reason()}")
        return int(bindings[0]["HostPort"])

    def _confinement(self) -> dict[str, Any]:
        from docker.types import LogConfig, Ulimit

        limits = self._limits
        return {
            "user": USER,
            "network_mode": self._network,
            "read_only": True,
            "tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,size={limits.tmp},mode=1777"},
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "mem_limit": limits.memory,
            "memswap_limit": limits.memory,
            "nano_cpus": int(limits.cpus * 1e9),
            "pids_limit": limits.pids,
            "ulimits": [
                Ulimit(name="nofile", soft=limits.files, hard=limits.files),
                Ulimit(name="core", soft=0, hard=0),
            ],
            "init": True,
            "log_config": LogConfig(type="json-file", config={"max-size": "10m", "max-file": "2"}),
            "healthcheck": {"test": ["NONE"]},  # this process checks the server
        }

    def _start_sidecar(self, label: str, routes: list[tuple[str, str]]) -> int:
        """Start the sidecar process and return the port on which it listens."""
        command = [sys.executable, "-I", docker_sidecar.__file__, str(os.getpid()), label]
        command += [str(self._folder or ""), *(address for route in routes for address in route)]
        self._sidecar = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._sidecar.stdout is not None
        line = self._sidecar.stdout.readline()
        if not line:
            raise ServeError("the sidecar process of the container did not start")
        return int(line)

    def _end_sidecar(self, message: str) -> None:
        sidecar, self._sidecar = self._sidecar, None
        if sidecar is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            sidecar.communicate(message, timeout=30.0)
        if sidecar.poll() is None:
            sidecar.kill()
            sidecar.wait()

    def _answers(self) -> bool:
        return healthy(self.url) if self.url else _SERVING.search(self.output()) is not None

    def _state(self) -> dict[str, Any]:
        try:
            with daemon_errors("cannot look at the container"):
                self._container.reload()
        except LaunchError:  # the container or the daemon is gone
            return {}
        return dict(self._container.attrs["State"])


class DockerService(DockerServer):
    """A server of another project, run from its image with the image's command and user, and a network.

    It answers ``/health`` on port 8000 of the container, which is published on loopback without a token. If
    this process dies, the container is removed as with ``DockerServer``.

    Args:
        image: the image.
        limits: limits, of which ``memory``, ``cpus`` and ``pids`` are used.
        options: the options ``environment`` and ``start_timeout`` of ``ServeOptions``.
    """

    _advice = "build it, or name the registry"

    def __init__(self, image: str, *, limits: ContainerLimits | None = None, **options: Any) -> None:
        super().__init__(image=image, network="bridge", limits=limits, **options)
        self.token = None

    def _start(self, image: str) -> None:
        run = uuid.uuid4().hex
        self._start_sidecar(f"{RUN}={run}", [])
        limits = self._limits
        self._launch(
            image,
            labels={RUN: run, OWNER: process_identity()},
            environment=self._options.environment,
            ports={f"{PORT}/tcp": ("127.0.0.1", None)},
            security_opt=["no-new-privileges"],
            mem_limit=limits.memory,
            memswap_limit=limits.memory,
            nano_cpus=int(limits.cpus * 1e9),
            pids_limit=limits.pids,
            init=True,
        )
        self.url = f"http://127.0.0.1:{self._published_port()}"


def _logs(container: Any) -> str:
    import docker

    try:
        return str(container.logs(tail=100_000).decode(errors="replace"))
    except docker.errors.APIError:
        return ""
