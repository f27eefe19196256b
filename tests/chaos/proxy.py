"""A TCP proxy that cuts, stalls, delays and refuses connections on command."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

CHUNK = 65_536


class Proxy:
    """Forwards connections to a local port and injects faults.

    Args:
        target: Port to forward to.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._lines: set[_Line] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.refusing = False
        self.port = 0

    async def start(self) -> None:
        """Start listening."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and abort all connections."""
        self.calm()
        if self._server is not None:
            self._server.close()
        self.cut(random.Random(0), 1.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self, rng: random.Random, share: float) -> None:
        """Abort a share of the connections in both directions."""
        for line in self._some(rng, share):
            line.abort()

    def cut_in_a_frame(self, rng: random.Random, share: float) -> None:
        """Forward part of the next data of a share of the connections, then abort them."""
        for line in self._some(rng, share):
            line.truncate = True

    def half_close(self, rng: random.Random, share: float) -> None:
        """Close one direction of a share of the connections."""
        for line in self._some(rng, share):
            line.half_close(rng.random() < 0.5)

    def stall(self) -> None:
        """Stop forwarding, with all connections open."""
        self._flowing.clear()

    def stall_some(self, rng: random.Random, share: float) -> None:
        """Discard all further data of a share of the connections, which stay open."""
        for line in self._some(rng, share):
            line.silent = True

    def calm(self) -> None:
        """End all faults and forward the delayed data."""
        self._flowing.set()
        self.delay_s, self.refusing = 0.0, False

    def _some(self, rng: random.Random, share: float) -> list[_Line]:
        return [line for line in list(self._lines) if rng.random() < share]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        line = None
        try:
            if self.refusing:
                writer.transport.abort()
                return
            await self._flowing.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target, limit=CHUNK)
            line = _Line(writer, far_writer)
            self._lines.add(line)
            await asyncio.gather(self._pump(line, reader, far_writer), self._pump(line, far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the connection is aborted below
        finally:
            self._tasks.discard(task)
            if line is None:
                writer.transport.abort()
            else:
                self._lines.discard(line)
                line.abort()

    async def _pump(self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._flowing.wait()
            if line.truncate:
                writer.write(data[: len(data) // 2])
                await asyncio.sleep(0)
                line.abort()
                return
            if not line.silent:
                with suppress(RuntimeError):  # this direction is closed
                    writer.write(data)
                await writer.drain()
        if not line.silent:
            with suppress(OSError, RuntimeError):
                writer.write_eof()


class _Line:
    """A pair of connections, to a client and to the target."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._near, self._far = near, far
        self.truncate = self.silent = False

    def abort(self) -> None:
        self._near.transport.abort()
        self._far.transport.abort()

    def half_close(self, near: bool) -> None:
        with suppress(OSError, RuntimeError):
            (self._near if near else self._far).write_eof()
