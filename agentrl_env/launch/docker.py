"""A server in a container: started, waited for, stopped whole, and never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from agentrl_env.errors import LaunchError, ServeError
from agentrl_env.launch import docker_sidecar as docker_keeper
from agentrl_env.launch.docker_daemon import (
    FOLDER,
    OWNER,
    RUN,
    connect,
    daemon_errors,
    make_folder,
    remove,
    remove_folder,
    sweep,
)
from agentrl_env.launch.image import build_image
from agentrl_env.launch.image_context import PORT, USER
from agentrl_env.launch.orphans import owner
from agentrl_env.launch.placement import Limits

_POLL_S = 0.05
_TAIL = 10
_INSIDE = "/run/agentrl"
_SOCKET = "server.sock"
_CONTROLLER_SOCKET = "controller.sock"
_SERVING = re.compile(r"^serving ", flags=re.MULTILINE)


class DockerServer:
    """A task served from a container that can do nothing else, on a free port of this machine.

    Example::

        with DockerServer("environments/shop", limits=Limits(memory="512m")) as server:
            client = EnvClient.connect(server.url, token=server.token)

    The container has no network: the server listens on a socket in a folder of this machine, and a
    child process carries what arrives at ``url`` (loopback) there. Its files are read-only but for
    /tmp, it runs as a user without capabilities, and it sees the environment variables given and no
    others. A child process removes it where this process dies, however it dies; what that misses,
    the next start on this machine does.

    Args:
        target: what to build an image of; ``build_image`` is called on every first start.
        image: an image that was built before; exactly one of both.
        network: "none", or a Docker network that the container shall reach ("bridge" reaches what
            this machine does); then its port is published on loopback.
        limits: what it may use.
        environment: its environment variables.
        token: what callers must show; a random one where there is a network and none is given. With a
            controller, what the server shows it: a fleet's is enough, from ``link_token``.
        max_sessions: how many sessions may be open at once.
        lease: seconds a session may be idle.
        drain: seconds that open sessions get to end when the server stops.
        oracle: whether ``expert`` may be called.
        start_timeout: seconds until the server must answer.
        arguments: further options of ``agentrl-env serve``.
        controller: the ``http://HOST:PORT`` of one to dial; then the server has no address of its own.
            Without a network it is dialled through a socket that the child process carries there.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        image: str | None = None,
        network: str = "none",
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,
        token: str | None = None,
        max_sessions: int = 1024,
        lease: float = 900.0,
        drain: float = 0.0,
        oracle: bool = False,
        start_timeout: float = 60.0,
        arguments: tuple[str, ...] = (),
        controller: str | None = None,
    ) -> None:
        if (target is None) == (image is None):
            raise LaunchError("a DockerServer needs a target or an image, and not both")
        reachable = network != "none" and controller is None
        self.token = token or (uuid.uuid4().hex if reachable else None)
        self.url = ""
        """Where the server answers, once it is started."""
        self._target, self._image, self._network = target, image, network
        self._controller = controller
        self._limits, self._environment = limits or Limits(), dict(environment or {})
        self._arguments = ["--max-sessions", str(max_sessions), "--lease", str(lease), "--drain", str(drain)]
        self._arguments += [*(["--oracle"] if oracle else []), *arguments]
        self._drain, self._start_timeout = drain, start_timeout
        self._client: Any = None
        self._container: Any = None
        self._folder: Path | None = None
        self._keeper: subprocess.Popen[str] | None = None
        self._output = ""

    @property
    def name(self) -> str:
        """The container's name while it runs."""
        return str(self._container.name) if self._container is not None else ""

    @property
    def running(self) -> bool:
        """Whether the container lives and can be reached; asks the daemon."""
        if self._container is None or self._keeper is None or self._keeper.poll() is not None:
            return False
        return self._state().get("Running", False) is True

    def start(self) -> Self:
        """Start the container and return once the server in it answers ``/health``.

        Raises:
            TargetError: there is no such task.
            LaunchError: no daemon, no image, or the daemon refused.
            ServeError: the server ended, or did not answer in time; the message has its last words.
        """
        if self._container is not None:
            if self.running:
                return self
            self.stop()
        if self._image is None:
            assert self._target is not None
            self._image = build_image(self._target).name
        self._client = connect()
        try:
            sweep(self._client)
            self._have_image(self._image)
            self._start(self._image)
            self._wait_until_ready(time.monotonic() + self._start_timeout)
        except BaseException:
            self._drain, drain = 0.0, self._drain
            self.stop()
            self._drain = drain
            raise
        return self

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the server and remove its container; idempotent.

        Args:
            timeout: seconds, after the drain, until it is killed.
        """
        container, self._container = self._container, None
        client, self._client = self._client, None
        try:
            if container is not None:
                with daemon_errors(f"cannot stop the container {container.name}"):
                    _stop(container, self._drain + timeout)
                    self._output = _logs(container)
                    remove(container)
        except BaseException:
            self._release_keeper("")  # it removes what could not be removed from here
            raise
        else:
            self._release_keeper("done")
        finally:
            if self._folder is not None:
                remove_folder(str(self._folder))
                self._folder = None
            if client is not None:
                client.close()

    def output(self) -> str:
        """Return what the server has printed since it was started."""
        return _logs(self._container) if self._container is not None else self._output

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _have_image(self, image: str) -> None:
        import docker

        with daemon_errors(f"cannot look for {image}"), contextlib.suppress(docker.errors.ImageNotFound):
            self._client.images.get(image)
            return
        try:
            self._client.images.pull(image)
        except docker.errors.DockerException as error:
            raise LaunchError(
                f"there is no image {image} here and it cannot be pulled; "
                f"build it with agentrl-env build TARGET ({error})"
            ) from error

    def _start(self, image: str) -> None:
        run = uuid.uuid4().hex
        labels = {RUN: run, OWNER: owner()}
        options = self._options()
        front, back, place = "", "", ["--host", "0.0.0.0", "--port", str(PORT)]
        if self._network == "none":
            self._folder = make_folder()
            labels[FOLDER] = str(self._folder)
            inner = self._folder / "socket"
            inner.mkdir()
            options["volumes"] = {str(inner): {"bind": _INSIDE, "mode": "rw"}}
            front, back = "127.0.0.1:0", f"unix:{inner}/{_SOCKET}"
            place = ["--host", f"unix:{_INSIDE}/{_SOCKET}"]
            if self._controller is None:
                inner.chmod(0o777)  # the server makes its socket in it; the folder above is ours alone
            else:
                inner.chmod(0o711)
                front, back = f"unix:{inner}/{_CONTROLLER_SOCKET}", urlsplit(self._controller).netloc
                place = ["--host", "none", "--controller", f"unix:{_INSIDE}/{_CONTROLLER_SOCKET}"]
        elif self._controller is not None:
            place = ["--host", "none", "--controller", self._controller]
        else:
            options["ports"] = {f"{PORT}/tcp": ("127.0.0.1", None)}
        port = self._start_keeper(f"{RUN}={run}", front, back)
        token = {} if self.token is None else {"AGENTRL_TOKEN": self.token}
        with daemon_errors(f"cannot start a container of {image}"):
            self._container = self._client.containers.create(
                image,
                [*place, *self._arguments],
                name=f"agentrl-{run[:12]}",
                labels=labels,
                environment={**self._environment, **token},
                **options,
            )
            self._container.start()
            if "ports" in options:
                self._container.reload()
                port = int(self._container.ports[f"{PORT}/tcp"][0]["HostPort"])
        self.url = "" if self._controller else f"http://127.0.0.1:{port}"

    def _options(self) -> dict[str, Any]:
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
            "healthcheck": {"test": ["NONE"]},  # this process looks by itself
        }

    def _start_keeper(self, label: str, front: str, back: str) -> int:
        """Start what removes the container if this process dies; return the port it carries."""
        command = [sys.executable, "-I", docker_keeper.__file__, str(os.getpid()), label]
        command += [str(self._folder or ""), front, back]
        self._keeper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            raise ServeError("the process that carries connections to the container did not start")
        return int(line)

    def _release_keeper(self, word: str) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            keeper.communicate(word, timeout=30.0)
        if keeper.poll() is None:
            keeper.kill()
            keeper.wait()

    def _wait_until_ready(self, deadline: float) -> None:
        while not self._answers():
            if not self.running:
                raise ServeError(f"the server in the container ended: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ServeError(
                    f"the server in the container did not answer within {self._start_timeout:g} s: "
                    f"{self._last_words()}"
                )
            time.sleep(_POLL_S)
        if self._folder is not None:
            (self._folder / "socket").chmod(0o711)  # the socket is there; nothing else may be written

    def _answers(self) -> bool:
        return _healthy(self.url) if self.url else _SERVING.search(self.output()) is not None

    def _state(self) -> dict[str, Any]:
        try:
            with daemon_errors("cannot look at the container"):
                self._container.reload()
        except LaunchError:  # it is gone, or the daemon is
            return {}
        return dict(self._container.attrs["State"])

    def _last_words(self) -> str:
        state = self._state()
        if state.get("OOMKilled"):
            return f"it took more than its {self._limits.memory >> 20} MiB of memory"
        lines = [line for line in self.output().splitlines() if line.strip()]
        if not lines:
            return f"it printed nothing (exit code {state.get('ExitCode')})"
        first = lines[-1].removeprefix("error: ")
        return first + "".join(f"\n  | {line}" for line in lines[-_TAIL:-1])


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _stop(container: Any, seconds: float) -> None:
    import docker

    with contextlib.suppress(docker.errors.NotFound):
        container.stop(timeout=int(seconds + 0.999))


def _logs(container: Any) -> str:
    import docker

    try:
        return str(container.logs(tail=100_000).decode(errors="replace"))
    except docker.errors.APIError:
        return ""
