"""Serve tasks to OpenEnv clients, and use OpenEnv environments as tasks."""
