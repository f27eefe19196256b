"""A real HTTP server for chat completions with scripted answers, and a task for it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from agentrl_env import Done, Environment, ToolCall, tool


class Sums(Environment):
    """Add two numbers; the second one is behind a tool."""

    max_turns = 4
    blocking = False

    @classmethod
    def samples(cls, split):
        return [{"a": n, "b": 7 * n + 1000} for n in range(40)]

    def reset(self, sample, rng):
        self.a, self.b = sample.data["a"], sample.data["b"]
        return f"Add the second number to {self.a}."

    @tool
    def look(self):
        """Return the second number."""
        return f"It is {self.b}."

    @tool
    def answer(self, total: int):
        """Answer."""
        return Done("Over.", reward=float(total == self.a + self.b))

    def expert(self, rng):
        return ToolCall.of("answer", total=self.a + self.b)


Answer = dict[str, Any] | tuple[int, dict[str, str]]
"""Fields of a chat completion, or the status and headers of an error. The header ``raw`` is its body."""


class ChatServer:
    """Serves ``POST /v1/chat/completions``. ``reply`` returns the answer for a request's body."""

    def __init__(self, reply: Callable[[dict[str, Any]], Answer]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.sent: list[tuple[str, Mapping[str, str]]] = []
        """Query and headers of each request."""
        lock, served = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                path, _, query = self.path.partition("?")
                assert path == "/v1/chat/completions"
                with lock:
                    served.requests.append(body)
                    served.keys.append(self.headers.get("authorization"))
                    served.sent.append((query, {k.lower(): v for k, v in self.headers.items()}))
                answer = reply(body)
                status, headers = answer if isinstance(answer, tuple) else (200, {})
                text = headers.pop("text", "try another time")
                raw = headers.pop("raw", None)
                data = (raw or json.dumps({"error": {"message": text}} if status != 200 else answer)).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *args: None  # the client was killed
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def completion(*calls: ToolCall, text: str | None = None, **message: Any) -> Answer:
    """Return a completion with calls or text, for 20 prompt tokens and 5 completion tokens."""
    fields = {"role": "assistant", "content": text, **message}
    if calls:
        fields["tool_calls"] = [call.model_dump() for call in calls]
    usage = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}
    return {"choices": [{"message": fields, "finish_reason": "stop"}], "usage": usage}


def numbers(body: dict[str, Any]) -> list[int]:
    """Return the numbers of the task that a conversation mentions."""
    found = [message["content"] for message in body["messages"] if message["role"] in ("user", "tool")]
    return [int(number) for text in found for number in re.findall(r"\d+", text)]


def play_sums(body: dict[str, Any], right: Callable[[int], bool] = lambda a: True) -> Answer:
    """Look, then answer. The answer is correct if ``right`` returns True for the first number."""
    known = numbers(body)
    if len(known) == 1:
        return completion(ToolCall.of("look"), reasoning_content="I must look <first>.")
    return completion(ToolCall.of("answer", total=sum(known) if right(known[0]) else -1))
