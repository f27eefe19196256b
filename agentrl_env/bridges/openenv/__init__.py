"""OpenEnv: tasks behind its clients, and its environments as tasks."""
