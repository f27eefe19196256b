"""TensorBoard's files, written in the caller's thread: what the disk refuses is heard of at once."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar

from agentrl_train.runtime.disk import run_folder_errors


class ScalarWriter:
    """Appends scalars to an event file of its own in ``folder``. Satisfies ``Sink``.

    Raises:
        RunFolderError: the disk is full or refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with run_folder_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer: EventsWriter | None = EventsWriter(str(folder / "events"))

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Write one step's values; those that are not finite are left out."""
        if self._writer is None:
            return
        with run_folder_errors(self._folder):
            for name, value in scalars.items():
                if math.isfinite(value):
                    event = Event(step=step, wall_time=time.time(), summary=scalar(name, value))
                    self._writer.write_event(event)
            self._writer.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with run_folder_errors(self._folder):
                writer.close()
