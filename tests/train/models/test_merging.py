"""Merging models: the rules by invariants and published values, and files as loaded by transformers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from agentrl_train.__main__ import app
from agentrl_train.errors import ConfigError
from agentrl_train.models.merging import (
    METHODS,
    average,
    changed_counts,
    dare,
    merge_models,
    ram,
    ram_plus_factors,
    ram_plus_tl_factors,
    read_header,
    ties,
)
from agentrl_train.storage.checkpoint import InModelFolder, save_checkpoint
from tests.tiny_models import make_model, make_tokenizer
from tests.train.learner.test_lora import trained

ROOT = Path(__file__).parents[3]
ONE, TWO = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([3.0, 0.0, 1.0, 1.0])


def differences(*tensors):
    return lambda: iter(tensors)


def ram_plus(given, scale=1.2):
    return ram(given, ram_plus_factors(*changed_counts(given), scale=scale))


def ram_plus_tl(given, rate=0.1, limit=0.2):
    return ram(given, ram_plus_tl_factors(*changed_counts(given), rate=rate, limit=limit))


RULES = {
    "average": average,
    "ram": lambda given: ram(given, [1.0] * len(list(given()))),
    "ram-plus": ram_plus,
    "ram-plus-tl": ram_plus_tl,
    "ties": lambda given: ties(given, density=1.0),
    "dare": lambda given: dare(given, drop=0.0, seed=0),
}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("ram", [2, 1, 1, 1]),
        ("ram-plus", [2, 1.2, 1, 1.2]),
        ("ram-plus-tl", [2, 1.02, 1, 1.02]),
        ("average", [2, 0.5, 1, 0.5]),
    ],
)
def test_rules_give_the_published_values(rule, expected):
    assert RULES[rule](differences(ONE, TWO)).tolist() == pytest.approx(expected)


def test_weights_changed_together_and_alone_are_counted():
    shared, unique = changed_counts(differences(ONE, TWO, torch.tensor([0.0, 0.0, 5.0, 1e-6])))
    assert (shared.tolist(), unique.tolist()) == ([2, 2, 1], [1, 1, 0])


def test_ties_trims_elects_and_averages_those_that_agree():
    one = torch.tensor([4.0, -2.0, 0.1, 1.0])
    two = torch.tensor([2.0, 5.0, 0.2, -0.1])
    three = torch.tensor([-1.0, 4.0, 0.3, -3.0])
    # The three largest of each are kept. The signs of the totals are + + +(0.2) -.
    merged = ties(differences(one, two, three), density=0.75)
    assert merged.tolist() == pytest.approx([3.0, 4.5, 0.2, -3.0])


def test_expert_without_unique_weights_has_a_factor():
    same = differences(ONE, ONE)
    assert ram_plus_factors(*changed_counts(same), scale=1.2) == [1.2, 1.2]
    nothing = differences(torch.zeros(4), torch.zeros(4))
    assert ram_plus_factors(*changed_counts(nothing), scale=1.2) == [1.0, 1.0]
    assert ram_plus(nothing).tolist() == [0, 0, 0, 0]


tensors = st.integers(0, 2**31).map(
    lambda seed: (
        torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
        * (torch.rand(6, 5, generator=torch.Generator().manual_seed(seed + 1)) < 0.5)
    )
)


@given(tensors, st.integers(1, 4), st.sampled_from(sorted(RULES)))
def test_merging_a_model_with_itself_changes_nothing(one, count, rule):
    merged = RULES[rule](differences(*[one] * count))
    assert torch.allclose(merged, one, atol=1.1e-5)


@given(tensors, tensors, st.integers(0, 2**31), st.sampled_from(["ram", "ties"]))
def test_disjoint_differences_are_all_kept(one, two, seed, rule):
    side = torch.rand(6, 5, generator=torch.Generator().manual_seed(seed)) < 0.5
    one, two = torch.where(side, one, 0.0), torch.where(side, 0.0, two)
    merged = RULES[rule](differences(one, two))
    assert torch.allclose(merged, one + two, atol=1.1e-5)
    assert torch.allclose(ram_plus(differences(one, two)), one + two, atol=1.1e-5)  # nothing shared: rho = 0
    assert torch.allclose(average(differences(one, two)), (one + two) / 2)


@given(st.lists(tensors, min_size=2, max_size=4), st.randoms(), st.sampled_from(sorted(RULES)))
def test_order_of_the_experts_does_not_matter(given_tensors, random, rule):
    shuffled = random.sample(given_tensors, len(given_tensors))
    merged = [RULES[rule](differences(*order)) for order in (given_tensors, shuffled)]
    if rule == "ties":  # rounding can change the sign of totals near zero
        total = sum(given_tensors)
        merged = [torch.where(total.abs() > 1e-5, one, 0.0) for one in merged]
    assert torch.allclose(*merged, atol=1e-5)


@given(tensors, tensors, st.floats(0.1, 3.0))
def test_ram_keeps_more_than_the_average_if_one_expert_changed(one, two, scale):
    given_ = differences(one, scale * two)
    alone = ((one.abs() > 1e-5) ^ ((scale * two).abs() > 1e-5)) & ((one + scale * two).abs() > 1e-4)
    assert (ram(given_, [1.0, 1.0]).abs() > average(given_).abs())[alone].all()


def test_dare_repeats_with_its_seed_and_keeps_the_mean():
    ones = torch.ones(200, 200)
    first = dare(differences(ones, ones), drop=0.9, seed=1, name="a")
    assert torch.equal(first, dare(differences(ones, ones), drop=0.9, seed=1, name="a"))
    assert not torch.equal(first, dare(differences(ones, ones), drop=0.9, seed=2, name="a"))
    assert not torch.equal(first, dare(differences(ones, ones), drop=0.9, seed=1, name="b"))
    assert first.mean().item() == pytest.approx(1.0, abs=0.05)
    assert {round(value, 4) for value in first.unique().tolist()} == {
        0.0,
        5.0,
        10.0,
    }  # experts drop independently


# --- files ---


@pytest.fixture
def models(tmp_path):
    """A base and two experts in folders of several files. Each expert changes different tensors."""
    base, tokenizer = make_model(), make_tokenizer()
    folders = {}
    for name, part in (("base", None), ("one", "q_proj"), ("two", "down_proj")):
        model = make_model()
        with torch.no_grad():
            for key, value in model.named_parameters():
                if part and part in key:
                    value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(5))
        folders[name] = tmp_path / name
        model.save_pretrained(folders[name], max_shard_size="20KB")
        tokenizer.save_pretrained(folders[name])
    assert len(list(folders["one"].glob("*.safetensors"))) > 2
    return {**folders, "state": base.state_dict()}


def command(*arguments):
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


def state(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def test_merged_folder_has_both_changes_and_the_files_of_the_first(tmp_path, models):
    output = tmp_path / "merged"
    done = command(models["one"], models["two"], "--base", models["base"], "--output", output)
    assert done.exit_code == 0, done.output
    assert f"model: {output}" in done.output
    merged, one, two, base = (
        state(folder) for folder in (output, models["one"], models["two"], models["base"])
    )
    for name, value in merged.items():
        assert torch.allclose(value, one[name] + two[name] - base[name], atol=1.1e-5), name
    assert sorted(path.name for path in output.iterdir()) == sorted(p.name for p in models["one"].iterdir())
    for file in output.glob("*.safetensors"):
        assert read_header(file) == read_header(models["one"] / file.name)
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert json.loads((output / name).read_text()) == json.loads((models["one"] / name).read_text())
    assert AutoTokenizer.from_pretrained(output).chat_template


@pytest.mark.parametrize("method", METHODS)
def test_model_merged_with_itself_is_itself(tmp_path, models, method):
    options = ["--density", 1.0, "--drop", 0.0]
    output = tmp_path / "merged"
    done = command(
        models["one"], models["one"], "--base", models["base"], "-o", output, "--method", method, *options
    )
    assert done.exit_code == 0, done.output
    expected = state(models["one"])
    assert all(torch.allclose(v, expected[name], atol=1.1e-5) for name, v in state(output).items())


def test_ratios_of_ram_plus_are_computed_over_the_whole_model(tmp_path):
    folders = []
    rows = (("base", [0, 0, 0, 0], [0, 0]), ("one", [1, 1, 1, 1], [1, 1]), ("two", [1, 0, 0, 0], [1, 1]))
    for name, a, b in rows:
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        tensors = {"a": torch.tensor(a, dtype=torch.float32), "b": torch.tensor(b, dtype=torch.float32)}
        save_file(tensors, folders[-1] / "model.safetensors", metadata={"format": "pt"})
        (folders[-1] / "config.json").write_text("{}")

    def merged(method):
        merge_models(folders[1:], base=folders[0], output=tmp_path / method, method=method)
        return {n: v.tolist() for n, v in load_file(tmp_path / method / "model.safetensors").items()}

    # rho of the first expert is 3/3 in the whole model, and 1/3 in tensor a.
    assert merged("ram-plus") == {"a": pytest.approx([1, 1.2, 1.2, 1.2]), "b": [1, 1]}
    assert merged("ram-plus-tl") == {"a": pytest.approx([1, 1.02, 1.02, 1.02]), "b": [1, 1]}
    assert merged("average") == {"a": [1, 0.5, 0.5, 0.5], "b": [1, 1]}


def test_dtype_is_kept_or_changed_on_request(tmp_path, models):
    for name in ("one", "two"):
        model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / f"{name}16", max_shard_size="20KB")
    experts = [tmp_path / "one16", tmp_path / "two16"]
    assert command(*experts, "--base", models["base"], "-o", tmp_path / "kept").exit_code == 0
    assert {v.dtype for v in state(tmp_path / "kept").values()} == {torch.bfloat16}
    done = command(*experts, "--base", models["base"], "-o", tmp_path / "wide", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    wide = state(tmp_path / "wide")
    assert {v.dtype for v in wide.values()} == {torch.float32}
    index = json.loads((tmp_path / "wide/model.safetensors.index.json").read_text())
    sizes = sum(v.numel() for n, v in wide.items() if n != "lm_head.weight") * 4
    assert index["metadata"]["total_size"] == sizes


def test_runs_and_checkpoints_are_merged(tmp_path, models):
    for name in ("one", "two"):
        model = AutoModelForCausalLM.from_pretrained(models[name])
        parts = [InModelFolder(pretrained=model), InModelFolder(pretrained=make_tokenizer())]
        save_checkpoint(tmp_path / f"run-{name}" / "checkpoints", step=3, parts=parts, loop={})
    output = tmp_path / "merged"
    checkpoint = tmp_path / "run-two/checkpoints/step_000003"
    done = command(tmp_path / "run-one", checkpoint, "--base", models["base"], "-o", output)
    assert done.exit_code == 0, done.output
    expected = command(models["one"], models["two"], "--base", models["base"], "-o", tmp_path / "other")
    assert expected.exit_code == 0
    ours, theirs = state(output), state(tmp_path / "other")
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def refused(*arguments):
    done = command(*arguments)
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


def test_incompatible_models_are_explained(tmp_path, models):
    one, two, output = models["one"], models["two"], tmp_path / "merged"
    base = ["--base", models["base"], "-o", output]
    assert "the method ram-plus needs --base" in refused(one, two, "-o", output)
    assert "already exists" in refused(one, two, "--base", models["base"], "-o", two)
    make_model(vocabulary=300).save_pretrained(tmp_path / "wide")
    assert "not models of one architecture" in refused(one, tmp_path / "wide", *base)
    assert "cannot be read" in refused(one, tmp_path / "nothing", *base)
    assert "the density 0 of ties" in refused(one, two, *base, "--density", 0)
    (tmp_path / "adapter").mkdir()
    trained(make_model()).snapshot().write(tmp_path / "adapter")
    adapter = next(tmp_path.glob("adapter/**/adapter_config.json")).parent
    assert "holds adapters, not a whole model" in refused(one, adapter, *base)
    broken = load_file(next(two.glob("*.safetensors")))
    name, value = next(iter(broken.items()))
    save_file({**broken, name: torch.full_like(value, torch.nan)}, next(two.glob("*.safetensors")))
    assert "has values that are not numbers" in refused(one, two, *base)
    assert not output.exists()
    assert not list(tmp_path.glob(".*.tmp"))


def test_average_needs_no_base(tmp_path, models):
    done = command(models["one"], models["two"], "--method", "average", "-o", tmp_path / "merged")
    assert done.exit_code == 0, done.output
    one, two = state(models["one"]), state(models["two"])
    merged = state(tmp_path / "merged")
    assert all(torch.allclose(v, (one[n] + two[n]) / 2, atol=1e-6) for n, v in merged.items())


MEMORY = """
import sys, torch
from pathlib import Path
from agentrl_train.models.merging import merge_models

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) / 1024

folder, most, seen = Path(sys.argv[1]), 0.0, []
torch.set_num_threads(1)
experts = [folder / "one", folder / "two"]
merge_models(experts, base=folder / "base", output=folder / "merged", method=sys.argv[2],
             on_tensor=lambda name: seen.append(anonymous()))
print(max(seen) - seen[0], len(seen))
"""


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="requires /proc")
def test_memory_is_bounded_by_one_tensor(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        tensors = {f"layer.{n}": torch.randn(512, 1024, generator=generator) for n in range(24)}  # 48 MB
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"}
    for method in ("ram-plus", "ties"):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(tmp_path), method],
            capture_output=True, text=True, env=environment, check=True,
        )  # fmt: skip
        growth, count = done.stdout.split()
        assert int(count) == 24
        assert float(growth) < 24  # the three models have 144 MB, a tensor 2
        shutil.rmtree(tmp_path / "merged")


def test_read_header_lists_tensors_in_the_order_of_the_file(models):
    file = sorted(models["base"].glob("*.safetensors"))[0]
    with safe_open(file, framework="pt") as opened:
        assert set(read_header(file)) == set(opened.keys())
