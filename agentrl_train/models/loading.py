"""Load a policy and its tokenizer from a folder or the hub."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME

from agentrl_train.chat import ChatFormat
from agentrl_train.config import EngineSection, ModelSection
from agentrl_train.errors import ConfigError, TrainError
from agentrl_train.models.adapters import (
    REVISION,
    adapter_base,
    adapter_revision,
    has_adapter,
    merge_adapter,
    require_whole_model,
)
from agentrl_train.models.sources import local_model
from agentrl_train.models.stored import (
    BUILDING,
    StoredModel,
    auto_class,
    require_all_tensors,
    require_no_surplus,
    require_ties,
    require_whole_weights,
    safetensors_files,
)
from agentrl_train.storage.atomic_io import run_folder_errors

transformers.utils.logging.disable_progress_bar()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry twice
logger = logging.getLogger(__name__)

MAX_REASON = 1_000
"""Maximum number of characters of the library's error message to keep."""
STORED_SETTINGS = "agentrl"
"""Key of the chat settings in ``tokenizer_config.json``."""
CHAT_SETTINGS = {"stop", "tool_parser", "template_kwargs", "system_prompt"}
"""Settings of ``[model]`` that are part of the trained policy."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAST_BFLOAT16 = ("avx512_bf16", "amx_bf16")
"""Capabilities of processors that multiply bfloat16 several times faster than float32."""
LARGE_MODEL = 50_000_000
"""Number of parameters from which a device should compute in bfloat16. Smaller models gain little."""


def load_policy(
    path: str, *, device: str = "cpu", dtype: str = "float32", revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer in ``path``, which is any source that ``local_model`` accepts.

    If the folder has a PEFT adapter, the adapter is merged into its base model. ``revision`` selects the
    revision of a model on the hub. The adapter's own revision of its base model takes precedence.

    Raises:
        ConfigError: the model does not exist, its files are not complete, or the device is not available.
    """
    path = local_model(path)
    with _as_config_errors(path):
        _check_source(path, device)
        base = adapter_base(Path(path))
        if base is not None:
            require_whole_model(base)
            revision = adapter_revision(Path(path)) or revision
        _check_hub(base or path, revision)
        tokenizer = _load_tokenizer(path, revision=revision)
        config = AutoConfig.from_pretrained(base or path, revision=revision, trust_remote_code=False)
        require_whole_weights(config)
        model: PreTrainedModel
        with BUILDING:
            model, found = auto_class(config).from_pretrained(
                base or path,
                dtype=DTYPES[dtype],
                revision=revision,
                ignore_mismatched_sizes=True,  # reported below
                output_loading_info=True,
            )
        require_all_tensors(lacking=found["missing_keys"], mismatched=found["mismatched_keys"])
        require_no_surplus(model, found["unexpected_keys"])
        require_ties(model)
        setattr(model, REVISION, revision)
        if base is not None:
            merge_adapter(model, Path(path))
    model.to(device)  # type: ignore[arg-type]  # the library types this by its first parameter
    return model, tokenizer


def save_policy(path: str, output: Path, *, dtype: str = "float32") -> None:
    """Write the model and the tokenizer in ``path`` to a folder, with an adapter merged.

    Raises:
        ConfigError: the model cannot be loaded.
        RunFolderError: the folder cannot be written.
    """
    model, tokenizer = load_policy(path)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    model.config.dtype = DTYPES[dtype]
    with run_folder_errors(output, option="folder"):
        output.mkdir(parents=True, exist_ok=True)  # the library only logs that a file is in the way
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)


def open_policy(
    path: str, *, dtype: str = "float32", revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, StoredModel | None]:
    """Return model and tokenizer like ``load_policy``, and the weights, which stay in their files.

    The model is on the meta device. An adapter to merge, or a file in another format, is loaded immediately,
    and then there are no weights to read later.

    Raises:
        ConfigError: the model does not exist, or its files are not complete.
    """
    path = local_model(path)
    with _as_config_errors(path):
        _check_source(path, "cpu")
        _check_hub(path, revision)
        files = safetensors_files(path, revision=revision) if not has_adapter(Path(path)) else []
        if files:
            tokenizer = _load_tokenizer(path, revision=revision)
            stored = StoredModel(path, files=files, dtype=DTYPES[dtype], revision=revision)
            return stored.model(), tokenizer, stored
    return *load_policy(path, dtype=dtype, revision=revision), None


def open_teacher(
    path: str, *, policy: str, dtype: str = "float32", revision: str | None = None
) -> tuple[PreTrainedModel, StoredModel | None]:
    """Return a frozen model that scores the tokens of the model in ``policy``, and its weights.

    Args:
        path: folder of the teacher, or its name on the hub.
        policy: source of the policy. The teacher must have the same tokens.
        dtype: dtype of its parameters.
        revision: revision of the policy on the hub.

    Raises:
        ConfigError: the teacher cannot be loaded, or has other tokens.
    """
    model, tokenizer, stored = open_policy(path, dtype=dtype)
    with _as_config_errors(policy):
        vocabulary = _load_tokenizer(local_model(policy), revision=revision).get_vocab()
    if tokenizer.get_vocab() != vocabulary:
        raise ConfigError(
            f"the teacher {path!r} has other tokens than the policy {policy!r}, so it cannot score "
            "them: choose a teacher with the same tokenizer"
        )
    return model, stored


def _load_tokenizer(path: str, *, revision: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model. An adapter without a tokenizer has the tokenizer of its base."""
    folder = Path(path)
    if (base := adapter_base(folder)) is not None and not any(folder.glob("tokenizer*")):
        path, revision = base, adapter_revision(folder) or revision
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, revision=revision, trust_remote_code=False
    )
    return tokenizer


@contextmanager
def _as_config_errors(path: str) -> Iterator[None]:
    """Convert any error that the library raises for a model. A broken folder can raise anything."""
    try:
        yield
    except TrainError:
        raise
    except Exception as error:
        # Keep all lines, because the link to a gated model is not in the first.
        reason = " ".join(str(error).split())[:MAX_REASON]
        if isinstance(error, SafetensorError):
            reason += ": download its files again"
        elif "trust_remote_code" in reason:
            reason = (
                "it needs Python code from its files, which is never executed: choose a model with an "
                "architecture of transformers"
            )
        elif not isinstance(error, OSError | ValueError | RuntimeError | ImportError):
            reason = f"{type(error).__name__}: {reason}"
        source = "" if Path(path).exists() else " from the hub (there is no folder with this name)"
        raise ConfigError(f"the model {path!r} cannot be loaded{source}: {reason}") from error


def chat_format(
    settings: ModelSection, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> ChatFormat:
    """Return the chat format of a loaded policy. A template in the settings becomes the tokenizer's template.

    Settings are stored in the tokenizer's configuration, so that every folder with this tokenizer can be
    served without giving them again. Stored settings apply unless others are given.

    Raises:
        ConfigError: the template does not support episodes, a setting does not fit it, or the tokenizer does
            not fit the model.
    """
    if settings.chat_template is not None:
        tokenizer.chat_template = _read_template(Path(settings.chat_template))
    _check_embeddings(model, tokenizer)
    stored = tokenizer.init_kwargs.get(STORED_SETTINGS) or {}
    kept = {name: value for name, value in stored.items() if name in CHAT_SETTINGS}
    kept |= settings.model_dump(mode="json", include=CHAT_SETTINGS, exclude_defaults=True)
    if kept:
        tokenizer.init_kwargs[STORED_SETTINGS] = kept
    return ChatFormat(tokenizer, eos_token_ids=_eos_token_ids(model), **kept)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file {path} of model.chat_template cannot be read: {error}") from error


def _eos_token_ids(model: PreTrainedModel) -> list[int]:
    """Return the stop tokens of the generation configuration."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = list(eos) if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"eos_token_id in generation_config.json is {eos!r}: set it to ids of tokens")
    return ids


def _check_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that every token that an episode can hold has an embedding.

    Special tokens that the template does not write never occur, so they can have no embedding (Gemma 3 1B).
    """
    rows = len(cast(torch.Tensor, model.get_input_embeddings().weight))
    template = str(tokenizer.chat_template)
    unused = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special and str(t) not in template}
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows and token not in unused}
    if beyond:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has {len(beyond)} tokens beyond the {rows} that the "
            f"model has embeddings for, {beyond[min(beyond)]!r} first: use the tokenizer of this model, or "
            "resize its embeddings"
        )


def auto_dtype(model: PreTrainedModel, device: str) -> str:
    """Return the dtype that "auto" selects for the computations of an engine or a learner.

    It is bfloat16 for a large model on a device with instructions for it, and otherwise float32. A
    measurement would be more exact, but repeated runs on a machine could differ.
    """
    large = sum(value.numel() for value in model.parameters()) >= LARGE_MODEL
    return "bfloat16" if large and _multiplies_bfloat16(device) else "float32"


def _multiplies_bfloat16(device: str) -> bool:
    if device != "cpu":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    # Older releases lack the function.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in FAST_BFLOAT16)


def with_dtype(engine: EngineSection, model: PreTrainedModel) -> EngineSection:
    """Return the settings with the dtype that "auto" selects for a model, with or without weights."""
    if engine.dtype != "auto":
        return engine
    return engine.model_copy(update={"dtype": auto_dtype(model, engine.device)})


def copy_of(model: PreTrainedModel, *, dtype: str = "float32", device: str | None = None) -> PreTrainedModel:
    """Return a copy for an engine, on another device if given."""
    copied = copy.deepcopy(model)
    if device is not None:
        copied.to(device)  # type: ignore[arg-type]  # the library types this by its first parameter
    for parameter in copied.parameters():  # without the buffers, because rotary frequencies need float32
        parameter.data = parameter.data.to(DTYPES[dtype])
    return copied


def _check_source(path: str, device: str) -> None:
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()
    has_model = (Path(path) / "config.json").is_file() or has_adapter(Path(path))
    if is_local and not has_model:
        inner = Path(path) / "model"
        hint = f"; {str(inner)!r} is one" if (inner / "config.json").is_file() else ""
        for file in Path(path).glob("*.gguf"):
            hint = f"; give the path of {file}, which is dequantized"
        raise ConfigError(f"{path!r} is not a model folder: it has no config.json{hint}")
    for name in ("config.json", "generation_config.json"):
        if (file := Path(path) / name).is_file():
            _check_json(file)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"engine.device = {device!r} is not available: {reason}") from error


def _check_hub(path: str, revision: str | None) -> None:
    """Check that the hub answers if a model is neither a folder nor in the hub's cache.

    transformers would retry each of several requests for half a minute.
    """
    if Path(path).exists():
        return
    logger.warning("there is no folder %s: loading the model from the hub", path)
    if try_to_load_from_cache(path, CONFIG_NAME, revision=revision) is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, CONFIG_NAME, revision=revision))
    except HfHubHTTPError:
        pass  # the hub has answered, and transformers describes the error
    except Exception as error:  # the errors of the HTTP library have no common base
        raise ConfigError(
            f"the model {path!r} cannot be loaded: there is no folder with this name, and the hub cannot be "
            f"reached ({error}). Correct the path, or check the connection."
        ) from error


def _check_json(file: Path) -> None:
    """Check that a file is a JSON object. transformers ignores an invalid generation_config.json."""
    try:
        value, reason = json.loads(file.read_text(encoding="utf-8")), ""
    except ValueError as error:
        value, reason = None, f" ({error})"
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not a JSON object{reason}")
