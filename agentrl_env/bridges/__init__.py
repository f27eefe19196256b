"""Bridges: tasks served in other protocols, and environments of other protocols as tasks."""
