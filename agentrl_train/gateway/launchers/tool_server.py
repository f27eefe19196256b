"""The tools of a session for one agent: a server of the Model Context Protocol on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from typing import Any

from agentrl_train.gateway.launchers.session import TaskSession

NAME = "task"
"""Name of the server in the settings of agents, which call ``bash`` for example ``mcp__task__bash``."""
PROTOCOL = "2025-06-18"
NO_METHOD = -32601


class ToolServer:
    """Answers the requests of one agent, one call after another.

    Args:
        session: the session with the tools.
    """

    def __init__(self, session: TaskSession) -> None:
        self._session = session
        self._turn = threading.Lock()
        self.ended = threading.Event()
        """Set when the agent cannot call tools any more."""
        self.failure: Exception | None = None
        """The error of the session, which ends the episode."""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the response to a JSON-RPC request, or None for a notification."""
        if "id" not in request:
            return None
        result = self._result(request.get("method", ""), request.get("params") or {})
        if result is None:
            error = {"code": NO_METHOD, "message": f"there is no method {request.get('method')!r}"}
            return {"jsonrpc": "2.0", "id": request["id"], "error": error}
        return {"jsonrpc": "2.0", "id": request["id"], "result": result}

    def _result(self, method: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        match method:
            case "initialize":
                return {
                    "protocolVersion": params.get("protocolVersion", PROTOCOL),
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": NAME, "version": PROTOCOL},
                }
            case "ping":
                return {}
            case "tools/list":
                functions = [spec.function for spec in self._session.tools]
                return {
                    "tools": [
                        {
                            "name": function.name,
                            "description": function.description,
                            "inputSchema": function.parameters,
                        }
                        for function in functions
                    ]
                }
            case "tools/call":
                with self._turn:
                    return self._call(params.get("name", ""), params.get("arguments") or {})
        return None

    def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self.ended.is_set():
            return {}
        try:
            output = self._session.call(name, arguments)
        except Exception as error:
            self.failure = error
            self.ended.set()
            return {}
        if self._session.exhausted:
            self.ended.set()
        return {"content": [{"type": "text", "text": output.text}], "isError": output.invalid}


@contextmanager
def served_tools(session: TaskSession) -> Iterator[tuple[ToolServer, str]]:
    """Serve the tools of a session. Yield the server and its address, which cannot be guessed."""
    tools, path, closed = ToolServer(session), f"/{token_urlsafe(16)}", threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.path != path:
                return self._send(HTTPStatus.NOT_FOUND)
            answer = tools.answer(json.loads(body))
            if tools.ended.is_set():
                closed.wait()  # with the answer, the agent would call the policy again
            self._send(HTTPStatus.ACCEPTED if answer is None else HTTPStatus.OK, answer)
            return None

        def do_GET(self) -> None:
            self._send(HTTPStatus.METHOD_NOT_ALLOWED)  # this server never sends events by itself

        def do_DELETE(self) -> None:
            self._send(HTTPStatus.METHOD_NOT_ALLOWED)

        def _send(self, status: HTTPStatus, answer: object = None) -> None:
            body = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield tools, f"http://127.0.0.1:{server.server_address[1]}{path}"
    finally:
        closed.set()
        server.shutdown()
        server.server_close()
