"""Where the steps become processes: configuration, the loop, checkpoints, metrics, reports."""
