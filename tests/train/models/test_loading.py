import asyncio
import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AddedToken, AutoTokenizer, PreTrainedModel, Qwen3ForCausalLM

from agentrl_train.chat import ChatFormat
from agentrl_train.config import LoraSection, ModelSection, load_config
from agentrl_train.errors import ConfigError
from agentrl_train.learner.lora import add_adapters, is_adapter, save_adapter
from agentrl_train.models import loading, stored
from agentrl_train.models.architecture import Threads
from agentrl_train.models.loading import chat_format, copy_of, load_policy, open_policy, open_teacher
from agentrl_train.models.merging import merge_models
from agentrl_train.placement.environments import Served
from agentrl_train.placement.launcher import Local
from agentrl_train.training import compose, engines
from agentrl_train.training.compose import open_launcher, policy, processes, run_follower, served_policy
from agentrl_train.types import UNTRACED, SamplingParams
from tests.tiny_models import make_model, make_tokenizer

CONFIG = Path(__file__).parents[3] / "examples/quickstart/train.toml"


def test_model_folder_loads_in_float32(tmp_path: Path) -> None:
    make_model().to(torch.bfloat16).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = load_policy(str(tmp_path))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.chat_template


def test_models_loaded_by_two_threads_leave_the_library_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    second_begins, first_ends, built = threading.Event(), threading.Event(), count()
    build, tie = Qwen3ForCausalLM.__init__, PreTrainedModel.tie_weights

    def overlap(model: Qwen3ForCausalLM, *arguments: Any) -> None:
        if next(built) == 0:
            second_begins.wait(0.5)  # in vain if one model is built at a time
        else:
            second_begins.set()
            first_ends.wait(60)
        build(model, *arguments)

    def load(path: Path) -> None:
        load_policy(str(path))
        first_ends.set()

    monkeypatch.setattr(Qwen3ForCausalLM, "__init__", overlap)
    monkeypatch.setattr(PreTrainedModel, "tie_weights", tie)  # restored even if the test fails
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(load, [tmp_path, tmp_path]))
    assert PreTrainedModel.tie_weights is tie


def test_bfloat16_copy_keeps_rotary_frequencies_and_tied_weights() -> None:
    copied = copy_of(make_model(), dtype="bfloat16")
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in copied.buffers() if b.is_floating_point()} == {torch.float32}
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight


def test_run_folder_instead_of_a_model_is_reported_with_its_model(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"it has no config\.json; '.*/model' is one"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "runs/nowhere/model"])
def test_missing_model_folder_is_reported(path: str) -> None:
    with pytest.raises(ConfigError, match="is not a model folder"):
        load_policy(path)


@pytest.mark.parametrize("load", [load_policy, open_policy])
def test_truncated_file_is_reported(load: Callable[..., object], tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*header"):
        load(str(tmp_path))


def without(name: str, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if name not in key}, folder / "model.safetensors")


def narrower(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, folder / "model.safetensors")


def configured(file: str, folder: Path, **values: Any) -> None:
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(settings | values))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a layer lacks weights": (
        lambda folder: without("layers.1.mlp", folder),
        r"lack 3 tensors, model\.layers\.1\.mlp\.down_proj\.weight first: download them again",
    ),
    "the embeddings are missing": (
        lambda folder: without("embed", folder),
        r"lack \d tensors?, lm_head.weight",
    ),
    "a tensor has another shape": (narrower, r"up_proj\.weight in the shape \(63, 32\), its config"),
    "the configuration is cut off": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"config\.json is not a JSON object \(Expecting",
    ),
    "the configuration is a list": (
        lambda folder: (folder / "config.json").write_text("[1]"),
        r"config\.json is not a JSON object$",
    ),
    "the generation configuration is cut off": (
        lambda folder: (folder / "generation_config.json").write_text("{"),
        r"generation_config\.json is not a JSON object",
    ),
    "the model has no attention heads": (
        lambda folder: configured("config.json", folder, num_attention_heads=0),
        "cannot be loaded: ZeroDivisionError",
    ),
    "a size is text": (
        lambda folder: configured("config.json", folder, hidden_size="big"),
        "cannot be loaded: .*hidden_size",
    ),
    "the weights are quantized": (
        lambda folder: configured("config.json", folder, quantization_config={"quant_method": "gptq"}),
        r"its weights are quantized \(gptq\) and cannot be trained: choose the model without",
    ),
    "the template is not UTF-8": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff{{ messages }}"),
        "cannot be loaded: 'utf-8' codec",
    ),
    "the weights are a pointer of Git LFS": (
        lambda folder: (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1"
        ),
        "header too large: download its files again",
    ),
    "the architecture is code": (
        lambda folder: configured(
            "config.json", folder, model_type="mine", auto_map={"AutoConfig": "configuration_mine.Mine"}
        ),
        "needs Python code from its files, which is never executed: choose a model",
    ),
    "the tokenizer is cut off": (
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        "cannot be loaded: Expecting property name",
    ),
}


def added(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


SURPLUS: dict[str, tuple[str, ...]] = {
    "biases": ("model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.v_proj.bias"),
    "biases, named without the prefix": ("layers.0.self_attn.q_proj.bias",),
    "a norm": ("model.layers.1.self_attn.sub_norm.weight",),
    "a layer": ("model.layers.2.mlp.up_proj.weight", "model.layers.2.self_attn.q_proj.weight"),
    "the bias of the head": ("lm_head.bias",),
}


@pytest.mark.parametrize("load", [load_policy, open_policy])
@pytest.mark.parametrize("kind", SURPLUS)
def test_tensors_that_the_architecture_does_not_use_are_refused(
    kind: str, load: Callable[..., object], tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    names = SURPLUS[kind]
    added(tmp_path, {name: torch.ones(2) for name in names})
    with pytest.raises(
        ConfigError, match=rf"{len(names)} tensors .* does not use, {names[0]} first: correct"
    ):
        load(str(tmp_path))


@pytest.mark.parametrize("load", [load_policy, open_policy])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "layers.1.self_attn.masked_bias",
        "model.position_ids",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.layers.2.eh_proj.weight",
        "v_head.summary.weight",
    ],
)
def test_tensors_that_do_not_belong_to_the_language_model_are_ignored(
    name: str, load: Callable[..., object], tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    configured("config.json", tmp_path, num_nextn_predict_layers=1)
    added(tmp_path, {name: torch.ones(2)})
    assert load(str(tmp_path))


def test_another_head_in_the_files_of_a_tied_model_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    embedding = make_model().get_input_embeddings().weight.detach()
    added(tmp_path, {"lm_head.weight": embedding.clone()})
    load_policy(str(tmp_path))
    added(tmp_path, {"lm_head.weight": embedding + 1})
    with pytest.raises(
        ConfigError, match=r"different tensors lm_head\.weight and model\.embed_tokens\.weight"
    ):
        load_policy(str(tmp_path))
    configured("config.json", tmp_path, tie_word_embeddings=False)
    model, _ = load_policy(str(tmp_path))
    assert torch.equal(model.get_output_embeddings().weight, embedding + 1)


@pytest.mark.parametrize("load", [load_policy, open_policy])
@pytest.mark.parametrize("fault", BROKEN)
def test_broken_model_folder_is_refused_with_its_fault(
    fault: str, load: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr("builtins.input", lambda _: "y")  # transformers asks before it runs code
    change, reason = BROKEN[fault]
    change(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load(str(tmp_path))


def test_adapter_with_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded: Expecting property name"):
        load_policy(str(tmp_path))


def test_tokenizer_with_tokens_beyond_the_embeddings_is_refused() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    rows = len(tokenizer)
    settings = ModelSection(path="policy")
    model.resize_token_embeddings(rows)
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    chat_format(settings, model=model, tokenizer=tokenizer)  # no episode can hold this token
    tokenizer.add_tokens(["word"])
    with pytest.raises(ConfigError, match=rf"1 tokens beyond the {rows} that the model .*, 'word' first"):
        chat_format(settings, model=model, tokenizer=tokenizer)


@pytest.mark.parametrize("eos", ["<|im_end|>", [2, -1], {"a": 1}, True])
def test_stop_tokens_that_are_not_ids_are_rejected(eos: Any) -> None:
    model = make_model()
    model.generation_config.eos_token_id = eos
    with pytest.raises(ConfigError, match=r"eos_token_id in generation_config\.json is .*: set it to ids"):
        chat_format(ModelSection(path="policy"), model=model, tokenizer=make_tokenizer())


@pytest.mark.parametrize("needs_a_plan", [False, True])
def test_weights_are_read_with_and_without_a_tensor_parallel_plan(
    needs_a_plan: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = stored.convert_and_load_state_dict_in_model
    own = {"tp_plan": None} if "tp_plan" in inspect.signature(convert).parameters else {}

    def late(model: Any, state_dict: Any, load_config: Any) -> Any:
        return convert(model, state_dict, load_config, **own)

    def early(model: Any, state_dict: Any, load_config: Any, tp_plan: None) -> Any:
        return late(model, state_dict, load_config)

    name = "convert_and_load_state_dict_in_model"
    monkeypatch.setattr(stored, name, early if needs_a_plan else late)
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert open_policy(str(tmp_path))[2] is not None


def test_missing_device_is_reported(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="device = 'gpu' is not available"):
        load_policy(str(tmp_path), device="gpu")


def printed_from_hub(code: str, folder: Path) -> list[float]:
    """Run code offline, with two revisions in the cache of the hub's library, and return its numbers."""
    repository = folder / "hub" / "models--org--name"
    for revision, seed in (("main", 0), ("older", 1)):
        snapshot = repository / "snapshots" / f"{seed:040x}"
        make_model(seed=seed).save_pretrained(snapshot)
        make_tokenizer().save_pretrained(snapshot)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(f"{seed:040x}")
    offline = {**os.environ, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def test_revision_of_a_model_on_the_hub_is_loaded(tmp_path: Path) -> None:
    code = (
        "from agentrl_train.models.loading import load_policy\n"
        "for revision in (None, 'older'):\n"
        "    model, _ = load_policy('org/name', revision=revision)\n"
        "    print(model.get_input_embeddings().weight.sum().item())\n"
    )
    sums = [make_model(seed=seed).get_input_embeddings().weight.sum().item() for seed in (0, 1)]
    assert printed_from_hub(code, tmp_path) == pytest.approx(sums, rel=1e-5)


@pytest.mark.parametrize("load", ["load_policy", "open_policy"])
def test_adapter_is_merged_into_the_revision_that_it_was_trained_on(load: str, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from agentrl_train.config import LoraSection, TrainSection\n"
        "from agentrl_train.learner import Learner\n"
        "from agentrl_train.models.loading import load_policy, open_policy\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"model, tokenizer, *stored = {load}('org/name', revision='older')\n"
        "if model.device.type == 'meta':\n"
        "    model.to_empty(device='cpu')\n"
        "learner = Learner(model, TrainSection(lora=LoraSection(rank=2, alpha=4.0)))\n"
        "learner.snapshot().write(folder)\n"
        "tokenizer.save_pretrained(folder / 'model')\n"
        "merged, _ = load_policy(str(folder / 'model'))\n"
        "print(merged.get_input_embeddings().weight.sum().item())\n"
    )
    expected = make_model(seed=1).get_input_embeddings().weight.sum().item()
    assert printed_from_hub(code, tmp_path) == pytest.approx([expected], rel=1e-5)
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", "older")


async def test_hub_that_does_not_answer_gets_one_request(tmp_path: Path) -> None:
    requests = []

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b" "))
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as hub:
        url = f"http://127.0.0.1:{hub.sockets[0].getsockname()[1]}"
        code = "from agentrl_train.models.loading import load_policy\nload_policy('models/typo')"
        settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, env={**os.environ, **settings}, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await child.communicate()
    assert b"'models/typo' cannot be loaded: there is no folder with this name, and the hub" in errors
    assert b"Correct the path, or check the connection." in errors
    assert requests.count(b"HEAD ") == 1


def test_frozen_weights_load_in_bfloat16(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, _ = load_policy(str(tmp_path), dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_bfloat16_parameters_need_adapters() -> None:
    with pytest.raises(ConfigError, match=r"train adapters \(train\.lora\)"):
        load_config(CONFIG, ["model.dtype=bfloat16"])
    chosen = ["model.dtype=bfloat16", "train.lora.rank=4", "train.lora.alpha=8"]
    assert load_config(CONFIG, chosen).model.dtype == "bfloat16"


def test_link_to_a_gated_model_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, **options: object) -> None:
        raise OSError(
            "You are trying to access a gated repo.\nMake sure to have access to it at "
            "https://huggingface.co/org/gated.\n401 Client Error."
        )

    monkeypatch.setattr(loading, "get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ConfigError, match=r"gated repo\. .* https://huggingface\.co/org/gated\."):
        load_policy("org/gated")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Return a folder with a trained adapter."""
    make_model().save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    model = load_policy(str(tmp_path / "base"))[0]
    lora = LoraSection(rank=2, alpha=16.0)
    add_adapters(model, lora)
    tensors = {name: torch.randn_like(p) for name, p in model.named_parameters() if is_adapter(name)}
    save_adapter(tmp_path / "adapter", model, lora, tensors)
    make_tokenizer().save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("base", [None, "", 7])
@pytest.mark.parametrize("load", [load_policy, open_policy])
def test_adapter_without_a_base_is_refused(load: Callable[..., object], base: Any, adapter: Path) -> None:
    configured("adapter_config.json", adapter, base_model_name_or_path=base)
    with pytest.raises(ConfigError, match=r"adapter_config\.json names no base model: set base_model"):
        load(str(adapter))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_merge_reports_an_adapter_with_a_broken_configuration(text: str, adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"adapter.* (cannot be loaded: |is not a JSON object)"):
        merge_models([adapter, adapter], base=None, method="average", output=adapter / "out")


def test_adapter_without_a_tokenizer_has_the_tokenizer_of_its_base(adapter: Path) -> None:
    for file in [*adapter.glob("*token*"), *adapter.glob("*.jinja")]:
        file.unlink()
    assert {file.suffix for file in adapter.iterdir()} == {".json", ".safetensors"}
    for tokenizer in (load_policy(str(adapter))[1], open_policy(str(adapter))[1]):
        assert tokenizer.get_vocab() == make_tokenizer().get_vocab()
    teacher, _ = open_teacher(str(adapter.parent / "base"), policy=str(adapter))
    assert teacher.config.model_type == "qwen3"


def test_adapter_on_an_adapter_is_refused(adapter: Path) -> None:
    second = adapter.parent / "second"
    shutil.copytree(adapter, second)
    configured("adapter_config.json", second, base_model_name_or_path=str(adapter))
    with pytest.raises(ConfigError, match=r"adapter holds adapters, .* with agentrl-train merge .*adapter"):
        load_policy(str(second))


async def test_run_refuses_to_train_adapters_on_top_of_adapters(adapter: Path) -> None:
    lora = ["train.lora.rank=2", "train.lora.alpha=4"]
    config = load_config(CONFIG, [f"model.path={adapter}", "run.threads=1", *lora])
    tasks = Served(clients={}, sources=(), harder={}, held_out={})
    refused = pytest.raises(ConfigError, match=r"holds adapters, .*: write a whole model first, with agentrl")
    with open_launcher(config) as launcher, refused:
        async with policy(config, path=str(adapter), launcher=launcher, served=tasks):
            pass
    with refused:
        run_follower(config)
    async with served_policy(config, path=str(adapter), launcher=launcher, served=tasks) as ready:
        assert ready.tokenizer.chat_template  # such a run can still be evaluated


def test_chat_template_in_another_encoding_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes(b"\xff{{ messages }}")
    settings = ModelSection(path="policy", chat_template=str(file))
    with pytest.raises(ConfigError, match=r"template\.jinja of model\.chat_template cannot be read: 'utf-8'"):
        chat_format(settings, model=make_model(), tokenizer=make_tokenizer())


async def test_engine_in_another_process_evaluates_adapter_without_a_learner(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(CONFIG, ["run.threads=1", "engine.max_sessions=2"])
    monkeypatch.setattr(Local, "separate_engines", True)
    monkeypatch.setattr(compose, "make_learner", None)
    context, sampling = [5, 6, 7, 8], SamplingParams(max_new_tokens=8, seed=1)
    with open_launcher(config) as launcher:
        tasks = Served(clients={}, sources=(), harder={}, held_out={})
        async with served_policy(config, path=str(adapter), launcher=launcher, served=tasks) as ready:
            completion = await ready.engine.generate(context, sampling=sampling, session_key="one")
    merged = load_policy(str(adapter))[0].eval()
    ids = torch.tensor([[*context, *completion.token_ids]])
    with torch.no_grad():
        expected = merged(ids).logits.log_softmax(-1)[0, len(context) - 1 : -1]
    ours = expected.gather(-1, ids[0, len(context) :, None])[:, 0]
    assert torch.allclose(ours, torch.tensor(completion.logprobs), atol=1e-4)


def test_engine_process_starts_with_base_of_adapter(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured("adapter_config.json", adapter, revision="older")
    started = []
    monkeypatch.setattr(engines, "require_vllm", lambda python: None)
    monkeypatch.setattr(engines, "EnginePool", lambda options, **others: started.append(options))
    config = load_config(CONFIG, ["engine.kind=vllm"])
    with open_launcher(config) as launcher:
        engines.make_engine(
            processes(config),
            config.model,
            model=make_model(),
            path=str(adapter),
            chat=ChatFormat(make_tokenizer()),
            sessions=config.sessions,
            threads=Threads(1),
            process_threads=1,
            trace=UNTRACED,
            launcher=launcher,
        )
    assert (started[0].model, started[0].revision) == (str(adapter.parent / "base"), "older")


@pytest.mark.parametrize(
    ("fast", "large", "expected"),
    [(True, True, "bfloat16"), (False, True, "float32"), (True, False, "float32")],
)
def test_large_model_uses_bfloat16_on_a_gpu_that_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, fast: bool, large: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: fast)
    model = make_model()
    monkeypatch.setattr(loading, "LARGE_MODEL", model.num_parameters() + (0 if large else 1))
    assert loading.auto_dtype(model, "cuda:0") == expected
