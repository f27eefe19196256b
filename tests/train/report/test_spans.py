"""Recorded episodes as spans, parsed with OpenTelemetry's Protobuf messages."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from typer.testing import CliRunner

from agentrl_env import EnvClient
from agentrl_env.types import Message, ToolCall
from agentrl_train import Trainer
from agentrl_train.__main__ import app
from agentrl_train.batch import sequences
from agentrl_train.errors import ConfigError
from agentrl_train.report.otlp import export_spans
from agentrl_train.report.transcript import last_episodes
from agentrl_train.telemetry.metrics import MetricsLog
from agentrl_train.types import TrajectoryGroup
from tests.tiny_models import make_model, make_tokenizer
from tests.train.fakes import CHAT, DOWN, EPISODE, Countdown, ScriptedEngine, always, make_actor
from tests.train.runs.babble import Babble
from tests.train.test_sub_agent import DELEGATE, ENTER, LOOK, REPORT, Played, Vault
from tests.train.training.test_trainer import TINY

ROOT = Path(__file__).parents[3]
COUNTS = Message.assistant(None, ToolCall.of("down", call_id="one"), ToolCall.of("up", call_id="two"))


def attributes(span: Span) -> dict[str, Any]:
    found = {}
    for one in span.attributes:
        value = getattr(one.value, str(one.value.WhichOneof("value")))
        if one.value.HasField("array_value"):
            value = [getattr(item, str(item.WhichOneof("value"))) for item in value.values]
        found[one.key] = value
    return found


def parsed(line: str) -> ExportTraceServiceRequest:
    """Parse a line as a message. Protobuf's JSON has bytes in base64, but OTLP's has ids in hexadecimal."""
    request = json.loads(line)
    for span in request["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in span:
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return ParseDict(request, ExportTraceServiceRequest())


def spans_of(request: ExportTraceServiceRequest) -> list[Span]:
    (resource,) = request.resource_spans
    (scope,) = resource.scope_spans
    return list(scope.spans)


def exported(run: Path, *, last: int = 100, messages: bool = False) -> list[list[Span]]:
    """Return the spans of each episode, read from a file."""
    file = run / "spans.jsonl"
    export_spans(last_episodes(run, last=last), str(file), run="mine", messages=messages)
    return [spans_of(parsed(line)) for line in file.read_text().splitlines()]


def named(spans: Sequence[Span], prefix: str) -> list[Span]:
    return [span for span in spans if span.name.startswith(prefix)]


def assert_nested(spans: Sequence[Span]) -> None:
    """Check that the spans form a tree and each lies within its parent's time."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert len({span.trace_id for span in spans}) == 1
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.parent_span_id:
            parent = by_id[span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano
    assert [span.name for span in spans if not span.parent_span_id] == [spans[0].name]


def write(folder: Path, group: TrajectoryGroup) -> None:
    rows = sequences([group], [[0.5] * len(group.trajectories)])
    log = MetricsLog(folder)
    log.log_step(1, policy_version=1, elapsed_s=1.0, metrics={}, tasks={}, groups=[group], rows=rows)
    log.close()


@pytest.fixture
async def client() -> Any:
    Countdown.broken_resets = Countdown.broken_steps = 0
    async with Countdown.local() as client:
        yield client


@pytest.fixture
async def engine(tmp_path: Path, client: EnvClient) -> ScriptedEngine:
    """Play a group of one three-turn episode into the run folder. Return its engine."""
    engine = ScriptedEngine(CHAT, always(DOWN), version=7)
    group, _ = await make_actor(engine, client).group(EPISODE, size=1, group_id=4, admitted_version=6)
    write(tmp_path, group)
    return engine


async def test_episode_is_a_trace_of_its_turns_and_calls(engine: ScriptedEngine, tmp_path: Path) -> None:
    ((episode, *rest),) = exported(tmp_path)
    assert [span.name for span in rest] == ["chat mine", "execute_tool down"] * 3
    assert_nested([episode, *rest])
    assert (episode.name, episode.kind) == ("invoke_agent countdown", Span.SPAN_KIND_INTERNAL)
    facts = attributes(episode)
    assert facts["gen_ai.operation.name"] == "invoke_agent"
    assert facts["gen_ai.conversation.id"] == "mine_step_000001_000000"
    expected = {"run": "mine", "task": "countdown", "split": "train", "index": 3, "step": 1, "group_id": 4}
    expected |= {"reward": 1.0, "success": True, "end": "terminated", "advantage": 0.5, "sibling": 0}
    expected |= {"policy_versions": [7, 7], "admitted_version": 6}
    assert {name: facts[f"agentrl.{name}"] for name in expected} == expected
    assert episode.status.code == Status.STATUS_CODE_UNSET
    assert "agentrl.times_estimated" not in facts
    assert "agentrl.error" not in facts


async def test_turn_has_the_tokens_that_the_engine_read_and_sampled(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    chats = named(exported(tmp_path)[0], "chat")
    assert {span.kind for span in chats} == {Span.SPAN_KIND_CLIENT}
    found = list(map(attributes, chats))
    assert [one["gen_ai.usage.input_tokens"] for one in found] == [len(one[1]) for one in engine.calls]
    assert {one["gen_ai.usage.output_tokens"] for one in found} == {len(CHAT.completion(DOWN))}
    assert [one["gen_ai.response.finish_reasons"] for one in found] == [["stop"]] * 3
    assert [one["agentrl.reward"] for one in found] == [0.0, 0.0, 1.0]
    assert {one["gen_ai.request.model"] for one in found} == {"mine"}
    assert {one["gen_ai.provider.name"] for one in found} == {"agentrl"}


async def test_call_has_the_result_with_its_id(client: EnvClient, tmp_path: Path) -> None:
    script = iter([COUNTS, DOWN, DOWN])
    actor = make_actor(ScriptedEngine(CHAT, lambda context, key: next(script)), client)
    write(tmp_path, (await actor.group(EPISODE, size=1, group_id=0, admitted_version=0))[0])
    (spans,) = exported(tmp_path, messages=True)
    found = [attributes(span) for span in named(spans, "execute_tool")]
    assert [one["gen_ai.tool.name"] for one in found] == ["down", "up", "down", "down"]
    assert len({one["gen_ai.tool.call.id"] for one in found}) == 4
    first, second, *later = [one["gen_ai.tool.call.result"] for one in found]
    assert first == "2"
    assert "up" in second
    assert later == ["1", "zero"]
    assert {one["gen_ai.tool.call.arguments"] for one in found} == {"{}"}
    assert_nested(spans)


async def test_messages_are_included_on_demand(engine: ScriptedEngine, tmp_path: Path) -> None:
    (spans,) = exported(tmp_path, messages=True)
    second = attributes(named(spans, "chat")[1])
    *_, user, said, result = json.loads(second["gen_ai.input.messages"])
    call = {"type": "tool_call", "name": "down", "arguments": {}}
    assert user["parts"] == [{"type": "text", "content": "Sample 3: call down() three times."}]
    assert (user["role"], said["role"], result["role"]) == ("user", "assistant", "tool")
    assert said["parts"][0] == {"type": "text", "content": "down we go"}
    assert said["parts"][1].items() >= call.items()
    assert result["parts"][0]["response"] == "2"
    assert result["parts"][0]["id"] == said["parts"][1]["id"]
    (output,) = json.loads(second["gen_ai.output.messages"])
    assert (output["role"], output["finish_reason"]) == ("assistant", "stop")
    assert output["parts"][1].items() >= call.items()
    exported(tmp_path)
    assert "down we go" not in (tmp_path / "spans.jsonl").read_text()


def test_parts_of_messages_follow_the_conventions(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    linked = {"type": "image_url", "image_url": {"url": "https://example.org/lamp.png"}}
    call = {"id": "a", "type": "function", "function": {"name": "buy", "arguments": '{lamp "\\ud83d"'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Here."}, image, linked]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "turn": {"number": 0, "thought": "A lamp.", "tokens": 2},
        },
    ]
    (tmp_path / "trajectories").mkdir()
    episode = {"task": "shop", "end": "truncated_turns", "seconds": 2.0, "messages": messages}
    (tmp_path / "trajectories/held_out_step_20.jsonl").write_text(json.dumps(episode) + "\n")
    ((root, chat),) = exported(tmp_path, messages=True)
    assert attributes(root)["agentrl.evaluation"] == "step_20"
    (heard,) = json.loads(attributes(chat)["gen_ai.input.messages"])
    assert heard["parts"] == [
        {"type": "text", "content": "Here."},
        {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "AAAA"},
        {"type": "uri", "modality": "image", "uri": "https://example.org/lamp.png"},
    ]
    (said,) = json.loads(attributes(chat)["gen_ai.output.messages"])
    thought, request = said["parts"]
    assert thought == {"type": "reasoning", "content": "A lamp."}
    assert (request["type"], request["arguments"]) == ("tool_call", '{lamp "\\ud83d"')


async def test_failed_episode_has_the_status_error_and_no_reward(client: EnvClient, tmp_path: Path) -> None:
    Countdown.broken_steps = 100
    actor = make_actor(ScriptedEngine(CHAT, always(DOWN)), client, environment_retries=0)
    failed = await actor.sibling(EPISODE)
    log = MetricsLog(tmp_path)
    log.log_evaluation("before", policy_version=0, results={"countdown": [failed]})
    log.close()
    ((episode, *turns),) = exported(tmp_path)
    facts = attributes(episode)
    assert [span.name for span in turns] == ["chat mine", "execute_tool down"]
    assert_nested([episode, *turns])
    assert turns[1].status.code == Status.STATUS_CODE_ERROR
    assert episode.status.code == Status.STATUS_CODE_ERROR
    assert episode.status.message == failed.error == facts["agentrl.error"]
    assert facts["error.type"] == "failed_environment"
    assert facts["agentrl.evaluation"] == "before"
    assert "agentrl.reward" not in facts


async def test_sub_agent_is_a_span_with_its_own_turns(tmp_path: Path) -> None:
    async with Vault.local() as vault:
        trajectory = await Played([DELEGATE, ENTER], [LOOK, REPORT]).run(vault)
    write(
        tmp_path,
        TrajectoryGroup(group_id=0, task="vault", trajectories=[trajectory], admitted_version=0),
    )
    (spans,) = exported(tmp_path)
    assert_nested(spans)
    names = {span.span_id: span.name for span in spans}
    assert [(span.name, names.get(span.parent_span_id)) for span in spans] == [
        ("invoke_agent vault", None),
        ("invoke_agent delegate", "invoke_agent vault"),
        ("chat mine", "invoke_agent vault"),
        ("execute_tool delegate", "invoke_agent vault"),
        ("chat mine", "invoke_agent delegate"),
        ("execute_tool look", "invoke_agent delegate"),
        ("chat mine", "invoke_agent delegate"),
        ("chat mine", "invoke_agent vault"),
        ("execute_tool enter", "invoke_agent vault"),
    ]
    assert attributes(spans[4])["agentrl.segment"] == 1


def test_export_of_another_process_is_equal(engine: ScriptedEngine, tmp_path: Path) -> None:
    file, again = tmp_path / "spans.jsonl", tmp_path / "again.jsonl"
    command = [sys.executable, "-m", "agentrl_train", "show", str(tmp_path), "--spans", str(again)]
    subprocess.run([*command, "--messages"], cwd=ROOT, check=True, capture_output=True, timeout=120)
    export_spans(last_episodes(tmp_path, last=9), str(file), run=tmp_path.name, messages=True)
    assert file.read_bytes() == again.read_bytes()


async def test_json_has_ids_in_hexadecimal_and_nanoseconds_as_text(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    exported(tmp_path)
    (request,) = map(json.loads, (tmp_path / "spans.jsonl").read_text().splitlines())
    span = request["resourceSpans"][0]["scopeSpans"][0]["spans"][1]
    assert [len(bytes.fromhex(span[name])) for name in ("traceId", "spanId", "parentSpanId")] == [16, 8, 8]
    assert span["startTimeUnixNano"].isdecimal()
    assert span["kind"] == 3


async def test_records_without_times_share_the_time_of_the_episode(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "trajectories/step_000001.jsonl"
    episode = json.loads(file.read_text())
    del episode["started"]
    for message in episode["messages"]:
        for name in ("times", "context"):
            message.get("turn", {}).pop(name, None)
    file.write_text(json.dumps(episode | {"seconds": 6.0}) + "\n")
    os.utime(file, (1_800_000_000, 1_800_000_000))
    (spans,) = exported(tmp_path)
    assert_nested(spans)
    assert all(attributes(span)["agentrl.times_estimated"] for span in spans)
    begin = 1_800_000_000 - 6
    seconds = [(span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for span in spans]
    assert seconds[0] == (begin, begin + 6)
    assert seconds[1:] == [(begin + n, begin + n + 1) for n in range(6)]
    assert "gen_ai.usage.input_tokens" not in attributes(spans[1])


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[tuple[str, str | None, bytes]]]]:
    """Serve a collector. Yield its address, and the path, key and body of each request."""
    received: list[tuple[str, str | None, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, self.headers["x-key"], body))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_collector_receives_the_spans_of_the_file(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    (spans,) = exported(tmp_path)
    with collector() as (address, received):
        export_spans(last_episodes(tmp_path, last=9), address + path, run="mine")
    ((asked, key, body),) = received
    assert (asked, key) == ("/v1/traces", "secret")
    assert spans_of(ExportTraceServiceRequest.FromString(body)) == spans


async def test_rejection_by_the_collector_is_an_error(engine: ScriptedEngine, tmp_path: Path) -> None:
    with collector(401) as (address, _), pytest.raises(ConfigError, match="did not accept the spans"):
        export_spans(last_episodes(tmp_path, last=9), address, run="mine")


async def test_file_that_cannot_be_written_is_named(engine: ScriptedEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written to .*nowhere"):
        export_spans(last_episodes(tmp_path, last=9), str(tmp_path / "nowhere/file"), run="mine")


def test_command_writes_the_spans_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model().save_pretrained("policy")
    make_tokenizer().save_pretrained("policy")
    Trainer(model=Path("policy"), environments=[Babble], steps=1, settings=TINY).train()
    done = CliRunner().invoke(app, ["show", "runs/run-1", "--last", "9", "--spans", "spans.jsonl"])
    traces = [spans_of(parsed(line)) for line in Path("spans.jsonl").read_text().splitlines()]
    assert done.output == f"wrote {len(traces)} traces to spans.jsonl\n"
    assert traces
    for spans in traces:
        assert_nested(spans)
        assert spans[0].name == "invoke_agent babble"
        assert named(spans, "chat run-1")
        assert spans[0].end_time_unix_nano > spans[0].start_time_unix_nano


def test_command_without_the_extra_explains_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories/step_000001.jsonl").write_text("")
    monkeypatch.delitem(sys.modules, "agentrl_train.report.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    done = CliRunner().invoke(app, ["show", str(tmp_path), "--spans", "spans.jsonl"])
    assert isinstance(done.exception, ConfigError)
    assert "agentrl-kit[otel]" in str(done.exception)


def test_messages_are_an_option_of_spans(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["show", str(tmp_path), "--messages"])
    assert done.exit_code == 2
