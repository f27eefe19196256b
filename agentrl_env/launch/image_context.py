"""The build context of a task's image: a Dockerfile, this package as a wheel, and the task's files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import agentrl_env
from agentrl_env.errors import LaunchError, TargetError, install_extra
from agentrl_env.launch.installed import installed_task, unknown_target

DISTRIBUTION = "agentrl-kit"
USER = "65532:65532"
"""The server's user. It is numeric, so that Kubernetes can verify that it is not root."""
PORT = 8000
_IGNORED = (
    *(".git", ".hg", ".svn", ".venv", "venv", ".env", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
    *("**/__pycache__", "**/*.pyc", "**/.DS_Store", ".hypothesis"),
)
_IS_NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 11))"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest zip timestamp, so that equal files make equal wheels
_IS_HEALTHY = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{PORT}/health', timeout=2)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFiles:
    """A target's files on this machine, and the target inside the image."""

    root: Path
    name: str
    target: str

    @classmethod
    def of(cls, target: str) -> TaskFiles:
        """Find a target's files without importing it. Raises TargetError."""
        if (task := installed_task(target)) is not None:
            file = task.file()
            if file is not None and file.name == "environment.py":
                return cls._in_folder(file.parent, file.name, task.target.partition(":")[2])
            target = task.target
        place, _, attribute = target.rpartition(":")
        if not place:
            place, attribute = target, ""
        path = Path(place)
        if path.is_dir():
            if not (path / "environment.py").is_file():
                raise TargetError(f"{target}: the folder has no environment.py")
            return cls._in_folder(path, "", attribute)
        if path.suffix == ".py":
            if not path.is_file():
                raise TargetError(f"{target}: no such file")
            return cls._in_folder(path.parent, path.name, attribute)
        if not attribute:
            raise unknown_target(target)
        return cls(root=_top_of(place, target), name=place.partition(".")[0], target=target)

    @classmethod
    def _in_folder(cls, folder: Path, file: str, attribute: str) -> TaskFiles:
        folder = folder.resolve()
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", folder.name).strip(".") or "task"
        place = "/".join(part for part in ("/srv", name, file) if part)
        return cls(root=folder, name=name, target=f"{place}:{attribute}" if attribute else place)

    def lines(self, name: str) -> list[str]:
        """Return the lines of a file such as requirements.txt without comments, or [] if it is missing."""
        file = self.root / name if self.root.is_dir() else self.root.parent / name
        if not file.is_file():
            return []
        lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if line]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The inputs of an image build, as for ``build_image``."""

    task: TaskFiles
    base: str
    requirements: Sequence[str] = ()
    wheelhouse: Path | None = None
    ca: Path | None = None

    def dockerfile(self) -> str:
        """Return the Dockerfile. Steps that rarely change come first, so that their layers are cached."""
        entry = ["/opt/agentrl/bin/agentrl-env", "serve", self.task.target]
        entry += ["--host", "0.0.0.0", "--port", str(PORT)]
        packages = " ".join(self._system_packages())
        index = "--no-index --find-links /install/wheels " if self.wheelhouse else ""
        pip = f"/opt/agentrl/bin/python -m pip install {index}"
        trust = [f"ENV {name}=/install/ca.crt" for name in ("PIP_CERT", "SSL_CERT_FILE")] if self.ca else []
        lines = [
            f"FROM {self.base} AS build",
            f"RUN {json.dumps(['python3', '-c', _IS_NEW_ENOUGH])}",
            "RUN python3 -m venv /opt/agentrl",
            *(f"ARG {name}" for name in index_settings()),
            "COPY install /install",
            *trust,
            "ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore",
            f"RUN {pip}-r /install/requirements.txt",
            "COPY package /package",
            f"RUN {pip}--no-deps --no-index --force-reinstall /package/*.whl",
            f"FROM {self.base}",
            f"RUN {_apt_install(packages)}" if packages else "",
            "ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp",
            "WORKDIR /srv",
            f"USER {USER}",
            f"EXPOSE {PORT}",
            "STOPSIGNAL SIGTERM",
            "HEALTHCHECK --interval=30s --timeout=5s --start-period=60s "
            f"CMD {json.dumps(['/opt/agentrl/bin/python', '-c', _IS_HEALTHY])}",
            "COPY --from=build /opt/agentrl /opt/agentrl",
            "COPY task /srv",
            f"ENTRYPOINT {json.dumps(entry)}",
        ]
        return "\n".join(line for line in lines if line) + "\n"

    def write(self, file: IO[bytes]) -> None:
        """Write the build context as a tar archive. Raises LaunchError if a file cannot be included."""
        requirements = list(self.requirements)
        extras = ",".join(filter(None, map(_own_extras, requirements)))
        own = f"/install/{wheel_name()}" + (f"[{extras}]" if extras else "")
        others = [line for line in requirements if _own_extras(line) is None]
        pip_lines = [own, *others, *self.task.lines("requirements.txt")]
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            _add_bytes(tar, "Dockerfile", self.dockerfile().encode())
            _add_bytes(tar, "install/requirements.txt", "\n".join([*pip_lines, ""]).encode())
            _add_bytes(tar, f"install/{wheel_name()}", make_wheel(files=False))
            _add_bytes(tar, f"package/{wheel_name()}", make_wheel(files=True))
            if self.ca is not None:
                _add_bytes(tar, "install/ca.crt", self.ca.read_bytes())
            for wheel in sorted(self.wheelhouse.iterdir()) if self.wheelhouse else []:
                if wheel.is_file():
                    tar.add(wheel, f"install/wheels/{wheel.name}", filter=_plain)
            for path, name in _task_paths(self.task):
                tar.add(path, name, recursive=False, filter=_plain)

    def _system_packages(self) -> list[str]:
        packages = self.task.lines("packages.txt")
        for package in packages:
            if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*(:[a-z0-9]+)?(=[\w.+:~-]+)?", package):
                raise LaunchError(f"{self.task.root}/packages.txt: {package!r} is not a Debian package name")
        return packages


def own_version() -> str:
    """Return this package's version. Raises LaunchError if it is not installed."""
    return str(_metadata()["Version"])


def wheel_name() -> str:
    """Return the file name of this package's wheel. Raises LaunchError if it is not installed."""
    return f"{DISTRIBUTION.replace('-', '_')}-{own_version()}-py3-none-any.whl"


def make_wheel(*, files: bool) -> bytes:
    """Return this package as a wheel, made from the imported files without a build tool or network.

    A wheel without files only declares the dependencies. Installing it makes an image layer that stays cached
    while the code changes. RECORD is empty, because pip writes it again. Raises LaunchError if this package
    is not installed.
    """
    metadata, root = _metadata(), Path(agentrl_env.__file__).parent
    info = f"{DISTRIBUTION.replace('-', '_')}-{metadata['Version']}.dist-info"
    keys = ("Name", "Version", "Requires-Python", "Provides-Extra", "Requires-Dist")
    headers = [f"{key}: {value}\n" for key in keys for value in metadata.get_all(key) or ()]
    content = {
        f"{info}/METADATA": "".join(["Metadata-Version: 2.1\n", *headers]).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": b"[console_scripts]\nagentrl-env = agentrl_env.__main__:main\n",
        f"{info}/RECORD": b"",
    }
    for path in sorted(root.rglob("*")) if files else ():
        if path.is_file() and path.suffix != ".pyc":
            content[f"agentrl_env/{path.relative_to(root)}"] = path.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in content.items():
            member = zipfile.ZipInfo(name, _EPOCH)
            member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(member, data)
    return buffer.getvalue()


def _metadata() -> importlib.metadata.PackageMetadata:
    try:
        return importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise LaunchError(f"building an image needs {DISTRIBUTION} to be installed with pip") from error


def index_settings() -> dict[str, str]:
    """Return pip's index settings from this process's environment. They are not stored in the image."""
    names = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _apt_install(packages: str) -> str:
    install = f"apt-get install --yes --no-install-recommends {packages}"
    return f"apt-get update && DEBIAN_FRONTEND=noninteractive {install} && rm -rf /var/lib/apt/lists/*"


def _top_of(module: str, target: str) -> Path:
    """Return the folder or file of a module's top-level package."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None or (spec.origin is None and not spec.submodule_search_locations):
        raise TargetError(f"{target}: there is no module {module!r}")
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else str(spec.origin)).resolve()


def _task_paths(task: TaskFiles) -> Iterator[tuple[Path, str]]:
    """Yield the task's files in sorted order, with their names in the context."""
    try:
        from docker.utils.build import exclude_paths
    except ImportError as error:
        raise LaunchError(f"an image needs an extra package: {install_extra('docker')}") from error
    if task.root.is_file():
        yield task.root, f"task/{task.root.name}"
        return
    patterns = [*_IGNORED, *task.lines(".dockerignore")]
    yield task.root, f"task/{task.name}"
    for name in sorted(exclude_paths(str(task.root), patterns)):
        path = task.root / name
        if path.is_symlink() and not path.resolve().is_relative_to(task.root):
            raise LaunchError(
                f"{path} links to {path.resolve()}, which would be missing in the image; "
                "copy it into the task's folder, or list the link in .dockerignore"
            )
        yield path, f"task/{task.name}/{name}"


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the owner and time of an entry. The image's user can read the entry but not write to it."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.pax_headers = {}
    info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
    return info


def _add_bytes(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    tar.addfile(info, io.BytesIO(content))


def _own_extras(requirement: str) -> str | None:
    """Return the extras of a requirement for this package (``agentrl-kit[otel]``), or None for others."""
    found = re.fullmatch(rf"{DISTRIBUTION}\s*(?:\[([^\]]*)\])?", requirement.strip())
    return (found.group(1) or "").replace(" ", "") if found else None
