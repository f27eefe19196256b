"""What can go wrong in training, as a tree.

TrainError
├── ConfigError               the configuration is refused
├── EngineError               no completion can be had
├── EnvironmentUnavailable    the environment server does not answer
├── Stalled                   nothing moves any more
├── WeightMismatch            engine and trainer disagree on the same tokens
├── LossNotFinite             the loss or a gradient is not a number
├── CheckpointError           a checkpoint cannot be written or read
└── RunFolderError            the run folder cannot be used (disk full, not writable)

Every message is one sentence that says what to do.
"""


class TrainError(Exception):
    """Root of everything that training raises on purpose."""


class ConfigError(TrainError):
    """The configuration is refused."""


class EngineError(TrainError):
    """No completion can be had from the engine."""


class EnvironmentUnavailable(TrainError):
    """The environment server does not answer, or not as it should."""


class Stalled(TrainError):
    """Nothing moves any more: every wait has a deadline, and this one passed."""


class WeightMismatch(TrainError):
    """Engine and trainer give the same tokens different log-probabilities."""


class LossNotFinite(TrainError):
    """The loss or a gradient is not a number."""


class CheckpointError(TrainError):
    """A checkpoint cannot be written or read."""


class RunFolderError(TrainError):
    """The run folder cannot be used."""
