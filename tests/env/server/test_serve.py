import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.errors import ServeError, ServerDraining, SessionEnded, TargetError
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.server.auth import is_weak
from tests.env.tasks import Quick, Slow, until


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "::", "example.org"])
def test_public_host_without_a_token_is_rejected(host):
    with pytest.raises(ServeError, match=f"refusing to serve on {host} without a token"):
        EnvServer([Quick], host=host, port=0)


@pytest.mark.parametrize("token", ["x", "T0K", "123456789012345", "abababababababababab"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_token_that_can_be_guessed_is_rejected_beyond_loopback(host, token):
    with pytest.raises(ServeError, match="16 characters, 8 of them different") as refused:
        EnvServer([Quick], host=host, port=0, token=token)
    command = re.search(r"python -c '(.*)' > token.txt", str(refused.value))[1]
    made = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert not is_weak(made.strip())
    with pytest.raises(ServeError, match="can be guessed"):
        ControllerServer(FleetService(), host=host, port=0, token=token)
    EnvServer([Quick], port=0, token=token)._listener._socket.close()


@pytest.mark.parametrize("token", ["tökens-are-ascii-1234", "two\nlines-of-a-token", " a-token-of-a-server "])
@pytest.mark.parametrize(
    "start",
    [
        lambda token: EnvServer([Quick], port=0, token=token),
        lambda token: EnvServer([Quick], host=NOWHERE, controllers=["http://127.0.0.1:9"], token=token),
        lambda token: ControllerServer(FleetService(), port=0, token=token),
    ],
    ids=["server", "server without an address", "controller"],
)
def test_token_that_clients_cannot_send_is_rejected_without_quoting_it(start, token):
    with pytest.raises(ServeError, match="not allowed in an HTTP header") as refused:
        start(token)
    assert "token-" not in str(refused.value)
    assert "tökens" not in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"token": secrets.token_urlsafe()}, {"insecure": True}, {"token": "x", "insecure": True}]
)
async def test_public_host_is_accepted_with_a_token_or_insecure(options):
    server = EnvServer([Quick], host="0.0.0.0", port=0, **options)
    await server.stop()


async def test_port_in_use_raises_serve_error():
    first = EnvServer([Quick], port=0)
    port = int(first.url.rpartition(":")[2])
    with pytest.raises(ServeError, match=f"cannot listen on 127.0.0.1:{port} .*choose another port"):
        EnvServer([Quick], port=port)
    await first.stop()


@pytest.mark.parametrize("port", [-1, 70000])
def test_invalid_port_is_rejected(port):
    with pytest.raises(ServeError, match="cannot listen"):
        EnvServer([Quick], port=port)


async def test_listening_socket_has_tcp_protocol_for_nodelay():
    server = EnvServer([Quick], port=0)
    assert server._listener._socket.proto == socket.IPPROTO_TCP
    await server.stop()


def test_targets_are_loaded_before_the_port_is_bound():
    with pytest.raises(TargetError):
        EnvServer(["/nowhere"], port=0)


class NoDatabase(Quick):
    @classmethod
    def startup(cls):
        raise OSError("no database")


async def test_failed_startup_stops_the_server():
    server = EnvServer([NoDatabase], port=0)
    with pytest.raises(ServeError, match="startup of task 'no_database' failed: OSError: no database"):
        await server.start()
    await server.stop()


async def test_ipv6_address_is_in_brackets():
    server = EnvServer([Quick], host="::1", port=0)
    assert server.url.startswith("http://[::1]:")
    await server.start()
    async with EnvClient.connect(server.url) as client:
        assert set(await client.tasks()) == {"quick"}
    await server.stop()


async def test_stop_lets_open_sessions_end_and_rejects_new_ones():
    server = EnvServer([Quick, Slow], port=0, drain_s=10)
    await server.start()
    async with EnvClient.connect(server.url) as client:
        session = await client.open("quick")
        stopping = asyncio.create_task(server.stop())
        await until(lambda: server.pool.draining)
        with pytest.raises(ServerDraining):
            await client.open("quick")
        assert (await session.step(ToolCall.of("finish"))).terminated
        await stopping
    await server.stop()


async def test_stop_waiting_closes_open_sessions():
    server = EnvServer([Slow], port=0, drain_s=60)
    await server.start()
    async with EnvClient.connect(server.url) as client:
        session = await client.open("slow")
        step = asyncio.create_task(session.step(ToolCall.of("wait")))
        await until(lambda: Slow.started.is_set())
        stopping = asyncio.create_task(server.stop())
        await until(lambda: server.pool.draining)
        server.stop_waiting()
        with pytest.raises(SessionEnded):
            await step
        await stopping
    assert len(Slow.closed) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_prints_its_url_and_exits_cleanly(number):
    code = (
        "from agentrl_env.hosting.serve import serve\n"
        "serve(['tests.env.tasks:Guess', 'tests.env.tasks:Quick'], port=0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving guess, quick at http://127.0.0.1:")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (out, err, process.returncode) == ("", "", 0)
    finally:
        process.kill()
        process.wait()


async def test_unix_socket_needs_no_token_and_is_removed_on_stop(tmp_path):
    path = tmp_path / "server.sock"
    server = EnvServer([Quick], host=f"unix:{path}")
    await server.start()
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
    assert server.url == f"unix:{path}"
    with pytest.raises(ServeError, match="choose an unused path"):
        EnvServer([Quick], host=f"unix:{path}")
    await server.stop()
    assert not path.exists()
