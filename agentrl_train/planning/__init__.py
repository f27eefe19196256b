"""Guidance before a run: memory, tokens and seconds of a step, and settings that suit a model."""
