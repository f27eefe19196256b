"""A conversation recorded with an earlier version replays byte for byte over HTTP and the WebSocket.

``python -m tests.env.server.test_recorded_wire URL`` records one with the server at URL, which serves
``tests/env/tasks.py:Quick`` with ``--oracle``.
"""

import asyncio
import json
import re
import sys
from pathlib import Path

import httpx
from websockets.asyncio.client import connect

from agentrl_env.hosting.serve import EnvServer
from tests.env.tasks import Quick

RECORD = Path(__file__).with_name("recorded_wire.json")
CALLS = [("note", {"text": "x"}), ("gain", {"amount": 0.25}), ("gain", {"amount": "much"}), ("nothing", {})]


def message(name, arguments, text=None):
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def requests():
    """Return the HTTP requests. ``{id}`` stands for the session opened by the first request."""
    session = "/v1/sessions/{id}"
    steps = [
        {"seq": seq, "message": message(name, arguments)} for seq, (name, arguments) in enumerate(CALLS, 1)
    ]
    batch = [{"session_id": "{id}", "seq": 5, "message": {"role": "assistant", "content": "say"}}]
    batch += [{"session_id": "nope", "seq": 1, "message": batch[0]["message"]}, {"seq": 1}, 7]
    return [
        ("POST", "/v1/sessions", {"task": "quick", "index": 3, "seed": 7}),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/v1/tasks", None),
        *(("POST", f"{session}/step", step) for step in steps),
        ("POST", f"{session}/step", steps[0]),
        ("POST", f"{session}/step", {"seq": 9, "message": steps[0]["message"]}),
        ("POST", f"{session}/step", {"seq": 5, "message": {"role": "user", "content": "x"}}),
        ("GET", session, None),
        ("POST", f"{session}/expert", None),
        ("POST", "/v1/step", {"steps": batch}),
        ("POST", "/v1/step", {"steps": []}),
        ("GET", f"{session}/transcript", None),
        ("GET", f"{session}/transcript?after=4", None),
        ("POST", f"{session}/fork", {"n": 2}),
        ("POST", f"{session}/step", {"seq": 6, "message": message("finish", {"reward": 1.0})}),
        ("POST", f"{session}/step", {"seq": 7, "message": message("note", {"text": "y"})}),
        ("DELETE", session, None),
        ("GET", "/v1/sessions/nope", None),
        ("GET", "/v1/nothing", None),
        ("PUT", "/v1/sessions", {}),
        ("POST", "/v1/sessions", {"task": "nope"}),
        ("POST", "/v1/sessions", {"task": "quick", "split": "nope"}),
        ("POST", "/v1/sessions", {"task": "quick", "index": 99}),
    ]


def frames():
    """Return the WebSocket frames in the order of sending."""
    call = message("note", {"text": "x"})
    return [
        {"id": 1, "call": "open", "task": "quick", "index": 1, "seed": 2},
        {"id": "two", "call": "step", "session_id": "{id}", "seq": 1, "message": call},
        {"id": 3, "call": "step_many", "steps": [{"session_id": "{id}", "seq": 2, "message": call}]},
        {"id": 4, "call": "info", "session_id": "{id}"},
        {"id": 5, "call": "expert", "session_id": "{id}"},
        {"id": 6, "call": "transcript", "session_id": "{id}", "after": 1},
        {"id": 7, "call": "tasks"},
        {"id": 8, "call": "close", "session_id": "{id}"},
        {"id": 9, "call": "info", "session_id": "nope"},
    ]


async def converse(url):
    """Return the method, path or frame, status and answer of each request, with placeholders for ids."""
    exchanges = []
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
        session_id = "{id}"
        for method, path, body in requests():
            content = None if body is None else json.dumps(body).replace("{id}", session_id)
            answer = await http.request(method, path.replace("{id}", session_id), content=content)
            if session_id == "{id}":
                session_id = answer.json()["session_id"]
            exchanges.append([method, path, answer.status_code, placeholders(answer.text, session_id)])
    async with connect(f"{url.replace('http', 'ws', 1)}/v1/ws") as socket:
        session_id = "{id}"
        for frame in frames():
            await socket.send(json.dumps(frame).replace("{id}", session_id))
            answer = await socket.recv()
            if session_id == "{id}":
                session_id = json.loads(answer)["result"]["session_id"]
            exchanges.append(["frame", frame["call"], 101, placeholders(answer, session_id)])
    return exchanges


def placeholders(text, session_id):
    return re.sub(r"[0-9a-f]{12}\.[\w-]{22}", "{other id}", text.replace(session_id, "{id}"))


async def test_recorded_conversation_replays_byte_for_byte():
    server = EnvServer([Quick], port=0, drain_s=0.0, oracle=True)
    await server.start()
    try:
        exchanges = await converse(server.url)
    finally:
        await server.stop()
    for recorded, now in zip(json.loads(RECORD.read_text()), exchanges, strict=True):
        assert now == recorded


if __name__ == "__main__":
    RECORD.write_text(json.dumps(asyncio.run(converse(sys.argv[1])), indent=1) + "\n")
