import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import httpx
import pytest

from agentrl_env import EnvClient, Environment, tool
from agentrl_env.errors import ServeError
from agentrl_env.launch import process
from agentrl_env.launch.process import ServerProcess
from tests.processes import alive, until_dead

TARGET = f"{__file__}:Wait"


class Wait(Environment):
    """Says hello, and starts a child process."""

    @classmethod
    def startup(cls):
        cls.child = subprocess.Popen(["sleep", "600"])
        print(f"child {cls.child.pid}", flush=True)

    def reset(self, sample, rng):
        return "Hello."

    @tool
    def wait(self):
        """Wait."""
        return "done"


class Chatty(Wait):
    """Prints a lot before it serves."""

    @classmethod
    def startup(cls):
        for number in range(40_000):
            print(f"line {number} {'x' * 40}")


class Complaining(Chatty):
    """Prints a lot before it fails."""

    @classmethod
    def startup(cls):
        super().startup()
        raise OSError("no database here")


async def hello(url, token):
    async with EnvClient.connect(url, token=token) as client:
        return (await client.open("wait")).messages[0].content


@pytest.fixture(scope="module")
def running():
    """Return a running server shared by several tests."""
    with ServerProcess(TARGET) as server:
        yield server


def test_server_listens_on_a_free_port_until_stop():
    server = ServerProcess(TARGET, token="s3cret")
    with server:
        assert server.running
        assert asyncio.run(hello(server.url, server.token)) == "Hello."
        url, pid = server.url, server.pid
    assert not server.running
    assert server.pid is None
    until_dead(pid)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=60)


def test_two_servers_get_two_ports(running):
    with ServerProcess(TARGET) as other:
        assert other.url != running.url


def test_server_with_workers_is_found_and_stopped():
    with ServerProcess(TARGET, token="s3cret", arguments=["--workers", "2"]) as server:
        assert asyncio.run(hello(server.url, server.token)) == "Hello."
        pid = server.pid
    until_dead(pid)


def test_module_of_the_standard_library_is_not_taken_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise ImportError('not the random of Python')")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    with ServerProcess(TARGET) as server:
        assert server.running


def test_stop_ends_child_processes_and_is_idempotent():
    server = ServerProcess(TARGET).start()
    child = int(server.output().split("child ")[1].split()[0])
    assert alive(child)
    server.stop()
    server.stop()
    until_dead(child)


def test_server_can_be_restarted():
    server = ServerProcess(TARGET)
    with server:
        first = server.pid
        assert server.start() is server
        assert server.pid == first
    with server:
        assert server.pid != first


def test_server_that_cannot_start_raises_its_error():
    with pytest.raises(ServeError, match=r"nowhere: no such folder"):
        ServerProcess("nowhere").start()


def test_url_is_found_after_much_output():
    with ServerProcess(f"{__file__}:Chatty") as server:
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert f"at {server.url}" in server.output()
        assert "line 39999 " in server.output()


def test_error_is_found_after_much_output():
    with pytest.raises(ServeError, match=r"no database here|startup"):
        ServerProcess(f"{__file__}:Complaining").start()


def test_taken_port_is_a_clear_error(running):
    port = int(running.url.rsplit(":", 1)[1])
    with pytest.raises(ServeError, match="choose another port"):
        ServerProcess(TARGET, port=port).start()


def test_server_that_starts_too_slowly_is_stopped():
    server = ServerProcess(TARGET, start_timeout=0.0)
    with pytest.raises(ServeError, match=r"did not answer within 0 s.*start_timeout"):
        server.start()
    assert not server.running


def test_server_that_starts_late_is_waited_for_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(process, "_LATE_S", 0.0)
    with ServerProcess(TARGET) as server:
        assert server.running
    assert [record.getMessage() for record in caplog.records] == [
        "the server has not started after 0 s; still waiting"
    ]


def test_log_file_is_appended_to(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("serving nothing at http://127.0.0.1:9\n")
    with ServerProcess(TARGET, log=log) as server:
        assert not server.url.endswith(":9")
    assert f"at {server.url}" in log.read_text()


def test_server_connects_to_every_controller():
    command = [sys.executable, "-m", "agentrl_env", "controller", "--port", "0"]
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            urls.append(process.stdout.readline().split(" at ")[1].strip())
        with ServerProcess(TARGET, controllers=urls) as server:
            assert server.url == ""
            assert [asyncio.run(hello(url, None)) for url in urls] == ["Hello.", "Hello."]


def test_server_and_its_children_end_with_a_killed_parent():
    code = f"""
import time
from agentrl_env.launch.process import ServerProcess
server = ServerProcess({TARGET!r}).start()
print(server.pid, server.output().split("child ")[1].split()[0], flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        server, child = map(int, parent.stdout.readline().split())
        assert alive(server)
        assert alive(child)
        parent.send_signal(signal.SIGKILL)
    until_dead(server)
    until_dead(child)
