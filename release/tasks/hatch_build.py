"""Build hooks of agentrl-tasks: the files come from the checkout, the version from agentrl-kit.

An unpacked source distribution already contains the folder agentrl_tasks and static metadata.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = "agentrl_tasks"
STARTER, PACKAGED_STARTER = 'path = "starter"', 'path = "package:agentrl-tasks"'


class CheckoutFiles(BuildHookInterface):
    """Include environments/ and examples/quickstart/ of the checkout in the package."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Map the files of the checkout to their places in the package."""
        root = Path(self.root)
        if (root / PACKAGE).is_dir():
            return
        checkout = root.parents[1]
        included = build_data["force_include"]
        included[str(checkout / "LICENSE")] = f"{PACKAGE}/LICENSE"
        for folder in sorted((checkout / "environments").iterdir()):
            if (folder / "environment.py").is_file():
                included[str(folder)] = f"{PACKAGE}/{folder.name}"
        quickstart = checkout / "examples" / "quickstart"
        for path in sorted(quickstart.iterdir()):
            if path.name != "train.toml" and path.name != "__pycache__":
                included[str(path)] = f"{PACKAGE}/quickstart/{path.name}"
        self._folder = tempfile.TemporaryDirectory()
        config = Path(self._folder.name, "train.toml")
        config.write_text(
            packaged_config((quickstart / "train.toml").read_text(encoding="utf-8")), encoding="utf-8"
        )
        included[str(config)] = f"{PACKAGE}/quickstart/train.toml"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary files."""
        if self._folder is not None:
            self._folder.cleanup()


def packaged_config(text: str) -> str:
    """Return the quick start's configuration with the names of installed tasks and the packaged starter."""
    text, replaced = re.subn(r'"\.\./\.\./environments/(\w+)"', r'"\1"', text)
    if replaced == 0 or STARTER not in text:
        raise ValueError("examples/quickstart/train.toml names its tasks or its model in another way")
    return text.replace(STARTER, PACKAGED_STARTER)


class SameVersion(MetadataHookInterface):
    """Depend on the agentrl-kit of the same version."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dependencies."""
        metadata["dependencies"] = [f"agentrl-kit=={metadata['version']}"]
