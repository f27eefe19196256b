"""A server on a thread, for tests without their own event loop."""

from contextlib import contextmanager

from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import EnvServer


@contextmanager
def server_on_thread(*targets, **options):
    """Serve targets and yield the address."""
    with _on_thread(lambda: EnvServer(targets, **{"port": 0, "drain_s": 0.0, **options})) as url:
        yield url


@contextmanager
def controller_on_thread(**options):
    """Run a controller without servers and yield the address."""
    with _on_thread(lambda: ControllerServer(FleetService(), port=0, **options)) as url:
        yield url


@contextmanager
def _on_thread(create):
    async def start():
        server = create()
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
