"""Build the release of a commit into a folder, and try it in an empty virtual environment.

``python -m release.dist [FOLDER]`` exports HEAD with ``git archive``, so that no untracked or changed file
is included. It builds a source distribution of agentrl-kit and of agentrl-tasks, a wheel from each of them,
and SHA256SUMS. Then it installs the wheels into a new environment and runs both commands in an empty folder.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECTS = (".", "release/tasks")
PATTERNS = ("agentrl_kit-*", "agentrl_tasks-*", "SHA256SUMS")
TRIALS = (
    "agentrl-env --version",
    "agentrl-env list",
    "agentrl-env play household --expert --seed 1",
    "agentrl-env check household",
    "agentrl-train --version",
    "agentrl-train quickstart --set run.steps=2 --set eval.samples=10",
)


def build(source: Path, output: Path) -> list[Path]:
    """Build both distributions of both projects of a source tree, and return the files in sorted order."""
    for project in PROJECTS:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output)]
        subprocess.run([*command, str(source / project)], check=True)
    return sorted(path for pattern in PATTERNS[:2] for path in output.glob(pattern))


def install(wheels: list[Path], environment: Path) -> None:
    """Create a virtual environment, and install the wheels with the trainer's dependencies into it."""
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [
        str(environment / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *constraints, *map(str, wheels), "agentrl-kit[train]"], check=True)


def try_commands(environment: Path, folder: Path, trials: tuple[str, ...] = TRIALS) -> None:
    """Run commands of an environment in an empty folder. Raises CalledProcessError if one fails."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for trial in trials:
        print(f"$ {trial}", flush=True)
        program, *arguments = trial.split()
        command = [str(environment / "bin" / program), *arguments]
        subprocess.run(command, cwd=folder, env=inherited, check=True)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main(output: Path) -> None:
    """Build the release of HEAD into ``output`` and try it."""
    if changed := _git("status", "--porcelain").splitlines():
        print(f"{len(changed)} changed files are not in the release, which is that of HEAD", file=sys.stderr)
    output.mkdir(parents=True, exist_ok=True)
    for pattern in PATTERNS:
        for old in output.glob(pattern):
            old.unlink()
    os.environ["SOURCE_DATE_EPOCH"] = _git("log", "-1", "--format=%ct").strip()  # equal commits, equal files
    with tempfile.TemporaryDirectory() as scratch:
        source, environment, empty = (Path(scratch, name) for name in ("source", "environment", "empty"))
        source.mkdir()
        empty.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "--extract", "--directory", str(source)], input=archive, check=True)
        files = build(source, output)
        install([path for path in files if path.suffix == ".whl"], environment)
        try_commands(environment, empty)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
    (output / "SHA256SUMS").write_text("\n".join([*sums, ""]))
    print("\n".join(sums))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist")
