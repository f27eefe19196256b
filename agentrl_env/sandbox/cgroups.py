"""Control groups, version 1 or 2: resource limits on a group of processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from agentrl_env.sandbox.orphans import PREFIX, is_orphan, resource_name
from agentrl_env.sandbox.sandbox import SandboxLimits

REQUIRED = frozenset({"memory", "pids"})
_PERIOD_US = 100_000
_SETTLE_S = 2.0


class Group:
    """The cgroups of one sandbox: one folder per controller (version 1), or one for all (version 2).

    ``bases`` is the result of ``find``. ``extra_pids`` processes are allowed in addition to ``limits.pids``.
    """

    def __init__(self, bases: Mapping[str, Path], limits: SandboxLimits, *, extra_pids: int) -> None:
        name = resource_name()
        self._folders = {controller: base / name for controller, base in bases.items()}
        try:
            for folder in set(self._folders.values()):
                folder.mkdir()
            for controller, folder in self._folders.items():
                for file, value in _settings(controller, folder, limits, extra_pids).items():
                    if not file.startswith("memory.swap") or (folder / file).exists():
                        (folder / file).write_text(value)
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Add a process to the group. Its children inherit the group. Raises OSError."""
        for folder in set(self._folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def oom_kills(self) -> int:
        """Return the number of processes that the kernel has killed for lack of memory."""
        folder = self._folders["memory"]
        return max(_count(folder / name, "oom_kill") for name in ("memory.oom_control", "memory.events"))

    def remove(self) -> None:
        """Delete the folders after the last process has ended. Idempotent."""
        end = time.monotonic() + _SETTLE_S
        for folder in set(self._folders.values()):
            while not _remove(folder) and time.monotonic() < end:
                time.sleep(0.002)


def find() -> dict[str, Path]:
    """Return the folders for new groups by controller, or nothing if this process cannot create groups."""
    own = _own_groups(Path("/proc/self/cgroup").read_text())
    bases: dict[str, Path] = {}
    for mount, root, controllers in _hierarchies(Path("/proc/self/mountinfo").read_text()):
        inner = own.get(min(controllers, default=""), "/")
        inner = inner[len(root) :] if root != "/" and inner.startswith(root) else inner
        folder = mount / inner.strip("/")
        if controllers:
            bases.update(dict.fromkeys(controllers, folder if folder.is_dir() else mount))
        else:
            bases.update(_delegated_controllers(folder, mount))
    usable = {c: base for c, base in bases.items() if c in REQUIRED | {"cpu"} and _writable(base)}
    return usable if usable.keys() >= REQUIRED else {}


def _writable(base: Path) -> bool:
    return os.access(base, os.W_OK) and os.access(base / "cgroup.procs", os.W_OK)


def remove_orphans(bases: Mapping[str, Path]) -> None:
    """Delete the groups whose owners have ended."""
    for base in set(bases.values()):
        for folder in base.glob(f"{PREFIX}*"):
            if is_orphan(folder.name):
                _remove(folder)


def _own_groups(text: str) -> dict[str, str]:
    """Return controller -> path from /proc/self/cgroup. The key "" stands for version 2."""
    groups = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _hierarchies(text: str) -> Iterator[tuple[Path, str, list[str]]]:
    """Yield (mount point, root, controllers) from /proc/self/mountinfo. Version 2 lists no controllers."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount = before.split(" ")[3:5]
        if kind == "cgroup2":
            yield Path(mount), root, []
        elif kind == "cgroup":
            found = sorted({"memory", "pids", "cpu", "cpuacct"} & set(options.split(",")))
            if found:
                yield Path(mount), root, found


def _delegated_controllers(own: Path, mount: Path) -> dict[str, Path]:
    """Return the controllers that children of a version 2 folder get, with this folder.

    The folder must not contain processes itself.
    """
    for base in (own, own.parent):
        if base == mount or mount in base.parents:
            with contextlib.suppress(OSError):
                controllers = (base / "cgroup.subtree_control").read_text().split()
                if set(controllers) >= REQUIRED:
                    return dict.fromkeys(controllers, base)
    return {}


def _settings(controller: str, folder: Path, limits: SandboxLimits, extra_pids: int) -> dict[str, str]:
    """Return file -> value for one controller's limits."""
    quota = int(limits.cpus * _PERIOD_US)
    match controller:
        case "memory" if (folder / "memory.max").exists():
            return {"memory.max": str(limits.memory), "memory.swap.max": "0"}
        case "memory":
            return {"memory.limit_in_bytes": str(limits.memory), "memory.swappiness": "0"}
        case "pids":
            return {"pids.max": str(limits.pids + extra_pids)}
        case "cpu" if (folder / "cpu.max").exists():
            return {"cpu.max": f"{quota} {_PERIOD_US}"}
        case "cpu":
            return {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota)}
    return {}


def _count(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
