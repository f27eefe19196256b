"""Bridges: serve tasks in other protocols, and use environments of other protocols as tasks."""
