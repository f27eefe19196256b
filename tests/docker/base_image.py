"""Build a base image with Python from this machine's Debian packages, without a registry or network.

It contains a few packages, their dependencies and dpkg's database, so that apt-get works in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

WANTED = ("python3", "python3-pip", "python3-venv", "ca-certificates", "apt", "debian-archive-keyring")
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_TOP = ("/bin", "/sbin", "/lib", "/lib64", "/tmp", "/root", "/run", "/var/tmp", "/etc/passwd", "/etc/group")
_MADE = (
    *("/etc/ld.so.conf", "/etc/ld.so.cache", "/etc/nsswitch.conf", "/etc/alternatives", _CERTIFICATES),
    *("/var/lib/dpkg/info", "/var/lib/dpkg/alternatives", "/var/lib/apt/lists/partial"),
    *("/var/cache/apt/archives/partial", "/var/log/apt", "/etc/apt/sources.list"),
)
_LEFT_OUT = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/")
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"


def missing_packages() -> list[str]:
    """Return the packages that the image needs and this machine lacks."""
    if shutil.which("dpkg-query") is None:
        return list(WANTED)
    return [package for package in WANTED if package not in _installed()]


def import_base_image(client, name: str) -> None:
    """Import the image under a name."""
    packages = _closure(WANTED)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "root.tar")
        with tarfile.open(file, "w") as tar:
            for path in sorted(_paths(packages)):
                tar.add(path, path.lstrip("/"), recursive=False)
            status = Path(folder, "status")
            status.write_text(_status(packages))
            tar.add(status, "var/lib/dpkg/status")
            link = tarfile.TarInfo("usr/local/bin/python")
            link.type, link.linkname = tarfile.SYMTYPE, "/usr/bin/python3"
            tar.addfile(link)
        repository, _, tag = name.partition(":")
        changes = [f"ENV PATH={_PATH} LANG=C.UTF-8", 'CMD ["python3"]']
        with file.open("rb") as stream:
            pieces = iter(lambda: stream.read(1 << 20), b"")
            client.api.import_image_from_stream(pieces, repository=repository, tag=tag, changes=changes)


def _query(*arguments: str) -> str:
    return subprocess.run(arguments, text=True, capture_output=True, timeout=60, check=True).stdout


def _installed() -> dict[str, tuple[bool, list[list[str]], list[str]]]:
    """Return whether each package is essential, its dependencies as alternatives, and its provided names."""
    fields = "${Package}\t${db:Status-Status}\t${Essential}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    installed = {}
    for line in _query("dpkg-query", "-W", "-f", fields).splitlines():
        package, status, essential, depends, provides = line.split("\t")
        if status == "installed":
            needs = [
                [_bare(name) for name in group.split("|")] for group in depends.split(",") if group.strip()
            ]
            installed[package] = (essential == "yes", needs, [_bare(name) for name in provides.split(",")])
    return installed


def _bare(name: str) -> str:
    return name.partition("(")[0].partition(":")[0].strip()


def _closure(wanted: tuple[str, ...]) -> set[str]:
    installed = _installed()
    providers = {alias: package for package, (_, _, aliases) in installed.items() for alias in aliases}
    pending = [*wanted, *(package for package, (essential, _, _) in installed.items() if essential)]
    seen: set[str] = set()
    while pending:
        package = pending.pop()
        package = package if package in installed else providers.get(package, "")
        if package in seen or not package:
            continue
        seen.add(package)
        for group in installed[package][1]:
            pending.append(next((name for name in group if name in installed), group[0]))
    return seen


def _paths(packages: set[str]) -> set[str]:
    """Return every file and folder of the packages, and the generated files of a Debian system."""
    named = {*_TOP, *_MADE}
    for package in packages:
        named.update(_query("dpkg", "-L", package).splitlines())
        named.update(map(str, Path("/var/lib/dpkg/info").glob(f"{package}[.:]*")))
    for folder in ("/etc/alternatives", "/etc/apt/sources.list.d"):
        named.update(entry.path for entry in os.scandir(folder))
    for folder in ("/usr/bin", "/usr/sbin"):
        links = (entry.path for entry in os.scandir(folder) if entry.is_symlink())
        named.update(link for link in links if os.readlink(link).startswith("/etc/alternatives"))
    found: set[str] = set()
    for path in named:
        if path.startswith("/") and path not in ("/", "/.") and not path.startswith(_LEFT_OUT):
            real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            while os.path.lexists(real) and real not in found and real != "/":
                found.add(real)
                real = os.path.dirname(real)
    return found - {path for path in found if path.endswith("EXTERNALLY-MANAGED")}


def _status(packages: set[str]) -> str:
    stanzas = Path("/var/lib/dpkg/status").read_text(encoding="utf-8").strip().split("\n\n")
    kept = (s for s in stanzas if s.partition("\n")[0].removeprefix("Package: ") in packages)
    return "\n\n".join(kept) + "\n"
