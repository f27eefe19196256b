"""The package and each extra can be installed alongside common training packages."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PEERS = ("verifiers>=0.4,<0.5", "inspect-ai>=0.3.200")
CONFLICTS = {
    ("agents", "verifiers>=0.4,<0.5"): "openai",
    ("dev", "verifiers>=0.4,<0.5"): "mcp",
    ("bench", "verifiers>=0.4,<0.5"): "mcp",
}
"""Extras that cannot be installed alongside a peer, and the conflicting package.

verifiers 0.4 needs openai 2 and mcp 2. The tested release of pydantic-ai-slim needs openai 3, and the tests'
OpenEnv needs mcp 1.
"""
SOURCES = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
}
"""pip's index variables and the matching variables of uv."""
UNREACHABLE = ("Failed to fetch", "error sending request", "not found in the package registry")
pytestmark = [pytest.mark.bridges, pytest.mark.extended]


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install uv, whose resolver can choose the lowest versions."""
    folder = tmp_path_factory.mktemp("uv")
    python = folder / "bin/python"
    for command in (
        [sys.executable, "-m", "venv", folder],
        [python, "-m", "pip", "--quiet", "install", "uv>=0.9"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot install uv: {done.stderr[-300:]}")
    return folder / "bin/uv"


def resolved(uv: Path, requirements: Path, resolution: str) -> tuple[dict[str, str], str]:
    """Return the resolved versions, or None and the reason."""
    sources = {theirs: os.environ[ours] for ours, theirs in SOURCES.items() if ours in os.environ}
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    done = subprocess.run(
        [*command, "--python", sys.executable, "--resolution", resolution, requirements],
        capture_output=True,
        text=True,
        env=os.environ | sources,
    )
    if any(reason in done.stderr for reason in UNREACHABLE):
        pytest.skip(f"the index does not have a package: {done.stderr[-300:]}")
    lines = [line.partition("==") for line in done.stdout.splitlines() if "==" in line]
    return {name: version for name, _, version in lines}, done.stderr if done.returncode else ""


@pytest.mark.parametrize("resolution", ["highest", "lowest-direct"])
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_extra_resolves_next_to_a_peer(
    extra: str, peer: str, resolution: str, uv: Path, tmp_path: Path
) -> None:
    requirements = tmp_path / "requirements.in"
    kept = PROJECT["optional-dependencies"].get(extra, [])
    requirements.write_text("\n".join([*PROJECT["dependencies"], *kept, peer]))
    versions, refusal = resolved(uv, requirements, resolution)
    if (extra, peer) in CONFLICTS:
        assert CONFLICTS[extra, peer] in refusal, "the conflict is gone: remove it from CONFLICTS"
    else:
        assert not refusal
        assert {"pydantic", "fastapi"} < versions.keys()
