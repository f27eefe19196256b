"""GGUF files, dequantized into model folders that can be trained."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from gguf import GGUFReader
from transformers import AutoConfig, AutoTokenizer, GgufConfig, PreTrainedModel

from agentrl_train.errors import ConfigError
from agentrl_train.models.gguf_fields import require_fields, require_tensors_read
from agentrl_train.models.gguf_rope import read_rope_scaling
from agentrl_train.models.stored import BUILDING, auto_class, require_all_tensors
from agentrl_train.storage.atomic_io import is_disk_full

logger = logging.getLogger(__name__)

CHUNK = 1 << 20
SAME_HEAD = 0.1
"""Largest relative difference at which head and embedding are the same matrix, quantized twice.

Q5_0 and Q8_0 of one matrix differ by 0.04, Q2_K and Q6_K by less than 0.1, two matrices by about 1.4.
"""
MAX_REASON = 1_000
"""Maximum number of characters of the library's error message to keep."""


class Part(Protocol):
    """A part of a GGUF file: a path, or an entry of a wheel."""

    @property
    def name(self) -> str:
        """Name without the folder."""
        ...

    def open(self, mode: str) -> IO[Any]:
        """Open the part."""
        ...


def digest(parts: Sequence[Part]) -> str:
    """Return the SHA-256 checksum of joined parts."""
    hashed = hashlib.sha256()
    for chunk in _chunks(parts):
        hashed.update(chunk)
    return hashed.hexdigest()


def dequantize(parts: Sequence[Part], folder: Path) -> None:
    """Write the model in a GGUF file into an empty folder: bfloat16 weights, configuration and tokenizer.

    Args:
        parts: the file, or its parts in order.
        folder: the folder.

    Raises:
        ConfigError: the file cannot be read, or is not a whole model.
        OSError: the folder cannot be written.
    """
    file = folder / "weights.gguf"
    if len(parts) == 1 and isinstance(parts[0], Path):
        file.symlink_to(parts[0].resolve())
    else:
        with file.open("wb") as joined:
            joined.writelines(_chunks(parts))
    try:
        model, tokenizer = _load(file)
    except Exception as error:
        if is_disk_full(error):
            raise
        reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
        raise ConfigError(f"{parts[0].name} cannot be read as a GGUF model: {reason}") from error
    finally:
        file.unlink()
    _tie_equal_head(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _chunks(parts: Sequence[Part]) -> Iterator[bytes]:
    for part in parts:
        with part.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


def _load(file: Path) -> tuple[PreTrainedModel, Any]:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    reader = GGUFReader(file)
    require_fields(reader, config)
    with BUILDING:
        model, loaded = auto_class(config).from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    require_all_tensors(lacking=loaded["missing_keys"], mismatched=loaded["mismatched_keys"])
    require_tensors_read(reader, model)
    if scaling := read_rope_scaling(reader, model.config):
        model.config.rope_parameters = {**model.config.rope_parameters, **scaling}
    model.config.__dict__.pop("quantization_config", None)  # the weights are no longer quantized
    return model, tokenizer


@torch.no_grad()
def _tie_equal_head(model: PreTrainedModel) -> None:
    """Tie head and embedding if they were one matrix before quantization. The head has more bits."""
    if model.config.tie_word_embeddings:
        return
    embedding = cast(torch.Tensor, model.get_input_embeddings().weight)
    head = cast(torch.Tensor, model.get_output_embeddings().weight)
    if embedding.shape != head.shape:
        return
    difference = float((head.float() - embedding.float()).norm() / embedding.float().norm())
    if difference > SAME_HEAD:
        return
    logger.warning(
        "the head equals the embedding except for quantization (relative difference %.3f): tied, as in the "
        "original model",
        difference,
    )
    embedding.copy_(head)
    model.config.tie_word_embeddings = True
    model.tie_weights()
