"""A server on a thread, for tests without their own event loop."""

from contextlib import contextmanager

from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.hosting.serve import EnvServer


@contextmanager
def server_on_thread(*targets, **options):
    """Serve targets and yield the address."""

    async def start():
        server = EnvServer(targets, **{"port": 0, "drain_s": 0.0, **options})
        await server.start()
        return server

    thread = LoopThread("test-server")
    try:
        server = thread.run(start())
        try:
            yield server.url
        finally:
            thread.run(server.stop())
    finally:
        thread.stop()
