import errno
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl_env.types import FunctionCall, Message, TaskSample, ToolCall
from agentrl_train.config import TrainSection
from agentrl_train.errors import CheckpointError, RunFolderError
from agentrl_train.learner import Learner
from agentrl_train.storage.atomic_io import is_disk_full, write_file
from agentrl_train.storage.checkpoint import (
    InModelFolder,
    best_success,
    keep_best,
    load_checkpoint,
    load_latest,
    save_checkpoint,
    steps,
)
from agentrl_train.storage.journal import Journal, decode_group, encode_group, frame, read_records
from agentrl_train.types import (
    ROOT,
    Completion,
    EpisodeEnd,
    Segment,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(allow_nan=False)
tokens = st.integers(0, 2**31 - 1)
calls = st.builds(ToolCall, id=texts, function=st.builds(FunctionCall, name=texts, arguments=texts))
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=st.none() | texts | st.just([{"type": "text", "text": "part"}]),
    tool_calls=st.none() | st.lists(calls, min_size=1, max_size=2).map(tuple),
    tool_call_id=st.none() | texts,
)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    token_ids = tuple(draw(st.lists(tokens, max_size=6)))
    same = {"min_size": len(token_ids), "max_size": len(token_ids)}
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(draw(st.lists(numbers, **same))),
        versions=tuple(draw(st.lists(st.integers(0, 10**9), **same))),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        policy=draw(st.sampled_from(["current", "stale"])),
    )


turns = st.builds(
    Turn,
    prompt_ids=st.lists(tokens, max_size=6).map(tuple),
    completion=completions(),
    message=messages,
    reply=st.lists(messages, max_size=2).map(tuple),
    reward=numbers,
    invalid_calls=st.integers(0, 3),
    thought=st.none() | st.text(max_size=8),
)
samples = st.builds(
    TaskSample,
    task=texts,
    split=texts,
    index=st.none() | st.integers() | texts,
    seed=st.integers(0, 2**63),
    data=st.dictionaries(texts, st.none() | st.booleans() | st.integers() | texts, max_size=2),
)


@st.composite
def trees(draw: st.DrawFn, trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with additional segments, each opened after a turn of an earlier segment."""
    played, segments = list(trajectory.turns), [ROOT]
    for index in range(len(played)):
        played[index] = replace(played[index], segment=draw(st.integers(0, len(segments) - 1)))
        if draw(st.booleans()):
            segments.append(
                Segment(
                    parent=played[index].segment,
                    after_turn=index,
                    reason=draw(st.sampled_from(["rewritten", "sub_agent"])),
                    agent=draw(texts),
                    opening=draw(st.lists(messages, max_size=2).map(tuple)),
                )
            )
    return replace(trajectory, turns=tuple(played), segments=tuple(segments))


trajectories = st.builds(
    Trajectory,
    sample=samples,
    opening=st.lists(messages, max_size=2).map(tuple),
    turns=st.lists(turns, max_size=4).map(tuple),
    end=st.sampled_from(EpisodeEnd),
    reward=numbers,
    success=st.booleans(),
    metrics=st.dictionaries(texts, numbers, max_size=2),
    error=st.none() | texts,
    seconds=numbers,
)
groups = st.builds(
    TrajectoryGroup,
    group_id=st.integers(0, 2**40),
    task=texts,
    trajectories=st.lists(trajectories.flatmap(trees), max_size=3).map(tuple),
    admitted_version=st.integers(0, 2**31),
)


def make_group(group_id: int, *, task: str = "shop") -> TrajectoryGroup:
    completion = Completion(token_ids=(5, 7), logprobs=(-0.1, -1e-17), versions=(3, 4), finish_reason="stop")
    turn = Turn(
        prompt_ids=(1, 2, 3),
        completion=completion,
        message=Message.assistant("hm", ToolCall.of("buy", item=group_id)),
        reply=(Message(role="tool", content="sold", tool_call_id="call_0"),),
        reward=1.0,
    )
    trajectory = Trajectory(
        sample=TaskSample(task=task, index=group_id, seed=9),
        opening=(Message(role="user", content="buy it"),),
        turns=(turn,),
        end=EpisodeEnd.TERMINATED,
        reward=1.0,
        success=True,
    )
    return TrajectoryGroup(
        group_id=group_id, task=task, trajectories=(trajectory, trajectory), admitted_version=3
    )


def ids(found) -> list[int]:
    return [group.group_id for group in found]


# --- the encoding and the journal ---


@settings(max_examples=60, deadline=None)
@given(groups)
def test_group_round_trips(group: TrajectoryGroup):
    assert decode_group(encode_group(group)) == group


def test_group_written_before_segments_existed_is_read():
    group = make_group(1)
    raw = zlib.decompress(encode_group(group))
    size, *counts = struct.unpack_from("<III", raw)
    structure = json.loads(raw[12 : 12 + size])
    for one in structure["trajectories"]:
        assert one.pop("segments")
        assert [turn.pop("segment") for turn in one["turns"]] == [0]
    text = json.dumps(structure).encode()
    former = zlib.compress(struct.pack("<III", len(text), *counts) + text + raw[12 + size :])
    assert decode_group(former) == group


def test_times_round_trip_and_are_not_compared():
    group = make_group(1)
    turn = replace(group.trajectories[0].turns[0], times=(0.0, 0.125, 0.1251))
    timed = replace(group.trajectories[0], turns=(turn,), started=1_800_000_000.25)
    (back,) = decode_group(encode_group(replace(group, trajectories=(timed,)))).trajectories
    assert (back.started, back.turns[0].times) == (1_800_000_000.25, (0.0, 0.125, 0.1251))
    assert back == group.trajectories[0]


def test_group_written_before_times_existed_is_read():
    group = make_group(1)
    raw = zlib.decompress(encode_group(group))
    size, *counts = struct.unpack_from("<III", raw)
    structure = json.loads(raw[12 : 12 + size])
    for one in structure["trajectories"]:
        assert one.pop("started") is None
        assert [turn.pop("times") for turn in one["turns"]] == [[]]
    text = json.dumps(structure).encode()
    former = zlib.compress(struct.pack("<III", len(text), *counts) + text + raw[12 + size :])
    assert decode_group(former) == group


def test_greedy_episode_of_a_group_round_trips():
    group = make_group(1)
    group = replace(group, greedy=group.trajectories[0])
    assert decode_group(encode_group(group)) == group


def test_non_finite_values_round_trip():
    group = make_group(1)
    strange = TrajectoryGroup(
        group_id=1,
        task="shop",
        admitted_version=0,
        trajectories=(
            Trajectory(
                sample=group.trajectories[0].sample,
                opening=(),
                turns=(),
                end=EpisodeEnd.FAILED_ENGINE,
                reward=float("nan"),
                success=False,
                seconds=float("inf"),
            ),
        ),
    )
    (trajectory,) = decode_group(encode_group(strange)).trajectories
    assert trajectory.reward != trajectory.reward
    assert trajectory.seconds == float("inf")


def test_lists_are_decoded_as_tuples():
    completion = Completion(
        token_ids=[1], logprobs=[torch.tensor(-0.1).item()], versions=[0], finish_reason="length"
    )
    turn = Turn(prompt_ids=[4], completion=completion, message=Message.assistant("x"), reply=[], reward=0.0)
    trajectory = Trajectory(
        sample=TaskSample(task="t"),
        opening=[],
        turns=[turn],
        end=EpisodeEnd.TERMINATED,
        reward=0.0,
        success=False,
    )
    group = TrajectoryGroup(group_id=0, task="t", trajectories=[trajectory], admitted_version=0)
    back = decode_group(encode_group(group)).trajectories[0].turns[0]
    assert back.prompt_ids == (4,)
    assert back.completion.logprobs == tuple(completion.logprobs)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=5), st.data())
def test_truncated_file_keeps_complete_records(payloads: list[bytes], data: st.DataObject):
    content = b"".join(frame(payload) for payload in payloads)
    cut = data.draw(st.integers(0, len(content)))
    whole = [i for i in range(len(payloads)) if len(b"".join(map(frame, payloads[: i + 1]))) <= cut]
    assert list(read_records(content[:cut])) == payloads[: len(whole)]


def test_truncated_journal_keeps_complete_groups(tmp_path: Path):
    journal = Journal(tmp_path)
    sizes = []
    (segment,) = tmp_path.glob("*.bin")
    for group_id in range(3):
        journal.append(make_group(group_id))
        sizes.append(segment.stat().st_size)
    content = segment.read_bytes()
    for cut in range(len(content) + 1):
        segment.write_bytes(content[:cut])
        assert ids(journal.read()) == list(range(sum(size <= cut for size in sizes)))
    journal.close()


def test_damaged_record_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    journal = Journal(tmp_path)
    (segment,) = tmp_path.glob("*.bin")
    for group_id in range(3):
        journal.append(make_group(group_id))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 0xFF
    segment.write_bytes(content)
    assert ids(journal.read()) == [0, 2]
    assert "played again" in caplog.text
    journal.close()


def test_restart_starts_new_segment_and_reads_truncated_one(tmp_path: Path):
    first = Journal(tmp_path, step=4)
    first.append(make_group(1))
    first.append(make_group(2))
    first.close()
    (segment,) = tmp_path.glob("*.bin")
    segment.write_bytes(segment.read_bytes()[:-3])
    second = Journal(tmp_path, step=4)
    second.append(make_group(3))
    second.close()
    assert ids(second.read()) == [1, 3]


def test_duplicate_group_is_read_once(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.append(make_group(1))
    journal.append(make_group(1, task="other"))
    assert [group.task for group in journal.read()] == ["shop"]
    journal.close()


def test_segments_are_read_and_pruned_by_checkpoint(tmp_path: Path):
    journal = Journal(tmp_path)
    for step in (0, 10, 20):
        if step:
            journal.rotate(step)
        journal.append(make_group(step))
    assert ids(journal.read()) == [0, 10, 20]
    assert ids(journal.read(10)) == [10, 20]
    journal.prune(10)
    assert ids(journal.read()) == [10, 20]
    journal.close()


def test_closed_journal_rejects_append_and_close_is_idempotent(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.close()
    journal.close()
    with pytest.raises(CheckpointError, match="closed"):
        journal.append(make_group(0))


APPENDING = """
import itertools, sys
from pathlib import Path
from agentrl_env.types import TaskSample
from agentrl_train.storage.journal import Journal
from agentrl_train.types import EpisodeEnd, Trajectory, TrajectoryGroup

one = Trajectory(sample=TaskSample(task="t", data={"text": "x" * 5000}), opening=(), turns=(),
                 end=EpisodeEnd.TERMINATED, reward=0.0, success=False)
journal = Journal(Path(sys.argv[1]))
for number in itertools.count():
    journal.append(TrajectoryGroup(group_id=number, task="t", trajectories=(one,), admitted_version=0))
    print(number, flush=True)
"""


def test_appended_groups_survive_sigkill(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", APPENDING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(25)]
        writer.kill()
        written += [int(line) for line in writer.stdout]
    journal = Journal(tmp_path)
    found = ids(journal.read())
    journal.close()
    assert found[: len(written)] == written
    assert len(found) <= len(written) + 1


# --- checkpoints ---


class Weights:
    """A fake model that writes one file."""

    def __init__(self, content: str = "weights") -> None:
        self.content = content

    def save_pretrained(self, save_directory: str) -> None:
        (Path(save_directory) / "weights.txt").write_text(self.content)


class State:
    """A fake learner state."""

    def write(self, folder: Path) -> None:
        (folder / "learner" / "optimizer").mkdir(parents=True)
        (folder / "learner" / "state.bin").write_bytes(bytes(64))
        (folder / "learner" / "optimizer" / "moments.bin").write_bytes(bytes(64))


class FullDisk:
    """A fake model on a full disk."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def save_pretrained(self, save_directory: str) -> None:
        (Path(save_directory) / "half.bin").write_bytes(b"half")
        raise self.error


def save(folder: Path, step: int, *, model=None, keep: int = 2, **more) -> int:
    return save_checkpoint(
        folder,
        step=step,
        parts=[InModelFolder(pretrained=model or Weights(f"weights {step}")), State()],
        loop={"window": {"next_id": step}, "rng": 2**80},
        keep=keep,
        **more,
    )


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)


def test_checkpoint_round_trips(tmp_path: Path):
    save(tmp_path, 12, groups=[make_group(3), make_group(5)])
    found = load_latest(tmp_path)
    assert found is not None
    assert (found.step, found.loop) == (12, {"window": {"next_id": 12}, "rng": 2**80})
    assert (found.folder / "learner" / "state.bin").read_bytes() == bytes(64)
    assert found.groups == (make_group(3), make_group(5))
    assert (found.model_folder / "weights.txt").read_text() == "weights 12"


def test_model_and_tokenizer_load_from_checkpoint(tmp_path: Path, model, tokenizer):
    learner = Learner(model, TrainSection(learning_rate=1e-3))
    save_checkpoint(
        tmp_path, step=1, parts=[learner.snapshot(), InModelFolder(pretrained=tokenizer)], loop={}
    )
    folder = load_checkpoint(tmp_path / "step_000001").model_folder
    again = AutoModelForCausalLM.from_pretrained(folder)
    token_ids = torch.tensor([[1, 9, 40]])
    assert torch.equal(again(token_ids).logits, model.eval()(token_ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("hello")["input_ids"] == tokenizer("hello")["input_ids"]
    assert (folder / "model.safetensors").exists()


def test_empty_folder_has_no_checkpoint(tmp_path: Path):
    assert load_latest(tmp_path / "none") is None


def test_only_newest_checkpoints_are_kept(tmp_path: Path):
    assert [save(tmp_path, step) for step in (5, 10, 15)] == [5, 5, 10]
    assert steps(tmp_path) == [10, 15]


def moments(folder: Path) -> list[int]:
    """Return the steps of the checkpoints with an optimizer state."""
    found = folder.glob("step_*/learner/optimizer/moments.bin")
    return sorted(int(path.parents[2].name.removeprefix("step_")) for path in found)


def test_only_the_newest_checkpoint_keeps_the_optimizer(tmp_path: Path):
    for step in (5, 10, 15):
        save(tmp_path, step, keep=2, pinned={5})
        assert moments(tmp_path) == [step]
    assert steps(tmp_path) == [5, 10, 15]
    for step in (5, 10, 15):
        assert load_checkpoint(tmp_path / f"step_{step:06d}").step == step


def test_optimizer_is_kept_until_the_next_checkpoint_is_complete(tmp_path: Path):
    save(tmp_path, 5)
    with pytest.raises(RunFolderError):
        save(tmp_path, 10, model=FullDisk(OSError(errno.ENOSPC, "No space left on device")))
    assert moments(tmp_path) == [5]


def test_killed_removal_of_an_optimizer_leaves_its_checkpoint_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, 5)
    remove = shutil.rmtree

    def killed(path: Path, **options: bool) -> None:
        if Path(path).name == "optimizer":
            raise KeyboardInterrupt
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 10)
    monkeypatch.undo()
    assert moments(tmp_path) == [5, 10]
    assert load_checkpoint(tmp_path / "step_000005").step == 5
    save(tmp_path, 15, keep=3)
    assert moments(tmp_path) == [15]


def test_optimizer_of_a_damaged_newer_checkpoint_is_not_removed(tmp_path: Path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    damage(tmp_path / "step_000020" / "learner" / "optimizer" / "moments.bin")
    save(tmp_path, 13)
    assert load_latest(tmp_path).step == 13


@pytest.mark.parametrize(
    "name", ["learner/state.bin", "loop.json", "groups.bin", "model/weights.txt", "manifest.json"]
)
def test_damaged_checkpoint_is_skipped_with_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
):
    save(tmp_path, 5)
    save(tmp_path, 10, groups=[make_group(3)])
    damage(tmp_path / "step_000010" / name)
    with caplog.at_level(logging.WARNING):
        found = load_latest(tmp_path)
    assert found is not None
    assert found.step == 5
    assert "damaged" in caplog.text
    assert "Falling back" in caplog.text


def test_damaged_newest_checkpoint_never_costs_the_last_intact_one(tmp_path: Path):
    save(tmp_path, 10, keep=2)
    save(tmp_path, 20, keep=2)
    damage(tmp_path / "step_000020" / "learner" / "state.bin")
    assert load_latest(tmp_path).step == 10
    # The run resumed from 10 and was stopped at 13.
    assert save(tmp_path, 13, keep=1) == 13
    assert load_latest(tmp_path).step == 13


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path):
    for step in (5, 10, 15):
        save(tmp_path, step, keep=3)
    damage(tmp_path / "step_000010" / "loop.json")
    assert save(tmp_path, 20, keep=3) == 5
    assert save(tmp_path, 25, keep=3) == 15
    assert steps(tmp_path) == [15, 20, 25]


def test_best_model_outlives_its_checkpoint_and_is_replaced_by_a_better_one(tmp_path: Path):
    checkpoints = tmp_path / "checkpoints"
    assert best_success(tmp_path) == -1.0
    save(checkpoints, 1, keep=1)
    keep_best(tmp_path, step=1, success=0.5)
    save(checkpoints, 2, keep=1)
    assert steps(checkpoints) == [2]
    assert best_success(tmp_path) == 0.5
    first = {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()}
    assert len(first) > 1
    keep_best(tmp_path, step=2, success=0.75)
    assert json.loads((tmp_path / "best" / "evaluation.json").read_text()) == {"step": 2, "success": 0.75}
    assert {path.name for path in (tmp_path / "best").iterdir()} == set(first)
    (tmp_path / "best" / "evaluation.json").write_text("{")
    assert best_success(tmp_path) == -1.0


def test_missing_file_is_damage(tmp_path: Path):
    save(tmp_path, 5)
    (tmp_path / "step_000005" / "learner" / "state.bin").unlink()
    with pytest.raises(
        CheckpointError, match=r"No checkpoint .* can be read\. .*state\.bin.*Start another run"
    ):
        load_latest(tmp_path)


def test_unknown_format_is_rejected(tmp_path: Path):
    save(tmp_path, 5)
    manifest = tmp_path / "step_000005" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(tmp_path / "step_000005")


def test_saving_same_step_replaces_damaged_checkpoint(tmp_path: Path):
    save(tmp_path, 5)
    save(tmp_path, 10)
    damage(tmp_path / "step_000010" / "learner" / "state.bin")
    save(tmp_path, 10)
    assert load_checkpoint(tmp_path / "step_000010").step == 10


def test_temporary_folder_of_killed_writer_is_ignored(tmp_path: Path):
    save(tmp_path, 5)
    left = tmp_path / ".step_000010.tmp"
    left.mkdir()
    (left / "groups.bin").write_bytes(b"half")
    found = load_latest(tmp_path)
    assert found is not None
    assert found.step == 5
    save(tmp_path, 10)
    assert not left.exists()
    assert steps(tmp_path) == [5, 10]


def test_renamed_checkpoint_of_killed_writer_is_recovered(tmp_path: Path):
    save(tmp_path, 5)
    (tmp_path / "step_000005").rename(tmp_path / ".step_000005.old")
    found = load_latest(tmp_path)
    assert found is not None
    assert found.step == 5
    save(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


# --- a full disk ---


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_reported_and_old_checkpoint_is_intact(tmp_path: Path, error: Exception):
    save(tmp_path, 5)
    with pytest.raises(RunFolderError) as refused:
        save(tmp_path, 10, model=FullDisk(error))
    assert str(refused.value) == (
        f"The disk of {tmp_path} is full; free some space, then continue with --resume."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]
    found = load_latest(tmp_path)
    assert found is not None
    assert found.step == 5


def test_unwritable_checkpoint_folder_is_reported(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(RunFolderError, match="cannot be written"):
        Journal(blocked / "journal")
    with pytest.raises(RunFolderError, match="cannot be written"):
        save(blocked / "checkpoints", 1)


def test_other_error_is_not_reported_as_full_disk(tmp_path: Path):
    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 5, model=FullDisk(ZeroDivisionError()))
    assert steps(tmp_path) == []


def test_full_disk_is_detected_in_cause():
    error = RuntimeError("writing failed")
    error.__cause__ = OSError(errno.ENOSPC, "full")
    assert is_disk_full(error)
    assert not is_disk_full(OSError(errno.EACCES, "denied"))


ON_A_SMALL_DISK = """
import resource, sys
from pathlib import Path
import torch
from agentrl_train.errors import RunFolderError
from agentrl_train.learner import Snapshot
from agentrl_train.storage.checkpoint import load_latest, save_checkpoint

def part(size):
    return Snapshot(model=None, weights={}, state={"x": torch.zeros(size)}, group=None)

folder = Path(sys.argv[1])
save_checkpoint(folder, step=1, parts=[part(8)], loop={})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(folder, step=2, parts=[part(100_000)], loop={})
except RunFolderError as error:
    print(error)
assert load_latest(folder).step == 1
"""


@pytest.mark.extended
@pytest.mark.slow
def test_file_size_limit_is_reported_as_full_disk(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "is full; free some space" in done.stdout


def test_journal_is_intact_after_full_disk(tmp_path: Path):
    code = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from agentrl_env.types import TaskSample
from agentrl_train.errors import RunFolderError
from agentrl_train.storage.journal import Journal
from agentrl_train.types import EpisodeEnd, Trajectory, TrajectoryGroup
import random

def group(number, size):
    text = random.Random(number).randbytes(size).hex()
    one = Trajectory(sample=TaskSample(task=text), opening=(), turns=(), end=EpisodeEnd.TERMINATED,
                     reward=0.0, success=False)
    return TrajectoryGroup(group_id=number, task="t", trajectories=(one,), admitted_version=0)

journal = Journal(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
journal.append(group(0, 100))
try:
    journal.append(group(1, 60_000))
except RunFolderError as error:
    print(error)
journal.append(group(2, 100))
assert [g.group_id for g in journal.read()] == [0, 2], journal.read()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "journal"), str(Path.cwd())],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "is full; free some space" in done.stdout


def test_file_is_replaced_atomically(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
