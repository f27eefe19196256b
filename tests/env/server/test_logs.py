"""The log of a server contains no messages without ``--log-messages``, and its lines cannot be forged."""

import asyncio
import gc
import json
import logging
import re
import signal
import subprocess
import sys
import tempfile
import threading
import warnings

import httpx
import pytest

from agentrl_env import Done, Environment, Message, ToolCall, tool
from agentrl_env.server.telemetry.logs import JsonLines, TextLines

SECRET = "s3cret-words"
FORGED = "2026-01-01T00:00:00.000Z INFO session ended session_id=forged"
NASTY = f"{SECRET}\n{FORGED}\r\x1b[2J\x9b31m\u2028{FORGED}\x85\x00\x7f\u202e"


class Fragile:
    """Raises when garbage collected."""

    def __init__(self, text):
        self.text = text

    def __del__(self):
        raise ValueError(self.text)


class Loud(Environment):
    """Every way to get the text of an argument into an exception."""

    max_turns = 50

    def reset(self, sample, rng):
        self.text = ""
        return "ready"

    @tool
    def fail(self, how: str, text: str):
        """Break."""
        self.text = text
        getattr(self, how)(text)
        return "survived"

    def plain(self, text):
        raise KeyError(text)

    def chained(self, text):
        try:
            raise ValueError(text)
        except ValueError as error:
            raise RuntimeError(f"while at {text}") from error

    def grouped(self, text):
        error = ExceptionGroup(text, [ValueError(text), OSError(2, text)])
        error.add_note(text)
        raise error

    def named(self, text):
        raise type(text.replace("\0", ""), (ArithmeticError,), {"__module__": text})(text)

    def compiled(self, text):
        name = re.sub(r"\W", "_", text)
        exec(compile(f"def {name}(): raise LookupError\n{name}()", text.replace("\0", ""), "exec"), {})

    def nested(self, text):
        error = ValueError(text)
        for _ in range(3000):
            deeper = ValueError(text)
            deeper.__cause__, error = error, deeper
        raise error

    def thread(self, text):
        working = threading.Thread(target=lambda: self.plain(text))
        working.start()
        working.join()

    def finalizer(self, text):
        Fragile(text)
        gc.collect()

    def warning(self, text):
        warnings.warn(text, stacklevel=1)

    def score(self):
        if self.text == "score":
            raise ValueError(SECRET)
        return {}

    def close(self):
        raise RuntimeError(self.text)

    @tool
    async def forget(self, text: str):
        """Leave a failing task behind."""

        async def fail():
            raise ValueError(text)

        left = asyncio.create_task(fail())
        await asyncio.sleep(0)
        del left
        gc.collect()
        asyncio.get_running_loop().call_soon(self.plain, text)
        await asyncio.sleep(0)
        return "survived"

    @tool
    def finish(self):
        """End."""
        self.text = "score"
        return Done("bye")


WAYS = ["plain", "chained", "grouped", "named", "compiled", "nested", "thread", "finalizer", "warning"]


def log_of(*options):
    """Return the log of a server after every kind of exception has quoted the agent."""
    command = [sys.executable, "-m", "agentrl_env", "serve", "--port", "0", "--drain", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, f"{__file__}:Loud"], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            play(process.stdout.readline().split(" at ")[1].split()[0])
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        log.seek(0)
        return log.read()


def play(url):
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        calls = [ToolCall.of("fail", how=way, text=NASTY) for way in WAYS]
        for call in (*calls, ToolCall.of("forget", text=NASTY), ToolCall.of("finish")):
            headers = {"x-agentrl-client": "me level=ERROR"}
            opened = http.post("/v1/sessions", json={"task": "loud"}, headers=headers).json()
            body = {"seq": 1, "message": Message.assistant(SECRET, call).wire()}
            answer = http.post(f"/v1/sessions/{opened['session_id']}/step", json=body)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("form", "level", "workers"),
    [
        ("text", "debug", "1"),
        ("json", None, "1"),
        pytest.param("text", None, "2", marks=pytest.mark.slow),
        ("json", "debug", "2"),
    ],
)
def test_log_names_the_failure_and_its_place_but_not_the_messages(form, level, workers):
    chosen = ("--log-level", level) if level else ()
    log = log_of("--log-format", form, "--workers", workers, *chosen)
    assert SECRET not in log
    assert "s3cret" not in log
    for kind in (
        "KeyError",
        "RuntimeError",
        "ValueError",
        "ExceptionGroup",
        "ArithmeticError",
        "LookupError",
    ):
        assert kind in log
    assert "test_logs.py" in log
    assert "in chained" in log
    assert_whole(log, form)


@pytest.mark.extended
@pytest.mark.parametrize("form", ["text", pytest.param("json", marks=pytest.mark.slow)])
def test_log_with_messages_is_complete_and_cannot_be_forged(form):
    log = log_of("--log-format", form, "--log-messages")
    assert log.count(SECRET) > 2 * len(WAYS)
    assert_whole(log, form)


def assert_whole(log, form):
    """Assert that a log has no control characters, and only records and lines of tracebacks."""
    assert log.replace("\n", "").isprintable()
    lines = log.splitlines()
    if form == "json":
        assert all(isinstance(json.loads(line)["event"], str) for line in lines)
        assert not [line for line in lines if json.loads(line).get("session_id") == "forged"]
    else:
        records = [line for line in lines if not line.startswith("  ")]
        assert all(re.match(r"\d{4}-\d\d-\d\dT\S+Z [A-Z]+ ", line) for line in records)
        assert not [line for line in records if line.startswith(FORGED)]


@pytest.mark.parametrize("form", ["text", "json"])
def test_drain_and_end_are_logged_in_both_forms(form):
    log = log_of("--log-format", form)
    events = [
        json.loads(line)["event"] if form == "json" else line.split(" ")[2] for line in log.splitlines()
    ]
    said = [event for event in events if event in ("draining", "stopped")]
    assert said == ["draining", "stopped"]


@pytest.mark.parametrize(
    "lines", [JsonLines(), TextLines(), JsonLines(messages=True), TextLines(messages=True)]
)
def test_no_part_of_a_record_can_forge_a_line(lines):
    record = logging.LogRecord(NASTY, logging.INFO, "", 0, "said: %s", (NASTY + "\ud800",), None)
    record.facts = {"client": NASTY, "why": NASTY}
    text = lines.format(record)
    assert text.isprintable()
    try:
        raise ZeroDivisionError(NASTY)
    except ZeroDivisionError:
        record.exc_info = sys.exc_info()
    assert lines.format(record).replace("\n  ", "").isprintable()
