"""Records of an evaluation: its settings, its episodes, and the file that holds them.

``episodes.jsonl`` starts with a line of settings. Every episode is appended as one line when it has ended, so
a killed evaluation loses only the episodes in progress. A line replaces an earlier line of the same sample
and attempt, since failed episodes are played again when the evaluation is resumed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentrl_env.client.credentials import public_url
from agentrl_env.dataset import stable_seed
from agentrl_env.errors import AgentRLError
from agentrl_env.evaluation.chat_model import Usage
from agentrl_env.types import Message

EPISODES = "episodes.jsonl"
RESULTS = ("summary.json", "report.html")
"""Files that a finished evaluation writes."""
MAX_NAMED = 8
"""Number of evaluations that an error names."""
M = TypeVar("M", bound=BaseModel)
Key = tuple[int | str, int]
"""Index of a sample and number of the attempt."""


class EvaluationError(AgentRLError):
    """An evaluation cannot start or continue. The message says what to do."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EvaluationSettings(_Frozen):
    """Settings that affect the results. A resumed evaluation must have equal settings."""

    format: Literal[1] = 1
    task: str
    split: str
    model: str
    url: str | None = None
    """Base URL of the endpoint without credentials, such as a password and the values of the query.

    It can change when the evaluation is resumed. None for other policies.
    """
    indices: tuple[int | str, ...]
    """Samples, in the order in which they are played. A repeated index counts once."""
    attempts: int = Field(default=1, ge=1)
    seed: int = 0
    temperature: float | None = None
    body: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of each request."""
    send_seed: bool = False
    """True if requests carry ``episode_seed``."""

    @field_validator("url")
    @classmethod
    def _without_credentials(cls, url: str | None) -> str | None:
        return None if url is None else public_url(url)

    @field_validator("indices")
    @classmethod
    def _once(cls, indices: tuple[int | str, ...]) -> tuple[int | str, ...]:
        return tuple(dict.fromkeys(indices))

    def plan(self) -> list[Key]:
        """Return all episodes: first the first attempts at all samples, then the second ones, and so on."""
        return [(index, attempt) for attempt in range(self.attempts) for index in self.indices]

    def episode_seed(self, index: int | str, attempt: int) -> int:
        """Return the model's sampling seed in an episode, with 31 bits."""
        return stable_seed(self.seed, self.task, self.split, index, attempt) & 0x7FFF_FFFF


class TurnRecord(_Frozen):
    """One message of the model and the environment's answer."""

    action: Message
    thought: str | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()
    invalid_calls: int = 0
    """Number of calls that the environment rejected."""
    model_s: float | None = None
    """Seconds that the model took. None if they were not measured."""
    repeats: int = 0
    """Number of failed requests before the answered request."""
    environment_s: float | None = None
    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    info: dict[str, Any] = Field(default_factory=dict)
    """Information from the environment that the model does not see, such as the hidden part of a user."""


class EpisodeRecord(_Frozen):
    """One episode."""

    index: int | str
    attempt: int
    seed: int | None = None
    """Seed of the environment. Together with the index it determines the problem."""
    opening: tuple[Message, ...] = ()
    turns: tuple[TurnRecord, ...] = ()
    end: str
    """Final status of the session, ``truncated_context`` if the model's context was full, or
    ``rejected_message`` if a message of the model exceeded a limit of the server."""
    reward: float = 0.0
    success: bool = False
    metrics: dict[str, float] = Field(default_factory=dict)
    error: str | None = None
    """Reason why there is no result. Reward and success are then meaningless."""
    failed: Literal["model", "environment"] | None = None
    """The side that failed."""
    tries: int = 1
    """Number of times that the episode was started."""
    seconds: float
    started: str
    """Start time, ISO 8601 in UTC."""

    @property
    def key(self) -> Key:
        """Index and attempt."""
        return self.index, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRun:
    """The content of an evaluation's file. The evaluation can be unfinished."""

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
    """Return the evaluation in a folder. Raises EvaluationError if it is missing or damaged."""
    path = Path(folder) / EPISODES
    try:
        run, _ = _parse(path, path.read_bytes())
    except OSError as error:
        inside = sorted(str(one.parent) for one in Path(folder).glob(f"*/{EPISODES}"))
        hint = f"; evaluations in it: {', '.join(inside[:MAX_NAMED])}" if inside else ""
        raise EvaluationError(f"{folder} has no evaluation: {error.strerror or error}{hint}") from error
    if run is None:
        raise EvaluationError(f"{path} is empty: its evaluation was stopped before it started")
    return run


class RunFile:
    """The file of an evaluation, open for appending by one process at a time.

    Args:
        folder: The folder. It is created if it is missing.
        settings: Settings of this evaluation.

    Raises:
        EvaluationError: The folder has an evaluation with other settings or results of something else, or
            another process writes to it.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: EvaluationSettings) -> None:
        self.path = Path(folder) / EPISODES
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="episodes")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            foreign = [name for name in RESULTS if self.path.with_name(name).exists()]
            if foreign and not self.path.exists():
                raise EvaluationError(
                    f"{folder} has a {foreign[0]} of something else; choose another --output"
                )
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
        if run is None or not run.episodes:  # stopped before its first episode ended
            self._file.truncate(0)
            self._write(settings)
            return EvaluationRun(settings=settings)
        self._file.truncate(size)  # remove a line that was cut off when the process was killed
        given, before = (one.model_dump(exclude={"url"}) for one in (settings, run.settings))
        if names := [name for name in given if given[name] != before[name]]:
            raise EvaluationError(
                f"{self.path.parent} has an evaluation with other settings ({', '.join(names)}); "
                "choose another --output, or the same settings to continue it"
            )
        return run

    def append(self, episode: EpisodeRecord) -> None:
        """Write an episode. It is on disk when this method returns. Raises EvaluationError."""
        self._write(episode)
        self.run.episodes[episode.key] = episode

    async def append_async(self, episode: EpisodeRecord) -> None:
        """Write an episode in a thread, so that a slow disk does not block the event loop.

        Episodes are written in the order of the calls, even if a call is cancelled. Raises EvaluationError.
        """
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._writer, self.append, episode))

    def close(self) -> None:
        """Write the remaining episodes and close the file."""
        self._writer.shutdown()
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
    """Return the content of the complete lines of a file, and their length."""
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
