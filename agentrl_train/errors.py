"""What can go wrong in training, as a tree.

TrainError
├── ConfigError               the configuration is refused
├── EngineError               no completion can be had
│   ├── EngineOutOfMemory     not even one sequence fits
│   └── EngineBroken          it breaks again each time it is built anew
├── EnvironmentUnavailable    the environment server does not answer
├── Stalled                   nothing moves any more
├── WeightMismatch            engine and trainer disagree on the same tokens
├── BadUpdate                 an update would spoil the parameters
│   ├── LossNotFinite         the loss or a gradient is not a number
│   └── GradientSpike         a gradient far larger than those before it
├── LearnerOutOfMemory        a batch does not fit beside the model
├── RanksLost                 one of the learner's processes failed or is gone
├── CheckpointError           a checkpoint cannot be written or read
└── RunFolderError            the run folder cannot be used (disk full, not writable)

Every message is one sentence that says what to do.
"""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; PyTorch says so by a class on GPUs and in words on CPUs."""
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    return named or "can't allocate memory" in str(error)


class TrainError(Exception):
    """Root of everything that training raises on purpose."""


class ConfigError(TrainError):
    """The configuration is refused."""


class EngineError(TrainError):
    """No completion can be had from the engine."""


class EngineOutOfMemory(EngineError):
    """Not even one sequence fits into the engine's memory."""


class EngineBroken(EngineError):
    """The engine breaks again each time it is built anew."""


class EnvironmentUnavailable(TrainError):
    """The environment server does not answer, or not as it should."""


class Stalled(TrainError):
    """Nothing moves any more: every wait has a deadline, and this one passed."""


class WeightMismatch(TrainError):
    """Engine and trainer give the same tokens different log-probabilities."""


class BadUpdate(TrainError):
    """An update would spoil the parameters; it was not made."""


class LossNotFinite(BadUpdate):
    """The loss or a gradient is not a number."""


class GradientSpike(BadUpdate):
    """The gradient is far larger than those before it."""


class LearnerOutOfMemory(TrainError):
    """A batch does not fit into memory beside the model."""


class RanksLost(TrainError):
    """One of the learner's processes failed or is gone, and the others cannot go on without it."""


class CheckpointError(TrainError):
    """A checkpoint cannot be written or read."""


class RunFolderError(TrainError):
    """The run folder cannot be used."""
