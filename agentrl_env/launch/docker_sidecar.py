"""The sidecar process of a container: forwards connections to the server, and removes the container.

It outlives its parent until the container is removed. It runs as a script, to import as little as possible.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time

_POLL_S = 0.5
_REMOVAL_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Pauses before each removal: a container that was being created when the parent died appears late."""


class _Pipe(asyncio.Protocol):
    """One side of a forwarded connection; its data goes to the other side, with back pressure."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Pipe | None = None

    @property
    def _target(self) -> asyncio.Transport | None:
        return self.other.transport if self.other is not None else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._target is not None:
            self._target.write(data)

    def eof_received(self) -> bool:
        if self._target is not None and self._target.can_write_eof():
            self._target.write_eof()
            return True
        return False

    def pause_writing(self) -> None:
        if self._target is not None:
            self._target.pause_reading()

    def resume_writing(self) -> None:
        if self._target is not None:
            self._target.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


class _Front(_Pipe):
    """An accepted connection; it is forwarded to the address ``back``."""

    def __init__(self, back: str) -> None:
        super().__init__()
        self._back = back
        self._early = bytearray()
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        self._connecting = asyncio.create_task(self._connect())

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data  # uvloop reads once more after a pause
        else:
            super().data_received(data)

    async def _connect(self) -> None:
        assert self.transport is not None
        try:
            _, back = await _connect(self._back)
        except OSError:  # the server has not started, or has ended
            self.transport.abort()
            return
        self.other, back.other = back, self
        if back.transport is not None and self._early:
            back.transport.write(bytes(self._early))
        if self.transport.is_closing():
            back.close()
        else:
            self.transport.resume_reading()


async def _connect(address: str) -> tuple[asyncio.BaseTransport, _Pipe]:
    loop = asyncio.get_running_loop()
    if address.startswith("unix:"):
        return await loop.create_unix_connection(_Pipe, address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await loop.create_connection(_Pipe, host, int(port))


async def _listen(address: str, back: str) -> tuple[asyncio.Server, int]:
    """Return the listening server and its port; the port of a Unix socket is 0."""
    loop = asyncio.get_running_loop()
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        server = await loop.create_unix_server(lambda: _Front(back), path, backlog=2048)
        os.chmod(path, 0o666)  # its folder restricts access
        return server, 0
    host, _, port = address.rpartition(":")
    server = await loop.create_server(lambda: _Front(back), host, int(port), backlog=2048)
    return server, int(server.sockets[0].getsockname()[1])


async def forward(parent: int, routes: list[tuple[str, str]]) -> bool:
    """Forward connections until the parent reports completion or ends; return whether it reported.

    Args:
        parent: its process id.
        routes: pairs of an address to listen on and one to forward to, ``HOST:PORT`` or ``unix:PATH``.
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
        await asyncio.wait((ended,), timeout=_POLL_S)  # a fork of the parent may hold the pipe open
    for server, _ in listening:
        server.close()
    return ended.done() and ended.result()


def clean_up(label: str, folder: str) -> None:
    """Remove every container with a label, and a folder; the next start on this machine retries failures."""
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
