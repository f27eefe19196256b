"""The command line of a bubblewrap sandbox: mounts, user, first process."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from pathlib import Path

from agentrl_env.errors import SandboxUnavailable
from agentrl_env.sandbox.sandbox import BASE_ENVIRONMENT, HOME, PATH, SandboxLimits

UID = 1000
"""The user id inside the sandbox."""
_MOUNT = "/sys"
"""Mount point of the tmpfs: a folder that exists everywhere and is not itself part of the sandbox. It is
visible only in the sandbox's mount namespace, so it disappears with the last process."""
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types")
_ETC_NETWORK = ("resolv.conf", "ssl", "ca-certificates", "pki")
_ETC_FILES = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_FOLDERS = (
    *("boot", "etc", "media", "mnt", "opt", "root", "run/lock", "srv", "sys"),
    *(f"var/{name}" for name in ("backups", "cache", "lib", "local", "log", "mail", "opt", "spool", "tmp")),
)
"""Folders of a normal Linux machine. They are empty, and the sandbox's user owns them."""
_INODE_BYTES = 16384
"""Bytes of disk per inode: an empty file uses about 1 KiB of the memory that ``OVERHEAD`` reserves."""


def layers(image: Path | None) -> dict[str, str]:
    """Return writable layer -> its path inside the sandbox."""
    return {"root": "/"} if image else {"root": "/", "local": "/usr/local"}


@functools.cache
def shell(image: Path | None) -> str:
    """Return the shell for text commands: bash if it is installed."""
    return "/bin/bash" if ((image or Path("/")) / "bin/bash").exists() else "/bin/sh"


def command(limits: SandboxLimits, image: Path | None, *, seccomp: int | None, source: int) -> list[str]:
    """Return the arguments that start a sandbox.

    ``seccomp`` and ``source`` are descriptors of the system call filter and of the supervisor's code. Raises
    SandboxUnavailable if the sandbox has no Python for the supervisor.
    """
    lower, upper = (image, "root") if image else (Path("/usr/local"), "local")
    python, prefix = _python(image)
    files = next(number for number in range(3, 10) if number not in (source, seccomp))
    script = _script(limits, lower, upper, files=files, host=image is None)
    supervise = [python, "-I", "-S", "-c", f"exec(open({source}).read())", str(files)]
    view = ["--bind", f"{_MOUNT}/merged", "/"] if image else _host_view(limits, prefix)
    options = ["--unshare-all", *(["--share-net"] if limits.network else [])]
    options += ["--unshare-user", "--disable-userns", "--uid", str(UID), "--gid", str(UID)]
    options += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    options += ["--cap-drop", "ALL", *view]
    # Read-only, so that no command can lower its oom_score_adj below the supervisor's.
    options += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
    options += ["--bind", f"{_MOUNT}/shm", "/dev/shm", "--remount-ro", "/dev"]
    options += ["--perms", "1777", "--dir", "/tmp", "--dir", HOME, "--chdir", HOME]
    for name, value in BASE_ENVIRONMENT.items():
        options += ["--setenv", name, value]
    options += [] if seccomp is None else ["--seccomp", str(seccomp)]
    namespaces = ["unshare", "--user", "--map-root-user", "--mount"]
    return [*namespaces, "sh", "-c", script, "setup", "bwrap", *options, "--", *supervise]


def _script(limits: SandboxLimits, lower: Path, upper: str, *, files: int, host: bool) -> str:
    """Return the setup script: wait for a line on stdin, mount, then execute the arguments.

    The arguments inherit the folder of the writable layers as the descriptor ``files``.
    """
    work = [f"{_MOUNT}/{name}" for name in (f"layers/{upper}", "work", "merged", "shm")]
    work += [f"{_MOUNT}/layers/root/{name}" for name in (_FOLDERS if host else ())]
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
    if host:
        for name, text in _ETC_FILES.items():
            lines.append(f"printf %s {shlex.quote(text)} >{_MOUNT}/layers/root/etc/{name}")
        var = f"{_MOUNT}/layers/root/var"
        lines += [f"chmod 1777 {var}/tmp", f"ln -s /run {var}/run", f"ln -s /run/lock {var}/lock"]
    lines.append(f"exec {files}<{_MOUNT}/layers")
    lines.append('exec "$@"')
    return "\n".join(lines)


def _writable(lower: Path) -> list[str]:
    """Return the folders below ``lower`` that the sandbox's user will own. Their files stay read-only."""
    try:
        return [entry.name for entry in os.scandir(lower) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _option(path: Path) -> str:
    """Return a path escaped for overlay mount options."""
    return str(path).replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _host_view(limits: SandboxLimits, prefix: str | None) -> list[str]:
    """Return the mounts that make only the host's programs visible."""
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


@functools.cache
def _python(image: Path | None) -> tuple[str, str | None]:
    """Return the path of a Python in the sandbox, and the folder to mount if it is outside ``/usr``."""
    root = image or Path("/")
    for folder in reversed(PATH.split(":")):
        if (root / folder.lstrip("/") / "python3").exists():
            return f"{folder}/python3", None
    if image:
        raise SandboxUnavailable(
            f"the root folder {image} has no python3 in {PATH}, which is needed to run commands"
        )
    prefix = os.path.realpath(sys.base_prefix)
    return f"{prefix}/bin/python3", prefix
