"""The child process beside a container: it carries connections to the server, and removes the container.

It outlives its parent just long enough for that. It is run as a script, to import no more than it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time

_LOOK_S = 0.5
_SWEEPS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Seconds between the sweeps: a container that was being made when its parent died appears late."""


class _Pipe(asyncio.Protocol):
    """One direction of a connection; what arrives is written to the other side, no faster than it reads."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Pipe | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        if (
            self.other is not None
            and self.other.transport is not None
            and self.other.transport.can_write_eof()
        ):
            self.other.transport.write_eof()
            return True
        return False

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


class _Front(_Pipe):
    """A caller's connection; it is carried on to where the server listens, or the controller."""

    def __init__(self, back: str) -> None:
        super().__init__()
        self._back = back
        self._early = bytearray()
        self._carrying: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        self._carrying = asyncio.create_task(self._carry())

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data  # uvloop reads once before it heeds the pause
        else:
            super().data_received(data)

    async def _carry(self) -> None:
        assert self.transport is not None
        try:
            _, back = await _connect(self._back)
        except OSError:  # the server is not there yet, or no longer
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
    """Return what listens, and its port; none for a socket in the file system."""
    loop = asyncio.get_running_loop()
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        server = await loop.create_unix_server(lambda: _Front(back), path, backlog=2048)
        os.chmod(path, 0o666)  # its folder says who may come
        return server, 0
    host, _, port = address.rpartition(":")
    server = await loop.create_server(lambda: _Front(back), host, int(port), backlog=2048)
    return server, int(server.sockets[0].getsockname()[1])


async def keep(parent: int, front: str, back: str) -> bool:
    """Carry connections until the parent says that all is removed, or is gone; return whether it said so.

    Args:
        parent: its process id.
        front: where callers come, ``HOST:PORT`` or ``unix:PATH``; empty where nothing is to be carried.
        back: where their connections are carried to.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[bool] = loop.create_future()

    def on_input() -> None:
        said = os.read(0, 4096)
        if not ended.done():
            ended.set_result(b"done" in said)

    loop.add_reader(0, on_input)
    server, port = await _listen(front, back) if front else (None, 0)
    print(port, flush=True)
    while not ended.done() and os.getppid() == parent:
        await asyncio.wait((ended,), timeout=_LOOK_S)  # a fork of the parent may hold the pipe open
    if server is not None:
        server.close()
    return ended.done() and ended.result()


def clean_up(label: str, folder: str) -> None:
    """Remove every container with a label, and a folder; what fails is left to the next owner's sweep."""
    import docker  # type: ignore[import-untyped, unused-ignore]

    for pause in _SWEEPS:
        time.sleep(pause)
        with contextlib.suppress(docker.errors.DockerException, OSError):
            client = docker.from_env(timeout=30)
            for container in client.containers.list(all=True, filters={"label": label}, ignore_removed=True):
                with contextlib.suppress(docker.errors.APIError):
                    container.remove(force=True, v=True)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Keep what the arguments name: the parent's id, a label, a folder, and two addresses."""
    parent, label, folder, front, back = sys.argv[1:]
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    if not asyncio.run(keep(int(parent), front, back)):
        clean_up(label, folder)


if __name__ == "__main__":
    main()
