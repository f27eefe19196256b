"""Exceptions of the trainer.

TrainError
├── ConfigError               the configuration is invalid
├── EngineError               the engine cannot produce a completion
│   ├── EngineOutOfMemory     not even one sequence fits
│   └── EngineBroken          the engine fails in a way that no rebuild repairs
├── EnvironmentUnavailable    the environment server does not answer
├── RewardUnavailable         a reward function gives no score
├── ProgramFailed             an agent program ended without a result
├── Stalled                   no progress before a deadline
├── WeightMismatch            engine and trainer disagree on the same tokens
├── BadUpdate                 an update would corrupt the parameters
│   ├── LossNotFinite         the loss or a gradient is not a number
│   └── GradientSpike         a gradient norm far above the recent median
├── LearnerOutOfMemory        a batch does not fit beside the model
├── RanksLost                 a learner process failed or disappeared
├── CallbackFailed            a callback of the user raised an exception
├── CheckpointError           a checkpoint cannot be written or read
└── RunFolderError            the run folder cannot be used (disk full, not writable)

Every message is one sentence that says how to fix the problem.
"""

import asyncio

from agentrl_env.errors import (
    AUTHOR_ERRORS,
    CallTimeout,
    ServerDraining,
    ServerFull,
    ServerUnreachable,
    SessionExpired,
    SessionLost,
    StateUnavailable,
    UnknownSession,
)

USER_ERRORS = (*AUTHOR_ERRORS, asyncio.CancelledError)
"""Exceptions that an async function of a user can raise."""


def raise_own_cancellation(error: BaseException) -> None:
    """Raise a cancellation of the current task again. Other errors are the user's, also a cancellation."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def ran_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means out of memory. On CPUs, PyTorch reports it only in the message."""
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    return named or "can't allocate memory" in str(error)


def not_numbers(part: str, version: int) -> str:
    """Return the message for a part of the trainer that computes log-probabilities that are not numbers."""
    return (
        f"the {part}'s own log-probabilities at version {version} are not numbers, so the weights contain "
        "NaN or infinite values, or overflow: check the files of model.path, or use float32 (model.dtype, "
        "engine.dtype, train.precision)"
    )


class TrainError(Exception):
    """Base class of all errors that the trainer raises deliberately."""


class ConfigError(TrainError):
    """The configuration is invalid."""


class EngineError(TrainError):
    """The engine cannot produce a completion."""


class ConstraintError(EngineError):
    """The engine cannot follow the grammar of a completion. A retry fails in the same way."""


class EngineOutOfMemory(EngineError):
    """Not even one sequence fits into the engine's memory."""


class EngineBroken(EngineError):
    """The engine fails again after every rebuild, or its weights are not numbers."""


class EnvironmentUnavailable(TrainError):
    """The environment server does not answer, or answers with failures."""


class RewardUnavailable(TrainError):
    """A reward function fails, or a judge gives no score."""


class ProgramFailed(TrainError):
    """An agent program crashed, did not end in time, or gave no reward."""


class Stalled(TrainError):
    """A wait exceeded its deadline without progress."""


class WeightMismatch(TrainError):
    """Engine and trainer assign different log-probabilities to the same tokens."""


class BadUpdate(TrainError):
    """An update would corrupt the parameters; it was not applied."""


class LossNotFinite(BadUpdate):
    """The loss or a gradient is not a number."""


class GradientSpike(BadUpdate):
    """The gradient norm is far above the recent median."""


class LearnerOutOfMemory(TrainError):
    """A batch does not fit into memory beside the model."""


class RanksLost(TrainError):
    """A learner process failed or disappeared, and the others cannot continue without it."""


class CallbackFailed(TrainError):
    """A callback raised an exception."""


class CheckpointError(TrainError):
    """A checkpoint cannot be written or read."""


class RunFolderError(TrainError):
    """The run folder cannot be used."""


OUTAGES = (
    CallTimeout,
    EngineError,
    ServerDraining,
    ServerFull,
    ServerUnreachable,
    SessionExpired,
    SessionLost,
    StateUnavailable,
    UnknownSession,
)
"""Failures that do not depend on the sampled tokens, so the same draws can be repeated."""
