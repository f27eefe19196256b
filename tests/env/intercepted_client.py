"""Local clients for fault injection."""

from __future__ import annotations

from agentrl_env import EnvClient


class InterceptedClient(EnvClient):
    """Base class of clients that override ``step`` and ``close`` of their sessions."""

    async def open(self, *args, **kwargs):
        return self._intercept(await super().open(*args, **kwargs))

    async def resume(self, session_id):
        return self._intercept(await super().resume(session_id))

    async def step(self, session, play, message):
        """Called instead of ``session.step(message)``, which is ``play(message)``."""
        return await play(message)

    async def close_session(self, session, close):
        """Called instead of ``session.close()``, which is ``close()``."""
        await close()

    def _intercept(self, session):
        play, close = session.step, session.close
        session.step = lambda message: self.step(session, play, message)
        session.close = lambda: self.close_session(session, close)
        return session


def pool_of(client):
    """Return the session pool of a local client."""
    return client.backend.pool
