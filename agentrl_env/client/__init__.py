"""Clients: ``EnvClient``, an async client over backends that open and step sessions."""

from agentrl_env.client.client import ClientSession, EnvClient, SessionBackend

__all__ = ["ClientSession", "EnvClient", "SessionBackend"]
