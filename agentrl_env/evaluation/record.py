"""Records of an evaluation: its settings, its episodes, and the file that holds them.

``episodes.jsonl`` begins with a line of settings. Every episode is appended as one line when it has ended, so
that a killed evaluation loses only the episodes under way. A line replaces an earlier one of the same sample
and attempt: an episode that failed is played again by the next start.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl_env.dataset import stable_seed
from agentrl_env.errors import AgentRLError
from agentrl_env.evaluation.chat_model import Usage
from agentrl_env.types import Message

EPISODES = "episodes.jsonl"
M = TypeVar("M", bound=BaseModel)
Key = tuple[int | str, int]
"""Index of a sample, and number of the attempt at it."""


class EvaluationError(AgentRLError):
    """An evaluation that cannot begin or go on; the message says what to do."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EvaluationSettings(_Frozen):
    """Settings on which the results depend; those of a resumed evaluation must be equal."""

    format: Literal[1] = 1
    task: str
    split: str
    model: str
    url: str | None = None
    """Base URL of the endpoint, which may move before a resumption; None for other policies."""
    indices: tuple[int | str, ...]
    """Samples, in the order in which they are played."""
    attempts: int = Field(default=1, ge=1)
    seed: int = 0
    temperature: float | None = None
    body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request."""
    send_seed: bool = False
    """True if requests carry ``episode_seed``."""

    def plan(self) -> list[Key]:
        """Return all episodes: the first attempt at every sample, then the second."""
        return [(index, attempt) for attempt in range(self.attempts) for index in self.indices]

    def episode_seed(self, index: int | str, attempt: int) -> int:
        """Return the seed of the model's draws in an episode, of 31 bits."""
        return stable_seed(self.seed, self.task, self.split, index, attempt) & 0x7FFF_FFFF


class TurnRecord(_Frozen):
    """One message of the model, and the environment's answer."""

    action: Message
    thought: str | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()
    invalid_calls: int = 0
    """Calls that the environment rejected."""
    model_s: float | None = None
    """Seconds of the model; None if they are not measured."""
    repeats: int = 0
    """Requests that failed before the one that was answered."""
    environment_s: float | None = None
    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    info: dict[str, Any] = Field(default_factory=dict)
    """The environment's notes that the model does not see, such as the hidden part of a user."""


class EpisodeRecord(_Frozen):
    """One episode."""

    index: int | str
    attempt: int
    seed: int | None = None
    """Seed of the environment, which with the index determines the problem."""
    opening: tuple[Message, ...] = ()
    turns: tuple[TurnRecord, ...] = ()
    end: str
    """Final status of the session; ``truncated_context`` if the conversation outgrew the model."""
    reward: float = 0.0
    success: bool = False
    metrics: dict[str, float] = Field(default_factory=dict)
    error: str | None = None
    """Reason why there is no result; reward and success mean nothing then."""
    failed: Literal["model", "environment"] | None = None
    """Side that the failure is on."""
    tries: int = 1
    """Times that the episode was begun."""
    seconds: float
    started: str
    """Time of the begin, ISO 8601 in UTC."""

    @property
    def key(self) -> Key:
        """Index and attempt."""
        return self.index, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRun:
    """An evaluation as its file has it, finished or not."""

    settings: EvaluationSettings
    episodes: dict[Key, EpisodeRecord] = field(default_factory=dict)

    @property
    def counted(self) -> list[EpisodeRecord]:
        """Episodes with a result, in the order of the settings."""
        found = (self.episodes.get(key) for key in self.settings.plan())
        return [episode for episode in found if episode is not None and episode.failed is None]

    @property
    def pending(self) -> list[Key]:
        """Episodes that have no result yet, because they were not played or failed."""
        done = {episode.key for episode in self.counted}
        return [key for key in self.settings.plan() if key not in done]


def read_run(folder: str | os.PathLike[str]) -> EvaluationRun:
    """Return the evaluation in a folder. Raises EvaluationError if there is none, or it is damaged."""
    path = Path(folder) / EPISODES
    try:
        run, _ = _parse(path, path.read_bytes())
    except OSError as error:
        raise EvaluationError(f"{folder} has no evaluation: {error.strerror or error}") from error
    if run is None:
        raise EvaluationError(f"{path} is empty: its evaluation was stopped before it began")
    return run


class RunFile:
    """The file of an evaluation, open for appending; one process has it open at a time.

    Args:
        folder: The folder, which is created.
        settings: Settings of this evaluation.

    Raises:
        EvaluationError: The folder has an evaluation with other settings, or another process writes it.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: EvaluationSettings) -> None:
        self.path = Path(folder) / EPISODES
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open(self.path, "a+b")  # noqa: SIM115 (close() closes it)
        except OSError as error:
            raise EvaluationError(f"{folder} cannot be written: {error.strerror or error}") from error
        try:
            self.run = self._begin(settings)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, settings: EvaluationSettings) -> EvaluationRun:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EvaluationError(
                f"another process writes {self.path}; wait for it, or choose another --output"
            ) from None
        self._file.seek(0)
        run, size = _parse(self.path, self._file.read())
        self._file.truncate(size)  # a line that a kill cut off
        if run is None:
            self._write(settings)
            return EvaluationRun(settings=settings)
        given, before = (one.model_dump(exclude={"url"}) for one in (settings, run.settings))
        if names := [name for name in given if given[name] != before[name]]:
            raise EvaluationError(
                f"{self.path.parent} has an evaluation with other settings ({', '.join(names)}); "
                "choose another --output, or the same settings to go on with it"
            )
        return run

    def append(self, episode: EpisodeRecord) -> None:
        """Write an episode; it is on the disk when this returns. Raises EvaluationError."""
        self._write(episode)
        self.run.episodes[episode.key] = episode

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> RunFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, line: BaseModel) -> None:
        try:
            self._file.write(line.model_dump_json().encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise EvaluationError(f"{self.path} cannot be written: {error.strerror or error}") from error


def _parse(path: Path, content: bytes) -> tuple[EvaluationRun | None, int]:
    """Return what the whole lines of a file hold, and their length."""
    size = content.rfind(b"\n") + 1
    lines = content[:size].splitlines()
    if not lines:
        return None, 0
    run = EvaluationRun(settings=_read(EvaluationSettings, lines[0], f"{path}:1"))
    for number, line in enumerate(lines[1:], start=2):
        episode = _read(EpisodeRecord, line, f"{path}:{number}")
        run.episodes[episode.key] = episode
    return run, size


def _read(model: type[M], line: bytes, where: str) -> M:
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise EvaluationError(f"{where} is damaged: {reason}; choose another --output") from error
