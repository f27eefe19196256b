"""The runtime of a training run: configuration, loop, checkpoints, metrics and reports."""
