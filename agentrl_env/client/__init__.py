"""Clients: one async face (``EnvClient``) over backends that open and step sessions."""

from agentrl_env.client.backend import SessionBackend
from agentrl_env.client.client import ClientSession, EnvClient

__all__ = ["ClientSession", "EnvClient", "SessionBackend"]
