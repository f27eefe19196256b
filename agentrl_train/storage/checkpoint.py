"""Checkpoints: everything a run needs to resume, written atomically.

``checkpoints/step_000012/`` holds::

    model/          weights (safetensors), configuration and tokenizer: loads with ``from_pretrained``
    learner/        learner state, a safetensors file of each rank; the optimizer's is in ``optimizer/``
    critic/         the same of a critic, if there is one, with its parameters
    loop.json       step, policy version, admission, random states
    groups.bin      finished groups that are not trained yet
    replay.bin      the replay buffer, if there is one
    manifest.json   size and SHA-256 of every file

A checkpoint is written to a temporary folder, synced and renamed. A resumed run loads the newest checkpoint
with files that match its manifest. It restores the groups that the journal recorded after the checkpoint as
finished. No group is lost, and no group is trained twice by the resumed weights.

Once a checkpoint is complete, the state of the optimizer is deleted from older checkpoints, which is two
thirds of their bytes. Older checkpoints serve evaluations, and a resume if the newest is damaged. The
optimizer then starts without its moments.

Required order: ``journal.rotate(step)`` atomically with the snapshot, then ``save_checkpoint``, possibly in a
thread, and then ``journal.prune`` up to the oldest kept checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentrl_train.errors import CheckpointError
from agentrl_train.storage.atomic_io import run_folder_errors, sync_file, sync_folder, write_file
from agentrl_train.storage.journal import decode_group, encode_group, frame, read_records
from agentrl_train.types import TrajectoryGroup

logger = logging.getLogger(__name__)

FORMAT = 3
OPTIMIZER = "optimizer"
"""Folders of the state of optimizers."""
CRITIC = "critic"
"""Folder of the state of a critic."""
MANIFEST = "manifest.json"
EVALUATION = "evaluation.json"
"""File with the step and the success of the best model."""


class Part(Protocol):
    """Interface: a part of a checkpoint, such as ``learner.Snapshot``."""

    def write(self, folder: Path) -> None:
        """Write files into subfolders of a checkpoint folder."""
        ...


class Pretrained(Protocol):
    """A model or tokenizer of transformers."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write everything that ``from_pretrained`` needs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InModelFolder:
    """A ``Part`` in the ``model/`` folder: the tokenizer."""

    pretrained: Pretrained

    def write(self, folder: Path) -> None:
        """Write the files of the tokenizer."""
        self.pretrained.save_pretrained(str(folder / "model"))


@dataclass(frozen=True, slots=True, kw_only=True)
class InFolder:
    """A ``Part`` in its own folder."""

    part: Part
    name: str

    def write(self, folder: Path) -> None:
        """Write the part into the folder."""
        self.part.write(folder / self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded and verified checkpoint."""

    folder: Path
    step: int
    loop: Mapping[str, Any]
    groups: Sequence[TrajectoryGroup]
    """Groups that were finished and not trained at the checkpoint."""

    @property
    def model_folder(self) -> Path:
        """Return the folder that loads with ``from_pretrained``."""
        return self.folder / "model"


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    parts: Sequence[Part],
    loop: Mapping[str, Any],
    groups: Sequence[TrajectoryGroup] = (),
    keep: int = 2,
    pinned: Collection[int] = (),
) -> int:
    """Write ``folder/step_<step>``, and delete checkpoints older than the ``keep`` newest intact ones.

    The state of the optimizer is deleted from older checkpoints that are kept.

    Args:
        folder: the ``checkpoints`` folder of a run.
        step: number of trained steps.
        parts: writers of ``model/`` and ``learner/``.
        loop: state of the loop, as JSON values.
        groups: finished, untrained groups.
        keep: number of checkpoints to keep, including this one. Damaged ones do not count.
        pinned: steps of older checkpoints that are also kept.

    Returns:
        The step of the oldest kept checkpoint, for ``journal.prune``.

    Raises:
        RunFolderError: the disk is full or not writable. Older checkpoints are unchanged.
    """
    target, temporary = folder / f"step_{step:06d}", folder / f".step_{step:06d}.tmp"
    try:
        with run_folder_errors(folder):
            _recover(folder)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _write(temporary, step=step, parts=parts, loop=loop, groups=groups)
            _put_in_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    oldest = min(_newest_intact(folder, written=step, count=keep))
    for old in steps(folder):
        if old < oldest and old not in pinned:
            shutil.rmtree(folder / f"step_{old:06d}")
        elif old < step:
            _drop_optimizer(folder / f"step_{old:06d}")
    return oldest


def load_latest(folder: Path) -> Checkpoint | None:
    """Return the newest valid checkpoint, or None if there is none.

    Checkpoints that cannot be read are skipped with a warning. Raises ``CheckpointError`` if none can be
    read.
    """
    with run_folder_errors(folder):
        _recover(folder)
    failures = []
    for step in reversed(steps(folder)):
        try:
            checkpoint = load_checkpoint(folder / f"step_{step:06d}")
        except CheckpointError as error:
            failures.append(str(error))
            continue
        for failure in failures:
            logger.warning("%s Falling back to step %d.", failure, step)
        return checkpoint
    if failures:
        reason = f"No checkpoint in {folder} can be read. {failures[0]}"
        raise CheckpointError(f"{reason} Start another run with --set run.name=NAME.")
    return None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Load and verify one checkpoint. Raises ``CheckpointError`` if it is damaged."""
    _verify(folder)
    loop = json.loads((folder / "loop.json").read_text())
    records = read_records((folder / "groups.bin").read_bytes())
    return Checkpoint(
        folder=folder,
        step=loop["step"],
        loop=loop["state"],
        groups=tuple(decode_group(payload) for payload in records),
    )


def keep_best(run_folder: Path, *, step: int, success: float) -> None:
    """Put the model of the checkpoint of ``step`` into ``best/``, replacing the previous one.

    Args:
        run_folder: folder of the run.
        step: step of a checkpoint.
        success: mean success over the tasks in its evaluation.

    Raises:
        RunFolderError: the disk is full or not writable. The previous model is unchanged.
    """
    best, temporary = run_folder / "best", run_folder / ".best.tmp"
    with run_folder_errors(run_folder):
        shutil.rmtree(temporary, ignore_errors=True)
        model = run_folder / "checkpoints" / f"step_{step:06d}" / "model"
        shutil.copytree(model, temporary, copy_function=_link)
        write_file(temporary / EVALUATION, json.dumps({"step": step, "success": success}).encode())
        shutil.rmtree(best, ignore_errors=True)
        temporary.rename(best)
        sync_folder(run_folder)


def best_success(run_folder: Path) -> float:
    """Return the success of the model in ``best/``, or -1 without a model."""
    try:
        return float(json.loads((run_folder / "best" / EVALUATION).read_text())["success"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1.0


def steps(folder: Path) -> list[int]:
    """Return the steps that have a subfolder such as ``step_000012``, oldest first."""
    names = [path.name for path in folder.glob("step_*") if path.is_dir()]
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d+", name))


def _link(source: str, target: str) -> None:
    """Link a file that is never changed, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write(
    folder: Path,
    *,
    step: int,
    parts: Sequence[Part],
    loop: Mapping[str, Any],
    groups: Sequence[TrajectoryGroup],
) -> None:
    (folder / "model").mkdir()
    for part in parts:
        part.write(folder)
    (folder / "loop.json").write_text(json.dumps({"step": step, "state": dict(loop)}))
    (folder / "groups.bin").write_bytes(b"".join(frame(encode_group(group)) for group in groups))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        "format": FORMAT,
        "files": {
            path.relative_to(folder).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": _sha256(path),
            }
            for path in files
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*files, folder / MANIFEST]:
        sync_file(path)
    for path in {file.parent for file in files} | {folder}:
        sync_folder(path)


def _newest_intact(folder: Path, *, written: int, count: int) -> list[int]:
    """Return the steps of ``count`` checkpoints: the new one, and the newest others that are intact.

    Damaged checkpoints do not count. Otherwise a run that resumed from a checkpoint before a damaged one
    would delete the checkpoint that it resumed from.
    """
    intact = [written]
    for step in reversed(steps(folder)):
        if len(intact) == count:
            break
        if step != written and is_intact(folder, step):
            intact.append(step)
    return intact


def _drop_optimizer(checkpoint: Path) -> None:
    """Delete the state of the optimizer from a checkpoint. An interruption leaves it intact."""
    folders = [path for path in checkpoint.rglob(OPTIMIZER) if path.is_dir()]
    if not folders:
        return
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files = manifest["files"].items()
        kept = {name: entry for name, entry in files if OPTIMIZER not in Path(name).parts}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # damaged
    with run_folder_errors(checkpoint):
        write_file(checkpoint / MANIFEST, json.dumps(manifest | {"files": kept}, indent=1).encode())
        for path in folders:
            shutil.rmtree(path)


def is_intact(folder: Path, step: int) -> bool:
    """Return True if the files of the checkpoint of a step match its manifest."""
    try:
        _verify(folder / f"step_{step:06d}")
    except CheckpointError:
        return False
    return True


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename a written checkpoint to its final name, replacing an existing one."""
    aside = target.with_name(f".{target.name}.old")
    if target.exists():
        target.rename(aside)
    temporary.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Recover from a kill between the two renames of ``_put_in_place``."""
    for aside in folder.glob(".step_*.old"):
        target = folder / aside.name.removeprefix(".").removesuffix(".old")
        if target.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(target)


def _verify(folder: Path) -> None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{folder} has format {manifest['format']}, of another version; this version reads {FORMAT}."
            )
        for name, entry in files.items():
            path = folder / name
            if path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
                raise CheckpointError(f"{path} is damaged: its checksum does not match.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}.") from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
