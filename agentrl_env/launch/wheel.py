"""This package as a wheel, made from what is imported: no build tool, no network."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from pathlib import Path

import agentrl_env
from agentrl_env.errors import LaunchError

DISTRIBUTION = "agentrl-kit"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can say; equal files make equal wheels


def wheel_name() -> str:
    """Return the wheel's file name. Raises LaunchError where this package is not installed."""
    return f"{DISTRIBUTION.replace('-', '_')}-{own_version()}-py3-none-any.whl"


def own_version() -> str:
    """Return this package's version. Raises LaunchError where it is not installed."""
    return str(_metadata()["Version"])


def _metadata() -> importlib.metadata.PackageMetadata:
    try:
        return importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise LaunchError(f"building an image needs {DISTRIBUTION} to be installed with pip") from error


def make_wheel(*, files: bool) -> bytes:
    """Return this package as a wheel; without its files it only names what it depends on.

    The one without files installs the dependencies in a layer of an image that stays while the code
    changes. Raises LaunchError where this package is not installed.
    """
    metadata = _metadata()
    root = Path(agentrl_env.__file__).parent
    content = {}
    if files:
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                content[f"agentrl_env/{path.relative_to(root)}"] = path.read_bytes()
    info = f"{DISTRIBUTION.replace('-', '_')}-{metadata['Version']}.dist-info"
    keys = ("Name", "Version", "Requires-Python", "Provides-Extra", "Requires-Dist")
    headers = [f"{key}: {value}" for key in keys for value in metadata.get_all(key) or ()]
    content[f"{info}/METADATA"] = "\n".join(["Metadata-Version: 2.1", *headers, ""]).encode()
    content[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: agentrl-env\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    content[f"{info}/entry_points.txt"] = b"[console_scripts]\nagentrl-env = agentrl_env.__main__:main\n"
    content[f"{info}/RECORD"] = _record(content, f"{info}/RECORD").encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            member = zipfile.ZipInfo(name, _EPOCH)
            member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(member, data)
    return buffer.getvalue()


def _record(content: dict[str, bytes], own_name: str) -> str:
    lines = []
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{own_name},,", ""])
