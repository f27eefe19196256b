"""Gymnasium: its environments as tasks."""
