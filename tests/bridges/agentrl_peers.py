"""AgentRL's client and worker, in the venv that ``make bridges`` installs, and a scripted model."""

import asyncio
import json
import os
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentrl_env.server.limits import Limits
from agentrl_env.server.sockets import Listener
from agentrl_env.server.telemetry.metrics import Metrics

PEERS = Path(__file__).parents[2] / ".venv-agentrl"
PYTHON = PEERS / "bin/python"
needs_peers = pytest.mark.skipif(not PYTHON.exists(), reason="agentrl-eval is missing; run make bridges")


def call(name, call_id=None, **arguments):
    """Return an assistant message with one tool call."""
    made = {"id": call_id or f"call_{os.urandom(6).hex()}", "type": "function"}
    made["function"] = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


def bisect(messages):
    """Return the next guess between 1 and 20, by binary search over the answers so far."""
    low, high = 1, 20
    guesses = {}
    for message in messages:
        for made in message.get("tool_calls") or ():
            guesses[made["id"]] = json.loads(made["function"]["arguments"])["n"]
        if message["role"] == "tool" and "higher" in str(message["content"]):
            low = guesses[message["tool_call_id"]] + 1
        elif message["role"] == "tool" and "lower" in str(message["content"]):
            high = guesses[message["tool_call_id"]] - 1
    return call("guess", n=(low + high) // 2)


@asynccontextmanager
async def scripted_model(policy):
    """Serve a function of the messages as an OpenAI-compatible model. Yield its base URL and the requests."""
    requests = []

    async def complete(request: Request):
        body = await request.json()
        requests.append(body)
        message = policy(body["messages"]) if body.get("tools") else {"role": "assistant", "content": "hi"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return JSONResponse(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": "scripted",
                "choices": [choice],
                "usage": usage,
            }
        )

    async def models(request: Request):
        return JSONResponse({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    routes = [
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
    ]
    async with serving_app(Starlette(routes=routes)) as url:
        yield f"{url}/v1", requests


@asynccontextmanager
async def serving_app(app):
    """Serve an application on a free loopback port and yield its URL."""
    listener = Listener("127.0.0.1", 0, token=None, insecure=False)
    await listener.start(app, Limits(), Metrics())
    try:
        yield listener.url
    finally:
        await listener.stop()


async def run_eval(controller, model, output, *arguments, timeout=300):
    """Run ``agentrl-eval`` and return the rows of its results.jsonl."""
    command = [str(PEERS / "bin/agentrl-eval"), "--controller", controller, "--base-url", model]
    command += ["--client", "openai", "--chat-completions", "--no-interactive", "--output", str(output)]
    process = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=output.parent,
    )
    try:
        async with asyncio.timeout(timeout):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    (results,) = output.glob("*/results.jsonl") if list(output.glob("*/results.jsonl")) else (None,)
    assert results is not None, printed.decode()
    return [json.loads(line) for line in results.read_text().splitlines()]


@asynccontextmanager
async def worker(folder, controller, task, module, port=None, **parameters):
    """Run ``python -m agentrl.worker`` and yield its process.

    Args:
        folder: folder for its configuration and log.
        controller: ``http://.../api`` or ``grpc://...``.
        task: name of the task.
        module: path of the task's class.
        port: port of its API. By default a free port.
        parameters: arguments of the class.
    """
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    config = folder / f"{task}-{port}.json"
    config.write_text(json.dumps({task: {"module": module, "parameters": parameters}}))
    command = [str(PYTHON), "-m", "agentrl.worker", task, "--config", str(config), "--controller", controller]
    command += ["--self", f"http://127.0.0.1:{port}/api", "--host", "127.0.0.1", "--port", str(port)]
    log = (folder / f"{task}-{port}.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=log, stderr=log, cwd=Path(__file__).parent, env={**os.environ, "PYTHONPATH": "."}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        log.close()
