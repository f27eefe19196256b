import os
import re
import shutil
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env import Environment, TaskSample, read_jsonl
from agentrl_env.dataset import SEED_BITS, Dataset, derived_file, stable_seed
from agentrl_env.errors import DefinitionError, UnknownSample
from tests.env.tasks import Guess, Quick

FINITE, ENDLESS = Dataset(Quick), Dataset(Guess)


class Books(Environment):
    """Samples named by strings, and some that are broken."""

    splits = ("train",)

    def reset(self, sample, rng):
        return ""

    @classmethod
    def samples(cls, split):
        return {"emma": {"pages": 474}, "broken": "no dict"}


def test_sample_has_split_index_seed_and_data():
    assert FINITE.sample("test", 3) == TaskSample(
        task="quick",
        split="test",
        index=3,
        seed=stable_seed("quick", "test", 3),
        data={"n": 3, "deep": {"list": [3]}},
    )


def test_default_seed_depends_on_task_split_and_index():
    assert FINITE.sample("train", 3, seed=7).seed == 7
    assert FINITE.sample("train", 3).seed == FINITE.sample("train", 3).seed
    assert FINITE.sample("train", 3).seed != FINITE.sample("train", 4).seed
    assert ENDLESS.sample("train", 3).seed != ENDLESS.sample("test", 3).seed


def test_stable_seed_is_fixed():
    assert stable_seed("quick", "train", 3) == 5652711417157361
    assert stable_seed("a", {"y": 1, "x": 2}) == stable_seed("a", {"x": 2, "y": 1})


@given(st.text(), st.integers() | st.text())
def test_seeds_fit_in_json_numbers(split, index):
    assert 0 <= stable_seed("task", split, index) < 2**SEED_BITS


@given(st.integers(0, 2**53))
def test_seed_picks_the_index(seed):
    sample = FINITE.sample("train", seed=seed)
    assert 0 <= sample.index < 10
    assert sample == FINITE.sample("train", seed=seed)
    assert ENDLESS.sample("train", seed=seed).index == seed


def test_index_is_random_without_index_and_seed():
    drawn = {FINITE.sample("train").index for _ in range(200)}
    assert drawn == set(range(10))
    assert FINITE.sample("train", FINITE.sample("train").index)


def test_given_data_replaces_the_data_of_the_dataset():
    sample = FINITE.sample("train", data={"n": 99})
    assert (sample.data, sample.index) == ({"n": 99}, None)
    assert sample.seed == FINITE.sample("train", data={"n": 99}).seed
    assert sample.seed != FINITE.sample("train", data={"n": 98}).seed
    assert FINITE.sample("train", 500, data={"n": 99}).index == 500


@pytest.mark.parametrize("index", [-1, 10, 10**30, "three"])
def test_index_out_of_range_is_rejected(index):
    with pytest.raises(UnknownSample, match="no index"):
        FINITE.sample("train", index)


def test_negative_index_is_rejected_in_an_endless_split():
    with pytest.raises(UnknownSample):
        ENDLESS.sample("train", -1)


def test_unknown_split_is_rejected_with_the_known_splits():
    with pytest.raises(UnknownSample, match="it has: train, test, empty"):
        FINITE.sample("dev", 1)


def test_empty_split_raises_unknown_sample():
    with pytest.raises(UnknownSample, match="has no samples"):
        FINITE.sample("empty")
    with pytest.raises(UnknownSample, match=r"has no samples; samples\('empty'\) must return some"):
        FINITE.sample("empty", 0)


def test_samples_can_have_string_indices():
    books = Dataset(Books)
    assert books.sample("train", "emma").data == {"pages": 474}
    with pytest.raises(UnknownSample):
        books.sample("train", "persuasion")


def named(*names):
    class Shelf(Books):
        @classmethod
        def samples(cls, split):
            return {name: {"name": name} for name in names}

    return Dataset(Shelf)


@pytest.mark.parametrize("name", [10, 0, 1.5, None, True, ("a", 1)])
def test_name_of_a_sample_that_is_not_text_raises_definition_error(name):
    advice = r"is a dict with the key .*: return a list, or \{str\(id\): sample for id"
    with pytest.raises(DefinitionError, match=advice):
        named("9", name).info()
    with pytest.raises(DefinitionError, match=advice):
        named(name).sample("train", 0)


def test_seed_picks_a_string_index():
    dataset = named("emma", "dune")
    assert {dataset.sample("train", seed=seed).index for seed in range(20)} == {"emma", "dune"}


def test_sample_that_is_not_a_dict_raises_definition_error():
    with pytest.raises(DefinitionError, match="must be a dict"):
        Dataset(Books).sample("train", "broken")


def test_info_has_the_size_of_each_split():
    assert {name: info.num_samples for name, info in FINITE.info().items()} == {
        "train": 10,
        "test": 10,
        "empty": 0,
    }
    assert ENDLESS.info()["train"].num_samples is None


def test_sample_data_must_be_json():
    class Odd(Books):
        @classmethod
        def samples(cls, split):
            return [{"when": object()}]

    with pytest.raises(DefinitionError, match=r"samples\('train'\)\[0\] .* cannot be sent as JSON"):
        Dataset(Odd).sample("train", 0)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (date(2026, 1, 2), "holds a date at ['x']"),
        (Decimal("1.5"), "holds a Decimal at ['x']"),
        (b"text", "holds a bytes at ['x']"),
        ([{3: "a"}], "has the key 3 at ['x'][0]; keys are text"),
        ("\ud800", "holds text with a lone surrogate at ['x']"),
    ],
)
def test_sample_data_that_json_would_change_is_rejected(value, problem):
    class Odd(Books):
        @classmethod
        def samples(cls, split):
            return [{"x": value}]

    with pytest.raises(DefinitionError, match=re.escape(problem)):
        Dataset(Odd).sample("train", 0)


def test_sample_of_a_data_set_is_equal_to_the_same_sample_after_its_transfer():
    class Places(Books):
        @classmethod
        def samples(cls, split):
            return [{"place": (1, {"size": np.float64(0.5)})}]

    sample = Dataset(Places).sample("train", 0)
    assert sample.data == TaskSample.model_validate_json(sample.model_dump_json()).data
    assert sample.data == {"place": [1, {"size": 0.5}]}


def test_generator_of_samples_raises_definition_error():
    class Streamed(Guess):
        @classmethod
        def samples(cls, split):
            yield {"n": 1}

    with pytest.raises(DefinitionError, match="is a generator, which has no index: return a list"):
        Dataset(Streamed).sample()


def test_key_error_in_a_sample_is_not_an_unknown_sample():
    class Broken(list):
        def __getitem__(self, index):
            return {"answer": {}["answer"]}

    class Rows(Guess):
        @classmethod
        def samples(cls, split):
            return Broken([1, 2])

    with pytest.raises(
        DefinitionError, match=r"samples\('train'\)\[1\] of task 'rows' raised KeyError: 'answer'"
    ):
        Dataset(Rows).sample(index=1)
    with pytest.raises(UnknownSample, match="no index 2"):
        Dataset(Rows).sample(index=2)


class Capitals(Guess):
    folder = Path()

    @classmethod
    def samples(cls, split):
        return read_jsonl(cls.folder / f"{split}.jsonl")


def test_samples_are_read_from_a_jsonl_file(tmp_path, monkeypatch):
    monkeypatch.setattr(Capitals, "folder", tmp_path)
    (tmp_path / "train.jsonl").write_text('{"c": "Perú", "n": [1, null]}\n\n{"c": "Chile"}', encoding="utf-8")
    (tmp_path / "test.jsonl").write_bytes(b'\xef\xbb\xbf{"c": "Cuba"}\r\n')
    dataset = Dataset(Capitals)
    assert {name: info.num_samples for name, info in dataset.info().items()} == {"train": 2, "test": 1}
    assert dataset.sample("train", 0).data == {"c": "Perú", "n": [1, None]}
    assert dataset.sample("test", 0).data == {"c": "Cuba"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{'c': 1}", "JSON is malformed"),
        (b'["c", 1]', "Expected `object`, got `array`"),
        (b'{"c": NaN}', "JSON is malformed"),
        (b'{"c": 1} {"c": 2}', "JSON is malformed"),
        ('{"c": "Perú"}'.encode("latin-1"), "'utf-8' codec can't decode|Invalid UTF-8"),
    ],
)
def test_malformed_line_of_a_jsonl_file_is_named(tmp_path, line, reason):
    (tmp_path / "train.jsonl").write_bytes(b'{"c": 1}\n\n' + line)
    with pytest.raises(DefinitionError, match=rf"train\.jsonl:3 is not a JSON object: {reason}"):
        read_jsonl(tmp_path / "train.jsonl")


def test_jsonl_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DefinitionError, match=r"cannot read train\.jsonl: No such file .*__file__"):
        read_jsonl("train.jsonl")


@pytest.fixture
def sources(tmp_path):
    """The two sources of a derived file."""
    files = [tmp_path / "data" / name for name in ("a.txt", "b.txt")]
    files[0].parent.mkdir()
    for file in files:
        file.write_text(file.stem)
    return files


def joined(sources, *, version=1):
    """Return the text of a derived file, and True if it was written by this call."""
    written = []

    def write(path):
        written.append(path)
        path.write_text("".join(file.read_text() for file in sources))

    path = derived_file(sources[0].with_name("all.txt"), sources=sources, write=write, version=version)
    return path.read_text(), bool(written)


def test_derived_file_is_written_once(sources):
    assert joined(sources) == ("ab", True)
    assert joined(sources) == ("ab", False)
    assert {path.name for path in sources[0].parent.iterdir()} == {
        *("a.txt", "b.txt", "all.txt"),
        "all.txt.sources",
    }


def test_derived_file_is_rewritten_when_a_source_changes_in_place(sources):
    joined(sources)
    status = sources[1].stat()
    sources[1].write_text("c")  # the same size and an earlier time
    os.utime(sources[1], ns=(status.st_atime_ns, status.st_mtime_ns - 1))
    assert joined(sources) == ("ac", True)


def test_derived_file_is_rewritten_when_a_source_appears_or_disappears(sources):
    joined(sources)
    added = sources[0].with_name("0.txt")
    added.write_text("0")
    assert joined([added, *sources]) == ("0ab", True)
    assert joined([added, *sources[:1]]) == ("0a", True)


def test_derived_file_is_rewritten_for_another_version(sources):
    joined(sources)
    assert joined(sources, version=2) == ("ab", True)


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"version": 1, "files": 5}', '{"version": 1, "files": {"a.txt": 5, "b.txt": {}}}'],
)
def test_derived_file_is_rewritten_if_its_record_is_damaged(sources, damage):
    joined(sources)
    sources[0].with_name("all.txt.sources").write_text(damage)
    assert joined(sources) == ("ab", True)


def test_derived_file_is_kept_in_a_copy_of_its_folder(sources, tmp_path):
    joined(sources)
    shutil.copytree(sources[0].parent, tmp_path / "copy", copy_function=shutil.copyfile)
    copies = [tmp_path / "copy" / file.name for file in sources]
    for copy in copies:
        os.utime(copy, (0, 0))
    assert joined(copies) == ("ab", False)


def test_failed_derivation_keeps_the_previous_file(sources):
    joined(sources)
    sources[0].write_text("longer")

    def write(path):
        path.write_text("half")
        raise ValueError("no more")

    target = sources[0].with_name("all.txt")
    with pytest.raises(ValueError, match="no more"):
        derived_file(target, sources=sources, write=write)
    assert target.read_text() == "ab"
    assert len(list(target.parent.iterdir())) == 4


def test_derived_file_in_a_folder_that_cannot_be_written_is_refused(sources):
    with pytest.raises(DefinitionError, match="cannot be written"):
        derived_file("/proc/all.txt", sources=sources, write=lambda path: None)
