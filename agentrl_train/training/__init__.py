"""The training run: admission of samples, the loop, training steps, evaluation."""
