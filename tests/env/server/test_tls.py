"""HTTPS of servers and controllers."""

import asyncio
import shutil
import ssl
import subprocess

import httpx
import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.cli.options import TlsOptions
from agentrl_env.errors import AgentRLError, ServeError
from agentrl_env.fleet.config import ControllerConfig, FleetConfig, TaskConfig
from agentrl_env.fleet.up import LocalFleet
from agentrl_env.server.sockets import Tls
from tests.env.tasks import Quick

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")


@pytest.fixture
def tls(tmp_path, monkeypatch):
    """A certificate for 127.0.0.1 that clients in this process trust."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "1", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    return Tls(cert=cert, key=key)


async def test_server_accepts_only_https_and_secure_websockets(serving, tls):
    server = await serving(Quick, tls=tls, token="secret")
    assert server.url.startswith("https://127.0.0.1:")
    async with EnvClient.connect(server.url, token="secret") as client:
        session = await client.open("quick")  # the first call over HTTP, the next ones over a WebSocket
        assert (await session.step(ToolCall.of("gain"))).seq == 1
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=ssl.create_default_context())
    writer.write(b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"431"
    writer.close()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        with pytest.raises(httpx.TransportError):
            await http.get(server.url.replace("https", "http") + "/ready")


async def test_fleet_serves_callers_over_tls_and_its_own_servers_without(tls):
    task = TaskConfig(name="quick", target="tests.env.tasks:Quick", drain=0.0)
    fleet = LocalFleet(
        FleetConfig(controller=ControllerConfig(port=0), tasks=(task,)), tls=tls, token="secret"
    )
    assert fleet.url.startswith("https://")
    try:
        await fleet.start()
        async with EnvClient.connect(fleet.url, token="secret", timeout=60) as client:
            session = await client.open("quick")
            assert (await session.step(ToolCall.of("gain"))).seq == 1
    finally:
        await fleet.stop()


def test_invalid_certificate_or_key_is_rejected_with_the_options_names(tmp_path, tls):
    (tmp_path / "text.pem").write_text("no certificate")
    for wrong in (Tls(cert=tmp_path / "absent"), Tls(cert=tmp_path / "text.pem"), Tls(cert=tls.cert)):
        with pytest.raises(ServeError, match="--tls-cert takes a PEM file with the certificate chain"):
            wrong.context()
    with pytest.raises(AgentRLError, match="--tls-key needs --tls-cert"):
        TlsOptions(tls_key=tls.key).tls()
    assert TlsOptions().tls() is None
    assert TlsOptions(tls_cert=tls.cert, tls_key=tls.key).tls() == tls
