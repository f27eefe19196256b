"""Metrics, logs and traces of a server."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect

from agentrl_env import EnvClient, Environment, Message, ToolCall, tool
from agentrl_env.client.http import HttpBackend
from agentrl_env.errors import UnknownTask
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.server.limits import Limits
from agentrl_env.server.telemetry.logs import JsonLines, TextLines
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.wire import StepRequest
from tests.env.tasks import Quick, until


class Threaded(Environment):
    """Runs its tool on a thread."""

    def reset(self, sample, rng):
        return "ready"

    @tool(name="renamed")
    def work(self):
        """Work."""
        return str(trace.get_current_span().get_span_context().trace_id)


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family):
    return {tuple(sorted(s.labels.items())): s.value for s in family.samples if s.name.endswith("_total")}


async def scraped(url):
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        answer = await http.get(f"{url}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return families(answer.text)


async def test_metrics_are_prometheus_text_with_correct_counts(serving):
    server = await serving(Quick, Threaded)
    async with EnvClient.connect(server.url) as client:
        session, other = await client.open("quick"), await client.open("threaded")
        for name in ("gain", "refuse", "made up", 'mad"e\nup', "note"):
            await session.step(ToolCall.of(name))
        await other.step(ToolCall.of("renamed"))
        await session.step(ToolCall.of("crash"))
        with pytest.raises(UnknownTask):
            await client.open("nope")
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            for path in ("/made/up", "/v1/sessions/x", "/v1/sessions/y"):
                await http.get(server.url + path)
    found = await scraped(server.url)
    assert values(found["agentrl_steps"]) == {(("task", "quick"),): 6, (("task", "threaded"),): 1}
    assert values(found["agentrl_sessions_opened"])[(("task", "quick"),)] == 1
    ended = (("status", "failed_environment"), ("task", "quick"))
    assert values(found["agentrl_sessions_ended"])[ended] == 1
    assert values(found["agentrl_errors"])[(("type", "unknown_task"),)] == 1
    assert values(found["agentrl_errors"])[(("type", "unknown_session"),)] == 2
    assert values(found["agentrl_invalid_tool_calls"]) == {(("task", "quick"),): 3}
    requests = values(found["agentrl_requests"])
    assert requests[(("method", "GET"), ("route", "other"), ("status", "404"))] == 1
    assert requests[(("method", "GET"), ("route", "/v1/sessions/{id}"), ("status", "404"))] == 2
    assert requests[(("method", "POST"), ("route", "/v1/sessions"), ("status", "201"))] == 1
    calls = values(found["agentrl_calls"])
    assert calls[(("call", "open"),)] == 3  # the first over HTTP, the others over the WebSocket
    assert sum(calls.values()) >= 10
    assert {"agentrl_sessions_open", "agentrl_sessions_waiting", "process_open_fds"} <= set(found)


async def test_tool_latency_has_labels_only_for_declared_tools(serving):
    server = await serving(Quick, Threaded)
    async with EnvClient.connect(server.url) as client:
        session, other = await client.open("quick"), await client.open("threaded")
        for name in ("gain", "gain", "made up", "refuse"):
            await session.step(ToolCall.of(name))
        await session.step("no call at all")
        await other.step(ToolCall.of("renamed"))
    tools = (await scraped(server.url))["agentrl_tool_seconds"]
    assert tools.type == "histogram"
    counts = {
        (s.labels["task"], s.labels["tool"]): s.value for s in tools.samples if s.name.endswith("_count")
    }
    assert counts == {
        ("quick", "gain"): 2,
        ("quick", "refuse"): 1,
        ("quick", "respond"): 1,
        ("threaded", "renamed"): 1,
    }
    by_bound = [s.value for s in tools.samples if s.name.endswith("_bucket") and s.labels["tool"] == "gain"]
    assert by_bound == sorted(by_bound)
    assert by_bound[-1] == 2


async def test_event_loop_lag_is_measured(serving):
    server = await serving(Quick)
    lag = server.metrics.loop_lag_seconds
    await until(lambda: sum(lag._buckets) > 0)
    assert (await scraped(server.url))["agentrl_event_loop_lag_seconds"].type == "histogram"


async def test_controller_serves_metrics():
    front = ControllerServer(FleetService(), port=0)
    await front.start()
    found = await scraped(front.url)
    assert found["agentrl_fleet_servers"].samples[0].value == 0
    await front.stop()


def logged(caplog):
    return [(r.getMessage(), r.facts) for r in caplog.records if hasattr(r, "facts")]


async def test_log_has_session_events_without_messages(serving, caplog):
    caplog.set_level(logging.INFO)
    server = await serving(Quick, slow_step_s=0.0)
    backend = HttpBackend(server.url)
    backend_headers = {"x-agentrl-client": "trainer-7"}
    async with httpx.AsyncClient(
        base_url=server.url, headers=backend_headers, trust_env=False, timeout=60
    ) as http:
        info = (await http.post("/v1/sessions", json={"task": "quick"})).json()
    step = StepRequest(
        session_id=info["session_id"], seq=1, message=Message.assistant(None, ToolCall.of("crash"))
    )
    await backend.step(step.session_id, 1, step.message)
    await backend.aclose()
    events = {name: facts for name, facts in logged(caplog) if facts.get("session_id") == info["session_id"]}
    assert events["session opened"]["client"] == "trainer-7"
    assert events["session opened"]["task"] == "quick"
    ended = events["session ended"]
    assert (ended["client"], ended["status"], ended["turns"]) == ("trainer-7", "failed_environment", 1)
    assert ended["duration_s"] >= 0
    assert events["slow step"]["seq"] == 1
    broke = next(r for r in caplog.records if r.exc_info)
    assert broke.facts["session_id"] == info["session_id"]
    assert info["session_id"] in broke.getMessage()
    everything = "".join(JsonLines().format(r) + TextLines().format(r) for r in caplog.records)
    assert "call_0" not in everything
    assert "Be quick" not in everything


async def test_messages_are_logged_by_their_own_logger(serving, caplog):
    caplog.set_level(logging.DEBUG, logger="agentrl_env.messages")
    server = await serving(Quick)
    async with EnvClient.connect(server.url) as client:
        session = await client.open("quick")
        await session.step(ToolCall.of("note", text="very private"))
    (record,) = [r for r in caplog.records if r.name == "agentrl_env.messages"]
    line = json.loads(JsonLines().format(record))
    assert line["session_id"] == session.session_id
    assert "very private" in line["message"]["tool_calls"][0]["function"]["arguments"]
    assert line["answer"][0]["role"] == "tool"


def test_log_record_is_a_single_line():
    record = logging.LogRecord("x", logging.INFO, "", 0, "two\nlines \x1b[31m", (), None)
    record.facts = {"client": "a b\n", "n": 1, "odd": {"x": object}}
    text, line = TextLines().format(record), JsonLines().format(record)
    assert "\n" not in text + line
    assert json.loads(line)["client"] == "a b\n"
    assert text.startswith(json.loads(line)["time"])


def test_process_logs_json_lines():
    command = ["-m", "agentrl_env", "serve", "--port", "0", "--log-format", "json", "tests.env.tasks:Quick"]
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        session = httpx.post(f"{url}/v1/sessions", json={"task": "quick"}, trust_env=False, timeout=60).json()
        call = Message.assistant(None, ToolCall.of("crash")).wire()
        address = f"{url}/v1/sessions/{session['session_id']}/step"
        httpx.post(address, json={"seq": 1, "message": call}, trust_env=False, timeout=60)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in err.splitlines()]
    events = [line["event"] for line in lines]
    assert [e for e in events if e in ("started", "draining", "stopped")] == [
        "started",
        "draining",
        "stopped",
    ]
    (opened,) = [line for line in lines if line["event"] == "session opened"]
    assert opened["session_id"] == session["session_id"]
    assert opened["client"] == "127.0.0.1"
    (broken,) = [line for line in lines if "traceback" in line]
    assert broken["session_id"] == session["session_id"]
    assert "ZeroDivisionError" in broken["traceback"]
    assert all({"time", "level", "event"} <= set(line) for line in lines)


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter, Tracing(provider)
    provider.shutdown()


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_calls_and_tools_are_spans_of_the_callers_trace(serving, spans):
    exporter, tracing = spans
    server = await serving(Quick, Threaded, tracing=tracing)
    headers = {"traceparent": PARENT, "x-agentrl-client": "me"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=60) as http:
        for task, name in (("quick", "gain"), ("threaded", "renamed")):
            info = (await http.post("/v1/sessions", json={"task": task})).json()
            address = f"/v1/sessions/{info['session_id']}"
            call = Message.assistant(None, ToolCall.of(name)).wire()
            answer = await http.post(f"{address}/step", json={"seq": 1, "message": call})
            assert answer.status_code == 200
            await http.delete(address)
            found = {span.name: span for span in exporter.get_finished_spans()}
            exporter.clear()
            assert {"open", "step", "tool", "close"} <= set(found), task
            where = {"agentrl.session_id": info["session_id"], "agentrl.task": task}
            for span in ("open", "step", "tool", "close"):
                assert where.items() <= dict(found[span].attributes).items(), span
                assert f"{found[span].context.trace_id:032x}" == PARENT.split("-")[1]
            assert found["tool"].attributes["agentrl.tool"] == name
            assert found["tool"].parent.span_id == found["step"].context.span_id
            request = found["POST /v1/sessions/{id}/step"]
            assert found["step"].parent.span_id == request.context.span_id
            assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
            assert request.attributes["agentrl.client"] == "me"


async def test_each_step_of_a_batch_has_a_span(serving, spans):
    exporter, tracing = spans
    server = await serving(Quick, tracing=tracing)
    async with EnvClient.connect(server.url) as client:
        sessions = [await client.open("quick") for _ in range(3)]
        await asyncio.gather(*(session.step(ToolCall.of("gain")) for session in sessions))
        await sessions[0].step(ToolCall.of("gain"))
    steps = [span for span in exporter.get_finished_spans() if span.name == "step"]
    assert len(steps) == 4
    assert {span.attributes["agentrl.session_id"] for span in steps} == {s.session_id for s in sessions}


async def test_websocket_call_continues_the_callers_trace(serving, spans):
    exporter, tracing = spans
    server = await serving(Quick, tracing=tracing)
    async with connect(server.url.replace("http", "ws", 1) + "/v1/ws") as socket:
        await socket.send(json.dumps({"id": 1, "call": "open", "task": "quick", "traceparent": PARENT}))
        session_id = json.loads(await socket.recv())["result"]["session_id"]
        step = {"session_id": session_id, "message": Message.assistant(None, ToolCall.of("gain")).wire()}
        calls = [
            {"call": "step", **step, "seq": 1},
            {"call": "step_many", "steps": [{**step, "seq": 2}]},
        ]
        for number, call in enumerate(calls, 2):
            await socket.send(json.dumps({"id": number, **call, "traceparent": PARENT}))
            assert "result" in json.loads(await socket.recv())
        await socket.send(json.dumps({"id": 9, **calls[0], "seq": 3, "traceparent": "nonsense"}))
        assert json.loads(await socket.recv())["result"]["seq"] == 3
    ended = exporter.get_finished_spans()
    found = [span for span in ended if f"{span.context.trace_id:032x}" == PARENT.split("-")[1]]
    names = Counter(span.name for span in found)
    assert (names["call"], names["open"], names["step"]) == (3, 1, 2)
    assert {f"{s.parent.span_id:016x}" for s in found if s.name == "call"} == {PARENT.split("-")[2]}


async def test_trace_continues_from_controller_to_server(serving, spans):
    exporter, tracing = spans
    front = ControllerServer(FleetService(), port=0, tracing=tracing)
    await front.start()
    try:
        await serving(Quick, tracing=tracing, host="none", controllers=[front.url])
        async with httpx.AsyncClient(
            base_url=front.url, headers={"traceparent": PARENT}, trust_env=False, timeout=60
        ) as http:
            info = (await http.post("/v1/sessions", json={"task": "quick"})).json()
            call = Message.assistant(None, ToolCall.of("gain")).wire()
            step = {"seq": 1, "message": call}
            await http.post(f"/v1/sessions/{info['session_id']}/step", json=step)
            items = [{"session_id": info["session_id"], **step, "seq": 2}]
            await http.post("/v1/step", json={"steps": items})
            await http.delete(f"/v1/sessions/{info['session_id']}")
    finally:
        await front.stop()
    ended = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in ended} == {PARENT.split("-")[1]}
    by_id = {span.context.span_id: span for span in ended}
    steps = [span for span in ended if span.name == "step"]
    assert len(steps) == 2
    for step in steps:
        link = by_id[step.parent.span_id]
        assert link.name == "call"
        assert by_id[link.parent.span_id].name in ("POST /v1/sessions/{id}/step", "POST /v1/step")


async def test_exception_is_recorded_on_its_span(serving, spans):
    exporter, tracing = spans
    server = await serving(Quick, tracing=tracing)
    async with EnvClient.connect(server.url) as client:
        session = await client.open("quick")
        await session.step(ToolCall.of("crash"))
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "tool"]
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.events[0].attributes["exception.type"] == "ZeroDivisionError"


async def test_no_spans_without_tracing(serving, spans):
    exporter, _ = spans
    server = await serving(Quick, limits=Limits())
    async with EnvClient.connect(server.url) as client:
        await (await client.open("quick")).step(ToolCall.of("gain"))
    assert exporter.get_finished_spans() == ()


def test_traces_without_the_extra_print_one_error_line():
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from agentrl_env.__main__ import main\n"
        "sys.argv = ['agentrl-env', 'serve', '--traces', '--port', '0', 'tests.env.tasks:Quick']\n"
        "main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    remedy = "pip install 'agentrl-kit[otel]', or '.[otel]' in a checkout"
    assert ended.stderr == f"error: traces need OpenTelemetry: {remedy}\n"
