"""AgentRL's workers over gRPC. Each worker opens one stream, over which the controller sends its calls.

The stream arrives at the controller's only port. gRPC uses HTTP/2, which uvicorn does not support. So a
connection that starts with HTTP/2 is forwarded, byte for byte, to a gRPC server on a socket in the file
system. This costs one copy of its bytes within this process. Other connections are not affected.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, cast

import grpc
from fastapi import FastAPI
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pydantic import ValidationError

from agentrl_env.bridges.agentrl.worker import START, Heartbeat, WorkerFailed, Workers, read_answer
from agentrl_env.errors import InvalidRequest, ServerFull

logger = logging.getLogger("agentrl_env")

MAX_BYTES = 100 * 1024 * 1024
"""Maximum size of a message, the same as in AgentRL's peers."""
RECONNECT_S = 15.0
"""Seconds that a call waits for a worker's stream. Workers reconnect after 1 s. Heartbeats are 8 s apart."""
_REQUEST = 1
_Field = descriptor_pb2.FieldDescriptorProto
_METHOD = "WorkerStream"
_SERVICE = "agentbench.Controller"


def _envelope() -> Any:
    """Return the class of the stream's messages, with the field numbers of AgentRL's ``controller.proto``."""
    file = descriptor_pb2.FileDescriptorProto(name="agentrl_kit/controller.proto", package="agentrl_kit")
    file.syntax = "proto3"

    def message(name: str, *fields: tuple[str, int, Any], oneof: int = 0) -> None:
        """Add a message. Fields numbered ``oneof`` or higher exclude each other."""
        made = file.message_type.add(name=name)
        if oneof:
            made.oneof_decl.add(name="body")
        for field, number, kind in fields:
            repeated, kind = isinstance(kind, list), kind[0] if isinstance(kind, list) else kind
            added = made.field.add(name=field, number=number)
            added.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            added.type = _Field.TYPE_MESSAGE if isinstance(kind, str) else kind
            if isinstance(kind, str):
                added.type_name = f".agentrl_kit.{kind}"
            if oneof and number >= oneof:
                added.oneof_index = 0

    text, data = _Field.TYPE_STRING, _Field.TYPE_BYTES
    message("TaskIndex", ("int_value", 1, _Field.TYPE_INT64), ("string_value", 2, text), oneof=1)
    indices = ("indices", 4, ["TaskIndex"])
    message("Heartbeat", ("id", 1, text), ("name", 2, text), ("concurrency", 3, _Field.TYPE_UINT32), indices)
    message("Notice", ("session_id", 1, _Field.TYPE_INT64))
    message("Response", ("code", 1, _Field.TYPE_INT32), ("message", 2, text), ("json", 3, data))
    message("Request", ("method", 1, text), ("endpoint", 2, text), ("json", 3, data))
    message(
        "Envelope",
        ("id", 1, text),
        ("type", 2, _Field.TYPE_INT32),
        ("heartbeat", 101, "Heartbeat"),
        ("notice", 111, "Notice"),
        ("response", 121, "Response"),
        ("request", 211, "Request"),
        oneof=101,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("agentrl_kit.Envelope"))


Envelope = _envelope()


class StreamTransport:
    """Calls of a worker over its stream. If the stream breaks, the calls in progress fail."""

    def __init__(self) -> None:
        self._context: Any = None
        self._attached = asyncio.Event()
        self._writing = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[str, asyncio.Future[Any]] = {}

    @property
    def attached(self) -> bool:
        """True while a stream is attached."""
        return self._context is not None

    def attach(self, context: Any) -> None:
        """Use a stream."""
        if self._context is not None and context is not self._context:
            self._fail("the worker has opened another stream")
        self._context = context
        self._attached.set()

    def detach(self, context: Any) -> None:
        """Handle the end of a stream."""
        if context is self._context:
            self._context = None
            self._attached.clear()
            self._fail("the worker's stream broke, so that the outcome of the call is unknown")

    def answer(self, envelope: Any) -> None:
        """Pass an answer to its caller. An answer that arrives too late is dropped."""
        call = self._calls.get(envelope.id)
        if call is not None and not call.done():
            call.set_result(envelope.response)

    async def call(self, endpoint: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        """Return the answer to a call. Raises WorkerFailed, or ServerFull if the worker has no room."""
        number = str(next(self._numbers))
        data = b"" if body is None else json.dumps(body).encode()
        request = {"method": "POST", "endpoint": endpoint, "json": data}
        envelope = Envelope(id=number, type=_REQUEST, request=request)
        await self._wait_for_stream(endpoint)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                async with self._writing:
                    await self._context.write(envelope)
                response = await answer
        except TimeoutError:
            raise WorkerFailed(f"the worker did not answer {endpoint} in time") from None
        except (grpc.RpcError, AttributeError, asyncio.InvalidStateError) as error:
            raise WorkerFailed(f"the worker's stream broke before {endpoint}: {error}") from error
        finally:
            del self._calls[number]
        return read_answer(endpoint, response.code, response.message, response.json)

    async def _wait_for_stream(self, endpoint: str) -> None:
        """Wait for a stream. Raises WorkerFailed, or ServerFull if the call would open a session."""
        try:
            async with asyncio.timeout(RECONNECT_S):
                await self._attached.wait()
        except TimeoutError:
            if endpoint == START:
                raise ServerFull("the worker has no stream; another might", retry_after=1) from None
            raise WorkerFailed(f"the worker has no stream for {endpoint}") from None

    async def aclose(self) -> None:
        """Fail the calls in progress."""
        self._fail("the worker is gone")

    def _fail(self, reason: str) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_exception(WorkerFailed(reason))


class GrpcServer:
    """The gRPC server of one controller. It starts with the first connection.

    Args:
        workers: the workers of the controller.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._transports: dict[str, StreamTransport] = {}
        self._folder = ""
        self._url = ""
        self._server: Any = None
        self._starting: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    def take(self, transport: asyncio.Transport, first: bytes, on_lost: Callable[[], None]) -> None:
        """Take over an HTTP/2 connection."""
        relay = Relay(on_lost, first)
        relay.connection_made(transport)
        transport.set_protocol(relay)
        if self._starting is None:
            host, port = transport.get_extra_info("sockname")[:2]
            self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._starting = asyncio.create_task(self._start())
        connecting = asyncio.create_task(self._connect(relay))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def aclose(self) -> None:
        """Close all streams."""
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        if self._server is not None:
            await self._server.stop(None)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="agentrl-")
        options = [(f"grpc.max_{way}_message_length", MAX_BYTES) for way in ("receive", "send")]
        server = grpc.aio.server(options=options)
        handler = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=Envelope.FromString,
            response_serializer=Envelope.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        server.add_insecure_port(f"unix:{self._folder}/grpc")
        await server.start()
        self._server = server

    async def _connect(self, relay: Relay) -> None:
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: Relay(peer=relay), f"{self._folder}/grpc")
        except OSError as error:
            logger.warning("the gRPC server does not answer: %s", error)
            relay.transport.abort()
        for key in [key for key, one in self._transports.items() if not one.attached]:
            if key not in self._workers:
                del self._transports[key]

    async def _stream(self, _: Any, context: Any) -> None:
        """Serve the stream of one worker."""
        transport: StreamTransport | None = None
        try:
            while (envelope := await context.read()) is not grpc.aio.EOF:
                kind = envelope.WhichOneof("body")
                if kind == "heartbeat":
                    transport = self._hear(envelope.heartbeat, context)
                elif kind == "response" and transport is not None:
                    transport.answer(envelope)
        finally:
            if transport is not None:
                transport.detach(context)

    def _hear(self, heard: Any, context: Any) -> StreamTransport:
        key = f"grpc://{heard.id}"
        transport = self._transports.setdefault(key, StreamTransport())
        transport.attach(context)
        indices = [getattr(index, index.WhichOneof("body") or "int_value") for index in heard.indices]
        try:
            beat = Heartbeat(name=heard.name, concurrency=heard.concurrency, indices=indices)
            self._workers.hear(key, beat, lambda: transport, self._url, None)
        except (InvalidRequest, ValidationError) as error:
            logger.warning("rejected the heartbeat of AgentRL worker %s: %s", key, error)
        return transport


class Relay(asyncio.Protocol):
    """One end of a pair of connections that forward their bytes to each other.

    Args:
        on_lost: called at the end of the connection.
        first: bytes already received.
        peer: the other end, if it already exists.
    """

    def __init__(
        self, on_lost: Callable[[], None] | None = None, first: bytes = b"", peer: Relay | None = None
    ) -> None:
        self.transport: asyncio.Transport
        self._on_lost = on_lost
        self._early = first
        self._peer = peer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start forwarding."""
        self.transport = cast(asyncio.Transport, transport)
        if self._peer is not None:
            self._peer.join(self)

    def join(self, peer: Relay) -> None:
        """Forward to another end, starting with the bytes received so far."""
        self._peer = peer
        peer.transport.write(self._early)
        self._early = b""
        if self.transport.is_closing():
            peer.transport.close()

    def data_received(self, data: bytes) -> None:
        """Forward bytes."""
        if self._peer is None:
            self._early += data
        else:
            self._peer.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        """End the other connection."""
        if self._peer is not None:
            self._peer.transport.close()
        if self._on_lost is not None:
            self._on_lost()

    def pause_writing(self) -> None:
        """Stop reading from the other end while this end cannot send."""
        if self._peer is not None:
            self._peer.transport.pause_reading()

    def resume_writing(self) -> None:
        """Continue reading."""
        if self._peer is not None:
            self._peer.transport.resume_reading()


def mount(app: FastAPI, workers: Workers) -> None:
    """Let an application's listener forward HTTP/2 connections."""
    server = GrpcServer(workers)
    workers.closing.append(server.aclose)
    app.state.on_http2 = server.take
