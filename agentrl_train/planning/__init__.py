"""Estimates before a run: memory, tokens and seconds of a step, and suitable settings for a model."""
