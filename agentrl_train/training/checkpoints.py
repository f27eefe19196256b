"""Checkpoints of a run: copied at a step boundary, and written while training continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentrl_train.config.sections import CheckpointSection
from agentrl_train.learner import Learner
from agentrl_train.storage.checkpoint import InModelFolder, best_success, keep_best, save_checkpoint, steps
from agentrl_train.telemetry.watchdog import in_thread
from agentrl_train.training.loop import Loop
from agentrl_train.training.step_trainer import StepTrainer
from agentrl_train.types import UNTRACED, Trace
from agentrl_train.weights import Publisher

WRITE_TIMEOUT_S = 1800.0
"""Deadline for copying or writing a checkpoint."""


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time.

    Args:
        section: number of checkpoints to keep, and whether the best model is kept.
        folder: folder of the run.
        loop: supplies the window and the groups that are not trained yet.
        trainer: supplies the parameters.
        tokenizer: saved with each model.
        publisher: knows which checkpoints have the weights of the stale policy.
        state: returns the other entries of a checkpoint's state.
        last: step of the checkpoint that the run resumed, or None.
        trace: records the writing.
    """

    def __init__(
        self,
        section: CheckpointSection,
        *,
        folder: Path,
        loop: Loop,
        trainer: StepTrainer,
        tokenizer: PreTrainedTokenizerBase,
        publisher: Publisher,
        state: Callable[[], Mapping[str, Any]],
        last: int | None = None,
        trace: Trace = UNTRACED,
    ) -> None:
        self.pinned: set[int] = set()
        """Steps with a checkpoint that is kept because its evaluation is not recorded yet."""
        self.writing: asyncio.Task[None] | None = None
        """The checkpoint in progress."""
        self._section = section
        self._run_folder = folder
        self.folder = folder / "checkpoints"
        """Folder of the checkpoints."""
        self._loop = loop
        self._trainer = trainer
        self._tokenizer = tokenizer
        self._publisher = publisher
        self._state = state
        self._last = last
        self._best = -1.0 if last is None else best_success(folder)
        self._trace = trace

    async def save(self, *, step: int) -> None:
        """Save the run at a step boundary, unless this step is the last one that was saved.

        Everything but the copy happens in the background.
        The state of the loop is taken right after the copy; parameters do not change meanwhile, because
        training waits.
        """
        if step == self._last:
            return
        await self.wait()
        self._last = step
        copy, doing = self._trainer.snapshots, f"copying the parameters of step {step}"
        snapshots = await in_thread(copy, within_s=WRITE_TIMEOUT_S, doing=doing)
        window, untrained = await self._loop.cut_journal(step)
        keep = self._section.keep
        kept = sorted({step, *(old for old in steps(self.folder) if old < step)})[-keep:]
        write = partial(
            save_checkpoint,
            self.folder,
            step=step,
            parts=(*snapshots, InModelFolder(pretrained=self._tokenizer)),
            loop={"step": step, "window": window, **self._state()},
            groups=untrained,
            keep=keep,
            pinned=self.pinned | self._publisher.refreshes(kept),
        )
        self.writing = asyncio.create_task(self._write(write, step=step))

    async def _write(self, write: Callable[[], int], *, step: int) -> None:
        with self._trace.span("trainer/checkpoints", f"checkpoint {step}"):
            doing = f"writing the checkpoint of step {step}"
            self._loop.prune_journal(await in_thread(write, within_s=WRITE_TIMEOUT_S, doing=doing))

    async def wait(self) -> None:
        """Wait for the checkpoint in progress; raises its error."""
        if (writing := self.writing) is not None:
            self.writing = None
            await writing

    async def keep_best(self, success: float, *, step: int) -> None:
        """Keep the model of a step if its success is the best; write a checkpoint if the step has none."""
        if not self._section.best or success <= self._best:
            return
        self._best = success
        if step not in self.pinned:
            await self.save(step=step)
            await self.wait()
        keep = partial(keep_best, self._run_folder, step=step, success=success)
        await in_thread(keep, within_s=WRITE_TIMEOUT_S, doing="keeping the best model")

    async def export(self, learner: Learner, folder: Path) -> None:
        """Write the current policy into a folder, with the files of a checkpoint's ``model``."""
        await self.wait()

        def write() -> None:
            learner.snapshot().write(folder)
            InModelFolder(pretrained=self._tokenizer).write(folder)

        await in_thread(write, within_s=WRITE_TIMEOUT_S, doing=f"writing the policy to {folder}")
