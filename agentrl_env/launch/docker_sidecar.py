"""The sidecar process of a container: forwards connections to the server, and removes the container.

It outlives its parent until the container is removed. It runs as a script, so that it imports few modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from functools import partial

_POLL_S = 0.5
_CHUNK = 1 << 18
_REMOVAL_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Pauses before each removal, since a container that was being created when the parent died appears late."""


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection, including its end, with back pressure."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _serve(back: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward an accepted connection to the address ``back`` until both directions end or one fails."""
    writers = [writer]
    try:
        if back.startswith("unix:"):
            answers, requests = await asyncio.open_unix_connection(back.removeprefix("unix:"))
        else:
            host, _, port = back.rpartition(":")
            answers, requests = await asyncio.open_connection(host, int(port))
        writers.append(requests)
        await asyncio.gather(_copy(reader, requests), _copy(answers, writer))
    except (OSError, RuntimeError, asyncio.CancelledError):  # no server yet, or one side is gone
        writer.transport.abort()
    finally:
        for each in writers:
            each.close()


async def _listen(address: str, back: str) -> tuple[asyncio.Server, int]:
    """Return the listening server and its port, which is 0 for a Unix socket."""
    serve = partial(_serve, back)
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        server = await asyncio.start_unix_server(serve, path, backlog=2048)
        os.chmod(path, 0o666)  # the permissions of its folder restrict access
        return server, 0
    host, _, port = address.rpartition(":")
    server = await asyncio.start_server(serve, host, int(port), backlog=2048)
    return server, int(server.sockets[0].getsockname()[1])


async def forward(parent: int, routes: list[tuple[str, str]]) -> bool:
    """Forward connections until the parent reports completion or ends. Return True if it reported.

    Args:
        parent: process id of the parent.
        routes: pairs of a listening address and a target address, ``HOST:PORT`` or ``unix:PATH``.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[bool] = loop.create_future()

    def on_input() -> None:
        received = os.read(0, 4096)
        if not ended.done():
            ended.set_result(b"done" in received)

    loop.add_reader(0, on_input)
    listening = [await _listen(front, back) for front, back in routes]
    print(next((port for _, port in listening if port), 0), flush=True)
    while not ended.done() and os.getppid() == parent:
        await asyncio.wait((ended,), timeout=_POLL_S)  # a fork of the parent can hold the pipe open
    for server, _ in listening:
        server.close()
    return ended.done() and ended.result()


def clean_up(label: str, folder: str) -> None:
    """Remove every container with a label, and a folder. The next start on this machine retries failures."""
    import docker  # type: ignore[import-untyped, unused-ignore]

    for pause in _REMOVAL_PAUSES_S:
        time.sleep(pause)
        with contextlib.suppress(docker.errors.DockerException, OSError):
            client = docker.from_env(timeout=30)
            for container in client.containers.list(all=True, filters={"label": label}, ignore_removed=True):
                with contextlib.suppress(docker.errors.APIError):
                    container.remove(force=True, v=True)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run with the arguments PARENT LABEL FOLDER [FRONT BACK]..."""
    parent, label, folder, *addresses = sys.argv[1:]
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    routes = list(zip(addresses[::2], addresses[1::2], strict=True))
    if not asyncio.run(forward(int(parent), routes)):
        clean_up(label, folder)


if __name__ == "__main__":
    main()
