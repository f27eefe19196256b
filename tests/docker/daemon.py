"""A private Docker daemon, which does not change this machine's network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl_env.sandbox.docker_daemon import connect
from tests.docker.base_image import missing_packages
from tests.processes import until

_BRIDGE, _ADDRESS = f"agentrl{os.getpid()}", f"10.213.{os.getpid() % 250}.1/24"
_FORBIDDEN = re.compile("operation not permitted|permission denied", re.IGNORECASE)
_SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class NoDaemon(Exception):
    """This machine cannot start a daemon; the message is the reason."""


def run(*command, timeout=60, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def reason_against():
    """Return why this machine cannot start a daemon; empty if it can."""
    if os.geteuid() != 0:
        return "starting a Docker daemon needs root"
    for tool in ("dockerd", "ip"):
        if shutil.which(tool, path=_SBIN) is None:
            return f"{tool} is not installed; make docker installs it"
    if missing := missing_packages():
        return f"the base image needs {', '.join(missing)} here; make docker installs them"
    return ""


@contextmanager
def running_daemon() -> Iterator[str]:
    """Run dockerd on a bridge without routing or iptables, as DOCKER_HOST; stop it and remove its files.

    Raises NoDaemon.
    """
    if reason := reason_against():
        raise NoDaemon(reason)
    folder = Path(tempfile.mkdtemp(prefix="dockerd-", dir="/var/tmp"))
    address = f"unix://{folder}/docker.sock"
    environment = {**os.environ, "PATH": _SBIN}
    run("ip", "link", "add", _BRIDGE, "type", "bridge", env=environment)
    run("ip", "address", "add", _ADDRESS, "dev", _BRIDGE, env=environment)
    run("ip", "link", "set", _BRIDGE, "up", env=environment)
    command = ["dockerd", "--data-root", folder / "data", "--exec-root", folder / "exec", "-H", address]
    command += ["--pidfile", folder / "pid", "--bridge", _BRIDGE, "--iptables=false", "--ip-forward=false"]
    log, before = folder / "log", os.environ.get("DOCKER_HOST")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
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
            run("ip", "link", "delete", _BRIDGE, env=environment)
            run("umount", folder / "exec/netns/default", env=environment)
            shutil.rmtree(folder, ignore_errors=True)
    assert left == "", f"containers were left behind: {left}"
    assert not folder.exists()


def answers():
    """Return whether a daemon answers at DOCKER_HOST."""
    try:
        connect(5.0).close()
    except Exception:
        return False
    return True
