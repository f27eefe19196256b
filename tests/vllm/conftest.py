"""Real vLLM engines on the CPU, in the environment of ``make vllm``."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pool import EnginePool
from tests.engine_contract import MAX_CONTEXT, POLICIES, STOP, Subject, contract_model

PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
START_S = 240.0
"""Start timeout. A start takes 10 s on an idle machine and minutes on a busy machine."""
PROBE = """\
import sys
from vllm import LLM, SamplingParams

engine = LLM(
    sys.argv[1], dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=128,
    max_num_seqs=4, kv_cache_memory_bytes=2**26,
)
engine.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4, detokenize=False))
"""
"""A program that uses vLLM alone.
"""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the engine contract's model for seed 0."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    contract_model(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def python(model_folder: Path) -> str:
    """Return the interpreter with vLLM. Skips the tests if vLLM does not run on this machine."""
    chosen = Path(os.environ.get("VLLM_PYTHON", PYTHON))
    if not chosen.exists():
        pytest.skip("vLLM is not installed; run make vllm")
    options = ServingOptions(model="", stop_token_ids=[], max_sessions=1, max_context=1)
    probe = subprocess.run(
        [chosen, "-c", PROBE, model_folder],
        env={**os.environ, **options.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        said = probe.stderr.strip().splitlines()
        pytest.skip(f"vLLM does not run on this machine (exit {probe.returncode}): {said[-1:]}")
    return str(chosen)


@pytest.fixture(scope="session")
def start_engine(python: str, model_folder: Path) -> Callable[..., EnginePool]:
    """Return a function that starts an engine. The caller closes the engine."""

    def start(
        *,
        model: Path = model_folder,
        kv_gib: float = 0.0625,
        max_context: int = MAX_CONTEXT,
        args: Mapping[str, object] = MappingProxyType({}),
        **settings: object,
    ) -> EnginePool:
        options = ServingOptions(
            model=str(model),
            stop_token_ids=[STOP],
            max_sessions=16,
            max_context=max_context,
            args={"kv_cache_memory_bytes": int(kv_gib * 2**30), **args},
        )
        return EnginePool(
            options, **{"python": python, "deadline_s": 60.0 + START_S, "start_s": START_S, **settings}
        )  # type: ignore[arg-type]

    return start


@pytest.fixture(scope="session")
def subject(start_engine: Callable[..., EnginePool]) -> Iterator[Subject]:
    """Return one pool of engines for all tests, with two policies and two replicas for the current policy."""
    engine = start_engine(policies=POLICIES, liveness_s=60.0)
    yield Subject(engine, tolerance=1e-3)
    asyncio.run(engine.close())
