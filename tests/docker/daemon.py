"""A private Docker daemon that does not change this machine's network."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl_env.sandbox.docker_daemon import connect
from tests.docker.base_image import missing_packages
from tests.processes import until

_BRIDGE = f"agentrl{os.getpid()}"
_ENVIRONMENT = {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])}
_FORBIDDEN = re.compile("operation not permitted|permission denied", re.IGNORECASE)


class NoDaemon(Exception):
    """Raised if this machine cannot start a daemon. The message gives the reason."""


def run(*command, timeout=60, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def reason_against():
    """Return the reason why this machine cannot start a daemon, or "" if it can."""
    if os.geteuid() != 0:
        return "starting a Docker daemon needs root"
    for tool in ("dockerd", "ip"):
        if shutil.which(tool, path=_ENVIRONMENT["PATH"]) is None:
            return f"{tool} is not installed; make docker installs it"
    if missing := missing_packages():
        return f"the base image needs {', '.join(missing)} here; make docker installs them"
    return ""


def _ip(*arguments):
    return run("ip", *arguments, env=_ENVIRONMENT)


def _remove_bridges_of_the_dead():
    """Remove bridges of killed runs, because bridges with the same subnet take each other's packets."""
    for name in re.findall(r"\bagentrl\d+\b", _ip("-oneline", "link", "show", "type", "bridge").stdout):
        if not Path("/proc", name.removeprefix("agentrl")).exists():
            _ip("link", "delete", name)


def _free_subnet():
    """Return an address in a subnet that no interface or route of this machine uses."""
    taken = _ip("-4", "-oneline", "address").stdout + _ip("-4", "route", "show", "table", "all").stdout
    numbers = set(map(int, re.findall(r"\b10\.213\.(\d+)\.", taken)))
    number = next(number for number in range(os.getpid() % 250, 500) if number % 250 not in numbers) % 250
    return f"10.213.{number}.1/24"


@contextmanager
def running_daemon() -> Iterator[str]:
    """Run dockerd as DOCKER_HOST on a bridge without routing or iptables. Stop it and remove its files at the
    end.

    Raises NoDaemon.
    """
    if reason := reason_against():
        raise NoDaemon(reason)
    folder = Path(tempfile.mkdtemp(prefix="dockerd-", dir="/var/tmp"))
    address = f"unix://{folder}/docker.sock"
    _remove_bridges_of_the_dead()
    for command in (
        ["link", "add", _BRIDGE, "type", "bridge"],
        ["address", "add", _free_subnet(), "dev", _BRIDGE],
        ["link", "set", _BRIDGE, "up"],
    ):
        if (done := _ip(*command)).returncode:
            raise NoDaemon(f"this machine does not permit a bridge: {done.stderr.strip()}")
    command = ["dockerd", "--data-root", folder / "data", "--exec-root", folder / "exec", "-H", address]
    command += ["--pidfile", folder / "pid", "--bridge", _BRIDGE, "--iptables=false", "--ip-forward=false"]
    log, before = folder / "log", os.environ.get("DOCKER_HOST")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_ENVIRONMENT)
        os.environ["DOCKER_HOST"] = address
        try:
            until(lambda: answers() or process.poll() is not None, "dockerd answers")
            if process.poll() is not None and _FORBIDDEN.search(text := log.read_text()):
                raise NoDaemon(f"this machine does not permit a Docker daemon: {text.splitlines()[-1]}")
            assert process.poll() is None, log.read_text()[-2000:]
            yield address
            left = run("docker", "-H", address, "ps", "--all", "--quiet").stdout
        finally:
            os.environ.pop("DOCKER_HOST") if before is None else os.environ.update(DOCKER_HOST=before)
            process.terminate()
            process.wait(60)
            _ip("link", "delete", _BRIDGE)
            run("umount", folder / "exec/netns/default", env=_ENVIRONMENT)
            shutil.rmtree(folder, ignore_errors=True)
    assert left == "", f"containers were left behind: {left}"
    assert not folder.exists()


def answers():
    """Return True if a daemon answers at DOCKER_HOST."""
    try:
        connect(5.0).close()
    except Exception:
        return False
    return True


def bridge_address(container):
    """Return the address of a running container on the bridge."""
    container.reload()
    (network,) = container.attrs["NetworkSettings"]["Networks"].values()
    return network["IPAddress"]


def reason_against_bridge(client, image):
    """Return the reason why this machine cannot reach a container on the bridge, or "" if it can."""
    serve = ["python3", "-m", "http.server", "8000"]
    container = client.containers.run(image, serve, detach=True, init=True)
    try:
        address = bridge_address(container)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                socket.create_connection((address, 8000), 5).close()
            except OSError as error:
                reason = str(error)
                time.sleep(0.2)
            else:
                return ""
        shown = [_ip(*what).stdout for what in (["-brief", "address"], ["route"], ["neighbour"])]
        return "\n".join(["no packet reaches a container on the bridge: " + reason, *shown])
    finally:
        container.remove(force=True)
