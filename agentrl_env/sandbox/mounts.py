"""The command line that makes a bubblewrap sandbox: its mounts, its user, its first process."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from pathlib import Path

from agentrl_env.errors import SandboxUnavailable
from agentrl_env.sandbox.limits import Limits
from agentrl_env.sandbox.sandbox import BASE_ENVIRONMENT, HOME, PATH

UID = 1000
"""The user inside."""
_MOUNT = "/sys"
"""Where the stage mounts its tmpfs: a folder that is everywhere and holds nothing that is bound. Only the
stage's own mount namespace sees it, so it is gone with the last process, however that ends."""
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types")
_ETC_NETWORK = ("resolv.conf", "ssl", "ca-certificates", "pki")
_ETC_FILES = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_INODE_BYTES = 4096
"""One file for so many bytes of disk: empty files fill memory too."""


def layers(image: Path | None) -> dict[str, str]:
    """Return layer -> where it is seen: the tmpfs's folders that take what is written."""
    return {"root": "/"} if image else {"root": "/", "local": "/usr/local"}


@functools.cache
def shell(image: Path | None) -> str:
    """Return the shell that text is given to: bash where there is one."""
    return "/bin/bash" if ((image or Path("/")) / "bin/bash").exists() else "/bin/sh"


def command(limits: Limits, image: Path | None, *, seccomp: int | None, source: int) -> list[str]:
    """Return the arguments that start a sandbox.

    Args:
        limits: of the sandbox.
        image: a folder that is the root file system, instead of the host's ``/usr``.
        seccomp: descriptor to read the filter from.
        source: descriptor to read the supervisor's code from.

    Raises:
        SandboxUnavailable: there is no Python for the supervisor.
    """
    lower, upper = (image, "root") if image else (Path("/usr/local"), "local")
    python, prefix = _python(image)
    script = _script(limits, lower, upper, etc=image is None)
    supervise = [python, "-I", "-S", "-c", f"exec(open({source}).read())"]
    view = _image_view() if image else _host_view(limits, prefix)
    options = ["--unshare-all", *(["--share-net"] if limits.network else [])]
    options += ["--unshare-user", "--disable-userns", "--uid", str(UID), "--gid", str(UID)]
    options += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    options += ["--cap-drop", "ALL", *view, "--proc", "/proc", "--dev", "/dev"]
    options += ["--bind", f"{_MOUNT}/shm", "/dev/shm", "--ro-bind", f"{_MOUNT}/layers", "/dev/layers"]
    options += ["--remount-ro", "/dev", "--perms", "1777", "--dir", "/tmp", "--dir", HOME, "--chdir", HOME]
    for name, value in BASE_ENVIRONMENT.items():
        options += ["--setenv", name, value]
    options += [] if seccomp is None else ["--seccomp", str(seccomp)]
    namespaces = ["unshare", "--user", "--map-root-user", "--mount"]
    return [*namespaces, "sh", "-c", script, "stage", "bwrap", *options, "--", *supervise]


def _script(limits: Limits, lower: Path, upper: str, *, etc: bool) -> str:
    """Return the stage: it waits for its go, mounts, and becomes the command in its arguments."""
    work = [f"{_MOUNT}/{name}" for name in ("layers/root/etc", f"layers/{upper}", "work", "merged", "shm")]
    work += [f"{_MOUNT}/layers/{upper}/{name}" for name in _writable(lower)]
    overlay = f"lowerdir={_option(lower)},upperdir={_MOUNT}/layers/{upper},workdir={_MOUNT}/work,userxattr"
    merged = f"{_MOUNT}/merged"
    size = f"size={limits.disk},nr_inodes={limits.disk // _INODE_BYTES + 512},mode=0755"
    lines = ["set -e", "umask 022", "read -r go || exit 1", f"mount -t tmpfs -o {size} sandbox {_MOUNT}"]
    lines.append(shlex.join(["mkdir", "-p", *work]))
    if lower.is_dir():
        readonly = (
            f"{shlex.join(['mount', '--bind', str(lower), merged])} && mount -o remount,bind,ro {merged}"
        )
        mount = shlex.join(["mount", "-t", "overlay", "-o", overlay, "overlay", merged])
        lines.append(f"{mount} 2>/dev/null || {{ {readonly}; }}")
    if etc:
        for name, text in _ETC_FILES.items():
            lines.append(f"printf %s {shlex.quote(text)} >{_MOUNT}/layers/root/etc/{name}")
    lines.append('exec "$@"')
    return "\n".join(lines)


def _writable(lower: Path) -> list[str]:
    """Return the folders below ``lower`` that the sandbox's user gets to own, though not their files."""
    try:
        return [entry.name for entry in os.scandir(lower) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _option(path: Path) -> str:
    """Return a path as overlay's options want it."""
    return str(path).replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _host_view(limits: Limits, prefix: str | None) -> list[str]:
    """Return the mounts that show the host's programs, and nothing of what else is on it."""
    view = ["--bind", f"{_MOUNT}/layers/root", "/", "--ro-bind", "/usr", "/usr"]
    if Path("/usr/local").is_dir():
        view += ["--bind", f"{_MOUNT}/merged", "/usr/local"]
    for name in _SYSTEM:
        folder = Path("/", name)
        if folder.is_symlink():
            view += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            view += ["--ro-bind", str(folder), str(folder)]
    for name in (*_ETC, *(_ETC_NETWORK if limits.network else ())):
        view += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return view + (["--ro-bind", prefix, prefix] if prefix else [])


def _image_view() -> list[str]:
    return ["--bind", f"{_MOUNT}/merged", "/"]


@functools.cache
def _python(image: Path | None) -> tuple[str, str | None]:
    """Return a Python that the sandbox sees, and the folder to show for it where it is not in ``/usr``."""
    root = image or Path("/")
    for folder in reversed(PATH.split(":")):
        if (root / folder.lstrip("/") / "python3").exists():
            return f"{folder}/python3", None
    if image:
        raise SandboxUnavailable(f"the root folder {image} has no python3 in {PATH}, which runs the commands")
    prefix = os.path.realpath(sys.base_prefix)
    return f"{prefix}/bin/python3", prefix
