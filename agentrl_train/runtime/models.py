"""Load a policy and its tokenizer from a folder or the hub."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agentrl_train.errors import ConfigError
from agentrl_train.learner import adapter_base, merge_adapter

transformers.utils.logging.disable_progress_bar()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry twice
logger = logging.getLogger(__name__)

MAX_REASON = 1_000
"""Characters of the library's error message that are kept."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(
    path: str, *, device: str = "cpu", dtype: str = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer in ``path``: a folder or a model name on the hub.

    For a folder with a PEFT adapter, the adapter is merged into its base model.

    Raises:
        ConfigError: the model does not exist, or the device is not available.
    """
    _check_source(path, device)
    if not Path(path).exists():
        logger.warning("there is no folder %s: loading the model from the hub", path)
    base = adapter_base(Path(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(
            base or path, dtype=DTYPES[dtype], attn_implementation="sdpa"
        )
        if base is not None:
            merge_adapter(model, Path(path))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[
            :MAX_REASON
        ]  # the link to a gated model is not in its first line
        source = "" if Path(path).exists() else " from the hub (there is no folder of this name)"
        raise ConfigError(f"the model {path!r} cannot be loaded{source}: {reason}") from error
    model.to(device)  # type: ignore[arg-type]  # the library types this by its first parameter
    return model, tokenizer


def copy_of(model: PreTrainedModel, *, dtype: str = "float32", device: str | None = None) -> PreTrainedModel:
    """Return a copy for an engine, on another device if given."""
    copied = copy.deepcopy(model)
    if device is not None:
        copied.to(device)  # type: ignore[arg-type]  # the library types this by its first parameter
    for parameter in copied.parameters():  # not the buffers: rotary frequencies need float32
        parameter.data = parameter.data.to(DTYPES[dtype])
    return copied


def _check_source(path: str, device: str) -> None:
    is_local = path.startswith((".", "/", "~")) or Path(path).exists()
    has_model = (Path(path) / "config.json").is_file() or adapter_base(Path(path)) is not None
    if is_local and not has_model:
        raise ConfigError(f"{path!r} is not a model folder: it has no config.json")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"engine.device = {device!r} is not available: {reason}") from error
